"""`attention_with_cache` as engines with FlashAttention's calls use it: slots and pages, new tokens, lengths on both sides."""

import importlib.util
import itertools
import subprocess
import sys

import numpy
import pytest
from conftest import reference
from flashtile import attention, attention_with_cache
from test_attention import Dlpack

# bfloat16 is a dtype of ml_dtypes. All other tests need numpy alone.
DTYPES = [numpy.dtype("float32"), numpy.dtype("float16")]
if importlib.util.find_spec("ml_dtypes"):
    import ml_dtypes

    DTYPES.append(numpy.dtype(ml_dtypes.bfloat16))
# As for `attention`.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
ROOM, PAGE, DIM, VALUE_DIM = 40, 8, 32, 16


def normal(rng, *shape, dtype=numpy.float32):
    return rng.standard_normal(shape, dtype=numpy.float32).astype(dtype)


def visible(q_len, kv_len, causal, window=(-1, -1), attention_chunk=0):
    """Keys that the last tokens of a sequence see."""
    p, j = numpy.arange(q_len)[:, None] + kv_len - q_len, numpy.arange(kv_len)[None, :]
    left, right = window
    right = 0 if causal else right
    chunk = p // attention_chunk == j // attention_chunk if attention_chunk else True
    return chunk & (j >= p - left if left >= 0 else True) & (j <= p + right if right >= 0 else True) & numpy.ones((q_len, kv_len), bool)


def expected(q, k, v, causal=True, window=(-1, -1), attention_chunk=0, **options):
    """Out `(queries, heads, dim)` and logsumexp `(heads, queries)` of one sequence, whose tensors are `(tokens, heads, dim)`."""
    of = [numpy.asarray(x).astype(numpy.float64).swapaxes(0, 1)[None] for x in (q, k, v)]
    out, lse = reference(*of, visible=visible(len(q), len(k), causal, window, attention_chunk), **options)
    return out[0].swapaxes(0, 1), lse[0]


class Cache:
    """Keys and values of some sequences `(tokens, heads, dim)`, in slots or pages full of NaN, as layout `bshd` has them."""

    def __init__(self, rng, lens, paged, dtype=numpy.float32, heads=2):
        self.lens, self.paged = lens, paged
        self.k = [normal(rng, n, heads, DIM, dtype=dtype) for n in lens]
        self.v = [normal(rng, n, heads, VALUE_DIM, dtype=dtype) for n in lens]
        count = len(lens)
        if paged:
            width = ROOM // PAGE
            pages = rng.permutation(count * width + 3)[: count * width].reshape(count, width)
            self.places = {"block_table": pages.astype(numpy.int32)}
            shape = (count * width + 3, PAGE, heads)
        else:
            pages = rng.permutation(count + 2)[:count]
            self.places = {"cache_batch_idx": pages}
            shape = (count + 2, ROOM, heads)
        self.pages = pages
        self.k_cache = numpy.full((*shape, DIM), numpy.nan, dtype)
        self.v_cache = numpy.full((*shape, VALUE_DIM), numpy.nan, dtype)
        for cache, rows in ((self.k_cache, self.k), (self.v_cache, self.v)):
            for sequence, tokens in enumerate(rows):
                self.put(cache, sequence, 0, tokens)

    def put(self, cache, sequence, at, tokens):
        for j, token in enumerate(tokens, at):
            if self.paged:
                cache[self.pages[sequence, j // PAGE], j % PAGE] = token
            else:
                cache[self.pages[sequence], j] = token


def close(got, want, dtype="float32"):
    numpy.testing.assert_allclose(numpy.asarray(got).astype(numpy.float64), want, rtol=0, atol=TOLERANCE[str(dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("q_heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("new", [0, 1, 5])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"causal": False, "window": (-1, 0)}, {"window": (7, 0)}, {"attention_chunk": 6}, {"causal": False, "window": (3, 2), "softcap": 4.0, "sinks": [0.5] * 6}])
def test_slots_and_pages(rng, dtype, paged, q_heads, kv_heads, new, options):
    """`flash_attn_with_kvcache`: q has an entry for each sequence; some calls append."""
    lens, q_len = [9, 33, 0, 16], max(new, 3)
    if new == 0:
        lens[2] = 3
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = options["sinks"][:q_heads]
    cache = Cache(rng, lens, paged, dtype, kv_heads)
    q = normal(rng, len(lens), q_len, q_heads, DIM, dtype=dtype)
    tokens = {}
    if new:
        tokens = {"k": normal(rng, len(lens), new, kv_heads, DIM, dtype=dtype), "v": normal(rng, len(lens), new, kv_heads, VALUE_DIM, dtype=dtype)}
    want_k, want_v = cache.k_cache.copy(), cache.v_cache.copy()
    out, lse = attention_with_cache(
        q, cache.k_cache, cache.v_cache, cache_lens=numpy.array(lens), layout="bshd", return_lse=True, **cache.places, **tokens, **options
    )
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((4, q_len, q_heads, VALUE_DIM), dtype, (4, q_heads, q_len), numpy.float32)
    for s in range(len(lens)):
        k, v = cache.k[s], cache.v[s]
        if new:
            cache.put(want_k, s, lens[s], tokens["k"][s])
            cache.put(want_v, s, lens[s], tokens["v"][s])
            k, v = numpy.concatenate([k, tokens["k"][s]]), numpy.concatenate([v, tokens["v"][s]])
        want, want_lse = expected(q[s], k, v, **options)
        close(out[s], want, dtype)
        close(lse[s], want_lse, dtype)
    assert numpy.array_equal(want_k, cache.k_cache, equal_nan=True) and numpy.array_equal(want_v, cache.v_cache, equal_nan=True)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_packed_queries(rng, paged, layout):
    """`flash_attn_varlen_func` with a block table, and with keys that are padded: `cu_seqlens_q` and `seqused_k`."""
    lens, q_lens = [9, 33, 12], [4, 1, 12]
    cache = Cache(rng, lens, paged)
    caches = [x if layout == "bshd" else numpy.ascontiguousarray(x.swapaxes(1, 2)) for x in (cache.k_cache, cache.v_cache)]
    q = normal(rng, sum(q_lens), 4, DIM)
    starts = numpy.cumsum([0, *q_lens])
    options = {"cache_lens": lens, "layout": layout, "return_lse": True, **cache.places}
    out, lse = attention_with_cache(q, *caches, cu_seqlens=starts, **options)
    by_lens = attention_with_cache(q, *caches, q_lens=q_lens, **options)
    assert numpy.array_equal(out, by_lens[0]) and numpy.array_equal(lse, by_lens[1])
    assert (out.shape, lse.shape) == ((17, 4, VALUE_DIM), (4, 17))
    for s, (at, end) in enumerate(itertools.pairwise(starts)):
        want, want_lse = expected(q[at:end], cache.k[s], cache.v[s])
        close(out[at:end], want)
        close(lse[:, at:end], want_lse)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_on_both_sides(rng, paged, packed):
    """`seqused_q` and `seqused_k`: rows of q past `q_lens` have out 0, and no others change."""
    lens, q_lens, rows = [9, 33, 12, 5], [4, 1, 0, 5], [4, 6, 3, 7]
    cache = Cache(rng, lens, paged)
    starts = numpy.cumsum([0, *rows]) if packed else numpy.arange(5) * 7
    q = normal(rng, starts[-1], 4, DIM)
    for s, used in enumerate(q_lens):
        q[starts[s] + used : starts[s + 1]] = numpy.nan
    places = {"cu_seqlens": starts} if packed else {"layout": "bshd"}
    of = (q, cache.k_cache, cache.v_cache) if packed else (q.reshape(4, 7, 4, DIM), cache.k_cache, cache.v_cache)
    if packed:
        places["layout"] = "bshd"
    out, lse = attention_with_cache(*of, cache_lens=lens, q_lens=q_lens, return_lse=True, **places, **cache.places)
    out, lse = out.reshape(-1, 4, VALUE_DIM), lse if packed else lse.swapaxes(0, 1).reshape(4, -1)
    for s, used in enumerate(q_lens):
        at, end = starts[s], starts[s] + used
        want, want_lse = expected(q[at:end], cache.k[s], cache.v[s])
        close(out[at:end], want)
        close(lse[:, at:end], want_lse)
        assert not out[end : starts[s + 1]].any() and (lse[:, end : starts[s + 1]] == -numpy.inf).all()


def test_packed_keys_with_lengths(rng):
    """`seqused_q` and `seqused_k` of packed queries and keys, by `attention`: rows past them are neither read nor anything but 0."""
    rows, used = ([4, 6, 3, 2], [9, 12, 5, 4]), ([4, 1, 0, 2], [7, 12, 5, 0])
    (starts_q, starts_k) = (numpy.cumsum([0, *n]) for n in rows)
    q, k, v = normal(rng, starts_q[-1], 4, DIM), normal(rng, starts_k[-1], 2, DIM), normal(rng, starts_k[-1], 2, VALUE_DIM)
    for s in range(4):
        q[starts_q[s] + used[0][s] : starts_q[s + 1]] = numpy.nan
        k[starts_k[s] + used[1][s] : starts_k[s + 1]] = numpy.nan
    options = {"cu_seqlens": (starts_q, starts_k), "causal": True, "q_offset": "bottom_right", "return_lse": True}
    out, lse = attention(q, k, v, q_lens=used[0], kv_lens=used[1], **options)
    for s in range(4):
        at, end, of_k = starts_q[s], starts_q[s] + used[0][s], slice(starts_k[s], starts_k[s] + used[1][s])
        want, want_lse = expected(q[at:end], k[of_k], v[of_k])
        close(out[at:end], want)
        close(lse[:, at:end], want_lse)
        assert not out[end : starts_q[s + 1]].any() and (lse[:, end : starts_q[s + 1]] == -numpy.inf).all()
    # One side alone, and lengths that are all rows.
    q, k = numpy.nan_to_num(q), numpy.nan_to_num(k)
    assert numpy.array_equal(attention(q, k, v, kv_lens=rows[1], **options)[0], attention(q, k, v, **options)[0])
    only_k = attention(q, k, v, kv_lens=used[1], **options)[0]
    close(only_k[:4], expected(q[:4], k[:7], v[:7])[0])
    for given, text in (
        ({"q_lens": [5, 1, 1, 1]}, "q_lens is .5, 1, 1, 1., expected a number for each sequence, at most its rows"),
        ({"kv_lens": [1, 1]}, "kv_lens is .1, 1., expected a number for each sequence"),
        ({"kv_lens": [1, 1, 1, 1], "mask": numpy.ones((1, 1), bool)}, "a mask was given with q_lens or kv_lens of packed sequences"),
        ({"q_lens": [1, 1], "cu_seqlens": ([0, 4, 15], [])}, "cu_seqlens"),
        ({"q_lens": [1, 1], "cu_seqlens": None}, "q_lens were given without cu_seqlens"),
    ):
        with pytest.raises(ValueError, match=text):
            attention(q, k, v, **(options | given))


def test_new_tokens_of_packed_sequences(rng):
    """Chunks of prompts and tokens of decoding in one call, and new tokens that are more than the queries."""
    lens, new_lens, q_lens = [9, 0, 16], [1, 12, 3], [1, 5, 3]
    cache = Cache(rng, lens, paged=True)
    k, v = normal(rng, 16, 2, DIM), normal(rng, 16, 2, VALUE_DIM)
    q = normal(rng, 9, 4, DIM)
    starts = (numpy.cumsum([0, *q_lens]), numpy.cumsum([0, *new_lens]))
    out = attention_with_cache(q, cache.k_cache, cache.v_cache, k=k, v=v, cache_lens=lens, cu_seqlens=starts, layout="bshd", **cache.places)
    for s, (n, m) in enumerate(zip(starts[0], starts[1])):
        if s == 3:
            break
        all_k, all_v = (numpy.concatenate([old[s], x[m : m + new_lens[s]]]) for old, x in ((cache.k, k), (cache.v, v)))
        close(out[n : n + q_lens[s]], expected(q[n : n + q_lens[s]], all_k, all_v)[0])
    # Every row is where one token after another would have put it.
    again = Cache(numpy.random.default_rng(7), lens, paged=True)
    for x, y in ((cache.k_cache, again.k_cache), (cache.v_cache, again.v_cache)):
        for s in range(3):
            again.put(y, s, lens[s], (k if y is again.k_cache else v)[starts[1][s] : starts[1][s + 1]])
        assert numpy.array_equal(x, y, equal_nan=True)


def test_decoding_step_by_step(rng):
    """Many steps over one cache give what attention over all tokens gives, bit for bit."""
    tokens, cache = 20, Cache(rng, [0, 0], paged=True)
    q, k, v = normal(rng, 2, tokens, 4, DIM), normal(rng, 2, tokens, 2, DIM), normal(rng, 2, tokens, 2, VALUE_DIM)
    whole = attention(q, k, v, causal=True, layout="bshd")
    for n in range(tokens):
        step = attention_with_cache(
            q[:, n], cache.k_cache, cache.v_cache, k=k[:, n], v=v[:, n], cache_lens=[n, n], layout="bshd", **cache.places
        )
        assert numpy.array_equal(step, whole[:, n])


@pytest.mark.parametrize("paged", [False, True])
def test_a_mask_for_each_sequence(rng, paged):
    """Masks with the lengths of their sequences, new tokens included."""
    cache = Cache(rng, [9, 33, 4], paged)
    counts, ends = [1, 4, 2], [0, 1, 5, 7]
    q, k, v = normal(rng, 7, 4, DIM), normal(rng, 7, 2, DIM), normal(rng, 7, 2, VALUE_DIM)
    masks = [rng.random((count, held + count)) < 0.6 for count, held in zip(counts, cache.lens)]
    given = {"cache_lens": cache.lens, "cu_seqlens": ends, "layout": "bshd", "causal": False, **cache.places}
    with pytest.raises(ValueError, match=r"mask\[2\] is of 2 queries and 5 keys, expected 2 and 6 as sequence 2 has"):
        attention_with_cache(q, cache.k_cache, cache.v_cache, k=k, v=v, mask=[*masks[:2], masks[2][:, :5]], **given)
    out = attention_with_cache(q, cache.k_cache, cache.v_cache, k=k, v=v, mask=masks, **given)
    for at, mask in enumerate(masks):
        rows = slice(*ends[at : at + 2])
        of = [x.swapaxes(0, 1)[None] for x in (q[rows], numpy.concatenate([cache.k[at], k[rows]]), numpy.concatenate([cache.v[at], v[rows]]))]
        close(out[rows], reference(*of, visible=mask)[0][0].swapaxes(0, 1))


def test_the_whole_cache(rng):
    """Without lengths all rows of an entry are keys; head-major caches take head-major queries, one for each sequence."""
    q, k, v = normal(rng, 3, 4, 1, DIM), normal(rng, 3, 2, 9, DIM), normal(rng, 3, 2, 9, VALUE_DIM)
    want = attention(q, k, v)
    assert numpy.array_equal(attention_with_cache(q, k, v), want)
    out = numpy.zeros((3, 4, 1, VALUE_DIM), numpy.float32)
    assert attention_with_cache(q, k, v, out=out) is out and numpy.array_equal(out, want)
    one = attention_with_cache(normal(rng, 1, 4, 7, DIM).swapaxes(1, 2)[0], k[:1], v[:1], q_lens=[7])
    assert one.shape == (7, 4, VALUE_DIM)


@pytest.mark.parametrize("paged", [False, True])
def test_head_major_views_of_tokens(rng, paged):
    """Tensors that were made token-major and swapped, as models have them, with new tokens."""
    q, k, v = normal(rng, 2, 3, 4, DIM), normal(rng, 2, 3, 2, DIM), normal(rng, 2, 3, 2, VALUE_DIM)
    caches = [Cache(numpy.random.default_rng(5), [9, 30], paged) for _ in range(2)]
    want, want_lse = attention_with_cache(
        q, caches[0].k_cache, caches[0].v_cache, k=k, v=v, cache_lens=[9, 30], layout="bshd", return_lse=True, **caches[0].places
    )
    swapped = [x.swapaxes(1, 2) for x in (q, caches[1].k_cache, caches[1].v_cache, k, v)]
    given = {"k": swapped[3], "v": swapped[4], "cache_lens": [9, 30], **caches[1].places}
    out, lse = attention_with_cache(*swapped[:3], return_lse=True, **given)
    assert numpy.array_equal(out, want.swapaxes(1, 2)) and numpy.array_equal(lse, want_lse)
    for of in ("k_cache", "v_cache"):
        assert numpy.array_equal(getattr(caches[0], of), getattr(caches[1], of), equal_nan=True)
    with pytest.raises(ValueError, match=r"out has shape .2, 3, 4, 16., expected .2, 4, 3, 16."):
        attention_with_cache(*swapped[:3], out=numpy.zeros((2, 3, 4, VALUE_DIM), numpy.float32), **given)
    with pytest.raises(ValueError, match=r"v has shape .3, 2, 2, 16., expected the tokens of k, .2, 3, 2, 32."):
        other = v.reshape(3, 2, 2, VALUE_DIM)
        attention_with_cache(q, caches[0].k_cache, caches[0].v_cache, k=k, v=other, cache_lens=[9, 30], layout="bshd", **caches[0].places)


def test_nothing_is_written_where_a_call_is_refused(rng):
    cache = Cache(rng, [9, 33], paged=True)
    q, k, v = normal(rng, 2, 4, DIM), normal(rng, 2, 2, DIM), normal(rng, 2, 2, VALUE_DIM)
    table = cache.pages
    kept = cache.k_cache.copy(), cache.v_cache.copy()
    readonly = cache.v_cache.view()
    readonly.flags.writeable = False
    both = table.copy()
    both[0, 1] = both[1, 4]
    absent = table.copy()
    absent[1, 4] = -1
    large = table.copy()
    large[1, 0] = 99
    given = {"k": k, "v": v, "cache_lens": [9, 33], "block_table": table, "layout": "bshd"}
    refused = [
        ({"cache_lens": [9, 40]}, ValueError, "sequence 1 keeps 41 tokens, its pages hold 40"),
        ({"cache_lens": [9]}, ValueError, "cache_lens has 1 entries, expected one for each of 2 sequences"),
        ({"cache_lens": None}, ValueError, "cache_lens is missing"),
        ({"block_table": large}, ValueError, "block 0 of sequence 1 is page 99, the pool has 13"),
        ({"block_table": absent}, ValueError, "block 4 of sequence 1 has no page"),
        ({"block_table": both}, ValueError, f"page {both[0, 1]} gets new tokens of sequence 0, and holds tokens of sequence 1 there"),
        ({"block_table": table[:1]}, ValueError, "block_table has 1 rows, expected one for each of 2 sequences"),
        ({"block_table": table[0]}, TypeError, "block_table has shape .5,., expected .sequences, width."),
        ({"block_table": table.astype(float)}, TypeError, "block_table is float64, expected integers"),
        ({"block_table": ([0, 5, 4], table[0])}, ValueError, "block_table has indptr .0, 5, 4. and 5 indices"),
        ({"cache_batch_idx": [0, 1]}, ValueError, "block_table and cache_batch_idx"),
        ({"v": None}, ValueError, "v is missing"),
        ({"k": k.astype(numpy.float16)}, TypeError, "k is f16, expected f32 as the cache has"),
        ({"k": k[:, :1]}, ValueError, "k has shape .2, 1, 32., expected 2 new tokens of 2 heads of 32"),
        ({"v": v[:1]}, ValueError, "v has shape .1, 2, 16., expected the tokens of k, .2, 2, 32."),
        ({"q_lens": [1, 2]}, ValueError, "q_lens is .1, 2., expected 2 queries in all"),
        ({"cu_seqlens": [0, 1]}, ValueError, "cu_seqlens of q is .0, 1., expected to start at 0"),
        ({"cu_seqlens": ([0, 1, 2], [0, 3, 2])}, ValueError, "cu_seqlens of k"),
        ({"cu_seqlens": [0, 2, 2], "q_lens": [1, 0]}, ValueError, "q_lens leave rows of q unused"),
        ({"mask": numpy.ones((3, 5), bool)}, ValueError, "mask has shape"),
        ({"sinks": [1.0]}, ValueError, "sinks has 1 elements, expected 4"),
        ({"q_offset": "right"}, ValueError, "q_offset is 'right'"),
        ({"out": k}, (ValueError, BufferError), "out"),
        ({"out": cache.v_cache[:2, :4, 0]}, BufferError, "out overlaps v_cache"),
        ({"k": cache.k_cache[0, :2]}, BufferError, "k_cache overlaps k in memory"),
    ]
    for changed, error, text in refused:
        with pytest.raises(error, match=text):
            attention_with_cache(q, cache.k_cache, cache.v_cache, **(given | changed))
    with pytest.raises(ValueError, match="q has 1099511627776 sequences, expected at most"):
        attention_with_cache(numpy.broadcast_to(q[:1], (1 << 40, 4, DIM)), cache.k_cache, cache.v_cache, cache_lens=[9], layout="bshd")
    with pytest.raises(BufferError, match="v_cache is read-only"):
        attention_with_cache(q, cache.k_cache, readonly, **given)
    with pytest.raises(ValueError, match="k_cache has 13 batch entries, and q has 2 sequences: give cache_batch_idx, or a block_table"):
        attention_with_cache(q, cache.k_cache, cache.v_cache, **(given | {"block_table": None}))
    with pytest.raises(BufferError, match="layout='bshd'"):
        attention_with_cache(normal(rng, 2, 4, 3, DIM), *(x.swapaxes(1, 2) for x in (cache.k_cache, cache.v_cache)), cache_lens=[9, 33], block_table=table)
    for got, want in zip((cache.k_cache, cache.v_cache), kept):
        assert numpy.array_equal(got, want, equal_nan=True)
    attention_with_cache(q, cache.k_cache, cache.v_cache, **given)
    assert not numpy.array_equal(cache.k_cache, kept[0], equal_nan=True)


def test_pages_are_read_in_place():
    """Keys and values that alternate in one array, as FlashInfer has them, and 64 MiB of pages that need no memory."""
    program = """
import resource, numpy, flashtile
pool = numpy.ones((1 << 13, 2, 16, 1, 64), numpy.float32)
q = numpy.ones((1, 1, 64), numpy.float32)
table = numpy.arange(1 << 13)[None]
def call(n):
    flashtile.attention_with_cache(q, pool[:, 0], pool[:, 1], cache_lens=[n], block_table=table, layout="bshd")
call(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
call(1 << 17)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(subprocess.check_output([sys.executable, "-c", program]))
    assert grown < 16 << 10, f"{grown} KiB for a call over 64 MiB of pages"


def test_tensors_of_pytorch(rng):
    torch = pytest.importorskip("torch")
    lens = [9, 33]
    for dtype in (torch.float32, torch.bfloat16):
        cache = Cache(rng, lens, paged=True)
        arrays = {"q": normal(rng, 2, 3, 4, DIM), "k": normal(rng, 2, 3, 2, DIM), "v": normal(rng, 2, 3, 2, VALUE_DIM)}
        tensors = {name: torch.from_numpy(x).to(dtype) for name, x in arrays.items()}
        caches = [torch.from_numpy(x.copy()).to(dtype) for x in (cache.k_cache, cache.v_cache)]
        q = tensors.pop("q")
        table = torch.from_numpy(cache.pages)
        options = {"cache_lens": torch.tensor(lens), "block_table": table, "layout": "bshd", "return_lse": True}
        out, lse = attention_with_cache(q, *caches, **tensors, **options)
        assert (type(out), out.dtype, tuple(out.shape), lse.dtype, tuple(lse.shape)) == (torch.Tensor, dtype, (2, 3, 4, VALUE_DIM), torch.float32, (2, 4, 3))
        for s in range(2):
            old = [torch.from_numpy(x[s]).to(dtype) for x in (cache.k, cache.v)]
            k, v = (torch.cat([o, tensors[name][s]]).double().numpy() for o, name in zip(old, "kv"))
            want, want_lse = expected(q[s].double().numpy(), k, v)
            close(out[s].double(), want, str(dtype).removeprefix("torch."))
            close(lse[s].double(), want_lse, str(dtype).removeprefix("torch."))
        # A second call over what the first one wrote, without new tokens, gives the same.
        after = torch.tensor(lens) + 3
        assert torch.equal(attention_with_cache(q, *caches, **(options | {"cache_lens": after}))[0], out)
    with torch.inference_mode():
        inference = caches[1].clone()
    kept = caches[0].clone()
    with pytest.raises(ValueError, match="v_cache was made under torch.inference_mode"):
        attention_with_cache(q, caches[0], inference, k=-tensors["k"], v=-tensors["v"], **options)
    assert torch.equal(caches[0].nan_to_num(), kept.nan_to_num())
    with pytest.raises(ValueError, match="k_cache is a view whose elements are computed"):
        attention_with_cache(q, torch._neg_view(caches[0]), caches[1], **tensors, **options)
    with pytest.raises(BufferError, match="elements overlap"):
        attention_with_cache(q, caches[0], caches[1][:1].expand_as(caches[1]), **tensors, **options)
    with pytest.raises(ValueError, match="k_cache, which requires one"):
        attention_with_cache(q, caches[0].clone().requires_grad_(), caches[1], **options)
    with pytest.raises(TypeError, match="k is a ndarray and k_cache a Tensor, expected both of one kind"):
        attention_with_cache(q, *caches, k=arrays["k"], v=arrays["v"], **options)


def test_caches_of_other_libraries(rng):
    """DLPack that says that it may be written is written; DLPack that cannot say so is refused."""
    cache, other = (Cache(numpy.random.default_rng(7), [9, 33], paged=True) for _ in range(2))
    q, k, v = normal(rng, 2, 4, DIM), normal(rng, 2, 2, DIM), normal(rng, 2, 2, VALUE_DIM)
    options = {"cache_lens": [9, 33], "layout": "bshd", **cache.places}
    want = attention_with_cache(q, cache.k_cache, cache.v_cache, k=k, v=v, **options)
    of = [Dlpack(x) for x in (q, other.k_cache, other.v_cache, k, v)]
    kept = other.k_cache.copy()
    with pytest.raises(BufferError, match="v_cache is read-only"):
        attention_with_cache(*of[:2], Dlpack(other.v_cache, versions=False), k=of[3], v=of[4], **options)
    with pytest.raises(TypeError, match="k_cache is a list"):
        attention_with_cache(q, [[1.0]], other.v_cache, k=k, v=v, **options)
    assert numpy.array_equal(other.k_cache, kept, equal_nan=True)
    assert numpy.array_equal(attention_with_cache(*of[:3], k=of[3], v=of[4], **options), want)
    assert numpy.array_equal(other.k_cache, cache.k_cache, equal_nan=True) and numpy.array_equal(other.v_cache, cache.v_cache, equal_nan=True)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_float8_is_refused_with_its_remedy(rng, kind):
    q, k, v = normal(rng, 1, 4, DIM), normal(rng, 1, 9, 2, DIM), normal(rng, 1, 9, 2, VALUE_DIM)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(x) for x in (q, k, v))
        codes = [x.to(torch.float8_e4m3fn) for x in (k, v)]
        wide = [x.to(torch.bfloat16) for x in codes]
        q = q.to(torch.bfloat16)
    else:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        codes = [x.astype(ml_dtypes.float8_e4m3fn) for x in (k, v)]
        wide = [x.astype(ml_dtypes.bfloat16) for x in codes]
        q = q.astype(ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="k_cache is float8_e4m3fn, expected .*: convert it by .*bfloat16.* multiply the option scale by the scale of the keys"):
        attention_with_cache(q, *codes, layout="bshd")
    # The remedy: no element changes, the scale of the keys is one of the scores, and the scale of the values one of the result.
    out = attention_with_cache(q, *wide, scale=DIM**-0.5 * 0.5, layout="bshd")
    scaled, _ = expected(*(numpy.asarray(x.float() if kind == "torch" else x).astype(float)[0] for x in (q[None], wide[0], wide[1])), scale=DIM**-0.5 * 0.5)
    close(out.float() if kind == "torch" else out, scaled, "bfloat16")
