"""Tensors of PyTorch on NVIDIA GPUs."""

import torch

from . import _flashtile
from ._arrays import lent
from ._compiler import load_compiler
from ._options import Options
from ._tensors import is_plain, needs_grad


def attention(tensors, options, make):
    """The result of `_flashtile.attention` for tensors of a CUDA device, on its current stream. Returns before the work has ended."""
    return _on_stream(_flashtile.attention, tensors, options, make)


def attention_plain(tensors, options, make, classes, records):
    """As `attention`, of `_flashtile.attention_plain`."""
    options = Options._make(options)
    if not all(_is_plain(numbers, classes) for numbers in (options.alibi_slopes, options.sinks)):
        return None
    return _on_stream(_flashtile.attention_plain, tensors, options, make, classes, records)


def attention_with_cache(tensors, new, args, options, make):
    """As `attention`, of `_flashtile.attention_with_cache`."""

    def compute(tensors, options, make):
        return _flashtile.attention_with_cache(tensors, new, args, options, make)

    return _on_stream(compute, tensors, options, make)


def _is_plain(x, classes):
    """True for numbers that lose nothing when they are moved to another device."""
    if type(x) in (list, tuple):
        return all(type(number) in (int, float) for number in x)
    return x is None or (type(x) in classes and is_plain(x) and not needs_grad(x))


def _on_stream(compute, tensors, options, *rest):
    load_compiler()
    device = tensors[0].device

    def moved(name, numbers):
        return None if numbers is None else lent(name, torch.as_tensor(numbers, dtype=torch.float32, device=device).contiguous())

    # The library works in the context of the device, and leaves that to be the thread's.
    with torch.cuda.device(device):
        options = options._replace(
            alibi_slopes=moved("alibi_slopes", options.alibi_slopes),
            sinks=moved("sinks", options.sinks),
            stream=(device.index, torch.cuda.current_stream(device).cuda_stream),
        )
        return compute(tensors, options, *rest)
