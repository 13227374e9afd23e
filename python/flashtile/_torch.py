"""Attention as an operator of PyTorch, which torch.compile keeps as it is."""

from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import _flashtile
from ._arrays import lent, maker

# Types that are tensors and nothing else.
_PLAIN = (Tensor, torch.nn.Parameter)


def attention(q, k, v, options, out=None):
    """`flashtile.attention` where q is a tensor of PyTorch."""
    if out is not None and any(_needs_grad(x) for x in (q, k, v)):
        raise ValueError("flashtile computes no gradients: call it under torch.no_grad()")
    if out is not None or _only_computes(q, k, v):
        made, lse = _call(q, k, v, options, out)
        made = made if out is None else out
    else:
        made, lse = _operator(q, k, v, options)
    return (made, lse) if options["return_lse"] else made


def _needs_grad(x):
    return torch.is_grad_enabled() and getattr(x, "requires_grad", False)


def _only_computes(*tensors):
    """Whether nobody records this call: neither a graph, nor autograd, nor a mode or a kind of tensor of PyTorch. It need not be an operator
    then, whose dispatch costs as much as a small problem."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode():
        return False
    return all(type(x) in _PLAIN and x.device.type in ("cpu", "cuda") and not _needs_grad(x) for x in tensors)


def _call(q, k, v, options, out=None):
    options = options | {"mask": lent(options["mask"])}
    tensors = [lent(x) for x in (q, k, v, out)]
    if q.is_cuda:
        from . import _cuda

        return _cuda.attention(q, tensors, options)
    return _flashtile.attention(tensors, options, maker(q))


def _operator(q, k, v, options):
    """The same as an operator, whose arguments are tensors, numbers and names."""
    q_offset = options["q_offset"]
    named = isinstance(q_offset, str)
    starts = options["cu_seqlens"]
    if starts is not None and not (isinstance(starts, tuple) and len(starts) == 2 and not isinstance(starts[0], int)):
        starts = (starts, starts)
    cu_seqlens_q, cu_seqlens_k = starts or (None, None)
    left, right = options["window"]
    return torch.ops.flashtile.attention(
        q,
        _tensor(k, None),
        _tensor(v, None),
        mask=_tensor(options["mask"], None),
        alibi_slopes=_tensor(options["alibi_slopes"], torch.float32),
        sinks=_tensor(options["sinks"], torch.float32),
        kv_lens=_tensor(options["kv_lens"], torch.int64),
        cu_seqlens_q=_tensor(cu_seqlens_q, torch.int64),
        cu_seqlens_k=_tensor(cu_seqlens_k, torch.int64),
        causal=options["causal"],
        left=left,
        right=right,
        q_offset_name=q_offset if named else None,
        q_offset=None if named else q_offset,
        scale=options["scale"],
        softcap=options["softcap"],
        layout=options["layout"],
        return_lse=options["return_lse"],
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
    kv_lens: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    *,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    q_offset_name: Optional[str] = None,
    q_offset: Optional[int] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    layout: str = "bhsd",
    return_lse: bool = False,
) -> Tuple[Tensor, Tensor]:
    """Out and the logsumexp, which is empty where it is not asked for."""
    options = {
        "causal": causal,
        "window": (left, right),
        "q_offset": q_offset if q_offset_name is None else q_offset_name,
        "scale": scale,
        "softcap": softcap,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "kv_lens": kv_lens,
        "cu_seqlens": None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k),
        "layout": layout,
        "return_lse": return_lse,
    }
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
    kv_lens=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    *,
    causal=False,
    left=-1,
    right=-1,
    q_offset_name=None,
    q_offset=None,
    scale=None,
    softcap=None,
    layout="bhsd",
    return_lse=False,
):
    out = q.new_empty([*q.shape[:-1], v.shape[-1]])
    if not return_lse:
        return out, q.new_empty([0], dtype=torch.float32)
    rows = list(q.shape[:-1])
    if cu_seqlens_q is not None or layout == "bshd":
        rows[-2:] = rows[:-3:-1]
    return out, q.new_empty(rows, dtype=torch.float32)
