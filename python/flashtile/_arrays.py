"""Results of the kind that the arguments have."""

import numpy

# Classes of arrays that are their elements.
_ARRAYS = (numpy.ndarray, numpy.memmap, numpy.matrix, numpy.recarray)

# Options that are numbers or lists of them.
NUMBERS = ("scale", "softcap", "alibi_slopes", "sinks", "kv_lens", "cu_seqlens")


def is_torch(x):
    """Whether something is a tensor of PyTorch, which need not be installed."""
    return hasattr(x, "__torch_function__")


def numpy_dtype(like):
    """The dtype of numpy with the name that the dtype of an array has."""
    name = str(like.dtype).rpartition(".")[2]
    if name == "bfloat16":
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            raise TypeError("results in bfloat16 are arrays of ml_dtypes, which is not installed: pip install ml_dtypes") from None
        return numpy.dtype(bfloat16)
    return numpy.dtype(name)


def maker(like):
    """A function that makes a result, and what is lent of it: `out` in the dtype of `like`, `lse` in float32."""
    if is_torch(like):
        import torch

        make = lambda name, shape: torch.empty(shape, dtype=like.dtype if name == "out" else torch.float32, device=like.device)
    else:
        make = lambda name, shape: numpy.empty(shape, numpy_dtype(like) if name == "out" else numpy.float32)

    def made(name, shape):
        result = make(name, shape)
        return result, lent(name, result)

    return made


def lent(name, x):
    """What the extension module reads the memory of an argument from."""
    if is_torch(x):
        from . import _tensors

        return _tensors.lent(name, x)
    check_array(name, x)
    return x


def numbers(name, x):
    """An argument that the extension module reads as numbers, or as lists of them."""
    if isinstance(x, (list, tuple)):
        for each in x:
            if not isinstance(each, (int, float)):
                numbers(name, each)
    elif is_torch(x):
        from . import _tensors

        _tensors.readable(name, x)
    else:
        check_array(name, x)
    return x


def check_array(name, x):
    """Refuses arrays of subclasses whose meaning a call would lose, such as the mask of a masked array, or a unit."""
    if isinstance(x, numpy.ndarray) and type(x) not in _ARRAYS:
        kind = f"{type(x).__module__}.{type(x).__name__}"
        instead = "fill it, and give what it hides by mask" if isinstance(x, numpy.ma.MaskedArray) else "give .view(numpy.ndarray)"
        raise TypeError(f"{name} is a {kind}, and what that says beside its elements would be lost: {instead}")


def written(x):
    """What a call gives that was told to write to x."""
    if is_torch(x):
        from . import _tensors

        _tensors.count_write(x)
    return x
