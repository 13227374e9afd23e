"""Gradients of attention in one call."""

from typing import Any, NamedTuple

from . import _flashtile
from ._arrays import checked, is_torch, lent, maker
from ._options import Options


class Gradients(NamedTuple):
    """Gradients of a loss with respect to the inputs of `flashtile.attention`, each in the shape of its input."""

    d_q: Any
    d_k: Any
    d_v: Any
    d_sinks: Any = None
    d_bias: Any = None
    d_alibi_slopes: Any = None


def attention_backward(
    q,
    k,
    v,
    out,
    lse,
    d_out,
    *,
    d_lse=None,
    causal=False,
    window=(-1, -1),
    attention_chunk=None,
    q_offset=None,
    scale=None,
    softcap=None,
    mask=None,
    alibi_slopes=None,
    sinks=None,
    q_lens=None,
    kv_lens=None,
    cu_seqlens=None,
    layout="bhsd",
    d_sinks=False,
    d_bias=False,
    d_alibi_slopes=False,
):
    """Gradients of a loss with respect to the inputs of `attention`, from those with respect to its results. Autograd of PyTorch calls it by
    itself, where tensors that require gradients are given to `attention`, on an NVIDIA GPU too::

        p       = exp(score - lse)                          of a visible key
        d_score = p * (d_out . v - sum(d_out * out) + d_lse)
        d_v     = sum over queries of p * d_out
        d_q     = sum over keys of    scale * softcap'(scale * q . k) * d_score * k
        d_k     = sum over queries of scale * softcap'(scale * q . k) * d_score * q

    The same arguments give the same bits on the same device. On a GPU it returns before its work on PyTorch's current stream has ended. A row that sees no key has d_q 0 and adds nothing; rows of k and v that no query sees have 0.

    Args:
        q, k, v: as `attention` was given: arrays of numpy, tensors of PyTorch on the CPU or an NVIDIA GPU, or other objects with `__dlpack__`.
        out, lse: what it returned, with `return_lse=True`. lse is dense float32. They, d_out and d_lse are on the device of q.
        d_out: gradient of the loss with respect to out, in its shape and dtype. Its last axis has stride 1.
        d_lse: gradient of the loss with respect to lse, dense float32, or None for zeros.
        causal, window, attention_chunk, q_offset, scale, softcap, mask, alibi_slopes, sinks, q_lens, kv_lens, cu_seqlens, layout: the options
            that `attention` was given.
        d_sinks: True for the gradient of sinks: float32, `(q_heads,)`.
        d_bias: True for the gradient of a mask that is added to scores: float32, in the shape of the mask; summed over axes that it broadcasts by
            size 1 or by being left out. Not of a list of masks.
        d_alibi_slopes: True for the gradient of alibi_slopes: float32, in their shape.

    Returns:
        `Gradients(d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes)`, a named tuple of arrays or tensors as q is. The first three are dense, in the
        dtype of q; the others None where they are not asked for.

    Raises:
        ValueError: where shapes and options contradict each other, a gradient is asked for whose input there is not, or a tensor requires a
            gradient.
        TypeError, BufferError, MemoryError, RuntimeError: as `attention`.
    """
    if isinstance(mask, (list, tuple)):
        raise ValueError("mask is a list, and attention_backward takes one mask: hide keys by one for all sequences, or use autograd of PyTorch")
    options = (
        causal, window, attention_chunk, q_offset, scale, softcap, mask, alibi_slopes, sinks, q_lens, kv_lens, cu_seqlens, layout, False,
        None, None,
    )  # fmt: skip
    named = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse}
    tensors = [lent(name, x) for name, x in named.items()]
    compute = _flashtile.attention_backward
    if is_torch(q) and q.is_cuda:
        from ._cuda import attention_backward as compute
    made = compute(tensors, checked(Options._make(options)), maker(q), d_sinks, d_bias, d_alibi_slopes)
    return Gradients(*made)
