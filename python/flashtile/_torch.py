"""Attention as an operator of PyTorch, which torch.compile keeps as it is."""

from numbers import Integral
from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import _flashtile
from ._arrays import check_numbers, checked, lent, maker
from ._options import Options
from ._tensors import EXCHANGES, check, check_tangent

# Types that are tensors and nothing else.
_PLAIN = (Tensor, torch.nn.Parameter)


def attention(q, k, v, options, out=None):
    """`(out, lse)` of `flashtile.attention` where q is a tensor of PyTorch; lse is None where the options, a tuple, do not ask for it."""
    if out is None:
        return _computed(q, k, v, options) or _recorded(q, k, v, Options._make(options))
    return _call(q, k, v, Options._make(options), out)


def _computed(q, k, v, options):
    """The result where nobody records this call: neither a graph, nor autograd, nor a mode, a transform or a kind of tensor of PyTorch. It
    need not be an operator then, whose dispatch takes longer than a small problem. None where somebody does, or a tensor has no memory of its
    own: the operator resolves it, or refuses it by its kind."""
    if not EXCHANGES or _is_traced() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    compute = _cuda().attention_plain if q.is_cuda else _flashtile.attention_plain
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
    _check_devices(named | lists)


def _check_devices(named):
    """Refuses tensors on other devices than q's. Lists of numbers are moved there, from wherever their elements are."""
    expected = named["q"].device
    for name, x in named.items():
        if isinstance(x, Tensor) and x.device != expected and (name in ("k", "v", "mask") or x.device.type == "meta"):
            raise BufferError(f'{name} is on {x.device}, expected {expected}: move it, as .to("{expected}") does')


def _call(q, k, v, options, out=None):
    """Computes from tensors of any kind."""
    tensors = [lent(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))]
    compute = _cuda().attention if q.is_cuda else _flashtile.attention
    return compute(tensors, checked(options), maker(q))


def _cuda():
    from . import _cuda

    return _cuda


def _operator(q, k, v, options):
    """Calls attention as an operator of PyTorch, whose arguments are tensors, numbers and names."""
    q_offset = options.q_offset
    named = isinstance(q_offset, str)
    starts = options.cu_seqlens
    if starts is not None and not (isinstance(starts, tuple) and len(starts) == 2 and not isinstance(starts[0], Integral)):
        starts = (starts, starts)
    cu_seqlens_q, cu_seqlens_k = starts or (None, None)
    left, right = options.window
    return torch.ops.flashtile.attention(
        q,
        _tensor(k, None),
        _tensor(v, None),
        mask=_tensor(options.mask, None),
        mask_lens=options.mask_lens,
        alibi_slopes=_tensor(options.alibi_slopes, torch.float32),
        sinks=_tensor(options.sinks, torch.float32),
        q_lens=_tensor(options.q_lens, torch.int64),
        kv_lens=_tensor(options.kv_lens, torch.int64),
        cu_seqlens_q=_tensor(cu_seqlens_q, torch.int64),
        cu_seqlens_k=_tensor(cu_seqlens_k, torch.int64),
        causal=options.causal,
        left=left,
        right=right,
        attention_chunk=options.attention_chunk,
        q_offset_name=q_offset if named else None,
        q_offset=None if named else q_offset,
        scale=options.scale,
        softcap=options.softcap,
        layout=options.layout,
        return_lse=options.return_lse,
    )


def _tensor(x, dtype):
    return x if x is None or isinstance(x, Tensor) else torch.as_tensor(x, dtype=dtype)


@torch.library.custom_op("flashtile::attention", mutates_args=())
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    q_lens: Optional[Tensor] = None,
    kv_lens: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    *,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    attention_chunk: Optional[int] = None,
    q_offset_name: Optional[str] = None,
    q_offset: Optional[int] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    mask_lens: Optional[List[int]] = None,
) -> Tuple[Tensor, Tensor]:
    """Out and the logsumexp, which is empty where it is not asked for."""
    options = Options(
        causal=causal,
        window=(left, right),
        attention_chunk=attention_chunk,
        q_offset=q_offset if q_offset_name is None else q_offset_name,
        scale=scale,
        softcap=softcap,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_lens=q_lens,
        kv_lens=kv_lens,
        cu_seqlens=None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k),
        layout=layout,
        return_lse=return_lse,
        mask_lens=mask_lens,
    )
    out, lse = _call(q, k, v, options)
    return out, q.new_empty([0], dtype=torch.float32) if lse is None else lse


@operator.register_fake
def _(
    q,
    k,
    v,
    mask=None,
    alibi_slopes=None,
    sinks=None,
    q_lens=None,
    kv_lens=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    *,
    causal=False,
    left=-1,
    right=-1,
    attention_chunk=None,
    q_offset_name=None,
    q_offset=None,
    scale=None,
    softcap=None,
    layout="bhsd",
    return_lse=False,
    mask_lens=None,
):
    lists = {"q_lens": q_lens, "kv_lens": kv_lens, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_devices({"q": q, "k": k, "v": v, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks, **lists})
    out = q.new_empty([*q.shape[:-1], v.shape[-1]])
    if not return_lse:
        return out, q.new_empty([0], dtype=torch.float32)
    rows = list(q.shape[:-1])
    if cu_seqlens_q is not None or layout == "bshd":
        rows[-2:] = rows[:-3:-1]
    return out, q.new_empty(rows, dtype=torch.float32)


_LIBRARY = torch.library.Library("flashtile", "FRAGMENT")
_record = make_autograd_impl(torch.ops.flashtile.attention.default, operator)


def _autograd(keyset, *tensors, **options):
    """The autograd kernel of the operator. It refuses derivatives of forward mode, which the operator by itself would drop silently."""
    for name, x in zip(("q", "k", "v", "mask", "alibi_slopes", "sinks"), tensors):
        if x is not None:
            check_tangent(name, x, level=0)
    return _record(keyset, *tensors, **options)


for _key in ("AutogradCPU", "AutogradCUDA"):
    _LIBRARY.impl("attention", _autograd, _key, with_keyset=True)
