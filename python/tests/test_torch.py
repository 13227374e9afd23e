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


def test_gradients_are_computed(qkv):
    q = qkv[0].requires_grad_()
    attention(q, *qkv[1:]).sum().backward()
    assert q.grad.shape == q.shape
    with pytest.raises(ValueError, match="records no gradients of q"):
        attention(q, *qkv[1:], out=torch.empty_like(q))
    with torch.no_grad():
        assert not attention(q, *qkv[1:]).requires_grad


def inputs_of(qkv):
    """Every argument that may be a tensor, by name."""
    q, k, v = qkv
    return {"q": q, "k": k, "v": v, "mask": torch.zeros(33, 33), "alibi_slopes": torch.zeros(4), "sinks": torch.zeros(4)}


DIFFERENTIABLE = ["q", "k", "v", "mask", "alibi_slopes", "sinks"]


@pytest.mark.parametrize("name", ["k", "v", "mask", "alibi_slopes", "sinks", "kv_lens"])
def test_meta_tensors_beside_others_are_refused(qkv, name):
    """Nothing is computed of tensors without memory, by the function, the operator or a compiler: not even a result of any bytes."""
    given = inputs_of(qkv)
    if name == "kv_lens":
        del given["alibi_slopes"]
        given[name] = torch.tensor([33, 20])
    given[name] = given[name].to("meta")
    with pytest.raises(BufferError, match=f"{name} is on meta"):
        attention(**given)
    with pytest.raises(BufferError, match=f"{name} is on meta, expected cpu"):
        torch.ops.flashtile.attention(**given)
    with pytest.raises(BufferError, match=f"{name} is on meta"):
        attention(**given, out=torch.empty_like(qkv[0]))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"{name} is on meta, expected cpu"):
        torch.compile(lambda given: attention(**given), backend="eager", fullgraph=True)(given)


def test_meta_tensors_have_a_shape(qkv):
    given = {name: x.to("meta") for name, x in inputs_of(qkv).items()}
    starts = torch.tensor([0, 33]).to("meta")
    assert attention(*(x.to("meta")[0].transpose(0, 1) for x in qkv), cu_seqlens=(starts, starts)).shape == (33, 4, 32)
    out, lse = attention(**given, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", qkv[0].shape, (2, 4, 33))
    assert torch.ops.flashtile.attention(given["q"], given["k"], given["v"])[0].device.type == "meta"
    assert attention(*(given[name] for name in "qkv"), sinks=[0.0] * 4).device.type == "meta"
    with pytest.raises(BufferError, match="k is on cpu, expected meta"):
        attention(given["q"], *qkv[1:])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_no_gradient_is_lost(qkv, name):
    """Autograd computes it for every input, or the call raises."""
    given = inputs_of(qkv)
    leaf = given[name].clone().requires_grad_()
    given[name] = leaf * 1
    found = []
    call = lambda given: attention(**given, out=None)
    compiled = torch.compile(lambda given: attention(**given), backend="eager")
    torch._dynamo.reset()
    for out in (call(given), torch.ops.flashtile.attention(**given)[0], compiled(given)):
        found.append(torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)[0])
    assert found[0].any() and all(torch.equal(each, found[0]) for each in found)
    with pytest.raises(ValueError, match=f"no gradients of {name}, which requires one"):
        attention(**given, out=torch.empty_like(qkv[0]))
    arrays = [x.detach().numpy() for x in qkv]
    if name != "q":
        of_numpy = dict(zip("qkv", arrays)) | {name: given[name]}
        with pytest.raises(ValueError, match=f"no gradients of {name}, which requires one"):
            attention(**of_numpy)
    with torch.no_grad():
        assert not attention(**given).requires_grad


def test_no_gradient_of_a_number_is_lost(qkv):
    number = torch.tensor(0.5, requires_grad=True)
    for options in ({"scale": number}, {"softcap": number}, {"sinks": [number] * 4}, {"alibi_slopes": (0.0, 0.0, 0.0, number)}):
        (name,) = options
        with pytest.raises(ValueError, match=f"no gradients of {name}, which requires one"):
            attention(*qkv, **options)
        with torch.no_grad():
            assert attention(*qkv, **options).shape == qkv[0].shape


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "out"])
def test_a_step_loses_no_gradient(qkv, name):
    cache = KvCache(layers=1, kv_heads=2, head_dim=32, k="f32", v="f32")
    given = inputs_of([x[0].transpose(0, 1) for x in qkv]) | {"mask": torch.zeros(1, 1, 33, 33), "out": torch.empty(33, 4, 32)}
    given[name].requires_grad_()
    seq = cache.create()
    with pytest.raises(ValueError, match=f"no gradients of {name}, which requires one"), cache.step([(seq, 33)]) as step:
        step.attend(0, **given)
    assert cache.len(seq) == 0
    with torch.no_grad(), cache.step([(seq, 33)]) as step:
        step.attend(0, **given)
    assert cache.len(seq) == 33


def test_out_counts_as_written(qkv):
    """A gradient that needs what out held raises."""
    cache = KvCache(layers=1, kv_heads=2, head_dim=32, k="f32", v="f32")
    packed = [x[0].transpose(0, 1) for x in qkv]

    def attend(out):
        with cache.step([(cache.create(), 33)]) as step:
            step.attend(0, *packed, out=out)

    by_arrays = [x.numpy() for x in qkv]
    for shape, write in (
        (qkv[0].shape, lambda out: attention(*qkv, out=out)),
        (qkv[0].shape, lambda out: attention(*by_arrays, out=out)),
        ((33, 4, 32), attend),
    ):
        x = torch.randn(shape, requires_grad=True)
        y = x * 1
        loss = (y * y).sum()
        with torch.no_grad():
            write(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    out = torch.empty_like(qkv[0], requires_grad=True)
    with pytest.raises(ValueError, match="no gradients of out, which requires one"):
        attention(*qkv, out=out)
    with torch.inference_mode():
        out = torch.empty_like(qkv[0])
        assert torch.equal(attention(*qkv, out=out), attention(*qkv))
    assert attention(*qkv, out=out) is out


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "out"])
def test_storage_that_was_freed(qkv, name):
    given = {"q": qkv[0], "k": qkv[1], "v": qkv[2], "mask": torch.zeros(33, 33), "out": torch.empty_like(qkv[0])}
    storage = given[name].untyped_storage()
    storage.resize_(storage.nbytes() - 4)
    with pytest.raises(BufferError, match=f"{name} takes .* bytes, and its storage has .*: it was resized"):
        attention(**given)
    storage.resize_(0)
    with pytest.raises(BufferError, match=f"{name} has shape .* and no memory|{name} takes .* bytes, and its storage has 0"):
        attention(**given)


def test_storage_that_was_cut(qkv):
    """Rows that are left are read."""
    larger = torch.zeros(4, *qkv[0].shape)
    left, lost = larger[1], larger[2]
    larger.untyped_storage().resize_(2 * qkv[0].nbytes)
    assert attention(left, *qkv[1:]).shape == qkv[0].shape
    with pytest.raises(BufferError, match="q takes .* its storage has 0"):
        attention(lost, *qkv[1:])


def test_zeros_without_memory(qkv):
    """A slice of one has an address that is not null, and no memory there."""
    q, k, v = qkv
    zeros = torch._efficientzerotensor((2, *q.shape))[1]
    for given in ((zeros, k, v), (q, k, zeros)):
        with pytest.raises(BufferError, match="has strides|its storage has 0"):
            attention(*given)


def test_options_of_numpy(qkv):
    q, k, v = qkv
    by_numbers = attention(q, k, v, scale=0.25, sinks=[0.5] * q.shape[1], kv_lens=[33] * len(q))
    kv_lens = numpy.full(len(q), 33, ">i8")[::-1]
    assert torch.equal(attention(q, k, v, scale=numpy.float32(0.25), sinks=numpy.full(q.shape[1], 0.5), kv_lens=kv_lens), by_numbers)
    rows = q[0].transpose(0, 1).contiguous()
    total = len(rows)
    assert torch.equal(attention(rows, rows, rows, cu_seqlens=(numpy.int64(0), numpy.int64(total))), attention(rows, rows, rows, cu_seqlens=[0, total]))
    with pytest.raises(TypeError, match="kv_lens is"):
        attention(q, k, v, kv_lens=numpy.full(len(q), 33.5))
    with pytest.raises(TypeError, match="sinks is a numpy.ma.MaskedArray"):
        attention(q, k, v, sinks=numpy.ma.array([0.0] * q.shape[1]))
    with pytest.raises(ValueError, match="sinks, which requires one"):
        attention(q, k, v, sinks=[torch.nn.Parameter(torch.zeros(())) for _ in range(q.shape[1])])
    endless = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        attention(q, k, v, kv_lens=endless)


def negated(x):
    """The elements of x, as memory that holds them with the other sign."""
    return torch._neg_view(-x)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "alibi_slopes", "sinks"])
def test_negated_views_have_their_sign(qkv, name):
    given = inputs_of(qkv)
    given["mask"], given["sinks"], given["alibi_slopes"] = torch.randn(33, 33), torch.randn(4), torch.rand(4)
    lazy = given | {name: negated(given[name])}
    assert lazy[name].is_neg()
    want = attention(**given)
    assert torch.equal(attention(**lazy), want)
    assert torch.equal(torch.ops.flashtile.attention(**lazy)[0], want)
    assert torch.equal(attention(**lazy, out=torch.empty_like(want)), want)
    by_arrays = {at: x.numpy() for at, x in given.items()}
    if name != "q":
        assert numpy.array_equal(attention(**(by_arrays | {name: lazy[name]})), want.numpy())


def test_lazy_tensors_elsewhere(qkv):
    with pytest.raises(BufferError, match="out is a lazy view"):
        attention(*qkv, out=negated(torch.empty_like(qkv[0])))
    report = {"q": qkv[0], "k": qkv[1], "v": qkv[2]}
    want = kv_report(report, codecs=["int8"])
    assert kv_report({name: negated(x) for name, x in report.items()}, codecs=["int8"]) == want
    cache, packed = KvCache(layers=1, kv_heads=2, head_dim=32, k="f32", v="f32"), [x[0].transpose(0, 1) for x in qkv]
    with cache.step([(cache.create(), 33)]) as step:
        out = step.attend(0, *(negated(x) for x in packed))
    assert torch.equal(out, attention(*packed, cu_seqlens=[0, 33], causal=True))
    with cache.step([(cache.create(), 33)]) as step:
        out = step.attend(0, packed[0], packed[1], torch._efficientzerotensor(packed[2].shape))
    assert not out.any()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_no_tangent_is_lost(qkv, name):
    given = inputs_of(qkv)
    refusal = f"{name} has a tangent|{name} is differentiated by torch.func"
    with torch.autograd.forward_ad.dual_level():
        dual = given | {name: torch.autograd.forward_ad.make_dual(given[name], torch.ones_like(given[name]))}
        for call in (lambda: attention(**dual), lambda: torch.ops.flashtile.attention(**dual), lambda: attention(**dual, out=torch.empty_like(qkv[0]))):
            with pytest.raises(ValueError, match=refusal):
                call()
    ones = (torch.ones_like(given[name]),)
    for function in (attention, lambda **given: torch.ops.flashtile.attention(**given)[0]):
        by_name = lambda x: function(**(given | {name: x}))
        with pytest.raises(ValueError, match=refusal):
            torch.func.jvp(by_name, (given[name],), ones)
        with pytest.raises(Exception, match=refusal + "|flashtile|setup_context"):
            torch.func.grad(lambda x: by_name(x).sum())(given[name])
    torch._dynamo.reset()
    with pytest.raises(Exception, match="exception|" + refusal):
        torch.compile(lambda x: torch.func.jvp(lambda x: attention(**(given | {name: x})), (x,), ones)[1], backend="eager", fullgraph=True)(given[name])


def test_a_step_loses_no_tangent(qkv):
    cache, packed = KvCache(layers=1, kv_heads=2, head_dim=32), [x[0].transpose(0, 1) for x in qkv]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(packed[1], packed[1])
        with pytest.raises(ValueError, match="k has a tangent"), cache.step([(cache.create(), 33)]) as step:
            step.attend(0, packed[0], dual, packed[2])


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
def test_transforms(qkv):
    """vmap and functionalize give what they give of operators of PyTorch."""
    both = [torch.stack([x, x.flip(0)]) for x in qkv]
    want = torch.stack([attention(*(x[i] for x in both), causal=True) for i in range(2)])
    assert torch.equal(torch.vmap(lambda q, k, v: attention(q, k, v, causal=True))(*both), want)
    sinks = torch.randn(2, 4)
    want = torch.stack([attention(*qkv, sinks=each) for each in sinks])
    assert torch.equal(torch.vmap(lambda sinks: attention(*qkv, sinks=sinks))(sinks), want)
    assert torch.equal(torch.func.functionalize(lambda q: attention(q, *qkv[1:]))(qkv[0]), attention(*qkv))
    assert torch.equal(torch.func.functionalize(lambda q: q + attention(*qkv))(qkv[0]), qkv[0] + attention(*qkv))
    with pytest.raises(ValueError, match="is batched by torch.vmap"):
        torch.vmap(lambda q, out: attention(q, *qkv[1:], out=out))(both[0], torch.empty_like(both[0]))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layouts_are_named(qkv):
    q, k, v = qkv
    jagged = torch.nested.nested_tensor([k[0], k[1, :, :4]], layout=torch.jagged)
    for other, refusal in (
        (k.to_sparse(), r"k has layout torch.sparse_coo, expected torch.strided: call .to_dense\(\)"),
        (k[0, 0].to_sparse_csr(), "k has layout torch.sparse_csr"),
        (k.to_mkldnn(), "k has layout torch._mkldnn"),
        (torch.quantize_per_tensor(k, 0.1, 0, torch.qint8), r"k is quantized, torch.qint8: call .dequantize\(\)"),
        (torch.nested.nested_tensor([k[0], k[1]]), "k is a nested tensor: give its sequences"),
        (jagged, "k is a nested tensor: give its sequences"),
    ):
        with pytest.raises(TypeError, match=refusal):
            attention(q, other, v)
        with pytest.raises(TypeError, match=refusal):
            attention(q, other, v, out=torch.empty_like(q))
        with pytest.raises(TypeError, match=refusal):
            attention(q.numpy(), other, v.numpy())
        with pytest.raises(TypeError, match=refusal):
            kv_report({"k": other, "v": v}, codecs=["int8"])
    with pytest.raises(TypeError, match=r"mask is a nested tensor: give .to_padded_tensor\(0\)"):
        attention(q, k, v, mask=jagged)
    # The remedy of a nested tensor.
    nested = torch.nested.nested_tensor([x[:, :n].transpose(0, 1) for x, n in zip(k, (33, 4))], layout=torch.jagged)
    rows = torch.cat(nested.unbind())
    assert torch.equal(attention(rows, rows, rows, cu_seqlens=nested.offsets())[:33], attention(*[k[:1].transpose(1, 2)] * 3, layout="bshd")[0])
    with pytest.raises(TypeError, match="mask has layout torch.sparse_coo"):
        attention(q, k, v, mask=torch.eye(33).to_sparse())
    with pytest.raises(TypeError, match="sinks has layout torch.sparse_coo"):
        attention(q, k, v, sinks=torch.ones(4).to_sparse())


class Named(torch.Tensor):
    """A subclass without operators of its own."""


class Meters(torch.Tensor):
    """A subclass that knows what its operators mean."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.flashtile.attention:
            return "meters", None
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses(qkv):
    q, k, v = qkv
    assert type(attention(q.as_subclass(Named), k, v)) is Named
    assert attention(q, k.as_subclass(Meters), v) == "meters"
    assert attention(q, k, v, sinks=torch.ones(4).as_subclass(Meters)) == "meters"
    want, out = attention(q, k, v), torch.empty_like(q)
    assert torch.equal(attention(q, k.as_subclass(Named), v, out=out), want)
    with pytest.raises(TypeError, match="k is a Meters, which has operators of its own"):
        attention(q, k.as_subclass(Meters), v, out=out)
    with torch.inference_mode():
        x = [each * 1 for each in qkv]
    assert torch.equal(attention(*x), want) and torch.equal(torch.ops.flashtile.attention(*x)[0], want)


def test_fake_tensors_are_not_memory(qkv):
    """Calls that are no operators refuse what stands for a tensor."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    fake = [mode.from_tensor(x) for x in qkv]
    with pytest.raises(BufferError, match="k is on cpu, a FakeTensor without elements in memory"):
        attention(qkv[0].numpy(), fake[1], qkv[2].numpy())
    with pytest.raises(BufferError, match="q is on cpu, a FakeTensor"):
        kv_report({"q": fake[0], "k": qkv[1], "v": qkv[2]}, codecs=["int8"])
    cache = KvCache(layers=1, kv_heads=2, head_dim=32)
    with pytest.raises(BufferError, match="q is on cpu, a FakeTensor"), cache.step([(cache.create(), 33)]) as step:
        step.attend(0, *(x[0].transpose(0, 1) for x in fake))


def test_lengths_are_compiled(qkv):
    """Lengths of packed sequences reach the operator as lists and as tensors."""
    packed = [x[0].transpose(0, 1) for x in qkv]

    def layer(x, lens):
        return attention(x, *packed[1:], cu_seqlens=([0, 10, 33], [0, 20, 33]), q_lens=lens, kv_lens=[9, 13]) + 1

    lens = torch.tensor([3, 20])
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(packed[0], lens), layer(packed[0], [3, 20])) and (layer(packed[0], lens)[3:10] == 1).all()
    with pytest.raises(TypeError, match="q_lens is a nested tensor"):
        layer(packed[0], torch.nested.nested_tensor([torch.ones(1), torch.ones(1)], layout=torch.jagged))


def test_a_mask_for_each_sequence(qkv):
    """Tensors give what arrays give, also compiled; a call that records nothing refuses their gradients."""
    packed = [x[0].transpose(0, 1) for x in qkv]
    masks, starts = [torch.rand(4, 10, 10) < 0.6, torch.rand(23, 23) < 0.6], [0, 10, 33]
    want = attention(*(x.numpy() for x in packed), cu_seqlens=starts, mask=[mask.numpy() for mask in masks])
    assert (attention(*packed, cu_seqlens=starts, mask=masks).numpy() == want).all()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, k, v, masks):
        return attention(q, k, v, cu_seqlens=torch.tensor([0, 10, 33]), mask=masks) + 0

    torch._dynamo.reset()
    assert (compiled(*packed, masks).numpy() == want).all()
    with pytest.raises(ValueError, match="expected 10 and 10 as sequence 0 has"):
        torch.ops.flashtile.attention(*packed, masks[1], cu_seqlens_q=torch.tensor(starts), cu_seqlens_k=torch.tensor(starts), mask_lens=[9, 9, 23, 23])
    with pytest.raises(ValueError, match="no gradients of mask, which requires one"):
        differentiable = [torch.zeros(10, 10), torch.zeros(23, 23, requires_grad=True)]
        attention(*packed, cu_seqlens=starts, mask=differentiable, out=torch.empty_like(packed[0]))
    with pytest.raises(TypeError, match=r"mask\[1\] is a ndarray, expected all masks"):
        attention(*packed, cu_seqlens=starts, mask=[masks[0], masks[1].numpy()])
    with pytest.raises(BufferError, match=r"mask\[1\] is on meta, expected cpu"):
        attention(*packed, cu_seqlens=starts, mask=[masks[0], torch.ones(23, 23, dtype=torch.bool, device="meta")])


def test_opcheck(qkv):
    """The fake of the operator gives shapes, strides and dtypes of the real one, for every layout."""
    packed = [x[0].transpose(0, 1) for x in qkv]
    starts = torch.tensor([0, 10, 33])
    cases = [
        (qkv, {}),
        (qkv, {"causal": True, "left": 5, "return_lse": True, "softcap": 2.0, "sinks": torch.zeros(4)}),
        (qkv, {"causal": True, "attention_chunk": 8}),
        (packed, {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "mask": torch.zeros(2, 1, 23, 23), "mask_lens": [10, 10, 23, 23]}),
        ([x.transpose(1, 2) for x in qkv], {"layout": "bshd", "return_lse": True}),
        (packed, {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "return_lse": True}),
        (packed, {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "q_lens": torch.tensor([3, 20]), "kv_lens": torch.tensor([9, 23])}),
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
        packed = attention(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens=starts, causal=True, attention_chunk=6, q_offset="bottom_right")
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



def test_devices_of_caches():
    for device in (None, "cpu", "cpu:0", torch.device("cpu")):
        assert "; on" not in repr(KvCache(1, 2, 32, device=device))
    with pytest.raises(ValueError, match="device is 'meta', expected None or 'cpu', or a CUDA device such as 'cuda' or 'cuda:1'"):
        KvCache(1, 2, 32, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="device is 'cuda:1', and PyTorch finds no CUDA device"):
            KvCache(1, 2, 32, device="cuda:1")


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
