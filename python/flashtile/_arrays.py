"""Results of the kind that the arguments have."""

import numpy


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
        return result, lent(result)

    return made


def lent(x):
    """What the extension module reads memory from: a capsule of DLPack where x is a tensor of PyTorch, whose own `__dlpack__` takes longer
    than a small problem, and x itself otherwise."""
    if not is_torch(x):
        return x
    from torch.utils.dlpack import to_dlpack

    return to_dlpack(x.detach())
