"""Tensors of PyTorch on an NVIDIA GPU. Without one, nothing here runs."""

import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from flashtile import KvCache, attention, attention_with_cache, kv_report  # noqa: E402

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
    with pytest.raises(BufferError, match="expected cpu"), cache.step([(seq, 33)]) as step:
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
