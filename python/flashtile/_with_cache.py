"""Attention over a cache of the caller's."""

from collections import namedtuple

import numpy

from . import _flashtile
from ._arrays import check_numbers, checked, is_torch, lent, maker, padded_masks, tensors, written
from ._options import Options

_CacheArgs = namedtuple("_CacheArgs", "cache_lens, block_table, cache_batch_idx, q_lens, cu_seqlens")
_NO_PAGE = 0xFFFFFFFF


def attention_with_cache(
    q,
    k_cache,
    v_cache,
    *,
    cache_lens=None,
    block_table=None,
    cache_batch_idx=None,
    k=None,
    v=None,
    q_lens=None,
    cu_seqlens=None,
    causal=True,
    window=(-1, -1),
    attention_chunk=None,
    q_offset="bottom_right",
    scale=None,
    softcap=None,
    mask=None,
    alibi_slopes=None,
    sinks=None,
    layout="bhsd",
    return_lse=False,
    out=None,
):
    """Attention to a cache in memory of the caller's, which is read in place: pages of a pool, or batch entries with room for more tokens. New
    tokens are written to it first::

        out = attention_with_cache(q, k_pages, v_pages, k=k, v=v, block_table=table, cache_lens=lens, layout="bshd")

    The caches are `(batch, kv_heads, rows, dim)` and `(batch, kv_heads, rows, value_dim)`, or with `layout="bshd"` `(batch, rows, kv_heads,
    dim)`, in any strides but that the last axis has stride 1. With a block table an entry of the batch is a page and `rows` its size:
    token `j` of sequence `s` is row `j % rows` of page `block_table[s, j // rows]`. Rows at or past a sequence's length may hold anything.

    q is, for one sequence after another, `(total, q_heads, dim)`; or has an entry for each sequence, `(batch, q_heads, q_len, dim)`, or with
    `layout="bshd"` `(batch, q_len, q_heads, dim)`, whose entries have to follow one another in memory. out is alike. The queries of a
    sequence are its last tokens, unless `q_offset` says otherwise.

    Args:
        q, k_cache, v_cache: arrays or tensors as for `flashtile.attention`, of one dtype.
        cache_lens: tokens of each sequence in the cache, without the new ones. None: all rows, without a block table and new tokens.
        block_table: pages of each sequence, `(sequences, width)`, integers. Entries behind its last page are not read. Or a tuple `(indptr,
            indices)`, page lists one after another, as FlashInfer has them.
        cache_batch_idx: the batch entry of the cache for each sequence; None is the same entry as q's.
        k, v: new tokens of the layout of q, which are written to the cache at `cache_lens` before attention. Both or neither. Nothing is
            written where an exception is raised. Where k is packed, it has the sequences of q, or the second list of `cu_seqlens`.
        q_lens: queries of each sequence. Of `(total, q_heads, dim)` these are all rows, one sequence after another; with `cu_seqlens`, or
            where q has an entry for each sequence, the first rows of each, and out is 0 at the others.
        cu_seqlens: first row of each sequence in q, then the total; a pair of such lists where new tokens are others than the queries. With
            neither `q_lens` nor `cu_seqlens` each row of `(total, q_heads, dim)` is a sequence.
        causal, window, attention_chunk, q_offset, scale, softcap, alibi_slopes, sinks: as for `flashtile.attention`; causal is True here.
        mask: as for `flashtile.attention`, `(sequences, heads, longest queries, longest keys)`, or a list with a mask for each sequence.
        layout: `"bhsd"`, or `"bshd"`: the order that FlashAttention and vLLM call NHD.
        return_lse: whether the result is `(out, lse)`: `(q_heads, total)` for packed queries, else `(batch, q_heads, q_len)`.
        out: where to write the result. It overlaps no other argument in memory.

    On an NVIDIA GPU the lists and the block table are read by the host, so that lists and tensors on the CPU save a wait.

    Raises:
        ValueError: as `flashtile.attention`; where a page that is needed is missing, or two sequences would write to one row.
        TypeError, BufferError, MemoryError, RuntimeError: as `flashtile.attention`.
    """
    if (k is None) != (v is None):
        raise ValueError(f"{'v' if v is None else 'k'} is missing: new tokens have a key and a value")
    for name, numbers in (("cache_lens", cache_lens), ("cache_batch_idx", cache_batch_idx), ("q_lens", q_lens), ("cu_seqlens", cu_seqlens)):
        if numbers is not None:
            check_numbers(name, numbers)
    args = _CacheArgs(cache_lens, _table(block_table), cache_batch_idx, q_lens, cu_seqlens)
    mask, mask_lens = padded_masks(mask)
    options = Options(
        causal=causal,
        window=window,
        attention_chunk=attention_chunk,
        q_offset=q_offset,
        scale=scale,
        softcap=softcap,
        mask=mask,
        mask_lens=mask_lens,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        layout=layout,
        return_lse=return_lse,
    )
    arguments = [lent(name, x) for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out))]
    new = None if k is None else [lent("k", k), lent("v", v), _writer([(k_cache, k), (v_cache, v)], layout)]
    compute = _flashtile.attention_with_cache
    if is_torch(q) and q.is_cuda:
        from ._cuda import attention_with_cache as compute
    made, lse = compute(arguments, new, args, checked(options), maker(q))
    if out is not None:
        out = written(out)
    else:
        # Made with the rows of a sequence one after another, as q has them.
        out = made.swapaxes(1, 2) if made.ndim == 4 and layout == "bhsd" else made
    if not return_lse:
        return out
    return out, lse if lse.ndim == 2 else _batch_first(lse)


def _table(x):
    """A block table as bytes of u32, and its number of rows."""
    if x is None:
        return None
    table = _rows_of_lists(*map(_integers, x)) if isinstance(x, tuple) and len(x) == 2 else _integers(x)
    if table.ndim != 2:
        raise TypeError(f"block_table has shape {table.shape}, expected (sequences, width), or a pair (indptr, indices)")
    is_page = (table >= 0) & (table < _NO_PAGE)
    return numpy.where(is_page, table, _NO_PAGE).astype("<u4").tobytes(), len(table)


def _integers(x):
    """The integers of a block table, as an array."""
    check_numbers("block_table", x)
    array = numpy.asarray(x.cpu() if is_torch(x) else x)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"block_table is {array.dtype}, expected integers")
    return array


def _rows_of_lists(indptr, indices):
    """The block table of page lists in compressed sparse rows."""
    is_list = indptr.ndim == indices.ndim == 1 and indptr.size
    if not is_list or indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(f"block_table has indptr {indptr.tolist()} and {indices.size} indices, expected to start at 0, never to decrease, and to end there")
    counts = indptr[1:].astype(numpy.int64) - indptr[:-1].astype(numpy.int64)
    table = numpy.full((len(counts), counts.max(initial=0)), -1, numpy.int64)
    table[numpy.arange(table.shape[1]) < counts[:, None]] = indices
    return table


def _writer(pairs, layout):
    """A function that writes new tokens to pages and rows of caches, for pairs `(cache, tokens)`. It cannot fail once the extension module calls it."""
    pairs = [(_writable(f"{name}_cache", cache, new), _array(new)) for name, (cache, new) in zip("kv", pairs)]

    def write(pages, rows):
        order = lambda x: x.swapaxes(1, 2) if layout == "bhsd" and x.ndim == 4 else x
        ordered = [(order(cache), order(new)) for cache, new in pairs]
        cache, new = ordered[0]
        at = [numpy.asarray(index, numpy.int64).reshape(new.shape[:-2]) for index in (pages, rows)]
        if is_torch(cache):
            at = [tensors().torch.as_tensor(index, device=cache.device) for index in at]
        for cache, new in ordered:
            cache[at[0], at[1]] = new

    return write


def _array(x):
    """x as a tensor of PyTorch, or as an array over its memory. What is neither is left for the extension module to refuse."""
    is_foreign = not is_torch(x) and not isinstance(x, numpy.ndarray) and hasattr(x, "__dlpack__")
    return numpy.from_dlpack(x) if is_foreign else x


def _writable(name, cache, new):
    """`_array` of a cache, which takes elements of the kind of the new ones."""
    if is_torch(cache) != is_torch(new):
        raise TypeError(f"{name[0]} is a {type(new).__name__} and {name} a {type(cache).__name__}, expected both of one kind")
    if is_torch(cache):
        if tensors().readable(name, cache) is not cache:
            raise ValueError(f"{name} is a view whose elements are computed when they are read: give the tensor that holds them, or a copy")
        if cache.is_inference() and not tensors().torch.is_inference_mode_enabled():
            raise ValueError(f"{name} was made under torch.inference_mode(), which allows writes there alone: call it there, or clone it")
        return cache
    array = _array(cache)
    if isinstance(array, numpy.ndarray) and not array.flags.writeable:
        raise BufferError(f"{name} is read-only")
    return array


def _batch_first(lse):
    """The logsumexp of queries with a batch, which is `(heads, batch, rows)`, in the order that q has."""
    moved = lse.swapaxes(0, 1)
    return moved.contiguous() if is_torch(moved) else numpy.ascontiguousarray(moved)
