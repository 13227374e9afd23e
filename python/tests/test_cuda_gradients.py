"""Gradients of tensors of PyTorch on an NVIDIA GPU. Without one, nothing here runs."""

import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from flashtile import Gradients, attention, attention_backward  # noqa: E402
from test_gradients import (  # noqa: E402
    BATCH, CASES, DIFFERENTIABLE, NAMES, batch, by_definition, close, definition, differentiated, losses, loss_of, problem, qkv, seeds_of,
)  # fmt: skip

DEVICE = torch.device("cuda", 0)
# Largest differences, relative to the largest magnitude of a gradient. In float32, p has the error of a fast exp2, 2 units in its last place,
# and of its score; in half precision, p and the gradients of scores are rounded for products.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on_device(x):
    """A tensor, a list of them, or the values of a dict on the device; anything else as it is."""
    if isinstance(x, dict):
        return {name: on_device(value) for name, value in x.items()}
    if torch.is_tensor(x):
        return x.detach().to(DEVICE)
    return [on_device(each) for each in x] if isinstance(x, list) and x and torch.is_tensor(x[0]) else x


def leaves(tensors, options, dtype=None, device=DEVICE):
    """Inputs by name on a device, those that are differentiated as leaves."""
    given = dict(zip("qkv", tensors)) | {name: options[name] for name in DIFFERENTIABLE if name in options}
    made = {}
    for name, x in given.items():
        made[name] = (x if dtype is None or x.dtype == torch.bool else x.to(dtype)).detach().clone().to(device)
        made[name].requires_grad_(x.dtype != torch.bool)
    return made


def gradients(outputs, inputs, **more):
    """Gradients of a loss, or of results, by those inputs that have one, by name."""
    names = list(differentiated(inputs))
    return dict(zip(names, torch.autograd.grad(outputs, [inputs[name] for name in names], **more)))


def exact_gradients(tensors, options, seeds):
    """Gradients by autograd of the definition in float64 on the CPU."""
    inputs = leaves(tensors, options, torch.float64, "cpu")
    return gradients(by_definition(inputs, options, seeds), inputs)


# The function, and autograd.


@pytest.mark.parametrize("name", CASES)
def test_definition(name):
    """Gradients by autograd equal the definition in float64, and the function has the same bits."""
    tensors, options = problem(name)
    seeds = seeds_of(tensors, options)
    want = exact_gradients(tensors, options, seeds)
    inputs, there = leaves(tensors, options), on_device(list(seeds))
    out, lse = attention(**(on_device(options) | inputs), return_lse=True)
    got = gradients(loss_of((out, lse), there), inputs)
    assert list(got) == list(want)
    for key, expected in want.items():
        assert (got[key].device, got[key].dtype) == (DEVICE, torch.float32)
        close(got[key].cpu(), expected, TOLERANCE[torch.float32])
    given = {key: x.detach() for key, x in inputs.items()}
    d_lse = torch.where(torch.isfinite(lse), there[1], 0).detach()
    wanted = {NAMES[key]: True for key in got if key in NAMES}
    made = attention_backward(out=out.detach(), lse=lse.detach(), d_out=there[0], d_lse=d_lse, **(on_device(options) | given), **wanted)
    assert type(made) is Gradients
    by_name = dict(zip(("q", "k", "v", "sinks", "mask", "alibi_slopes"), made))
    assert {key for key, x in by_name.items() if x is not None} == set(got)
    assert all(torch.equal(by_name[key], got[key]) for key in got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "kv_lens and all", "packed, all", "bshd", "many queries of a head"])
def test_dtypes(name, dtype):
    """Gradients have the dtypes of the inputs, also of sinks and slopes."""
    tensors, options = problem(name)
    tensors = [x.to(dtype) for x in tensors]
    options |= {key: options[key].to(dtype) for key in ("mask", "sinks", "alibi_slopes") if key in options}
    seeds = [x.to(dtype) for x in seeds_of(tensors, options)]
    want = exact_gradients(tensors, options, seeds)
    inputs = leaves(tensors, options)
    got = gradients(loss_of(attention(**(on_device(options) | inputs), return_lse=True), on_device(seeds)), inputs)
    for key, expected in want.items():
        assert got[key].dtype == inputs[key].dtype
        close(got[key].cpu(), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_errs_at_most_as_much_as_twice_pytorch(dtype, causal):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 300, 64, generator=generator).to(DEVICE, dtype) for _ in range(4)]

    def gradients_of(attend, dtype):
        q, k, v, d_out = (x.to(dtype) for x in tensors)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        return [x.double() for x in torch.autograd.grad(attend(*inputs), inputs, d_out)]

    sdpa = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    want, theirs = gradients_of(sdpa, torch.float64), gradients_of(sdpa, dtype)
    ours = gradients_of(lambda q, k, v: attention(q, k, v, causal=causal), dtype)
    for name, want, theirs, ours in zip("qkv", want, theirs, ours):
        errors = [((got - want).norm() / want.norm()).item() for got in (ours, theirs)]
        assert errors[0] <= 2 * errors[1], f"d_{name}: {errors[0]:.2e}, PyTorch {errors[1]:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_same_bits(dtype):
    """Of many threadgroups, in three runs."""
    torch.manual_seed(7)
    inputs = [torch.randn(2, heads, 513, dim).to(DEVICE, dtype).requires_grad_() for heads, dim in ((8, 64), (2, 64), (2, 32))]
    inputs += [torch.randn(8, device=DEVICE, requires_grad=True), torch.rand(8, device=DEVICE, requires_grad=True)]
    d_out, d_lse = torch.randn(2, 8, 513, 32).to(DEVICE, dtype), torch.randn(2, 8, 513, device=DEVICE)

    def run():
        q, k, v, sinks, slopes = inputs
        results = attention(q, k, v, causal=True, window=(200, 0), sinks=sinks, alibi_slopes=slopes, return_lse=True)
        return torch.autograd.grad(results, inputs, (d_out, d_lse))

    first = run()
    assert all(x.isfinite().all() and x.any() for x in first)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(run(), first))


@pytest.mark.parametrize("name", ["q", "k", "v", "alibi_slopes", "sinks"])
def test_some_inputs(name):
    """Inputs that require no gradient get none; the others have the bits that they have among all."""
    inputs = leaves(qkv(BATCH), {"mask": torch.randn(33, 33), "sinks": torch.randn(4), "alibi_slopes": torch.rand(4)})
    want = torch.autograd.grad(attention(**inputs).square().sum(), inputs[name])[0]
    only = {key: x.detach() for key, x in inputs.items()} | {name: inputs[name].detach().clone().requires_grad_()}
    for out in (attention(**only), torch.ops.flashtile.attention(**only)[0]):
        only[name].grad = None
        out.square().sum().backward()
        assert torch.equal(only[name].grad, want) and all(x.grad is None for key, x in only.items() if key != name)


def test_lists_of_numbers_elsewhere():
    """Sinks and slopes on the CPU have their gradients there."""
    lists = {"sinks": torch.randn(4), "alibi_slopes": torch.rand(2, 4)}
    inputs = leaves(qkv(BATCH), lists)
    moved = inputs | {name: x.clone().requires_grad_() for name, x in lists.items()}
    want, got = (gradients(attention(**given).square().sum(), given) for given in (inputs, moved))
    for name in want:
        assert got[name].device == moved[name].device and torch.equal(got[name].to(DEVICE), want[name])


def test_either_result_alone():
    """A loss of one result of the two."""
    tensors = qkv(BATCH)
    for at in (0, 1):
        inputs, exact = leaves(tensors, {}), leaves(tensors, {}, torch.float64, "cpu")
        got = gradients(attention(**inputs, return_lse=True)[at].exp().sum(), inputs)
        want = gradients(definition(*exact.values(), {})[at].exp().sum(), exact, allow_unused=True)
        for key, expected in want.items():
            close(got[key].cpu(), torch.zeros(got[key].shape) if expected is None else expected, TOLERANCE[torch.float32])


def test_rows_without_keys():
    """They have 0, and so have rows of keys and values that no query sees, whatever is there."""
    tensors = qkv(((2, 2, 12, 16),) * 3)
    visible = torch.ones(12, 12, dtype=torch.bool, device=DEVICE).tril(-3)
    for options, no_keys, unseen in (
        ({"mask": visible}, slice(0, 3), slice(9, 12)),
        ({"causal": True, "q_offset": -4}, slice(0, 4), slice(8, 12)),
        ({"kv_lens": [0, 0]}, slice(0, 12), slice(0, 12)),
        ({"kv_lens": [7, 7], "causal": True, "q_offset": "bottom_right"}, slice(0, 5), slice(7, 12)),
    ):
        of = [x.to(DEVICE, copy=True) for x in tensors]
        if "kv_lens" in options:
            of[1][:, :, unseen], of[2][:, :, unseen] = float("nan"), float("nan")
        of = [x.requires_grad_() for x in of]
        out, lse = attention(*of, **options, return_lse=True)
        (out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum() + out[:, :, no_keys].sum()).backward()
        assert not of[0].grad[:, :, no_keys].any() and not of[1].grad[:, :, unseen].any() and not of[2].grad[:, :, unseen].any()
        assert all(x.grad.isfinite().all() for x in of)
        assert unseen == slice(0, 12) or all(x.grad.any() for x in of)


def test_no_rows_and_no_keys():
    """Without queries, keys have gradients of 0; without keys, queries have."""
    for q_len, kv_len in ((0, 5), (5, 0)):
        inputs = [torch.ones(2, heads, rows, 16, device=DEVICE, requires_grad=True) for heads, rows in ((4, q_len), (2, kv_len), (2, kv_len))]
        out = attention(*inputs)
        assert out.shape == (2, 4, q_len, 16)
        made = torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert all(x.shape == of.shape and not x.any() for x, of in zip(made, inputs))


# Memory and streams.


def test_gradients_of_any_strides():
    """Inputs inside one projection, gradients of a sum, whose strides are 0, and transposed ones."""
    torch.manual_seed(7)
    fused = torch.randn(2, 33, 8, 24, device=DEVICE, requires_grad=True)
    parts = [x.detach().contiguous().requires_grad_() for x in fused.split([4, 2, 2], dim=2)]
    options = {"causal": True, "layout": "bshd", "return_lse": True}
    results, of_parts = attention(*fused.split([4, 2, 2], dim=2), **options), attention(*parts, **options)
    for d_out, d_lse in (
        (torch.ones((), device=DEVICE).expand(2, 33, 4, 24), torch.ones((), device=DEVICE).expand(2, 4, 33)),
        (torch.randn(24, 33, 4, 2, device=DEVICE).permute(3, 1, 2, 0), torch.randn(33, 2, 4, device=DEVICE).permute(1, 2, 0)),
        (torch._neg_view(torch.randn(2, 33, 4, 24, device=DEVICE)), None),
    ):
        seeds = (d_out,) if d_lse is None else (d_out, d_lse)
        (got,) = torch.autograd.grad(results[: len(seeds)], fused, seeds, retain_graph=True)
        dense = [x.clone(memory_format=torch.contiguous_format) for x in seeds]
        want = torch.autograd.grad(of_parts[: len(seeds)], parts, dense, retain_graph=True)
        assert torch.equal(got, torch.cat(want, dim=2))


def test_streams():
    """A backward pass follows the work that is on the stream of the forward pass, and what follows it sees the gradients."""
    q, k, v = on_device(qkv(BATCH))
    q.requires_grad_()
    want = torch.autograd.grad(attention(q * 2, k, v).square().sum(), q)[0] + 0
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            out = attention(q * 2, k, v)
            torch.cuda._sleep(20_000_000)
            (got,) = torch.autograd.grad(out.square().sum(), q)
            got = got + 0
        stream.synchronize()
        assert torch.equal(got, want)


def test_nothing_waits_for_the_device():
    """Forward and backward return while the device is busy with what was before them."""
    q, k, v = on_device(qkv(BATCH))
    q.requires_grad_()
    d_out = torch.randn(2, 4, 33, 24, device=DEVICE)
    torch.autograd.grad(attention(q, k, v), q, d_out)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    slept = torch.cuda.Event()
    slept.record()
    (got,) = torch.autograd.grad(attention(q, k, v), q, d_out)
    assert not slept.query()
    torch.cuda.synchronize()
    assert got.any()


def test_threads():
    tensors = on_device(qkv(BATCH))
    out, lse = attention(*tensors, causal=True, return_lse=True)
    d_out, wrong = torch.randn_like(out), []
    want = attention_backward(*tensors, out, lse, d_out, causal=True)
    torch.cuda.synchronize()

    def work():
        for _ in range(20):
            made = attention_backward(*tensors, out, lse, d_out, causal=True)
            wrong.append(not all(torch.equal(a, b) for a, b in zip(made[:3], want[:3])))

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(wrong) == 80 and not any(wrong)


def test_memory():
    """Nothing is kept for the backward pass whose size is queries times keys."""
    size = 8192
    q, k, v = (torch.randn(1, 4, size, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, causal=True)
    kept = torch.cuda.memory_allocated() - before
    # Out, and 4 bytes of the logsumexp for each query and head; PyTorch rounds sizes up.
    assert kept <= out.nbytes + 4 * 4 * size + 4096
    out.backward(torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before <= kept + 6 * out.nbytes


def test_graphs():
    """A graph captures a training step that has run once on the stream of the capture."""
    q, k, v = on_device(qkv(BATCH))
    q.requires_grad_()

    def step():
        return torch.autograd.grad(attention(q * 1, k, v, causal=True).square().sum(), q)[0]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    for factor in (1, 3):
        with torch.no_grad():
            q.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, step())


# Refusals, transforms and compilers.


def test_what_is_refused():
    q, k, v = (x.requires_grad_() for x in on_device(qkv(BATCH)))
    bias = torch.randn(33, 33, device=DEVICE)
    (d_q,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flashtile computes no second derivatives"):
        d_q.sum().backward()
    with pytest.raises(ValueError, match="q is differentiated by torch.func, which flashtile does not support: use torch.autograd"):
        torch.func.grad(lambda q: attention(q, k, v).sum())(q)
    with pytest.raises(ValueError, match="q has a tangent"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,))
    with pytest.raises(ValueError, match="no gradients of q, which requires one"):
        attention(q, k, v, out=torch.empty(2, 4, 33, 24, device=DEVICE))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = attention(q, k, v, return_lse=True)
    d_out = torch.randn_like(out)
    for changed, error, what in (
        ({"d_sinks": True}, ValueError, "d_sinks was asked for, and there is no option sinks"),
        ({"d_bias": True}, ValueError, "d_bias was asked for, and there is no mask that is added"),
        ({"d_bias": True, "mask": bias > 0}, ValueError, "d_bias was asked for, and there is no mask that is added"),
        ({"lse": lse[:, :, :8]}, ValueError, r"lse has shape \[2, 4, 8\], expected \[2, 4, 33\]"),
        ({"lse": lse.transpose(0, 1).contiguous().transpose(0, 1)}, BufferError, "lse has strides"),
        ({"lse": lse.half()}, BufferError, "lse is not a dense array of float32"),
        ({"lse": lse.cpu()}, BufferError, "lse is on cpu, expected cuda:0"),
        ({"d_lse": lse[0]}, ValueError, "d_lse has shape"),
        ({"d_lse": lse.cpu()}, BufferError, "d_lse is on cpu, expected cuda:0"),
        ({"k": k.cpu()}, BufferError, "k is on cpu, expected cuda:0"),
        ({"out": out.cpu()}, BufferError, "out is on cpu, expected cuda:0"),
        ({"d_out": d_out.cpu()}, BufferError, "d_out is on cpu, expected cuda:0"),
        ({"d_out": d_out.half()}, TypeError, "d_out"),
        ({"d_out": d_out[:, :1]}, ValueError, "d_out"),
        ({"out": out[..., :8]}, ValueError, "out"),
        ({"d_out": torch.ones((), device=DEVICE).expand(out.shape)}, BufferError, "d_out has strides"),
        ({"q": q[:, :, :4], "causal": True}, ValueError, "'top_left'"),
    ):
        with pytest.raises(error, match=what):
            attention_backward(**({"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out} | changed))


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
def test_transforms():
    """Batched gradients, and gradients through vmap, equal the gradients of each entry."""
    q, k, v = (x.requires_grad_() for x in on_device(qkv(((1, 2, 3, 4),) * 3)))
    slow, fast = (torch.autograd.functional.jacobian(lambda *x: attention(*x, causal=True), (q, k, v), vectorize=fast) for fast in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(slow, fast))
    both = torch.stack([q.detach(), 2 * q.detach()]).requires_grad_()
    (got,) = torch.autograd.grad(torch.vmap(lambda q: attention(q, k, v))(both).square().sum(), both)
    want = [torch.autograd.grad(attention(x, k, v).square().sum(), x)[0] for x in (both.detach()[0].requires_grad_(), both.detach()[1].requires_grad_())]
    assert torch.equal(got, torch.stack(want))
    recomputed = torch.utils.checkpoint.checkpoint(lambda q: attention(q, k, v, causal=True), q, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(recomputed.sum(), q)[0], torch.autograd.grad(attention(q, k, v, causal=True).sum(), q)[0])


def test_opcheck():
    """The fake of both operators gives what the real ones do, with gradients."""
    for name in ("causal", "sinks", "ALiBi", "bias for all", "bool", "bshd"):
        tensors, options = problem(name)
        inputs = leaves(tensors, options)
        rest = {key: on_device(value) for key, value in options.items() if key not in inputs}
        rest["q_offset"] = options.get("q_offset")
        positional = [inputs.get(key) for key in DIFFERENTIABLE]
        torch.library.opcheck(torch.ops.flashtile.attention.default, tuple(positional), rest | {"return_lse": True})
        given = [None if x is None else x.detach() for x in positional]
        out, lse = torch.ops.flashtile.attention(*given, **rest, return_lse=True)
        wanted = {NAMES[key]: True for key in differentiated(inputs) if key in NAMES}
        for d_lse in (None, torch.randn_like(lse)):
            torch.library.opcheck(torch.ops.flashtile.attention_backward.default, (torch.randn_like(out), d_lse, out, lse, *given), rest | wanted)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    """Compilers keep the operators, for shapes that change, and the gradients have the same values."""

    def loss(q, k, v, sinks, starts):
        out, lse = attention(q * 2, k, v, sinks=sinks, softcap=5.0, return_lse=True)
        packed = attention(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens=starts, causal=True)
        return out.square().sum() + lse.sum() + packed.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=True)
    for length in (33, 21):
        inputs = leaves([x[:, :, :length].contiguous() for x in qkv(BATCH)], {"sinks": torch.randn(4)})
        starts = torch.tensor([0, 10, length])
        got, want = (gradients(f(*inputs.values(), starts), inputs) for f in (compiled, loss))
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


# Hugging Face transformers.


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
def test_a_model_learns(is_padded):
    """The losses of 50 steps are those with `sdpa`, by PyTorch's own products and softmax, and the batch is learned."""
    given = on_device(list(batch(is_padded)))
    got = losses("flashtile", *given)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = losses("sdpa", *given)
    assert want[-1] < 0.1 * want[0]
    assert ((got - want).abs() / want).max() <= 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_parameters_have_gradients(name):
    """The gradient of every parameter, with windows, softcap and sinks, from a batch with padding on either side."""
    pytest.importorskip("transformers")
    from test_transformers import decoder, prompt

    ids = prompt().to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :6], mask[2, -4:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    # A padded token, whose query sees no key, predicts the first one after it.
    labels[1, 6] = -100
    found = {}
    for attn in ("flashtile", "eager"):
        model = decoder(name, attn).train().to(DEVICE)
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        found[attn] = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert found["flashtile"].keys() == found["eager"].keys()
    for key, want in found["eager"].items():
        got, scale = found["flashtile"][key], want.abs().max()
        assert scale > 0 and (got - want).abs().max() <= 1e-4 * scale, key
