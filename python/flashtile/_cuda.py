"""Tensors of PyTorch on NVIDIA GPUs."""

import torch

from . import _flashtile
from ._arrays import lent, maker
from ._compiler import load_compiler


def attention(q, tensors, options):
    """What `_flashtile.attention` gives for q on a CUDA device, on its current stream. `tensors` are what is lent of q, k, v and out. Returns
    before the work has ended."""
    load_compiler()
    device = q.device
    # The library works in the context of the device, and leaves that to be the thread's.
    with torch.cuda.device(device):
        options = options | {"stream": (device.index, torch.cuda.current_stream(device).cuda_stream)}
        for name in ("alibi_slopes", "sinks"):
            if options[name] is not None:
                options[name] = lent(name, torch.as_tensor(options[name], dtype=torch.float32, device=device).contiguous())
        return _flashtile.attention(tensors, options, maker(q))
