"""`attention` over arrays of numpy, and over DLPack."""

import ctypes
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
import time

import flashtile
import numpy
import pytest
from conftest import reference
from flashtile import attention

# bfloat16 is a dtype of ml_dtypes. All other tests need numpy alone.
DTYPES = [numpy.dtype("float32"), numpy.dtype("float16")]
if importlib.util.find_spec("ml_dtypes"):
    import ml_dtypes

    DTYPES.append(numpy.dtype(ml_dtypes.bfloat16))
# Half a unit in the last place of the result, and the rounding of p in kernels of the same dtype.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def normal(rng, *shape, dtype=numpy.float32):
    return rng.standard_normal(shape, dtype=numpy.float32).astype(dtype)


def qkv(rng, dtype=numpy.float32, heads=(4, 2), lens=(33, 33), dims=(32, 32)):
    q = normal(rng, 2, heads[0], lens[0], dims[0], dtype=dtype)
    k = normal(rng, 2, heads[1], lens[1], dims[0], dtype=dtype)
    return q, k, normal(rng, 2, heads[1], lens[1], dims[1], dtype=dtype)


def causal(q_len, kv_len, offset=0, left=None):
    p, j = numpy.arange(q_len)[:, None] + offset, numpy.arange(kv_len)[None, :]
    return (j <= p) & (True if left is None else j >= p - left)


def close(got, want, dtype="float32"):
    numpy.testing.assert_allclose(numpy.asarray(got).astype(numpy.float64), want, rtol=0, atol=TOLERANCE[str(dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(rng, dtype):
    q, k, v = qkv(rng, dtype)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    want, want_lse = reference(q, k, v, visible=causal(33, 33))
    assert (type(out), out.dtype, out.shape) == (numpy.ndarray, dtype, q.shape)
    assert (lse.dtype, lse.shape) == (numpy.float32, q.shape[:3])
    close(out, want, dtype)
    close(lse, want_lse, dtype)


def test_a_softcap_of_0_is_off(rng):
    q, k, v = qkv(rng)
    assert (attention(q, k, v, softcap=0.0) == attention(q, k, v)).all()


def test_options_together(rng):
    q, k, v = qkv(rng, lens=(5, 40), dims=(16, 48))
    slopes, sinks = numpy.array([0.5, 0.25, 0.125, 0.0625], numpy.float32), [0.5, -1.0, 2.0, 0.0]
    options = {"causal": True, "window": (7, -1), "q_offset": "bottom_right", "scale": 0.3, "softcap": 2.0, "sinks": sinks}
    out, lse = attention(q, k, v, alibi_slopes=slopes, return_lse=True, **options)
    p = numpy.arange(5)[:, None] + 35
    bias = -slopes[None, :, None, None] * abs(p - numpy.arange(40)[None, :])
    want, want_lse = reference(q, k, v, visible=causal(5, 40, 35, 7), bias=bias, scale=0.3, softcap=2.0, sinks=sinks)
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("offset, at", [("top_left", 0), ("bottom_right", 7), (3, 3), (-2, -2)])
def test_offsets(rng, offset, at):
    q, k, v = qkv(rng, lens=(5, 12))
    want, _ = reference(q, k, v, visible=causal(5, 12, at))
    close(attention(q, k, v, causal=True, q_offset=offset), want)


def chunks(q_len, kv_len, size, at=0):
    return (numpy.arange(q_len)[:, None] + at) // size == numpy.arange(kv_len)[None, :] // size


def test_chunks(rng):
    """With causality and windows, at any offset, dense and packed."""
    q, k, v = qkv(rng)
    for size in (1, 5, 16, 33, 40):
        out, lse = attention(q, k, v, causal=True, attention_chunk=size, return_lse=True)
        want, want_lse = reference(q, k, v, visible=causal(33, 33) & chunks(33, 33, size))
        close(out, want)
        close(lse, want_lse)
        out = attention(q[:, :, :5], k, v, attention_chunk=size, window=(3, -1), q_offset="bottom_right")
        close(out, reference(q[:, :, :5], k, v, visible=(numpy.arange(33) >= numpy.arange(25, 30)[:, None]) & chunks(5, 33, size, 28))[0])
        packed = [x[0].swapaxes(0, 1) for x in (q, k, v)]
        out = attention(*packed, cu_seqlens=[0, 10, 33], causal=True, attention_chunk=size)
        for begin, end in [(0, 10), (10, 33)]:
            one = [x[:1, :, begin:end] for x in (q, k, v)]
            want, _ = reference(*one, visible=causal(end - begin, end - begin) & chunks(end - begin, end - begin, size))
            close(out[begin:end], want[0].swapaxes(0, 1))
    for off in (None, 0, numpy.int64(0)):
        assert numpy.array_equal(attention(q, k, v, causal=True, attention_chunk=off), attention(q, k, v, causal=True))


def test_masks(rng):
    q, k, v = qkv(rng, lens=(6, 9))
    visible = rng.random((2, 1, 6, 9)) < 0.6
    visible[0, 0, 2] = False
    want, _ = reference(q, k, v, visible=visible)
    assert not want[0, :, 2].any()
    close(attention(q, k, v, mask=visible), want)
    added = numpy.where(visible, 0, -numpy.inf)
    for dtype in DTYPES:
        close(attention(q, k, v, mask=added.astype(dtype)), want)
    # Two axes, an axis of stride 0, and a mask of a larger array.
    two, _ = reference(q, k, v, visible=visible[1, 0])
    close(attention(q, k, v, mask=visible[1, 0]), two)
    close(attention(q, k, v, mask=numpy.broadcast_to(visible[1], (2, 4, 6, 9))), two)
    larger = numpy.ones((2, 1, 8, 20), bool)
    larger[:, :, 1:7, 3:12] = visible
    close(attention(q, k, v, mask=larger[:, :, 1:7, 3:12]), want)


def test_a_mask_for_each_sequence(rng):
    """Masks with the lengths of their sequences, packed and over a batch, of bool and added, with heads and without."""
    q, k, v = qkv(rng)
    lens = [(10, 7), (23, 26)]
    ends = ([0, 10, 33], [0, 7, 33])
    packed = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    visible = [rng.random(shape) < 0.6 for shape in (lens[0], (4, *lens[1]))]
    bias = [normal(rng, 4, *lens[0]), normal(rng, *lens[1])]
    for masks in (visible, tuple(bias)):
        out, lse = attention(*packed, cu_seqlens=ends, mask=masks, causal=True, q_offset="bottom_right", return_lse=True)
        for at, mask in enumerate(masks):
            rows, keys = (slice(*of[at : at + 2]) for of in ends)
            seen = causal(*lens[at], lens[at][1] - lens[at][0])
            given = {"bias": mask, "visible": seen} if mask.dtype != bool else {"visible": mask & seen}
            want, want_lse = reference(q[:1, :, rows], k[:1, :, keys], v[:1, :, keys], **given)
            close(out[rows], want[0].swapaxes(0, 1))
            close(lse[:, rows], want_lse[0])
    for layout in ("bhsd", "bshd"):
        of_layout = [x if layout == "bhsd" else numpy.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
        padded = [rng.random((33, 5)) < 0.6, rng.random((33, 20)) < 0.6]
        out = attention(*of_layout, mask=padded, kv_lens=[5, 20], layout=layout)
        for at, mask in enumerate(padded):
            keys = mask.shape[1]
            want, _ = reference(q[at : at + 1], k[at : at + 1, :, :keys], v[at : at + 1, :, :keys], visible=mask)
            close((out if layout == "bhsd" else out.swapaxes(1, 2))[at], want[0])
    one = rng.random((33, 33)) < 0.6
    assert numpy.array_equal(attention(q, k, v, mask=[one, one]), attention(q, k, v, mask=one))
    first, second = visible
    for error, text, masks in [
        (ValueError, r"mask\[0\] is of 10 queries and 6 keys, expected 10 and 7 as sequence 0 has", [first[:, :6], second]),
        (ValueError, r"mask\[1\] is of 22 queries and 26 keys, expected 23 and 26", [first, second[:, :22]]),
        (ValueError, "mask is a list of 1, expected one for each of 2 sequences", [second]),
        (ValueError, "mask is an empty list", []),
        (ValueError, r"mask\[0\] has shape \[7\], expected \(queries, keys\)", [first[0], second]),
        (ValueError, r"mask\[1\] has 2 heads, expected 1 or 4", [bias[0], bias[0][:2]]),
        (TypeError, r"mask\[1\] is float32, expected bool as mask\[0\]", [first, bias[1]]),
        (TypeError, r"mask\[0\] is a list, expected all masks", [first.tolist(), second]),
        (TypeError, r"mask\[1\] is a numpy.ma", [first, numpy.ma.array(second)]),
        (TypeError, "mask is int64, expected bool", [mask.astype(int) for mask in visible]),
    ]:
        refused(error, text, *packed, cu_seqlens=ends, mask=masks)
    refused(ValueError, r"mask\[1\] is of 33 queries and 33 keys, expected 33 and 20 as sequence 1 has", q, k, v, mask=[one[:, :5], one], kv_lens=[5, 20])


def test_kv_lens(rng):
    q, k, v = qkv(rng, lens=(3, 10))
    for x in (k, v):
        x[0, :, 4:] = numpy.nan
    visible = numpy.arange(10) < numpy.array([4, 10])[:, None, None, None]
    want, _ = reference(q, numpy.nan_to_num(k), numpy.nan_to_num(v), visible=visible)
    for lens in ([4, 10], numpy.array([4, 10]), (4, 10)):
        close(attention(q, k, v, kv_lens=lens), want)


def test_packed(rng):
    q, k, v = normal(rng, 9, 4, 16), normal(rng, 13, 2, 16), normal(rng, 13, 2, 16)
    starts = ([0, 4, 9], [0, 6, 13])
    out, lse = attention(q, k, v, cu_seqlens=starts, causal=True, q_offset="bottom_right", return_lse=True)
    assert (out.shape, lse.shape) == ((9, 4, 16), (4, 9))
    for (a, b), (c, d) in zip([(0, 4), (4, 9)], [(0, 6), (6, 13)]):
        of = [x.transpose(1, 0, 2)[None] for x in (q[a:b], k[c:d], v[c:d])]
        want, want_lse = reference(*of, visible=causal(b - a, d - c, d - c - (b - a)))
        close(out[a:b], want[0].transpose(1, 0, 2))
        close(lse[:, a:b], want_lse[0])
    same = attention(q, k[:9], v[:9], cu_seqlens=numpy.array([0, 4, 9]))
    want, _ = reference(*(x[:4].transpose(1, 0, 2)[None] for x in (q, k, v)))
    close(same[:4], want[0].transpose(1, 0, 2))


def test_layouts_are_strides(rng):
    q, k, v = qkv(rng)
    want = attention(q, k, v, causal=True)
    # Sequence-major memory, seen head-major, and the other way round.
    moved = [numpy.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)]
    assert numpy.array_equal(attention(*moved, causal=True, layout="bshd"), want.transpose(0, 2, 1, 3))
    assert numpy.array_equal(attention(*(x.transpose(0, 2, 1, 3) for x in moved), causal=True), want)
    # One fused projection.
    fused = numpy.concatenate([moved[0], moved[1], moved[2]], axis=2)
    assert numpy.array_equal(attention(fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:], causal=True, layout="bshd"), want.transpose(0, 2, 1, 3))
    # Every second batch entry, and one entry read twice.
    assert numpy.array_equal(attention(q[::2], k[::2], v[::2], causal=True), want[::2])
    once = [numpy.broadcast_to(x[:1], x.shape) for x in (k, v)]
    assert numpy.array_equal(attention(q, *once, causal=True)[:1], want[:1])


def test_nothing_is_copied(rng):
    """A result is written where `out` is, and 64 MiB of keys need no memory."""
    q, k, v = qkv(rng)
    out = numpy.full((2, 33, 8, 32), 7, numpy.float32)
    place = out[:, :, 2:6].transpose(0, 2, 1, 3)
    assert attention(q, k, v, out=place) is place
    close(place, reference(q, k, v)[0])
    assert (out[:, :, :2] == 7).all() and (out[:, :, 6:] == 7).all()
    program = """
import resource, numpy, flashtile
k = numpy.ones((1, 1, 1 << 18, 64), numpy.float32)
q = numpy.ones((1, 1, 1, 64), numpy.float32)
flashtile.attention(q, k[:, :, :64], k[:, :, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
flashtile.attention(q, k, k)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(subprocess.check_output([sys.executable, "-c", program]))
    assert grown < 16 << 10, f"{grown} KiB for a call over 64 MiB of keys"


def test_empty(rng):
    q, k, v = qkv(rng, lens=(0, 4))
    assert attention(q, k, v).shape == (2, 4, 0, 32)
    q, k, v = qkv(rng, lens=(3, 0))
    out, lse = attention(q, k, v, return_lse=True)
    assert not out.any() and (lse == -numpy.inf).all()


class Dlpack:
    """A tensor of another library: DLPack and nothing else."""

    def __init__(self, array, device=(1, 0), versions=True):
        self.array, self.device, self.versions = array, device, versions
        self.dtype = array.dtype

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if not self.versions and options:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("versions", [True, False])
def test_dlpack(rng, versions):
    q, k, v = qkv(rng)
    want = attention(q, k, v)
    moved = [numpy.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    got = attention(*(Dlpack(x, versions=versions) for x in moved))
    assert type(got) is numpy.ndarray and numpy.array_equal(got, want)
    visible = rng.random((33, 33)) < 0.5
    assert numpy.array_equal(attention(q, k, v, mask=Dlpack(visible)), attention(q, k, v, mask=visible))
    out = numpy.zeros_like(q)
    attention(q, k, v, out=Dlpack(out))
    assert numpy.array_equal(out, want)


def test_dlpack_is_given_back(rng):
    """No call keeps its arguments, whether it succeeds or not."""
    q, k, v = qkv(rng)
    counts = [sys.getrefcount(x) for x in (q, k, v)]
    for _ in range(3):
        attention(Dlpack(q), Dlpack(k), Dlpack(v))
        with pytest.raises(ValueError):
            attention(Dlpack(q), Dlpack(k), Dlpack(v[:, :, 1:]))
    assert [sys.getrefcount(x) for x in (q, k, v)] == counts


def test_other_devices_are_named(rng):
    q, k, v = qkv(rng)
    with pytest.raises(BufferError, match=r"k is on cuda:1, expected cpu: move it"):
        attention(q, Dlpack(k, device=(2, 1)), v)
    with pytest.raises(BufferError, match=r"out is on rocm:0"):
        attention(q, k, v, out=Dlpack(q.copy(), device=(10, 0)))


def refused(error, match, *tensors, **options):
    with pytest.raises(error, match=match):
        attention(*tensors, **options)


def test_errors_of_tensors(rng):
    q, k, v = qkv(rng)
    refused(TypeError, "q is a list, expected a numpy array", [1.0], k, v)
    refused(TypeError, "q is float64, expected float32, float16 or bfloat16", q.astype(float), k, v)
    refused(TypeError, "q is >f4", q.astype(">f4"), k, v)
    refused(TypeError, "k is f16, expected f32", q, k.astype(numpy.float16), v)
    refused(TypeError, "q is int32", Dlpack(q.view(numpy.int32)), k, v)
    refused(ValueError, r"q has shape \[4, 33, 32\], expected \(batch, heads, seq, dim\)", q[0], k, v)
    refused(ValueError, r"v has shape \[2, 2, 32, 32\], expected \[2, 2, 33, 32\]", q, k, v[:, :, 1:])
    refused(ValueError, "q_heads", q[:, :3], k, v)
    refused(BufferError, "q has strides .*, expected 1 for the last axis", q[..., ::2], k[..., ::2], v)
    refused(BufferError, "q has strides .*, expected none below 0", q[:, :, ::-1], k, v)


def test_errors_of_out(rng):
    q, k, v = qkv(rng)
    refused(BufferError, "out overlaps q", q, k, v, out=q)
    frozen = numpy.empty_like(q)
    frozen.flags.writeable = False
    refused(BufferError, "out is read-only", q, k, v, out=frozen)
    refused(ValueError, "out has shape", q, k, v, out=numpy.empty((2, 4, 33, 31), numpy.float32))
    refused(TypeError, "out is f16, expected f32", q, k, v, out=numpy.empty(q.shape, numpy.float16))
    refused(BufferError, "overlap", q, k, v, out=numpy.lib.stride_tricks.as_strided(numpy.empty(q[0].size, numpy.float32), q.shape, (0, *q.strides[1:])))


def test_options_are_in_the_order_of_the_extension():
    from flashtile import _flashtile

    names = tuple(inspect.signature(attention).parameters)
    assert names == ("q", "k", "v", *_flashtile.OPTIONS[:-2], "out")


def test_errors_of_options(rng):
    q, k, v = qkv(rng, lens=(3, 5))
    refused(ValueError, "q_offset", q, k, v, causal=True)
    refused(ValueError, "q_offset is 'left', expected", q, k, v, causal=True, q_offset="left")
    refused(ValueError, r"window is \(-2, 0\)", q, k, v, window=(-2, 0))
    refused(TypeError, "window is 3, expected two integers", q, k, v, window=3)
    refused(ValueError, "attention_chunk is -1, expected the keys of a chunk, or 0", q, k, v, attention_chunk=-1)
    refused(TypeError, "attention_chunk is 1.5, expected the keys of a chunk, or 0", q, k, v, attention_chunk=1.5)
    refused(ValueError, "q_offset", q, k, v, attention_chunk=2)
    refused(ValueError, "layout is 'hbsd'", q, k, v, layout="hbsd")
    refused(ValueError, "scale", q, k, v, scale=float("nan"))
    refused(TypeError, "scale is 'x', expected a number", q, k, v, scale="x")
    refused(ValueError, "sinks has 3 elements, expected 4", q, k, v, sinks=[0, 0, 0])
    refused(ValueError, "q has shape", q, k, v, kv_lens=[1, 1], cu_seqlens=[0, 3, 5])
    refused(ValueError, "mask has shape", q, k, v, mask=numpy.ones((3, 4), bool))
    refused(ValueError, r"mask has shape \[1, 3, 5\], expected \(keys,\), \(queries, keys\) or", q, k, v, mask=numpy.ones((1, 3, 5), bool))
    refused(TypeError, "mask is int64, expected bool, float32", q, k, v, mask=numpy.ones((3, 5), int))


def test_the_interpreter_runs_during_a_call(rng):
    """A thread of Python counts while a call computes."""
    rows, taken = 128, 0
    while taken < 0.1:
        rows *= 2
        q, k, v = (normal(rng, 1, 8, rows, 64) for _ in range(3))
        begin = time.perf_counter()
        attention(q, k, v)
        taken = time.perf_counter() - begin
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    attention(q, k, v)
    end = time.perf_counter()
    done.set()
    thread.join()
    during = sum(begin < at < end for at in ticks)
    assert during >= 5, f"{during} ticks in {end - begin:.3f} s"


def test_threads_give_the_same_bits(rng):
    q, k, v = qkv(rng, lens=(200, 200))
    want, results = attention(q, k, v, causal=True), [None] * 8

    def call(index):
        results[index] = attention(q, k, v, causal=True)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(numpy.array_equal(result, want) for result in results)


FORKED = """
import os, signal, sys, numpy as np, flashtile
x = np.ones((1, 8, 300, 64), np.float32)
row = np.ones((300, 8, 64), np.float32)
cache = flashtile.KvCache(layers=1, kv_heads=8, head_dim=64, k="f32", v="f32", pages=64)
seq = cache.create()
def step():
    open = cache.step([(seq, 300)])
    open.attend(0, row, row, row)
    return open
def attend():
    held.attend(0, row, row, row)
def dropped():
    global held
    held = None
    raise RuntimeError("forked off")
calls = {
    "attention": lambda: flashtile.attention(x, x, x),
    "plan": lambda: flashtile.plan(heads=8, q_len=300, head_dim=64),
    "kv_report": lambda: flashtile.kv_report({"k": x, "v": x, "q": x}, codecs=["int8"]),
    "step": step,
    "attend": attend,
    "finish": lambda: held.finish(),
    "cancel": lambda: held.cancel(),
    "lens": lambda: held.lens(),
    "len": lambda: cache.len(seq),
    "create": lambda: cache.create(),
    "memory": lambda: cache.memory(),
    "drop": dropped,
}
held = calls[sys.argv[1]]() if sys.argv[1] != "nothing" else None
if sys.argv[2:] == ["multiprocessing"]:
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            pool.apply(flashtile.attention, (x, x, x))
        except RuntimeError as error:
            print("told" if "forked off" in str(error) else error)
    sys.exit()
for name in sys.argv[2:]:
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            calls[name]()
        except RuntimeError as error:
            os._exit(3 if "forked off" in str(error) else 4)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print(name, {0: "done", 3: "told"}.get(os.waitstatus_to_exitcode(status), status))
if held is not None and sys.argv[1] == "step":
    held.finish()
    print("finished", cache.len(seq))
"""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


def forked(before, *after):
    """The lines that a process prints which was forked off after a call."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED, before, *after], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split("\n")[:-1]


@needs_fork
@pytest.mark.parametrize("before", ["attention", "plan", "kv_report"])
def test_a_forked_process_is_told(before):
    """Whatever started the threads, and whatever needs them or waits for them."""
    after = ["attention", "plan", "kv_report", "step", "len", "create", "memory"]
    assert forked(before, *after) == [f"{name} told" for name in after]


@needs_fork
def test_a_process_forked_within_a_step_is_told():
    after = ["attend", "finish", "cancel", "lens", "drop", "len", "attention"]
    assert forked("step", *after) == [f"{name} told" for name in after] + ["finished 300"]


@needs_fork
def test_processes_that_are_forked_before_compute():
    """A cache that is made and read, but computed nothing, starts no threads."""
    after = ["attention", "plan", "kv_report", "step", "len"]
    assert forked("nothing", *after) == [f"{name} done" for name in after]
    assert forked("attention", "multiprocessing") == ["told"]


def test_threads_that_cannot_start_are_an_error():
    """Stacks for which there is no memory stand for a limit of processes."""
    program = """
import numpy as np, flashtile
x = np.ones((1, 8, 300, 64), np.float32)
cache = flashtile.KvCache(layers=1, kv_heads=8, head_dim=64, k="f32", v="f32", pages=64)
row = np.ones((300, 8, 64), np.float32)
def step():
    with cache.step([(cache.create(), 300)]) as step:
        step.attend(0, row, row, row)
for call in (lambda: flashtile.attention(x, x, x), step, lambda: flashtile.kv_report({"k": x, "v": x}, codecs=["int8"]), lambda: flashtile.attention(x, x, x)):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
"""
    environment = os.environ | {"RUST_MIN_STACK": str(1 << 46), "RAYON_NUM_THREADS": "2"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=200)
    lines = ran.stdout.split("\n")[:-1]
    assert len(lines) == 4 and all(line.startswith("RuntimeError the threads of the pool cannot start: ") for line in lines), ran
    assert "panicked" not in ran.stderr, ran.stderr


class Unit(numpy.ndarray):
    """An array whose elements are not all that it says."""


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "out", "sinks", "alibi_slopes", "kv_lens"])
def test_arrays_that_say_more_than_their_elements(rng, name):
    q, k, v = qkv(rng)
    given = {"q": q, "k": k, "v": v, "mask": numpy.zeros((33, 33), numpy.float32), "out": numpy.empty_like(q), "kv_lens": numpy.array([33, 20])}
    given |= {"sinks": numpy.zeros(4, numpy.float32), "alibi_slopes": numpy.zeros(4, numpy.float32), "q_offset": 0}
    attention(**given)
    with pytest.raises(TypeError, match=rf"{name} is a numpy.*MaskedArray, .* would be lost: fill it, and give what it hides by mask"):
        attention(**(given | {name: numpy.ma.masked_array(given[name], mask=False)}))
    with pytest.raises(TypeError, match=rf"{name} is a .*Unit, .* would be lost: give .view\(numpy.ndarray\)"):
        attention(**(given | {name: given[name].view(Unit)}))


def test_arrays_that_are_their_elements(rng, tmp_path):
    q, k, v = qkv(rng)
    kept = numpy.memmap(tmp_path / "k", numpy.float32, "w+", shape=k.shape)
    kept[:] = k
    mask = numpy.asmatrix(rng.random((33, 33)) < 0.5)
    assert numpy.array_equal(attention(q, kept, v, mask=mask), attention(q, k, v, mask=numpy.asarray(mask)))
    with pytest.raises(TypeError, match="q is .*f4.*, expected float32"):
        attention(numpy.zeros(q.shape, [("x", "f4")]).view(numpy.recarray), k, v)


class Interface:
    """An object that says where its memory is, whatever that is."""

    def __init__(self, array, **fields):
        self.array, self.dtype = array, array.dtype
        self.__array_interface__ = {**array.__array_interface__, **fields}


def test_interfaces_that_say_anything(rng):
    q, k, v = qkv(rng)
    assert numpy.array_equal(attention(q, Interface(k), v), attention(q, k, v))
    for error, refusal, fields in (
        (TypeError, "k is float32, expected float32, float16 or bfloat16", {"typestr": "\u03c0f4"}),
        (TypeError, "k is float32, expected", {"typestr": ""}),
        (TypeError, "k is float32, expected", {"typestr": "<\u03c0"}),
        (BufferError, "k has shape .* and no memory", {"data": (0, False)}),
        (BufferError, "k.__array_interface__ has no address in data", {"data": b"bytes"}),
        (BufferError, "k.__array_interface__ has no data", {"data": None}),
        (TypeError, "k hides elements by a mask of its own", {"mask": numpy.ones(k.shape, bool)}),
        (BufferError, "shape times strides is not addressable", {"data": (1 << 62, False), "shape": (1 << 40, 1 << 40, 9, 9)}),
        (BufferError, "k has strides .* of shape", {"strides": (4,)}),
        (ValueError, "k has 65 axes", {"shape": (1,) * 65}),
        (OverflowError, "negative", {"shape": (-1, 2, 33, 32)}),
    ):
        with pytest.raises(error, match=refusal):
            attention(q, Interface(k, **fields), v)


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def test_capsules_that_say_anything(rng):
    q, k, v = qkv(rng)
    numbers, make = ctypes.c_int64 * 4, ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

    def capsule(**fields):
        shape = numbers(*k.shape)
        known = {"data": k.ctypes.data, "device": (1, 0), "ndim": 4, "code": 2, "bits": 32, "lanes": 1, "shape": shape}
        tensor = DlTensor(**(known | fields))
        capsules.append(tensor)
        return make(ctypes.addressof(tensor), b"dltensor", None)

    capsules = []
    assert numpy.array_equal(attention(q, capsule(), v), attention(q, k, v))
    for error, refusal, fields in (
        (BufferError, "k has shape .* and no memory", {"data": None}),
        (BufferError, "k has shape .* and no memory", {"data": None, "byte_offset": 64}),
        (BufferError, "k has 4 axes, and no shape", {"shape": None}),
        (BufferError, "k has -1 axes", {"ndim": -1}),
        (BufferError, "k has 2147483647 axes", {"ndim": 2147483647}),
        (BufferError, "k has offset .*, which is not addressable", {"byte_offset": (1 << 64) - 1}),
        (BufferError, "k has shape .*-1", {"shape": numbers(2, 2, -1, 32)}),
        (BufferError, "not addressable", {"shape": numbers(1 << 40, 1 << 40, 2, 32)}),
        (BufferError, "not addressable", {"strides": numbers(1 << 62, 1 << 62, 32, 1)}),
        (BufferError, "expected none below 0", {"strides": numbers(-64, 32, 32, 1)}),
        (TypeError, "k is float32x4", {"lanes": 4}),
        (TypeError, "k is an unknown type", {"code": 77}),
        (BufferError, "k is on a device of DLPack type 99", {"device": (99, 0)}),
    ):
        with pytest.raises(error, match=refusal):
            attention(q, capsule(**fields), v)


def test_names():
    assert flashtile.__version__.count(".") == 2
    assert all(getattr(flashtile, name).__doc__ for name in flashtile.__all__ if name != "__version__")
