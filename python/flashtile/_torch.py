"""Attention of tensors of PyTorch: at once, or by the operator where somebody records a call."""

from numbers import Integral

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import _autograd, _flashtile  # noqa: F401  registers the gradients of the operator
from ._arrays import check_numbers, maker
from ._operator import call, check_devices, cuda
from ._options import Options
from ._tensors import EXCHANGES, check

# Types that are tensors and nothing else.
_PLAIN = (Tensor, torch.nn.Parameter)


def attention(q, k, v, options, out=None):
    """`(out, lse)` of `flashtile.attention` where q is a tensor of PyTorch; lse is None where the options, a tuple, do not ask for it."""
    if out is None:
        return _computed(q, k, v, options) or _recorded(q, k, v, Options._make(options))
    return call(q, k, v, Options._make(options), out)


def _computed(q, k, v, options):
    """The result where nobody records this call: neither a graph, nor autograd, nor a mode, a transform or a kind of tensor of PyTorch. It
    need not be an operator then, whose dispatch takes longer than a small problem. None where somebody does, or a tensor has no memory of its
    own: the operator resolves it, or refuses it by its kind."""
    if not EXCHANGES or _is_traced() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    compute = cuda().attention_plain if q.is_cuda else _flashtile.attention_plain
    return compute([q, k, v, None], options, maker(q), _PLAIN, torch.is_grad_enabled())


def _recorded(q, k, v, options):
    """The result of the operator."""
    if not _is_traced():
        named = {"q": q, "k": k, "v": v, "mask": options.mask, "alibi_slopes": options.alibi_slopes, "sinks": options.sinks}
        _check(named, options)
    out, lse = _operator(q, k, v, options)
    return out, lse if options.return_lse else None


def _is_traced():
    """True if a compiler or a mode of PyTorch traces this call, so that its tensors are stand-ins."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or is_in_torch_dispatch_mode()


def _check(named, options):
    """Refuses arguments that the operator would not take, or whose derivatives it would lose."""
    starts = options.cu_seqlens
    lists = {"q_lens": options.q_lens, "kv_lens": options.kv_lens} | {f"cu_seqlens[{i}]": x for i, x in enumerate(starts if isinstance(starts, tuple) else (starts,))}
    for name, x in (named | lists).items():
        (check if isinstance(x, Tensor) else check_numbers)(name, x)
    for name in ("scale", "softcap"):
        check_numbers(name, getattr(options, name))
    check_devices(named | lists)
    # The operator has words of its own for the others. Lengths are checked together, or, beside a tensor, by `_integers`.
    apart = {"mask", "mask_lens"} | {name for name in ("alibi_slopes", "sinks") if isinstance(getattr(options, name), Tensor)}
    if any(isinstance(x, Tensor) for x in lists.values()):
        apart |= {"q_lens", "kv_lens", "cu_seqlens"}
    _flashtile.check_options(tuple(None if name in apart else x for name, x in zip(Options._fields, options)))


def _operator(q, k, v, options):
    """Calls attention as an operator of PyTorch, whose arguments are tensors, numbers and names."""
    q_offset = options.q_offset
    named = isinstance(q_offset, str)
    starts = options.cu_seqlens
    if starts is not None and not (isinstance(starts, tuple) and len(starts) == 2 and not isinstance(starts[0], Integral)):
        starts = (starts, starts)
    cu_seqlens_q, cu_seqlens_k = starts or (None, None)
    left, right = (-1, -1) if options.window is None else options.window
    return torch.ops.flashtile.attention(
        q,
        _tensor(k, None),
        _tensor(v, None),
        mask=_tensor(options.mask, None),
        mask_lens=options.mask_lens,
        alibi_slopes=_tensor(options.alibi_slopes, torch.float32),
        sinks=_tensor(options.sinks, torch.float32),
        q_lens=_integers("q_lens", options.q_lens),
        kv_lens=_integers("kv_lens", options.kv_lens),
        cu_seqlens_q=_integers("cu_seqlens", cu_seqlens_q),
        cu_seqlens_k=_integers("cu_seqlens", cu_seqlens_k),
        causal=options.causal or False,
        left=left,
        right=right,
        attention_chunk=options.attention_chunk,
        q_offset_name=q_offset if named else None,
        q_offset=None if named else q_offset,
        scale=options.scale,
        softcap=options.softcap,
        layout="bhsd" if options.layout is None else options.layout,
        return_lse=options.return_lse or False,
    )


def _integers(name, x):
    """Lengths as a tensor. One that is no integer is refused, not cut."""
    if x is None or isinstance(x, Tensor):
        return x
    made = torch.as_tensor(x)
    if made.numel() and (made.is_floating_point() or made.is_complex() or made.dtype == torch.bool):
        raise TypeError(f"{name} is {x!r}, expected integers")
    return made.to(torch.int64)


def _tensor(x, dtype):
    return x if x is None or isinstance(x, Tensor) else torch.as_tensor(x, dtype=dtype)
