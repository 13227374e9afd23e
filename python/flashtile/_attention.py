"""Attention in one call."""

from . import _flashtile
from ._arrays import checked, is_torch, lent, maker, padded_masks, written
from ._options import Options

_torch = None


def attention(
    q,
    k,
    v,
    *,
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
    return_lse=False,
    out=None,
):
    """Attention of queries to keys and values::

        out = softmax(softcap(scale * q . k) + bias) . v        over the visible keys

    q `(batch, q_heads, q_len, dim)`, k `(batch, kv_heads, kv_len, dim)` and v `(batch, kv_heads, kv_len, value_dim)` give out
    `(batch, q_heads, q_len, value_dim)`. `q_heads` is a multiple of `kv_heads`. All three are float32, float16 or bfloat16 alike, and are
    read in place, whatever their strides, but that the last axis has stride 1. Arrays of numpy give arrays of numpy, tensors of PyTorch
    tensors of PyTorch; other tensors with `__dlpack__` give arrays of numpy. A row without visible keys is 0.

    Autograd of PyTorch differentiates it by q, k, v, a mask that is added to scores, alibi_slopes and sinks, through out and lse. Second
    derivatives, forward mode and torch.func are refused, and so are gradients of a call with `out`.
    `attention_backward` computes gradients for arrays.

    Args:
        q, k, v: numpy arrays (bfloat16 by ml_dtypes), PyTorch tensors on the CPU or an NVIDIA GPU, or other objects with `__dlpack__`.
        causal: whether a query sees only keys at or before its own position.
        window: keys that a query sees before and after its position, which itself does not count; -1 is an unbounded side.
        attention_chunk: keys of a chunk, counted from key 0: a query at position `p` sees the keys `j` with `j // attention_chunk ==
            p // attention_chunk` alone, as in the chunked layers of Llama 4, which are causal too. None and 0 are off.
        q_offset: the position of query 0: `"top_left"` puts it at key 0 (PyTorch), `"bottom_right"` puts the last query at the last key
            (FlashAttention), an integer at that key. Required where positions matter and there are more or fewer keys than queries, or
            `kv_lens`.
        scale: multiplier of `q . k`; None is `1 / sqrt(dim)`.
        softcap: `c` of `softcap(x) = c * tanh(x / c)`; None and 0 are off.
        mask: `(keys,)`, `(queries, keys)` or `(batch, heads, queries, keys)`; axes of size or stride 0 or 1 are broadcast. Of bool, True is visible; of
            float32, float16 or bfloat16 it is added to the score, and `-inf` hides. Or a list with a mask for each sequence or batch entry, `(queries,
            keys)` or `(heads, queries, keys)` with its own lengths: they are copied to one mask of the longest, `sequences * heads * queries * keys`
            elements.
        alibi_slopes: a number for each query head, or `(batch, q_heads)`, of packed sequences `(sequences, q_heads)`: the bias of key `j` for a
            query at position `p` is `-slope * abs(p - j)`. Slopes of either sign.
        sinks: a logit for each query head, which joins the denominator of the softmax.
        q_lens: with `cu_seqlens`, queries of each sequence: the first of its rows. out is 0 at the others. Not with a mask.
        kv_lens: keys of each batch entry, or with `cu_seqlens` of each sequence; rows of k and v past them are never read. With `cu_seqlens` not
            with a mask.
        cu_seqlens: first row of each of many sequences that lie one after another, then the total; a pair of such lists where q and k
            differ. Tensors are `(total, heads, dim)` then, whatever the layout.
        layout: `"bhsd"`, or `"bshd"` for `(batch, seq, heads, dim)`; out has the same.
        return_lse: whether the result is `(out, lse)`, with the logsumexp `(batch, q_heads, q_len)` in float32, natural logarithm, sinks
            included; of packed sequences `(q_heads, total)`.
        out: where to write the result. It overlaps no other argument in memory.

    Raises:
        ValueError: where shapes and options contradict each other, or a derivative is asked for that flashtile does not compute.
        TypeError: where a dtype, a layout, a class of arrays or the type of an option is wrong.
        BufferError: where memory cannot be used as it is: on another device than q's, freed, with strides below 0, read-only, or shared.
        MemoryError: where there is no memory.
        RuntimeError: where threads cannot start, the process was forked off one that has them, or a GPU, its driver or its compiler failed.
    """
    mask_lens = None
    if isinstance(mask, (list, tuple)):
        # A mask over a batch has as many keys as k.
        axes = getattr(k, "shape", ()) if cu_seqlens is None else ()
        mask, mask_lens = padded_masks(mask, axes[1 if layout == "bshd" else 2] if len(axes) == 4 else 0)
    # In the order of `Options`, whose constructor takes a part of a small call.
    options = (
        causal, window, attention_chunk, q_offset, scale, softcap, mask, alibi_slopes, sinks, q_lens, kv_lens, cu_seqlens, layout, return_lse,
        mask_lens, None,
    )  # fmt: skip
    if is_torch(q):
        global _torch
        # An import statement takes as long as a small problem, each time.
        if _torch is None:
            from . import _torch
        made, lse = _torch.attention(q, k, v, options, out)
    else:
        options = checked(Options._make(options))
        tensors = [lent(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))]
        made, lse = _flashtile.attention(tensors, options, maker(q))
    out = made if out is None else written(out)
    return (out, lse) if return_lse else out
