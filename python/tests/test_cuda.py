"""Tensors of PyTorch on an NVIDIA GPU. Without one, nothing here runs."""

import copy
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from flashtile import KvCache, Layers, attention, attention_with_cache, kv_report  # noqa: E402

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture
def qkv():
    torch.manual_seed(7)
    return torch.randn(2, 4, 33, 32), torch.randn(2, 2, 33, 32), torch.randn(2, 2, 33, 32)


def on_device(x):
    return x.cuda() if torch.is_tensor(x) else x


def both(tensors, **options):
    """The results on the device and on the CPU, as lists on the CPU."""
    device = attention(*map(on_device, tensors), **{name: on_device(value) for name, value in options.items()})
    host = attention(*tensors, **options)
    results = []
    for result in (device, host):
        results.append([x.cpu() for x in (result if isinstance(result, tuple) else (result,))])
    return results


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_sdpa(qkv, dtype):
    q, k, v = (x.to("cuda", dtype) for x in qkv)
    out = attention(q, k, v, causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True, enable_gqa=True)
    assert (type(out), out.dtype, out.device) == (torch.Tensor, dtype, q.device)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCES[dtype])


def test_every_option_as_on_the_cpu(qkv):
    torch.manual_seed(8)
    visible = torch.rand(2, 1, 33, 33) < 0.5
    bias = torch.randn(4, 33)[None, :, None, :].expand(2, 4, 33, 33)
    packed = [x[0].transpose(0, 1) for x in qkv]
    cases = [
        (qkv, {"causal": True, "window": (5, 0), "return_lse": True}),
        (qkv, {"causal": True, "attention_chunk": 10}),
        (qkv, {"mask": visible, "softcap": 3.0, "return_lse": True}),
        (qkv, {"mask": visible[0, 0]}),
        (qkv, {"mask": bias, "scale": 0.3}),
        (qkv, {"mask": bias.to(torch.bfloat16)}),
        (qkv, {"sinks": [0.5, -1.0, 2.0, 0.0], "alibi_slopes": [0.1, 0.2, 0.3, 0.4], "return_lse": True}),
        (qkv, {"alibi_slopes": torch.tensor([[0.1, 0.2, 0.3, 0.4], [-0.1, 0.2, -0.3, 0.5]])}),
        (qkv, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)}),
        (qkv, {"kv_lens": torch.tensor([33, 5]), "causal": True, "q_offset": "top_left"}),
        ([qkv[0][:, :, :4], *qkv[1:]], {"causal": True, "q_offset": "bottom_right"}),
        ([qkv[0][:, :, :4], *qkv[1:]], {"causal": True, "q_offset": 12}),
        ([qkv[0], qkv[1], qkv[2][..., :16]], {"return_lse": True}),
        ([x.transpose(1, 2) for x in qkv], {"layout": "bshd", "return_lse": True}),
        (packed, {"cu_seqlens": torch.tensor([0, 10, 33]), "causal": True, "return_lse": True}),
        (packed, {"cu_seqlens": ([0, 10, 33], [0, 20, 33])}),
        ([qkv[0][:, :, :0], *qkv[1:]], {}),
        ([qkv[0], qkv[1][:, :, :0], qkv[2][:, :, :0]], {"return_lse": True}),
    ]
    for tensors, options in cases:
        for device, host in zip(*both(tensors, **options)):
            torch.testing.assert_close(device, host, rtol=0, atol=4e-6, msg=lambda text: f"{options}: {text}")


def test_a_mask_for_each_sequence(qkv):
    packed = [x[0].transpose(0, 1) for x in qkv]
    masks = [torch.rand(10, 10) < 0.6, torch.rand(4, 23, 23) < 0.6]
    want = attention(*packed, cu_seqlens=[0, 10, 33], mask=masks)
    got = attention(*map(on_device, packed), cu_seqlens=[0, 10, 33], mask=[mask.cuda() for mask in masks])
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=4e-6)
    with pytest.raises(BufferError, match="mask.1. is on cpu, expected cuda:0"):
        attention(*map(on_device, packed), cu_seqlens=[0, 10, 33], mask=[masks[0].cuda(), masks[1]])
    with pytest.raises(ValueError, match="mask.0. is of 9 queries and 10 keys, expected 10 and 10"):
        attention(*map(on_device, packed), cu_seqlens=[0, 10, 33], mask=[masks[0][:9].cuda(), masks[1].cuda()])


def test_out(qkv):
    q, k, v = map(on_device, qkv)
    out = torch.empty_like(q)
    assert attention(q, k, v, out=out) is out and torch.equal(out, attention(q, k, v))
    with pytest.raises(BufferError, match="out overlaps q"):
        attention(q, k, v, out=q)
    with pytest.raises(BufferError, match="out is on cpu, expected cuda:0"):
        attention(q, k, v, out=torch.empty(2, 4, 33, 32))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("paged", [False, True])
@torch.no_grad()
def test_caches_of_the_caller(dtype, layout, paged):
    """Pages and slots, new tokens, padded queries: as on the CPU, in out, logsumexp and what is written."""
    torch.manual_seed(7)
    lens, rows = torch.tensor([9, 33, 0]), 16 if paged else 40
    places = {"block_table": torch.randperm(12).reshape(3, 4)} if paged else {"cache_batch_idx": torch.tensor([3, 0, 2])}
    caches = [torch.randn(12 if paged else 4, rows, 2, dim).to(dtype) for dim in (64, 32)]
    caches = [x if layout == "bshd" else x.transpose(1, 2).contiguous() for x in caches]
    q, k, v = (torch.randn(9, heads, dim).to(dtype) for heads, dim in ((4, 64), (2, 64), (2, 32)))
    starts = torch.tensor([0, 1, 5, 9])
    cases = [
        {"k": k, "v": v, "cu_seqlens": starts, "cache_lens": lens},
        {"cu_seqlens": starts, "cache_lens": lens + torch.tensor([1, 4, 4]), "window": (5, 0), "softcap": 3.0},
        {"cu_seqlens": starts, "cache_lens": lens + torch.tensor([1, 4, 4]), "attention_chunk": 8},
        {"cu_seqlens": starts, "q_lens": [1, 2, 3], "cache_lens": [9, 33, 3], "sinks": [0.5, -1.0, 2.0, 0.0], "causal": False},
        {"q_lens": [2, 3, 4], "cache_lens": [9, 33, 4], "mask": torch.rand(3, 1, 4, 33) < 0.6},
    ]
    on_gpu = [x.cuda() for x in caches]
    for options in cases:
        options = {"layout": layout, "return_lse": True, **places, **options}
        device = attention_with_cache(q.cuda(), *on_gpu, **{name: on_device(x) for name, x in options.items()})
        host = attention_with_cache(q, *caches, **options)
        for got, want in zip((*device, *on_gpu), (*host, *caches)):
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=2 * TOLERANCES[dtype], msg=lambda text: f"{options}: {text}")
    kept = [x.clone() for x in on_gpu]
    wrong = {"cache_lens": [60, 33, 0], "k": k.cuda(), "v": v.cuda(), "cu_seqlens": starts, "layout": layout, **places}
    with pytest.raises(ValueError, match="sequence 0 keeps"):
        attention_with_cache(q.cuda(), *on_gpu, **(wrong | {"cache_lens": [64, 33, 0]}))
    with pytest.raises(TypeError, match="mask"):
        attention_with_cache(q.cuda(), *on_gpu, **(wrong | {"cache_lens": [9, 33, 0], "mask": torch.ones(1, dtype=torch.int8).cuda()}))
    with pytest.raises(ValueError, match="sinks has 1"):
        attention_with_cache(q.cuda(), *on_gpu, **(wrong | {"cache_lens": [9, 33, 0], "sinks": [1.0]}))
    with pytest.raises(BufferError, match="k_cache is on cpu, expected cuda:0"):
        attention_with_cache(q.cuda(), caches[0], on_gpu[1], **wrong)
    assert all(map(torch.equal, kept, on_gpu))


def test_refusals(qkv):
    q, k, v = map(on_device, qkv)
    with pytest.raises(BufferError, match="k is on cpu, expected cuda:0"):
        attention(q, qkv[1], v)
    with pytest.raises(BufferError, match="k is on cuda:0, expected cpu"):
        attention(qkv[0], k, v)
    with pytest.raises(BufferError, match="mask is on cpu, expected cuda:0"):
        attention(q, k, v, mask=torch.ones(33, 33, dtype=torch.bool))
    with pytest.raises(ValueError, match="q_offset"):
        attention(q[:, :, :4], k, v, causal=True)
    with pytest.raises(ValueError, match=r"v has shape \[2, 2, 4, 32\], expected \[2, 2, 33, 32\]"):
        attention(q, k, v[:, :, :4])
    with pytest.raises(TypeError, match="dtype|bf16|BF16"):
        attention(q, k.bfloat16(), v)
    with pytest.raises(BufferError, match="last axis"):
        attention(q, k, v.transpose(-1, -2).contiguous().transpose(-1, -2))
    with pytest.raises(BufferError, match="expected cpu"):
        kv_report({"k": k, "v": v})
    cache = KvCache(layers=1, kv_heads=2, head_dim=32)
    seq = cache.create()
    with pytest.raises(BufferError, match='q is on cuda:0, expected cpu: make the cache with device="cuda:0"'), cache.step([(seq, 33)]) as step:
        step.attend(0, *(x[0].transpose(0, 1) for x in (q, k, v)))


@torch.no_grad()
def test_streams(qkv):
    """A call follows the work that is on the current stream, and what follows the call sees its result."""
    q, k, v = map(on_device, qkv)
    want = attention(q * 2, k, v)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            got = attention(q * 2, k, v) + 0
        stream.synchronize()
        assert torch.equal(got, want)


@torch.no_grad()
def test_threads(qkv):
    q, k, v = map(on_device, qkv)
    want, wrong = attention(q, k, v, causal=True), []

    def work():
        for _ in range(50):
            wrong.append(not torch.equal(attention(q, k, v, causal=True), want))

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(wrong) == 200 and not any(wrong)


@torch.no_grad()
def test_many_problems(qkv):
    """More problems than a thread keeps plans of, as they come when keys are joined one by one."""
    q, k, v = map(on_device, qkv)
    for _ in range(2):
        for length in range(1, 33):
            got = attention(q[:, :, :1], k[:, :, :length], v[:, :, :length])
            want = torch.nn.functional.scaled_dot_product_attention(q[:, :, :1], k[:, :, :length], v[:, :, :length], enable_gqa=True)
            torch.testing.assert_close(got, want, rtol=0, atol=4e-6)


@torch.no_grad()
def test_graphs(qkv):
    q, k, v = map(on_device, qkv)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = attention(q, k, v, causal=True)
    with torch.cuda.stream(stream):
        # Other problems must not evict the plan and the workspace that a graph has captured.
        for length in range(1, 33):
            attention(q, k[:, :, :length], v[:, :, :length])
    torch.cuda.synchronize()
    for factor in (1, 3):
        q.mul_(factor)
        graph.replay()
        assert torch.equal(out, attention(q, k, v, causal=True))
    with pytest.raises(RuntimeError, match="once on this stream before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        attention(q, k, v, window=(9, 9))


@torch.no_grad()
def test_opcheck(qkv):
    q, k, v = map(on_device, qkv)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    starts = torch.tensor([0, 10, 33])
    cases = [
        ((q, k, v), {}),
        ((q, k, v), {"causal": True, "left": 5, "return_lse": True, "softcap": 2.0, "sinks": torch.zeros(4, device="cuda")}),
        (packed, {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "return_lse": True}),
        ((q, k, v), {"mask": torch.ones(33, 33, dtype=torch.bool, device="cuda")}),
    ]
    for tensors, options in cases:
        torch.library.opcheck(torch.ops.flashtile.attention.default, tuple(tensors), options)


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs", "inductor"])
@torch.no_grad()
def test_compiled(qkv, backend):
    def layer(q, k, v):
        return attention(q * 2, k, v, causal=True, window=(7, 0)) + 1

    torch._dynamo.reset()
    tensors = [on_device(x) for x in qkv]
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(4):
        tensors[0].mul_(1.1)
        torch.testing.assert_close(compiled(*tensors), layer(*tensors), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_generation():
    transformers = pytest.importorskip("transformers")
    import flashtile.transformers

    flashtile.transformers.register()
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).eval().cuda()
    ids = torch.randint(3, 128, (3, 12), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    texts = {}
    for name in ("eager", "sdpa", "flashtile"):
        model.set_attn_implementation(name)
        texts[name] = model.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)
        assert texts[name].shape == (3, 76)
    assert torch.equal(texts["flashtile"], texts["eager"])


class Both:
    """A cache on the CPU and one on the device, which are given the same."""

    def __init__(self, layers, dtype, dims=(64, 64), limit=None, **given):
        self.caches = [KvCache(layers, device=device, **given) for device in (None, "cuda")]
        self.count, self.dtype, self.dims = sum(each._count for each in layers), dtype, dims
        self.names, self.limit = [], limit or CACHED[dtype]

    def create(self):
        self.names.append([cache.create() for cache in self.caches])

    def fork(self, at):
        self.names.append([cache.fork(name) for cache, name in zip(self.caches, self.names[at])])

    def truncate(self, at, length):
        for cache, name in zip(self.caches, self.names[at]):
            cache.truncate(name, length)

    def tensors(self, count):
        key, value = self.dims
        return [(torch.rand(count, heads, dim) * 2 - 1).to(self.dtype) for heads, dim in ((4, key), (2, key), (2, value))]

    def step(self, batch, options=lambda layer: {}):
        """Adds tokens, and compares the results of every layer."""
        steps = [cache.step([(self.names[at][place], count) for at, count in batch]) for place, cache in enumerate(self.caches)]
        assert steps[0].lens() == steps[1].lens()
        for layer in range(self.count):
            q, k, v = self.tensors(sum(count for _, count in batch))
            given = options(layer)
            host = steps[0].attend(layer, q, k, v, return_lse=True, **given)
            device = steps[1].attend(layer, q.cuda(), k.cuda(), v.cuda(), return_lse=True, **{name: on_device(x) for name, x in given.items()})
            for got, want in zip(device, host):
                assert (got.device.type, got.dtype, got.shape) == ("cuda", want.dtype, want.shape)
                got, want = got.cpu().double(), want.double()
                assert torch.equal(got.isneginf(), want.isneginf())
                got, want = (x.masked_fill(want.isneginf(), 0) for x in (got, want))
                error = ((got - want).square().mean() / want.square().mean()).sqrt().item()
                assert error < self.limit, (layer, error, given)
        for step in steps:
            step.finish()


# Distances of the device's result from the CPU's, in which kernels round p, and over codes q, each in their way.
CACHED = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 1e-2}
SLIDING = Layers(1, 2, 64, layout="ring", slots=3, capacity=24, k="bf16", v="bf16")
KINDS = {
    "f32": (torch.float32, [Layers(2, 2, 64, value_dim=32, pages=40, page_size=4, k="f32", v="f32")], (64, 32)),
    "bf16 over int8": (torch.bfloat16, [Layers(2, 2, 64, layout="contiguous", slots=3, capacity=64, k="int8", v="int8")], (64, 64)),
    "f16 over tq4": (torch.float16, [Layers(2, 2, 64, pages=40, page_size=4, k="tq4", v="tq4")], (64, 64)),
    "layers that differ": (torch.bfloat16, [SLIDING, Layers(1, 2, 64, pages=40, page_size=4, k="int8", v="tq5")] * 2, (64, 64)),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_of_a_cache(kind):
    """Prompts, decoding, forks and truncation, with every option, as on the CPU."""
    torch.manual_seed(7)
    dtype, layers, dims = KINDS[kind]
    slides = "ring" in repr(layers)
    both = Both(layers, dtype, dims=dims)

    def options(**given):
        # Windows in rings, as those drop older tokens.
        return lambda layer: given | ({"window": (7, 0)} if slides and layer % 2 == 0 else {})

    both.create()
    both.create()
    both.step([(0, 9), (1, 3)], options())
    both.step([(1, 1), (0, 1)], options(softcap=3.0, scale=0.3))
    both.step([(0, 1)], options(sinks=[0.5, -1.0, 2.0, 0.0], alibi_slopes=[0.1, 0.2, 0.3, 0.4]))
    both.step([(0, 2), (1, 5)], options(alibi_slopes=torch.tensor([[0.1, 0.2, 0.3, 0.4], [-0.1, 0.2, -0.3, 0.5]])))
    both.step([(0, 1), (1, 1)], options(attention_chunk=4))
    visible = torch.rand(2, 1, 3, 17) < 0.7
    both.step([(0, 3), (1, 3)], options(mask=visible))
    both.step([(0, 1)], options(mask=torch.randn(1, 4, 1, 18).to(dtype)))
    both.fork(0)
    both.step([(0, 1), (2, 2)], options())
    both.truncate(2, 15)
    both.step([(2, 1), (1, 1), (0, 1)], options())
    host, device = both.caches
    assert host.memory() == device.memory()
    assert [device.len(names[1]) for names in both.names] == [host.len(names[0]) for names in both.names] == [20, 14, 16]
    device.check_stored()
    device.remove(both.names[1][1])
    device.forget(both.names[0][1], 8)
    assert device.memory()["sequences"] == 2 and "; on cuda:0; 2 sequences" in repr(device)


@torch.no_grad()
def test_means_on_the_device():
    torch.manual_seed(7)
    mean = 4 * torch.randn(2, 64)
    both = Both([Layers(2, 2, 64, k="int8", v="f16")], torch.float32, limit=5e-3, center=[mean.numpy()] * 2)
    plain, both.tensors = both.tensors, lambda count: [x + shift for x, shift in zip(plain(count), (0, mean, 0))]
    both.create()
    both.step([(0, 20)])
    both.step([(0, 1)])
    # Without the mean, what is attended to differs by more than the limit.
    with pytest.raises(AssertionError):
        other = Both([Layers(2, 2, 64, k="int8", v="f16")], torch.float32, limit=5e-3, center=[mean.numpy()] * 2)
        other.caches[0] = KvCache(2, 2, 64, k="int8", v="f16")
        other.tensors = both.tensors
        other.create()
        other.step([(0, 20)])


def apart():
    """A cache on the device of two kinds of layers, a sequence, and tensors of three steps of two tokens and two layers."""
    seeded = torch.Generator().manual_seed(7)
    layers = [Layers(1, 2, 64, layout="ring", slots=2, capacity=16, k="f32", v="f32"), Layers(1, 2, 64, pages=8, page_size=4, k="int8", v="int8")]
    cache = KvCache(layers, device=torch.device("cuda"))
    tensors = [[[torch.randn(2, heads, 64, generator=seeded).cuda() for heads in (4, 2, 2)] for _ in range(2)] for _ in range(3)]
    torch.cuda.synchronize()
    return cache, cache.create(), tensors


def in_order():
    """Results of the steps of `apart`, and of one of a fork, on one stream."""
    cache, seq, tensors = apart()
    results = []
    for layers in tensors:
        with cache.step([(seq, 2)]) as step:
            results.append([step.attend(layer, q * 2, k, v) + 0 for layer, (q, k, v) in enumerate(layers)])
    with cache.step([(cache.fork(seq), 2)]) as step:
        results.append([step.attend(layer, q * 2, k, v) + 0 for layer, (q, k, v) in enumerate(tensors[0])])
    torch.cuda.synchronize()
    return results


@torch.no_grad()
def test_a_cache_follows_the_current_stream():
    """Each step is on another stream, after the one before, whose stream is late."""
    want = in_order()
    cache, seq, tensors = apart()
    results, last = [], torch.cuda.Stream()
    for layers, stream in zip(tensors, (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1))):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            with cache.step([(seq, 2)]) as step:
                results.append([step.attend(layer, q * 2, k, v) + 0 for layer, (q, k, v) in enumerate(layers)])
    with torch.cuda.stream(last):
        fork = cache.fork(seq)
        torch.cuda._sleep(50_000_000)
    # The copy of the slot is on a stream that no longer is the current one.
    with cache.step([(fork, 2)]) as step:
        results.append([step.attend(layer, q * 2, k, v) + 0 for layer, (q, k, v) in enumerate(tensors[0])])
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for got, of in zip(results, want) for a, b in zip(got, of))


@torch.no_grad()
def test_a_step_over_several_streams():
    """Layers of a step are called on streams of their own: each follows the work there, and what follows sees its result."""
    want = in_order()
    cache, seq, tensors = apart()
    results = []
    for layers in tensors:
        with cache.step([(seq, 2)]) as step:
            results.append([])
            for layer, (q, k, v) in enumerate(layers):
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda._sleep(50_000_000)
                    results[-1].append(step.attend(layer, q * 2, k, v) + 0)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for got, of in zip(results, want) for a, b in zip(got, of))


@torch.no_grad()
def test_a_step_that_is_cancelled_on_the_device():
    want = in_order()
    cache, seq, tensors = apart()
    with pytest.raises(ZeroDivisionError), cache.step([(seq, 2)]) as step:
        step.attend(0, *tensors[1][0])
        raise ZeroDivisionError
    assert cache.len(seq) == 0
    with pytest.raises(ValueError, match="layer 1"), cache.step([(seq, 2)]) as step:
        step.attend(0, *tensors[1][0])
    out = torch.empty(2, 4, 64, device="cuda")
    with cache.step([(seq, 2)]) as step:
        for layer, (q, k, v) in enumerate(tensors[0]):
            assert step.attend(layer, q * 2, k, v, out=out) is out
            assert torch.equal(out, want[0][layer])
    assert cache.len(seq) == 2


class Foreign:
    """A tensor of a library that is not PyTorch."""

    def __init__(self, x):
        self.x, self.dtype, self.shape = x, str(x.dtype).removeprefix("torch."), tuple(x.shape)

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


@torch.no_grad()
def test_tensors_of_other_libraries_on_the_device():
    want = in_order()
    cache, seq, tensors = apart()
    with cache.step([(seq, 2)]) as step:
        for layer, (q, k, v) in enumerate(tensors[0]):
            out, lse = step.attend(layer, *map(Foreign, (q * 2, k, v)), return_lse=True)
            assert torch.equal(out, want[0][layer]) and (lse.dtype, lse.shape) == (torch.float32, (4, 2))


@torch.no_grad()
def test_rows_that_are_not_stored():
    cache = KvCache(1, 2, 64, k="int8", v="int8", device="cuda:0")
    seq, x = cache.create(), torch.randn(3, 2, 64, device="cuda")
    wrong = x.clone()
    wrong[1, 0, 5] = torch.nan
    with cache.step([(seq, 3)]) as step:
        assert step.attend(0, x, wrong, x).isnan().any()
    with pytest.raises(ValueError, match="layer 0: row [0-9]+ of head 0 of k"):
        cache.check_stored()
    cache.truncate(seq, 1)
    with cache.step([(seq, 3)]) as step:
        assert step.attend(0, x, x, x).isfinite().all()
    cache.check_stored()


@torch.no_grad()
def test_refusals_of_caches():
    cache, seq, tensors = apart()
    q, k, v = tensors[0][0]
    cases = [
        (BufferError, "q is on cpu, expected cuda:0: move it", (q.cpu(), k, v), {}),
        (BufferError, "q is on cpu, expected cuda:0", (q.cpu().numpy(), k, v), {}),
        (BufferError, "v is on cpu, expected cuda:0", (q, k, v.cpu()), {}),
        (BufferError, "mask is on cpu, expected cuda:0", (q, k, v), {"mask": torch.ones(2, 2, dtype=torch.bool)}),
        (BufferError, "out is on cpu, expected cuda:0", (q, k, v), {"out": torch.empty(2, 4, 64)}),
        (BufferError, "out overlaps q", (q, k, v), {"out": q}),
        (ValueError, "k has shape", (q, k[:1], v), {}),
        (ValueError, "q has shape", (q[:1], k, v), {}),
        (ValueError, "sinks has 1", (q, k, v), {"sinks": [1.0]}),
        (ValueError, "alibi_slopes has shape", (q, k, v), {"alibi_slopes": [1.0]}),
    ]
    for error, text, given, options in cases:
        with pytest.raises(error, match=text), cache.step([(seq, 2)]) as step:
            step.attend(0, *given, **options)
        assert cache.len(seq) == 0
    with pytest.raises(RuntimeError, match="PyTorch finds [0-9]+ CUDA devices"):
        KvCache(1, 2, 64, device="cuda:99")
    with pytest.raises(ValueError, match="slot"):
        [cache.create() for _ in range(2)]
    with pytest.raises(ValueError, match="a step of a ring has at most its capacity"):
        cache.step([(seq, 17)])


@torch.no_grad()
def test_graphs_do_not_capture_a_cache():
    want = in_order()
    cache, seq, tensors = apart()
    stream = torch.cuda.Stream()
    for call in (lambda: cache.step([(seq, 2)]), lambda: cache.fork(seq)):
        with pytest.raises(RuntimeError, match="or capture attention_with_cache"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            call()
    with cache.step([(seq, 2)]) as step:
        with pytest.raises(RuntimeError, match="or capture attention_with_cache"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            step.attend(0, *tensors[0][0])
        for layer, (q, k, v) in enumerate(tensors[0]):
            assert torch.equal(step.attend(layer, q * 2, k, v), want[0][layer])


@torch.no_grad()
def test_caches_of_threads():
    want, wrong = in_order(), []

    def work():
        with torch.no_grad():
            results = in_order()
        wrong.append(not all(torch.equal(a, b) for got, of in zip(results, want) for a, b in zip(got, of)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(wrong) == 4 and not any(wrong)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@torch.no_grad()
def test_a_cache_on_the_second_device():
    """The current device stays the first, also when the cache is dropped."""
    cache = KvCache(1, 2, 64, k="f32", v="f32", device="cuda:1")
    seq, x = cache.create(), torch.randn(3, 2, 64)
    with cache.step([(seq, 3)]) as step:
        out = step.attend(0, *[x.to("cuda:1")] * 3)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    torch.testing.assert_close(out.cpu(), attention(x, x, x, cu_seqlens=[0, 3], causal=True), rtol=0, atol=4e-6)
    with pytest.raises(BufferError, match="q is on cuda:0, expected cuda:1"), cache.step([(seq, 3)]) as step:
        step.attend(0, *[x.cuda()] * 3)
    del cache, step, out
    assert torch.cuda.current_device() == 0 and torch.empty(1, device="cuda").device.index == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@torch.no_grad()
def test_generation_over_a_cache(name, monkeypatch):
    """Greedy tokens of `generate`, of beams and of a copy by a `FlashtileCache` there as by `eager`, with padding, windows and memory that grows."""
    pytest.importorskip("transformers")
    from flashtile.transformers import FlashtileCache
    from test_generation import options, padded
    from test_transformers import decoder, prompt

    monkeypatch.setattr("flashtile._batch.MIN_ROOM", 4)
    ids = prompt(3, 90)
    mask = padded(ids).cuda()
    ids = ids.cuda()
    model, eager = decoder(name, "flashtile").cuda(), decoder(name, "eager").cuda()
    for more in ({}, {"num_beams": 3}):
        cache = FlashtileCache(model.config, k="f32", v="f32")
        got = model.generate(ids, past_key_values=cache, **options(ids, mask, tokens=60, **more))
        assert torch.equal(got, eager.generate(ids, **options(ids, mask, tokens=60, **more)))
        cache.check_stored()
    cache = FlashtileCache(model.config)
    model(ids, attention_mask=mask, past_key_values=cache)
    twin, after = copy.deepcopy(cache), torch.cat([mask, mask[:, -1:]], 1)
    logits = [model(ids[:, -1:], attention_mask=after, past_key_values=each).logits for each in (cache, twin)]
    assert torch.equal(*logits) and logits[0].isfinite().all()
    exact = FlashtileCache(model.config, k="f32", v="f32")
    model(ids, attention_mask=mask, past_key_values=exact)
    want = model(ids[:, -1:], attention_mask=after, past_key_values=exact).logits
    assert (logits[0] - want).norm() < 0.3 * want.norm()
