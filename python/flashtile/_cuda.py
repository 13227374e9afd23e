"""Tensors of PyTorch on NVIDIA GPUs."""

import ctypes
import functools
import importlib.util
import pathlib

import torch

from . import _flashtile
from ._arrays import lent, maker


def attention(q, tensors, options):
    """What `_flashtile.attention` gives for q on a CUDA device, on its current stream. `tensors` are what is lent of q, k, v and out. Returns
    before the work has ended."""
    _load_compiler()
    device = q.device
    # The library works in the context of the device, and leaves that to be the thread's.
    with torch.cuda.device(device):
        options = options | {"stream": (device.index, torch.cuda.current_stream(device).cuda_stream)}
        for name in ("alibi_slopes", "sinks"):
            if options[name] is not None:
                options[name] = lent(torch.as_tensor(options[name], dtype=torch.float32, device=device).contiguous())
        return _flashtile.attention(tensors, options, maker(q))


@functools.cache
def _load_compiler():
    """Loads NVRTC, which compiles the kernels, from the packages that PyTorch brings: loaders find what is loaded by its name."""
    spec = importlib.util.find_spec("nvidia")
    for folder in map(pathlib.Path, [] if spec is None else spec.submodule_search_locations):
        # The compiler looks for its second part by name, once it needs it.
        for library in [*folder.glob("*/lib/libnvrtc-builtins.so.*"), *folder.glob("*/lib/libnvrtc.so.*")]:
            if ".alt." not in library.name:
                ctypes.CDLL(str(library))
