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
    """A function that makes the memory of a result: `out` in the dtype of `like`, `lse` in float32."""
    if is_torch(like):
        import torch

        return lambda name, shape: torch.empty(shape, dtype=like.dtype if name == "out" else torch.float32)
    return lambda name, shape: numpy.empty(shape, numpy_dtype(like) if name == "out" else numpy.float32)


def detached(x):
    """The same memory without a gradient, where that is a tensor of PyTorch."""
    return x.detach() if is_torch(x) else x
