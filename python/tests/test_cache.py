"""`KvCache` and its steps."""

import gc
import subprocess
import sys

import numpy
import pytest
from conftest import reference
from flashtile import KvCache, Layers, attention, key_factors
from test_attention import causal, chunks, close, normal

SHAPE = {"layers": 2, "kv_heads": 2, "head_dim": 32}


def tokens(rng, count, heads=(4, 2)):
    return [normal(rng, count, of, 32) for of in (heads[0], heads[1], heads[1])]


def run(cache, batch, layers, **options):
    """A step over all layers, and what the last one gave."""
    with cache.step(batch) as step:
        for layer, (q, k, v) in enumerate(layers):
            out = step.attend(layer, q, k, v, **options)
    return out


@pytest.mark.parametrize(
    "layout",
    [{"pages": 8, "page_size": 4}, {"layout": "contiguous", "slots": 2, "capacity": 12}, {"layout": "ring", "slots": 2, "capacity": 12}],
    ids=["paged", "contiguous", "ring"],
)
def test_steps_are_attention(rng, layout):
    """A prompt and two tokens give the rows of one causal call over all of them."""
    cache = KvCache(**SHAPE, k="f32", v="f32", **layout)
    a, b = cache.create(), cache.create()
    layers = [tokens(rng, 9), tokens(rng, 9)]
    want = [attention(*layer, cu_seqlens=[0, 9], causal=True, softcap=3.0) for layer in layers]
    got = numpy.empty_like(want[1])
    for begin, end in [(0, 7), (7, 8), (8, 9)]:
        # The other sequence has the same tokens, and goes first.
        twice = [[numpy.concatenate([x[begin:end]] * 2) for x in layer] for layer in layers]
        out = run(cache, [(b, end - begin), (a, end - begin)], twice, softcap=3.0)
        got[begin:end] = out[end - begin :]
    assert numpy.array_equal(got, want[1])
    assert (cache.len(a), cache.len(b)) == (9, 9)


def test_chunks_of_keys(rng):
    """A step sees the keys of its own chunk, counted from the first token of the sequence."""
    cache = KvCache(**SHAPE, k="f32", v="f32")
    seq, (q, k, v) = cache.create(), tokens(rng, 9)
    want, _ = reference(*(x.swapaxes(0, 1)[None] for x in (q, k, v)), visible=causal(9, 9) & chunks(9, 9, 4))
    got = [run(cache, [(seq, end - begin)], [(q[begin:end], k[begin:end], v[begin:end])] * 2, attention_chunk=4) for begin, end in [(0, 6), (6, 7), (7, 9)]]
    close(numpy.concatenate(got), want[0].swapaxes(0, 1))


def test_a_mask_for_each_sequence(rng):
    cache = KvCache(**SHAPE, k="f32", v="f32")
    a, b, layer = cache.create(), cache.create(), tokens(rng, 7)
    masks = [numpy.tril(rng.random((count, count)) < 0.6) for count in (2, 5)]
    with cache.step([(a, 2), (b, 5)]) as step:
        with pytest.raises(ValueError, match=r"mask\[0\] is of 5 queries and 5 keys, expected 2 and 2"):
            step.attend(0, *layer, mask=masks[::-1])
        got = [step.attend(at, *layer, mask=masks) for at in range(2)]
    want = attention(*layer, cu_seqlens=[0, 2, 7], mask=masks, causal=True)
    assert numpy.array_equal(got[0], want) and numpy.array_equal(got[1], want)


def test_out_and_logsumexp(rng):
    cache = KvCache(**SHAPE, k="f32", v="f32")
    seq, layer = cache.create(), tokens(rng, 5)
    out = numpy.empty((5, 4, 32), numpy.float32)
    with cache.step([(seq, 5)]) as step:
        assert step.lens() == [(5, 5)]
        got, lse = step.attend(0, *layer, out=out, return_lse=True)
        step.attend(1, *layer)
    want, want_lse = attention(*layer, cu_seqlens=[0, 5], causal=True, return_lse=True)
    assert got is out and numpy.array_equal(out, want) and numpy.array_equal(lse, want_lse)


@pytest.mark.parametrize("k, v, error", [("bf16", "bf16", 1e-2), ("int8", "int8", 2e-2), ("int8", "tq5", 9e-2), ("tq4", "tq4", 0.25)])
def test_codecs(rng, k, v, error):
    """Errors relative to the result are of the size that docs/kv.md has for the codec."""
    cache = KvCache(**SHAPE, k=k, v=v)
    seq, layer = cache.create(), tokens(rng, 64)
    got = run(cache, [(seq, 64)], [layer, layer])
    want = attention(*layer, cu_seqlens=[0, 64], causal=True)
    found = float(numpy.sqrt(((got - want) ** 2).mean() / (want**2).mean()))
    assert 0 < found < error


def test_a_failed_step_takes_its_tokens_back(rng):
    cache = KvCache(**SHAPE)
    seq, layer = cache.create(), tokens(rng, 3)
    with pytest.raises(ZeroDivisionError), cache.step([(seq, 3)]) as step:
        step.attend(0, *layer)
        raise ZeroDivisionError
    assert cache.len(seq) == 0
    with pytest.raises(ValueError, match="layer 1"), cache.step([(seq, 3)]) as step:
        step.attend(0, *layer)
    assert cache.len(seq) == 0
    step = cache.step([(seq, 3)])
    with pytest.raises(RuntimeError, match="a step of this cache is open"):
        cache.len(seq)
    step.cancel()
    with pytest.raises(RuntimeError, match="the step has ended"):
        step.attend(0, *layer)
    assert cache.len(seq) == 0
    # A step that nobody ended.
    step = cache.step([(seq, 3)])
    del step
    gc.collect()
    assert cache.len(seq) == 0
    run(cache, [(seq, 3)], [layer, layer])
    assert cache.len(seq) == 3


def test_sequences(rng):
    cache = KvCache(**SHAPE, pages=4, page_size=4)
    a, layer = cache.create(), tokens(rng, 6)
    run(cache, [(a, 6)], [layer, layer])
    b = cache.fork(a)
    assert a != b and len({a, b, a}) == 2 and cache.memory()["pages_shared"] == 2
    cache.truncate(b, 3)
    assert (cache.len(a), cache.len(b)) == (6, 3)
    cache.remove(b)
    with pytest.raises(ValueError, match="removed"):
        cache.len(b)
    cache.forget(a, 4)
    assert cache.memory()["tokens"] == 2
    with pytest.raises(ValueError, match="cache"):
        KvCache(**SHAPE).len(a)
    with pytest.raises(ValueError, match="page"):
        cache.step([(a, 40)])
    assert cache.len(a) == 6


@pytest.mark.parametrize(
    "given, error, text",
    [
        ({"k": "int4"}, ValueError, r"k is 'int4', expected a codec: f32, f16, bf16, rot16, fp8, int8, tq6, .*mlx-tq8, [^0-9]*"),
        ({"v": None}, ValueError, "v is None, expected a codec"),
        ({"layers": "2"}, TypeError, "layers is '2', expected an integer"),
        ({"page_size": 1.5}, TypeError, "page_size is 1.5, expected an integer"),
        ({"head_dim": -1}, ValueError, "head_dim is -1, expected 0 or more"),
        ({"page_size": 0}, ValueError, "page_size 0 is outside 1..=2147483647"),
        ({"layout": "rings"}, ValueError, "layout is 'rings', expected 'paged', 'contiguous' or 'ring'"),
    ],
)
def test_a_wrong_description_is_named(given, error, text):
    with pytest.raises(error, match=text) as raised:
        KvCache(**(SHAPE | given))
    assert "column" not in str(raised.value)


WINDOW = Layers(1, 2, 32, layout="ring", slots=2, capacity=8, k="bf16", v="bf16")
FULL = Layers(1, 2, 32, pages=16, page_size=4, k="int8", v="tq4")


# Five windows to a full layer, whose heads are others.
LOCAL = Layers(5, 2, 32, layout="ring", slots=2, capacity=8, k="f32", v="f32")
GLOBAL = Layers(1, 1, 64, value_dim=32, pages=16, page_size=4)


@pytest.mark.parametrize(
    "layers, shapes, places",
    [
        ([WINDOW, FULL] * 3, [(2, 32), (2, 32)], [(layer % 2, layer // 2) for layer in range(6)]),
        ([LOCAL, GLOBAL], [(2, 32), (1, 64)], [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]),
    ],
    ids=["gpt-oss", "gemma"],
)
def test_layers_that_differ(rng, layers, shapes, places):
    """Windows in rings beside full layers in pages give the bits of a cache of each kind, in as many bytes."""
    options = [{"window": (3, 0), "sinks": [0.1, 0.2, 0.3, 0.4]}, {"softcap": 9.0}]
    mixed, apart = KvCache(layers), [KvCache([each for each in layers if each is kind]) for kind in layers[:2]]
    names = [[cache.create() for cache in (mixed, *apart)] for _ in range(2)]
    for batch in ([(0, 5)], [(0, 1), (1, 4)], [(1, 1), (0, 4)]):
        steps = [cache.step([(names[name][at], count) for name, count in batch]) for at, cache in enumerate((mixed, *apart))]
        count = sum(count for _, count in batch)
        for layer, (kind, at) in enumerate(places):
            heads, dim = shapes[kind]
            q, k, v = normal(rng, count, 4, dim), normal(rng, count, heads, dim), normal(rng, count, heads, 32)
            got, want = steps[0].attend(layer, q, k, v, **options[kind]), steps[1 + kind].attend(at, q, k, v, **options[kind])
            assert numpy.array_equal(got, want), (batch, layer)
        for step in steps:
            step.finish()
    held, parts = mixed.memory(), [cache.memory() for cache in apart]
    assert all(held[name] == sum(part[name] for part in parts) for name in ("bytes_reserved", "bytes_used", "pages", "pages_free"))
    assert (held["sequences"], [mixed.len(of) for of, *_ in names]) == (2, [10, 5])
    mixed.truncate(names[0][0], 9)
    with pytest.raises(ValueError, match="position 1 of .* is outside 2..=9"):
        mixed.truncate(names[0][0], 1)
    mixed.remove(names[1][0])
    fork = mixed.fork(names[0][0])
    mixed.forget(fork, 6)
    assert (mixed.len(fork), mixed.len(names[0][0]), mixed.memory()["sequences"]) == (9, 9, 2)


def test_snapshots(rng):
    """A sequence goes on in a cache with other pages and slots as in its own; a ring keeps as many tokens as it has room for."""
    layers = [WINDOW, FULL]
    larger = [Layers(1, 2, 32, layout="ring", slots=5, capacity=6, k="bf16", v="bf16"), Layers(1, 2, 32, pages=9, page_size=8, k="int8", v="tq4")]
    cache, other = KvCache(layers), KvCache(larger)
    seq, rows, more = cache.create(), [tokens(rng, 8) for _ in layers], [tokens(rng, 2) for _ in layers]
    run(cache, [(seq, 8)], rows)
    snapshot = cache.snapshot(seq)
    moved = other.restore(snapshot)
    row = 2 * 2 * 32 * 2, cache.memory()["bytes_used"] // 8
    assert (len(snapshot), other.len(moved), snapshot.nbytes) == (8, 8, 8 * row[0] + 8 * (row[1] - row[0]))
    assert repr(snapshot) == f"<Snapshot of 8 tokens, {snapshot.nbytes} bytes>"
    results = []
    for each, of in ((cache, seq), (other, moved)):
        with each.step([(of, 2)]) as step:
            results.append([step.attend(layer, *more[layer], window=(3, 0) if layer == 0 else (-1, -1)) for layer in range(2)])
    for got, want in zip(*results):
        assert numpy.array_equal(got, want)
    with pytest.raises(ValueError, match="tq4"):
        KvCache([WINDOW, Layers(1, 2, 32, pages=16, page_size=4, k="int8", v="int8")]).restore(snapshot)
    with pytest.raises(ValueError, match="snapshot has groups 2, expected 1"):
        KvCache([FULL]).restore(snapshot)
    with pytest.raises(ValueError, match="free"):
        KvCache([WINDOW, Layers(1, 2, 32, pages=1, page_size=4, k="int8", v="tq4")]).restore(snapshot)
    step = cache.step([(seq, 1)])
    with pytest.raises(RuntimeError, match="a step of this cache is open"):
        cache.snapshot(seq)
    step.cancel()


def test_bytes_of_layers():
    """Slots of 8 tokens in bf16, and pages of codes with an f16 scale for each row of a head."""
    ring, paged = (KvCache([each]).memory()["bytes_reserved"] for each in (WINDOW, FULL))
    assert ring == 2 * 8 * 2 * (32 + 32) * 2
    assert KvCache([WINDOW, FULL, WINDOW]).memory()["bytes_reserved"] == 2 * ring + paged
    assert KvCache([FULL] * 3).memory() == KvCache(3, 2, 32, pages=16, page_size=4, k="int8", v="tq4").memory()


def test_means_of_layers(rng):
    """An array for a layer, and none for the layers that have none."""
    mean = normal(rng, 2, 32)
    layer, answers = tokens(rng, 9), []
    for layers, center in (([FULL, FULL], None), ([FULL, WINDOW, FULL], [None, None, mean]), ([FULL, FULL], [None, mean.tolist()])):
        cache = KvCache(layers, center=center)
        with cache.step([(cache.create(), 8)]) as step:
            answers.append([step.attend(at, *(x[:8] for x in layer)) for at in range(len(layers))])
    (plain, _), (first, _, third), (again, second) = answers
    assert numpy.array_equal(plain, first) and numpy.array_equal(plain, again)
    assert numpy.array_equal(third, second) and not numpy.array_equal(plain, third)
    other = Layers(1, 1, 32)
    for layers, center, text in [
        ([FULL, other], mean, "center is an array, and layers differ: expected a list"),
        ([FULL, other], True, r"center=True names no mean: expected a list with an array \(kv_heads, head_dim\)"),
        ([FULL, other], [mean], "center has 1 entries, expected an array or None for each of 2 layers"),
        ([FULL, other], [None, mean], r"center\[1\] has shape \(2, 32\), expected \(kv_heads, head_dim\), \(1, 32\)"),
        ([FULL, WINDOW], [None, mean], "keys are stored as bf16"),
    ]:
        with pytest.raises(ValueError, match=text):
            KvCache(layers, center=center)


def test_errors_of_layers():
    for error, text, layers, given in [
        (ValueError, "layers is a list, whose Layers have k, kv_heads of their own", [FULL], {"k": "f16", "kv_heads": 2}),
        (TypeError, "layers.1. is 2, expected flashtile.Layers", [FULL, 2], {}),
        (ValueError, "layers 0 is outside", [], {}),
        (TypeError, "kv_heads is None, expected an integer", 2, {}),
    ]:
        with pytest.raises(error, match=text):
            KvCache(layers, **given)
    with pytest.raises(TypeError, match="count is 'x', expected an integer"):
        Layers("x", 2, 32)
    cache = KvCache([WINDOW, FULL])
    with pytest.raises(ValueError, match="a step of a ring has at most its capacity"):
        cache.step([(cache.create(), 9)])
    names = [cache.create()]
    with pytest.raises(ValueError, match="slot"):
        cache.create()
    assert cache.len(names[0]) == 0 and cache.memory()["sequences"] == 2


def test_integers_of_numpy_are_sizes():
    cache = KvCache(numpy.int64(2), kv_heads=numpy.int32(2), head_dim=numpy.uint8(32), pages=numpy.int64(8))
    assert repr(cache) == repr(KvCache(**SHAPE, pages=8))


def test_what_they_are(rng):
    cache = KvCache(**SHAPE, value_dim=16, pages=8, page_size=4, k="f32", v="f16")
    a = cache.create()
    bytes_of = cache.memory()["bytes_reserved"]
    assert repr(cache) == f"<KvCache paged, 8 pages of 4 tokens; 2 layers, 2 heads of 32 and 16; k f32, v f16; 1 sequences, 0 tokens, 0 of {bytes_of} bytes>"
    step = cache.step([(a, 3)])
    assert repr(step) == "<Step of 1 sequences, 3 new tokens of 3>"
    assert "a step of this cache is open" in repr(cache)
    step.cancel()
    assert repr(step) == "<Step, the step has ended>"
    assert repr(FULL) == "<Layers paged, 16 pages of 4 tokens; 1 layers, 2 heads of 32; k int8, v tq4>"
    assert repr(KvCache([WINDOW, FULL] * 2)).startswith(
        "<KvCache ring, 2 slots of 8 tokens; 2 layers, 2 heads of 32; k bf16, v bf16 | paged, 16 pages of 4 tokens; 2 layers, 2 heads of 32; k int8, v tq4; 0 sequences, "
    )
    ring = KvCache(**SHAPE, layout="ring", slots=2, capacity=12)
    assert repr(ring).startswith("<KvCache ring, 2 slots of 12 tokens; 2 layers, 2 heads of 32; k int8, v tq4; 0 sequences, 0 tokens, ")


def test_remedies(rng):
    """Errors of a step say what to do."""
    layer = tokens(rng, 3)
    ring = KvCache(**SHAPE, layout="ring", slots=1, capacity=4)
    a = ring.create()
    with pytest.raises(ValueError, match="6 tokens, expected at most 4: a step of a ring has at most its capacity: give the prompt in several steps"):
        ring.step([(a, 6)])
    run(ring, [(a, 3)], [layer] * 2)
    with pytest.raises(ValueError, match=r"sees key 0, the first kept is 2: expected a window that hides keys before 2"):
        run(ring, [(a, 3)], [layer] * 2)
    run(ring, [(a, 3)], [layer] * 2, window=(1, 0))
    slot = KvCache(**SHAPE, layout="contiguous", slots=1, capacity=4)
    a = slot.create()
    run(slot, [(a, 3)], [layer] * 2)
    slot.forget(a, 2)
    with pytest.raises(ValueError, match="6 tokens, expected at most 4: forget frees no room in a slot"):
        slot.step([(a, 3)])
    paged = KvCache(**SHAPE, pages=1, page_size=4)
    with pytest.raises(ValueError, match="pages.*: remove, truncate or forget frees pages, or make pages more"):
        paged.step([(paged.create(), 5)])


def nrmse(out, want):
    return numpy.sqrt(((out - want) ** 2).mean() / (want**2).mean())


@pytest.mark.parametrize("codec, limit", [("int8", 0.02), ("tq4", 0.2)])
def test_a_mean_of_the_keys(rng, codec, limit):
    """Keys with a constant part are stored as precisely as others where their mean is given, whatever numpy makes of it."""
    q, k, v = tokens(rng, 60)
    k += 20 * normal(rng, 2, 32)
    want = attention(q, k, v, cu_seqlens=[0, 60], causal=True)
    mean = numpy.stack([k.mean(axis=0)] * 2)
    answers = []
    for center in (mean, mean.astype(numpy.float64), mean.tolist(), None, False):
        cache = KvCache(**SHAPE, k=codec, v="f32", center=center)
        answers.append(run(cache, [(cache.create(), 60)], [(q, k, v)] * 2))
    given, wide, listed, none, false = answers
    assert nrmse(given, want) < limit < nrmse(none, want)
    assert numpy.array_equal(given, listed) and numpy.array_equal(given, wide) and numpy.array_equal(none, false)


@pytest.mark.parametrize("codec", ["int8", "tq4", "tq3"])
def test_factors_of_the_keys(rng, codec):
    """Keys with unequal channels are stored more precisely where their factors are given."""
    deviations = numpy.exp(normal(rng, 2, 32)).astype(numpy.float32)
    q, k, v = tokens(rng, 60)
    q *= 0.1
    k *= deviations
    want = attention(q, k, v, cu_seqlens=[0, 60], causal=True)
    mean = k.mean(axis=0)
    factors = numpy.stack([key_factors(k, mean)] * 2)
    expected = (k - mean).std(axis=0) ** 0.5
    expected /= numpy.exp(numpy.log(expected).mean(axis=-1, keepdims=True))
    assert numpy.allclose(factors[0], expected, rtol=1e-4)
    answers = []
    for equalize in (factors, factors.tolist(), None, False, -factors):
        cache = KvCache(**SHAPE, k=codec, v="f32", center=[mean, mean], equalize=equalize)
        answers.append(run(cache, [(cache.create(), 60)], [(q, k, v)] * 2))
    given, listed, none, false, negative = answers
    assert nrmse(given, want) < 0.8 * nrmse(none, want)
    assert numpy.array_equal(given, listed) and numpy.array_equal(none, false)
    assert nrmse(negative, want) < 1.2 * nrmse(given, want)


@pytest.mark.parametrize("codec", ["f16", "rot16", "int8", "fp8", "tq6", "tq5", "tq4", "tq3", "tq2"])
@pytest.mark.parametrize("centered", [False, True])
def test_other_sequences_change_no_answer(rng, codec, centered):
    """A warm-up of one large key, removed or not, and the sequences of a batch leave the bits of an answer."""
    center = normal(rng, 2, 2, 32) if centered and codec != "f16" else None
    layers = [tokens(rng, 40), tokens(rng, 40)]
    large = [(q[:1], 8 * k[:1], v[:1]) for q, k, v in layers]
    answers = []
    for warm_up in (None, "removed", "kept"):
        cache = KvCache(**SHAPE, k=codec, v=codec, center=center)
        if warm_up:
            other = cache.create()
            run(cache, [(other, 1)], large)
            if warm_up == "removed":
                cache.remove(other)
        seq = cache.create()
        out = [run(cache, [(seq, 40)], layers)]
        fork = cache.fork(seq)
        batch = [numpy.concatenate([many[:1], one]) for many, one in zip(layers[0], large[0], strict=True)]
        out.append(run(cache, [(seq, 1), (fork, 1)], [batch, batch])[:1])
        answers.append(numpy.concatenate(out))
    assert numpy.array_equal(answers[0], answers[1]) and numpy.array_equal(answers[0], answers[2])


def test_errors(rng):
    with pytest.raises(ValueError, match="needs slots and capacity"):
        KvCache(**SHAPE, layout="ring")
    with pytest.raises(ValueError, match="slots and capacity are of"):
        KvCache(**SHAPE, slots=3)
    with pytest.raises(ValueError, match="layout is 'flat'"):
        KvCache(**SHAPE, layout="flat")
    with pytest.raises(ValueError, match="int9"):
        KvCache(**SHAPE, k="int9")
    with pytest.raises(ValueError, match="head_dim"):
        KvCache(layers=1, kv_heads=1, head_dim=0)
    with pytest.raises(ValueError, match=r"center=True names no mean: .* \(2, 2, 32\), such as k.mean\(axis=0\)"):
        KvCache(**SHAPE, center=True)
    with pytest.raises(ValueError, match=r"center has shape \(2, 32\), expected \(layers, kv_heads, head_dim\), \(2, 2, 32\)"):
        KvCache(**SHAPE, center=numpy.zeros((2, 32)))
    with pytest.raises(ValueError, match="NaN"):
        KvCache(**SHAPE, center=numpy.full((2, 2, 32), numpy.nan))
    with pytest.raises(ValueError, match="keys are stored as f16"):
        KvCache(**SHAPE, k="f16", center=numpy.zeros((2, 2, 32)))
    with pytest.raises(ValueError, match=r"equalize=True names no factors: .* \(2, 2, 32\), such as flashtile.key_factors"):
        KvCache(**SHAPE, equalize=True)
    with pytest.raises(ValueError, match=r"equalize has shape \(2, 32\), expected \(layers, kv_heads, head_dim\), \(2, 2, 32\)"):
        KvCache(**SHAPE, equalize=numpy.ones((2, 32)))
    with pytest.raises(ValueError, match="factor of channel 0 of head 0: expected a magnitude"):
        KvCache(**SHAPE, equalize=numpy.zeros((2, 2, 32)))
    with pytest.raises(ValueError, match="keys are stored as fp8, expected one of rot16, int8, tq6"):
        KvCache(**SHAPE, k="fp8", equalize=numpy.ones((2, 2, 32)))
    with pytest.raises(ValueError, match=r"k has shape \(3, 2\) and mean \(2,\), expected"):
        key_factors(numpy.ones((3, 2)), numpy.ones(2))
    with pytest.raises(ValueError, match="holds a NaN"):
        key_factors(numpy.full((3, 2, 4), numpy.nan), numpy.ones((2, 4)))
    cache = KvCache(**SHAPE)
    seq, layer = cache.create(), tokens(rng, 3)
    with pytest.raises(ValueError, match="k has shape"), cache.step([(seq, 2)]) as step:
        step.attend(0, *layer)
    with pytest.raises(ValueError, match="layer 2"), cache.step([(seq, 3)]) as step:
        step.attend(2, *layer)
    with pytest.raises(ValueError, match=r"q has shape .* expected \(total, heads, dim\)"), cache.step([(seq, 3)]) as step:
        step.attend(0, layer[0][None], *layer[1:])


def test_a_cache_without_memory():
    """Each layout, where the process may have 4 GiB."""
    resource = pytest.importorskip("resource")
    program = """
import resource, flashtile
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
for layout in ({"pages": 1000000}, {"layout": "contiguous", "slots": 100, "capacity": 100000}, {"layout": "ring", "slots": 100, "capacity": 100000}):
    try:
        flashtile.KvCache(32, 8, 128, **layout)
    except Exception as error:
        print(type(error).__name__, error)
"""
    assert resource
    lines = subprocess.check_output([sys.executable, "-c", program], text=True).split("\n")[:-1]
    assert len(lines) == 3 and all(line.startswith("MemoryError no memory for ") for line in lines), lines
