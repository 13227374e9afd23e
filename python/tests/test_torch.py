"""Tensors of PyTorch, and the operator."""

import numpy
import pytest

torch = pytest.importorskip("torch")

import flashtile  # noqa: E402
from flashtile import KvCache, attention, kv_report  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def qkv():
    torch.manual_seed(7)
    return torch.randn(2, 4, 33, 32), torch.randn(2, 2, 33, 32), torch.randn(2, 2, 33, 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sdpa(qkv, dtype):
    q, k, v = (x.to(dtype) for x in qkv)
    out = attention(q, k, v, causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True, enable_gqa=True)
    assert (type(out), out.dtype, out.device.type) == (torch.Tensor, dtype, "cpu")
    torch.testing.assert_close(out.double(), want, rtol=0, atol={torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype])


def test_the_same_bits_as_numpy(qkv):
    want, lse = attention(*(x.numpy() for x in qkv), causal=True, return_lse=True)
    out, of = attention(*qkv, causal=True, return_lse=True)
    assert numpy.array_equal(out.numpy(), want) and numpy.array_equal(of.numpy(), lse)
    mixed = attention(qkv[0].numpy(), *qkv[1:], causal=True)
    assert type(mixed) is numpy.ndarray and numpy.array_equal(mixed, want)
    for q in (qkv[0], qkv[0].clone().requires_grad_()):
        mixed = attention(q, *(x.numpy() for x in qkv[1:]), causal=True, mask=numpy.ones((33, 33), bool))
        assert torch.is_tensor(mixed) and torch.equal(mixed.detach(), out)


def test_strides_and_options(qkv):
    q, k, v = qkv
    moved = [x.transpose(1, 2).contiguous() for x in qkv]
    assert torch.equal(attention(*(x.transpose(1, 2) for x in moved)), attention(*qkv))
    assert torch.equal(attention(*moved, layout="bshd"), attention(*qkv).transpose(1, 2))
    visible = torch.rand(2, 1, 33, 33) < 0.5
    by_arrays = attention(*(x.numpy() for x in qkv), mask=visible.numpy(), sinks=[0.5] * 4, softcap=3.0)
    assert numpy.array_equal(attention(*qkv, mask=visible, sinks=torch.full((4,), 0.5), softcap=3.0).numpy(), by_arrays)
    by_bias = attention(*qkv, mask=torch.zeros(2, 1, 33, 33, dtype=torch.bfloat16).masked_fill(~visible, float("-inf")))
    assert torch.equal(by_bias, attention(*qkv, mask=visible))
    assert torch.equal(attention(*qkv, kv_lens=torch.tensor([33, 5])), attention(*qkv, kv_lens=[33, 5]))
    packed = [x[0].transpose(0, 1) for x in qkv]
    got, lse = attention(*packed, cu_seqlens=torch.tensor([0, 10, 33]), causal=True, return_lse=True)
    assert got.shape == (33, 4, 32) and lse.shape == (4, 33)
    assert torch.equal(got, attention(*packed, cu_seqlens=([0, 10, 33], [0, 10, 33]), causal=True))


def test_out(qkv):
    out = torch.empty_like(qkv[0])
    assert attention(*qkv, out=out) is out and torch.equal(out, attention(*qkv))
    given, lse = attention(*qkv, out=out, return_lse=True)
    assert given is out and lse.shape == (2, 4, 33)
    with pytest.raises(BufferError, match="out overlaps q"):
        attention(*qkv, out=qkv[0])


def test_gradients_are_refused(qkv):
    q = qkv[0].requires_grad_()
    out = attention(q, *qkv[1:])
    with pytest.raises(Exception, match="flashtile.*autograd|autograd.*flashtile"):
        out.sum().backward()
    with pytest.raises(ValueError, match="computes no gradients"):
        attention(q, *qkv[1:], out=torch.empty_like(q))
    with torch.no_grad():
        assert not attention(q, *qkv[1:]).requires_grad


def test_meta_tensors_have_a_shape(qkv):
    meta = [x.to("meta") for x in qkv]
    assert torch.ops.flashtile.attention(*meta)[0].device.type == "meta"


def test_opcheck(qkv):
    """The fake of the operator gives shapes, strides and dtypes of the real one, for every layout."""
    packed = [x[0].transpose(0, 1) for x in qkv]
    starts = torch.tensor([0, 10, 33])
    cases = [
        (qkv, {}),
        (qkv, {"causal": True, "left": 5, "return_lse": True, "softcap": 2.0, "sinks": torch.zeros(4)}),
        ([x.transpose(1, 2) for x in qkv], {"layout": "bshd", "return_lse": True}),
        (packed, {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "return_lse": True}),
        ([qkv[0], qkv[1], qkv[2][..., :16]], {"mask": torch.ones(33, 33, dtype=torch.bool)}),
    ]
    for tensors, options in cases:
        torch.library.opcheck(torch.ops.flashtile.attention.default, tuple(tensors), options)


def test_compile_keeps_the_operator(qkv):
    graphs = []

    def backend(module, _):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    def layer(q, k, v):
        return flashtile.attention(q * 2, k, v, causal=True, window=(7, 0)) + 1

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert torch.equal(compiled(*qkv), layer(*qkv))
    (graph,) = graphs
    assert torch.ops.flashtile.attention.default in graph or torch.ops.flashtile.attention in graph


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_compiled(qkv, backend):
    """The compilers of PyTorch take shapes from the fake operator, and give what runs without them, for shapes that change."""

    def layer(q, k, v, mask, starts):
        out, lse = attention(q * 2, k, v, mask=mask, scale=0.3, return_lse=True)
        packed = attention(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens=starts, causal=True, q_offset="bottom_right")
        return out + 1, lse.exp(), packed * 2, attention(q, k, v, layout="bhsd", causal=True, window=(3, -1), q_offset=0)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for length in (33, 21):
        tensors = [x[:, :, :length] for x in qkv]
        visible, starts = torch.ones(length, length, dtype=torch.bool).tril(3), torch.tensor([0, 10, length])
        for got, want in zip(compiled(*tensors, visible, starts), layer(*tensors, visible, starts)):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_modes_and_transforms_see_the_operator(qkv):
    """Nothing is baked into a graph, and nothing is computed where only shapes are asked for."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda q, k, v: attention(q, k, v, causal=True))(*qkv)
    other = [x.flip(2) for x in qkv]
    assert torch.equal(graph(*other), attention(*other, causal=True))
    with FakeTensorMode() as mode:
        assert attention(*(mode.from_tensor(x) for x in qkv)).shape == qkv[0].shape
    with pytest.raises(Exception, match="storage|Batching rule"):
        torch.vmap(lambda q, k, v: attention(q, k, v))(*(x[None] for x in qkv))


def test_cache(qkv):
    cache = KvCache(layers=1, kv_heads=2, head_dim=32, k="f32", v="f32")
    seq, packed = cache.create(), [x[0].transpose(0, 1) for x in qkv]
    with cache.step([(seq, 33)]) as step:
        out = step.attend(0, *packed)
    assert torch.equal(out, attention(*packed, cu_seqlens=[0, 33], causal=True))


def test_report(qkv):
    q, k, v = (x.to(torch.bfloat16) for x in qkv)
    (pair,) = kv_report({"q": q, "k": k, "v": v}, codecs=["bf16", "int8"])["pairs"]
    assert pair["keys"][0]["error"] == 0 and pair["keys"][1]["error"] > 0 and pair["nrmse"][0][0] == 0
