"""Attention over pages as engines with FlashInfer's calls use it: page lists, NHD and HND, appended tokens, cascades of states."""

import importlib.util

import numpy
import pytest
from conftest import reference
from flashtile import KvCache, attention, attention_with_cache, merge

# bfloat16 is a dtype of ml_dtypes. All other tests need numpy alone.
DTYPES = [numpy.dtype("float32")]
if importlib.util.find_spec("ml_dtypes"):
    import ml_dtypes

    DTYPES.append(numpy.dtype(ml_dtypes.bfloat16))
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.6e-2}


def normal(rng, *shape, dtype=numpy.float32):
    return rng.standard_normal(shape, dtype=numpy.float32).astype(dtype)


def close(got, want, dtype="float32"):
    numpy.testing.assert_allclose(numpy.asarray(got).astype(numpy.float64), want, rtol=0, atol=TOLERANCE[str(dtype)])


class Pages:
    """A pool `(pages, 2, page_size, kv_heads, dim)` in the layout NHD, or `(pages, 2, kv_heads, page_size, dim)` in HND, and page lists of some
    sequences of these lengths. Rows without a token are NaN."""

    def __init__(self, rng, lens, page_size, kv_heads, dim, layout, dtype=numpy.float32):
        counts = [-(-n // page_size) for n in lens]
        self.indptr = numpy.cumsum([0, *counts]).astype(numpy.int32)
        self.indices = rng.permutation(self.indptr[-1] + 2)[: self.indptr[-1]].astype(numpy.int32)
        self.lens, self.page_size, self.layout = lens, page_size, layout
        nhd = numpy.full((self.indptr[-1] + 2, 2, page_size, kv_heads, dim), numpy.nan, dtype)
        self.pool = nhd if layout == "bshd" else numpy.ascontiguousarray(nhd.swapaxes(2, 3))
        self.tokens = [normal(rng, n, 2, kv_heads, dim, dtype=dtype) for n in lens]
        for s, tokens in enumerate(self.tokens):
            for j, token in enumerate(tokens):
                page, row = self.indices[self.indptr[s] + j // page_size], j % page_size
                (self.pool if layout == "bshd" else self.pool.swapaxes(2, 3))[page, :, row] = token

    def attention(self, q, lens=None, **options):
        lens = self.lens if lens is None else lens
        lists = (self.indptr, self.indices)
        return attention_with_cache(q, self.pool[:, 0], self.pool[:, 1], cache_lens=lens, block_table=lists, layout=self.layout, **options)

    def expected(self, s, q, **options):
        """Out and logsumexp of the queries `(tokens, heads, dim)` of a sequence."""
        of = [x.swapaxes(0, 1)[None] for x in (q, self.tokens[s][:, 0], self.tokens[s][:, 1])]
        out, lse = reference(*of, **options)
        return out[0].swapaxes(0, 1), lse[0]


def ends(q_len, kv_len, left=-1):
    p, j = numpy.arange(q_len)[:, None] + kv_len - q_len, numpy.arange(kv_len)[None, :]
    return (j <= p) & (j >= p - left if left >= 0 else True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"], ids=["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("kv_heads, group", [(1, 1), (2, 4)])
@pytest.mark.parametrize("options", [{}, {"window": (6, 0)}, {"softcap": 8.0}, {"scale": 0.3, "sinks": True}], ids=str)
def test_batch_decode(rng, layout, dtype, page_size, kv_heads, group, options):
    lens, heads = [1, 17, 54, 5], kv_heads * group
    pages, q = Pages(rng, lens, page_size, kv_heads, 64, layout, dtype), normal(rng, 4, heads, 64, dtype=dtype)
    options = options | ({"sinks": numpy.linspace(-1, 1, heads).astype(numpy.float32)} if "sinks" in options else {})
    out, lse = pages.attention(q, return_lse=True, **options)
    left, _ = options.get("window", (-1, 0))
    of = {name: value for name, value in options.items() if name != "window"}
    for s, n in enumerate(lens):
        want, want_lse = pages.expected(s, q[s : s + 1], visible=ends(1, n, left), **of)
        close(out[s : s + 1], want, dtype)
        close(lse[:, s : s + 1], want_lse, dtype)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"], ids=["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("q_lens", [(3, 37, 1), (11, 0, 54)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 80])
def test_batch_prefill(rng, layout, dtype, page_size, q_lens, causal, dim):
    lens = [11, 37, 54]
    pages, q = Pages(rng, lens, page_size, 2, dim, layout, dtype), normal(rng, sum(q_lens), 8, dim, dtype=dtype)
    starts = numpy.cumsum([0, *q_lens]).astype(numpy.int32)
    out, lse = pages.attention(q, cu_seqlens=starts, causal=causal, return_lse=True)
    for s, (n, rows) in enumerate(zip(lens, q_lens)):
        at = slice(starts[s], starts[s + 1])
        want, want_lse = pages.expected(s, q[at], visible=ends(rows, n) if causal else None)
        close(out[at], want, dtype)
        close(lse[:, at], want_lse, dtype)


def test_masks_and_slopes_of_sequences(rng):
    """A mask for each sequence has the longest queries and keys; ALiBi counts from the position of a query."""
    lens, q_lens = [11, 20], [4, 2]
    pages, q = Pages(rng, lens, 4, 2, 64, "bshd"), normal(rng, 6, 4, 64)
    mask = rng.random((2, 1, 4, 20)) < 0.6
    slopes = numpy.array([0.5, 0.25, 0.125, -0.1], numpy.float32)
    out = pages.attention(q, q_lens=q_lens, causal=False, mask=mask, alibi_slopes=slopes)
    for s, at in enumerate([slice(0, 4), slice(4, 6)]):
        p, j = numpy.arange(q_lens[s])[:, None] + lens[s] - q_lens[s], numpy.arange(lens[s])[None, :]
        want, _ = pages.expected(s, q[at], visible=mask[s, 0, : q_lens[s], : lens[s]], bias=-slopes[None, :, None, None] * abs(p - j))
        close(out[at], want)


def test_slopes_of_each_sequence(rng):
    """Slopes of either sign for each query head of each sequence: over pages, of a batch, packed, and in steps of a cache."""
    lens, q_lens = [11, 20], [4, 2]
    pages, q = Pages(rng, lens, 4, 2, 64, "bshd"), normal(rng, 6, 4, 64)
    slopes = normal(rng, 2, 4)
    given = {"numpy": slopes, "lists": slopes.tolist()}
    if importlib.util.find_spec("torch"):
        import torch

        given["torch"] = torch.from_numpy(slopes)
    k, v = (numpy.concatenate([tokens[:, side] for tokens in pages.tokens]) for side in (0, 1))
    starts = (numpy.cumsum([0, *q_lens]), numpy.cumsum([0, *lens]))
    options = {"causal": True, "q_offset": "bottom_right"}
    for alibi in given.values():
        out = pages.attention(q, q_lens=q_lens, alibi_slopes=alibi)
        packed = attention(q, k, v, cu_seqlens=starts, alibi_slopes=alibi, **options)
        for s, at in enumerate([slice(0, 4), slice(4, 6)]):
            distance = abs(numpy.arange(q_lens[s])[:, None] + lens[s] - q_lens[s] - numpy.arange(lens[s])[None, :])
            want, _ = pages.expected(s, q[at], visible=ends(q_lens[s], lens[s]), bias=-slopes[s][None, :, None, None] * distance)
            close(out[at], want)
            close(packed[at], want)
        # A batch, of which each entry is a call of its own.
        of = [x[:22].reshape(2, 11, 2, 64) for x in (k, v)]
        whole = attention(q.reshape(2, 3, 4, 64), *of, alibi_slopes=alibi, layout="bshd", **options)
        parts = [attention(q[3 * s : 3 * s + 3][None], *(x[s : s + 1] for x in of), alibi_slopes=slopes[s], layout="bshd", **options) for s in range(2)]
        assert numpy.array_equal(whole, numpy.concatenate(parts))
    cache = KvCache(layers=1, kv_heads=2, head_dim=64, k="f32", v="f32")
    a, b = cache.create(), cache.create()
    rows = [pages.tokens[s][:, side] for side in (0, 1) for s in range(2)]
    with cache.step([(a, 11), (b, 20)]) as step:
        queries = normal(rng, 31, 4, 64)
        got = step.attend(0, queries, numpy.concatenate(rows[:2]), numpy.concatenate(rows[2:]), alibi_slopes=slopes)
        with pytest.raises(ValueError, match=r"alibi_slopes has shape \[4, 2\], expected \[4\], or \[2, 4\] for slopes of each sequence"):
            step.attend(0, queries, k, v, alibi_slopes=slopes.T)
    assert numpy.array_equal(got, attention(queries, k, v, cu_seqlens=starts[1], alibi_slopes=slopes, causal=True))
    for wrong, error, text in (
        (slopes.T, ValueError, r"alibi_slopes has shape \[4, 2\], expected \[4\], or \[2, 4\]"),
        (slopes.ravel(), ValueError, r"alibi_slopes has shape \[8\], expected \[4\], or \[2, 4\]"),
        (slopes[None], TypeError, "expected a number for each query head, or a list of them for each sequence"),
        ([[0.5], [0.5, 1.0]], TypeError, "expected a number for each query head, or a list of them for each sequence"),
    ):
        with pytest.raises(error, match=text):
            pages.attention(q, q_lens=q_lens, alibi_slopes=wrong)
        with pytest.raises(error, match=text):
            attention(q, k, v, cu_seqlens=starts, alibi_slopes=wrong, **options)
    with pytest.raises(ValueError, match="alibi_slopes are of each sequence, whose rows q_lens or kv_lens leave unused"):
        attention(q, k, v, cu_seqlens=starts, q_lens=[3, 2], alibi_slopes=slopes, **options)
    with pytest.raises(TypeError, match="(?s)sinks is .*, expected a number for each query head$"):
        attention(q, k, v, cu_seqlens=starts, sinks=slopes, **options)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"], ids=["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_appended_tokens(rng, layout, page_size, dtype):
    """Tokens appended in uneven chunks lie where pages that were filled at once have them, and attention sees them."""
    lens = [13, 1, 30]
    whole, cut = Pages(rng, lens, page_size, 2, 64, layout, dtype), numpy.array([9, 0, 30 - 16])
    q = normal(rng, sum(lens) - cut.sum(), 4, 64, dtype=dtype)
    starts = numpy.cumsum([0, *(numpy.array(lens) - cut)])
    want, want_lse = whole.attention(q, cu_seqlens=starts, return_lse=True)
    partly = Pages(numpy.random.default_rng(7), lens, page_size, 2, 64, layout, dtype)
    for s, n in enumerate(lens):
        for j in range(cut[s], n):
            at = (partly.indices[partly.indptr[s] + j // page_size], slice(None), j % page_size)
            (partly.pool if layout == "bshd" else partly.pool.swapaxes(2, 3))[at] = numpy.nan
    assert not numpy.array_equal(partly.pool, whole.pool, equal_nan=True)
    new = numpy.concatenate([tokens[n:] for tokens, n in zip(whole.tokens, cut)])
    got, lse = partly.attention(q, cut, k=new[:, 0], v=new[:, 1], cu_seqlens=starts, return_lse=True)
    assert numpy.array_equal(partly.pool, whole.pool, equal_nan=True)
    assert numpy.array_equal(got, want) and numpy.array_equal(lse, want_lse)


@pytest.mark.parametrize("causal", [False, True])
def test_cascades(rng, causal):
    """A prefix that sequences share, by its own call and merged with the rest, gives what pages with the prefix give."""
    prefix, rest, q_lens = normal(rng, 32, 2, 2, 64), [5, 11, 9], [2, 1, 3]
    pages = Pages(rng, [32 + n for n in rest], 8, 2, 64, "bshd")
    for s in range(3):
        pages.tokens[s][:32] = prefix
        pages.indices[pages.indptr[s] : pages.indptr[s] + 4] = pages.indices[:4]
    for j, token in enumerate(prefix):
        pages.pool[pages.indices[j // 8], :, j % 8] = token
    q = normal(rng, 6, 4, 64)
    want, want_lse = pages.attention(q, q_lens=q_lens, causal=causal, return_lse=True)
    shared = attention(q, prefix[:, 0], prefix[:, 1], cu_seqlens=([0, 6], [0, 32]), return_lse=True)
    suffix_table = numpy.stack([numpy.resize(pages.indices[pages.indptr[s] + 4 : pages.indptr[s + 1]], 2) for s in range(3)])
    own = attention_with_cache(
        q, pages.pool[:, 0], pages.pool[:, 1], cache_lens=rest, block_table=suffix_table, q_lens=q_lens, causal=causal, layout="bshd", return_lse=True
    )
    out, lse = merge([shared, own])
    close(out, want.astype(float))
    close(lse, want_lse.astype(float))
    for s, at in enumerate([slice(0, 2), slice(2, 3), slice(3, 6)]):
        close(out[at], pages.expected(s, q[at], visible=ends(q_lens[s], 32 + rest[s]) if causal else None)[0])


def test_no_sequences_and_no_keys(rng):
    pages = Pages(rng, [3, 0], 4, 2, 64, "bshd")
    out, lse = pages.attention(normal(rng, 2, 4, 64), return_lse=True)
    assert out[0].any() and not out[1].any() and (lse[:, 1] == -numpy.inf).all()
    none = attention_with_cache(normal(rng, 0, 4, 64), pages.pool[:, 0], pages.pool[:, 1], cache_lens=[], block_table=numpy.zeros((0, 3), int), layout="bshd")
    assert none.shape == (0, 4, 64)


def test_a_batch_of_one_dimension_is_decoded(rng):
    """q, k and v `(sequences, heads, dim)` are one token of each sequence, over tensors of PyTorch too."""
    torch = pytest.importorskip("torch")
    pages = Pages(rng, [8, 3], 4, 2, 64, "bhsd")
    lens = [7, 2]
    new = numpy.stack([pages.tokens[0][7], pages.tokens[1][2]])
    q = normal(rng, 2, 4, 64)
    want = pages.attention(q)
    pool = torch.from_numpy(pages.pool.copy())
    pool[pages.indices[1], :, :, 3] = torch.nan
    pool[pages.indices[2], :, :, 2] = torch.nan
    of = [torch.from_numpy(x) for x in (q, new[:, 0].copy(), new[:, 1].copy())]
    lists = tuple(map(torch.from_numpy, (pages.indptr, pages.indices)))
    got = attention_with_cache(of[0], pool[:, 0], pool[:, 1], k=of[1], v=of[2], cache_lens=lens, block_table=lists, layout="bhsd")
    assert numpy.array_equal(got.numpy(), want) and numpy.array_equal(pool.numpy(), pages.pool, equal_nan=True)
