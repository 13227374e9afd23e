"""Tensors of PyTorch on NVIDIA GPUs."""

import torch

from . import _flashtile
from ._arrays import lent
from ._compiler import load_compiler
from ._options import Options
from ._tensors import is_plain, needs_grad


def attention(tensors, options, make):
    """The result of `_flashtile.attention` for tensors of a CUDA device, on its current stream. Returns before the work has ended."""
    return _on_stream(_flashtile.attention, tensors[0].device, tensors, options, make)


def attention_plain(tensors, options, make, classes, records):
    """As `attention`, of `_flashtile.attention_plain`."""
    options = Options._make(options)
    if not all(_is_plain(numbers, classes) for numbers in (options.alibi_slopes, options.sinks)):
        return None
    return _on_stream(_flashtile.attention_plain, tensors[0].device, tensors, options, make, classes, records)


def attention_backward(tensors, options, make, *wanted):
    """As `attention`, of `_flashtile.attention_backward`."""
    return _on_stream(_flashtile.attention_backward, tensors[0].device, tensors, options, make, *wanted)


def attention_with_cache(tensors, new, args, options, make):
    """As `attention`, of `_flashtile.attention_with_cache`."""

    def compute(tensors, options, make):
        return _flashtile.attention_with_cache(tensors, new, args, options, make)

    return _on_stream(compute, tensors[0].device, tensors, options, make)


def device_of(x):
    """The CUDA device of a cache, from its name."""
    device = torch.device(x)
    if device.type != "cuda":
        raise ValueError(f"device is {x!r}, expected None or 'cpu', or a CUDA device such as 'cuda' or 'cuda:1'")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device is {x!r}, and PyTorch finds no CUDA device: torch.cuda.is_available() is False")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(f"device is {x!r}, and PyTorch finds {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def ordered(device, call, *arguments):
    """The result of a call that takes a stream as its last argument: the current one of a device."""
    load_compiler()
    # As in `_on_stream`.
    with torch.cuda.device(device):
        return call(*arguments, _current(device))


def attend(device, layer, step, tensors, options, like, make):
    """The result of `_flashtile.Step.attend` over a cache on a device. It is a tensor of PyTorch, also where q, `like`, is none."""

    def compute(tensors, options, make):
        return step.attend(layer, tensors, options, make)

    return _on_stream(compute, device, tensors, options, make if isinstance(like, torch.Tensor) else _maker(like, device))


def _maker(like, device):
    """As `_arrays.maker`, of tensors on a device."""

    def made(name, shape):
        dtype = torch.float32 if name == "lse" else getattr(torch, str(like.dtype).rpartition(".")[2])
        return torch.empty(shape, dtype=dtype, device=device)

    return made


def _current(device):
    return device.index, torch.cuda.current_stream(device).cuda_stream


def _is_plain(x, classes):
    """True for numbers that lose nothing when they are moved to another device."""
    if type(x) in (list, tuple):
        return all(type(number) in (int, float) for number in x)
    return x is None or (type(x) in classes and is_plain(x) and not needs_grad(x))


def _on_stream(compute, device, tensors, options, *rest):
    load_compiler()

    def moved(name, numbers):
        return None if numbers is None else lent(name, torch.as_tensor(numbers, dtype=torch.float32, device=device).contiguous())

    # The library works in the context of the device, and leaves that to be the thread's.
    with torch.cuda.device(device):
        options = options._replace(
            alibi_slopes=moved("alibi_slopes", options.alibi_slopes),
            sinks=moved("sinks", options.sinks),
            stream=_current(device),
        )
        return compute(tensors, options, *rest)
