"""Gradients of attention: against autograd of its definition in float64, and through PyTorch and Hugging Face transformers."""

import numpy
import pytest
from conftest import reference

import flashtile
from flashtile import attention, attention_backward

torch = pytest.importorskip("torch")

DIFFERENTIABLE = ("q", "k", "v", "mask", "alibi_slopes", "sinks")
NAMES = {"sinks": "d_sinks", "mask": "d_bias", "alibi_slopes": "d_alibi_slopes"}
# Largest differences, relative to the largest magnitude of a gradient.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# The definition.


def seen(lens, kv_len, options):
    """The keys `(q_len, kv_len)` that queries see by their positions, and the positions relative to the keys."""
    q_len, keys = lens
    offset = options.get("q_offset", 0)
    offset = {"top_left": 0, "bottom_right": kv_len - q_len}.get(offset, offset)
    p, j = torch.arange(q_len)[:, None] + offset, torch.arange(keys)[None]
    left, right = options.get("window", (-1, -1))
    visible = (j < kv_len) & (p - j <= left if left >= 0 else j >= 0) & (j - p <= right if right >= 0 else j >= 0)
    if options.get("causal"):
        visible = visible & (j <= p)
    if options.get("attention_chunk"):
        visible = visible & (torch.div(p, options["attention_chunk"], rounding_mode="floor") == j // options["attention_chunk"])
    return visible, (p - j).abs()


def of_sequence(q, k, v, kv_len, options):
    """Out and logsumexp of one sequence, `(heads, rows, dim)`, with a finite logsumexp in rows that see no key."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    visible, distance = seen((q.shape[1], k.shape[1]), kv_len, options)
    scores = q @ k.transpose(1, 2) * options.get("scale", q.shape[-1] ** -0.5)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if options.get("alibi_slopes") is not None:
        scores = scores - options["alibi_slopes"][:, None, None] * distance
    mask = options.get("mask")
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        visible = visible & (mask > float("-inf"))
        scores = scores + torch.where(mask > float("-inf"), mask, 0)
    sinks = options.get("sinks")
    # Scores of hidden keys are no -inf, whose gradients are NaN.
    p = torch.where(visible, scores.exp(), 0)
    total = p.sum(-1) + (0 if sinks is None else sinks[:, None].exp())
    total = torch.where(total > 0, total, 1)
    return p @ v / total[..., None], total.log()


def definition(q, k, v, options):
    """Out and logsumexp of a batch, or of packed sequences, in the layout of the options."""
    options = dict(options)
    if "cu_seqlens" in options:
        starts = options.pop("cu_seqlens")
        of_q, of_k = starts if isinstance(starts, tuple) else (starts, starts)
        made = []
        for at in range(len(of_q) - 1):
            rows, keys = slice(of_q[at], of_q[at + 1]), slice(of_k[at], of_k[at + 1])
            each = options | {name: options[name][at] for name in ("mask", "alibi_slopes") if options.get(name) is not None and options[name].ndim != 1}
            each["mask"] = None if options.get("mask") is None else each["mask"][..., : of_q[at + 1] - of_q[at], : of_k[at + 1] - of_k[at]]
            of = (q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1))
            made.append(of_sequence(*of, of[1].shape[1], each))
        return torch.cat([out.transpose(0, 1) for out, _ in made]), torch.cat([lse for _, lse in made], dim=1)
    if options.get("layout") == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads, q_len, _ = q.shape
    mask, slopes = options.get("mask"), options.get("alibi_slopes")
    if mask is not None:
        mask = mask.expand(batch, heads, q_len, k.shape[2])
    made = []
    for at, kv_len in enumerate(options.get("kv_lens", [k.shape[2]] * batch)):
        each = {"mask": None if mask is None else mask[at], "alibi_slopes": slopes if slopes is None or slopes.ndim == 1 else slopes[at]}
        made.append(of_sequence(q[at], k[at], v[at], kv_len, options | each))
    out, lse = (torch.stack(x) for x in zip(*made))
    return (out.transpose(1, 2) if options.get("layout") == "bshd" else out), lse


# Problems.


def qkv(shapes):
    torch.manual_seed(7)
    return [torch.randn(shape) for shape in shapes]


BATCH = ((2, 4, 33, 32), (2, 2, 33, 32), (2, 2, 33, 24))
LONGER = ((2, 4, 19, 16), (2, 2, 70, 16), (2, 2, 70, 16))
ROWS = ((2, 33, 4, 32), (2, 33, 2, 32), (2, 33, 2, 32))
PACKED = ((50, 4, 16), (61, 2, 16), (61, 2, 16))


def hiding(shape):
    return torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, float("-inf"))


CASES = {
    "full": (BATCH, {}),
    "causal": (BATCH, {"causal": True}),
    "one head": (((1, 1, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8)), {"causal": True, "scale": 0.7}),
    "many queries of a head": (((1, 8, 40, 64), (1, 1, 40, 64), (1, 1, 40, 64)), {"causal": True}),
    "window": (BATCH, {"window": (5, 3)}),
    "causal window, later queries": (LONGER, {"causal": True, "window": (20, 0), "q_offset": "bottom_right"}),
    "chunks": (BATCH, {"causal": True, "attention_chunk": 8}),
    "softcap": (BATCH, {"softcap": 1.5, "causal": True}),
    "sinks": (BATCH, {"sinks": "sinks", "causal": True, "scale": 0.4}),
    "ALiBi": (LONGER, {"alibi_slopes": "slopes", "q_offset": 51}),
    "ALiBi of each entry": (BATCH, {"alibi_slopes": "slopes of each", "causal": True}),
    "bias": (BATCH, {"mask": lambda: hiding((2, 4, 33, 33))}),
    "bias for all": (BATCH, {"mask": lambda: hiding((33, 33)), "softcap": 3.0}),
    "bias of keys": (BATCH, {"mask": lambda: torch.randn(33), "causal": True}),
    "bias of heads": (LONGER, {"mask": lambda: hiding((1, 4, 19, 70))}),
    "bias of a batch": (LONGER, {"mask": lambda: torch.randn(2, 1, 1, 70)}),
    "bias of stride 0": (BATCH, {"mask": lambda: torch.randn(1, 4, 33, 33).expand(2, 4, 33, 33)}),
    "bool": (BATCH, {"mask": lambda: torch.rand(2, 1, 33, 33) < 0.6, "sinks": "sinks"}),
    "kv_lens": (LONGER, {"kv_lens": [70, 11], "causal": True, "q_offset": "top_left"}),
    "kv_lens and all": (LONGER, {"kv_lens": [64, 40], "mask": lambda: hiding((2, 4, 19, 70)), "sinks": "sinks", "softcap": 2.0}),
    "bshd": (ROWS, {"layout": "bshd", "causal": True, "sinks": "sinks", "mask": lambda: hiding((33, 33))}),
    "packed": (PACKED, {"cu_seqlens": ([0, 20, 20, 50], [0, 20, 31, 61]), "causal": True, "q_offset": "top_left"}),
    "packed, all": (PACKED, {"cu_seqlens": ([0, 20, 50], [0, 20, 61]), "sinks": "sinks", "alibi_slopes": "slopes of each", "q_offset": 0, "mask": lambda: hiding((2, 4, 30, 41))}),
}


def problem(name):
    """q, k, v and options of a case, all in float32."""
    shapes, options = CASES[name]
    made = qkv(shapes)
    named = {"sinks": torch.randn(4), "slopes": torch.rand(4) / 4, "slopes of each": torch.rand(2, 4) / 4}
    return made, {key: named.get(value, value) if isinstance(value, str) else value() if callable(value) else value for key, value in options.items()}


def leaves(tensors, options, dtype):
    """Inputs by name, those that are differentiated as leaves of a dtype."""
    given = dict(zip("qkv", tensors)) | {name: options[name] for name in DIFFERENTIABLE if name in options}
    return {name: x if x.dtype == torch.bool else x.to(dtype).requires_grad_() for name, x in given.items()}


def loss_of(results, seeds):
    """A loss of out and of a finite logsumexp."""
    (out, lse), (d_out, d_lse) = results, seeds
    return (out * d_out.to(out.dtype)).sum() + (torch.where(torch.isfinite(lse), lse, 0) * d_lse.to(lse.dtype)).sum()


def seeds_of(tensors, options):
    out, lse = attention(*tensors, **options, return_lse=True)
    return torch.randn(out.shape), torch.randn(lse.shape)


def by_definition(inputs, options, seeds):
    q, k, v, *_ = inputs.values()
    return loss_of(definition(q, k, v, options | {name: x for name, x in inputs.items() if name not in "qkv"}), seeds)


def differentiated(inputs):
    return {name: x for name, x in inputs.items() if x.requires_grad}


def close(got, want, tolerance):
    assert got.shape == want.shape
    error = (got.double() - want).abs().max().item() if want.numel() else 0.0
    assert error <= tolerance * max(want.abs().max().item(), 1.0), f"{error:.1e}"


# The function, and autograd.


@pytest.mark.parametrize("name", CASES)
def test_definition(name):
    """Gradients by autograd equal the definition in float64, and the function has the same bits."""
    tensors, options = problem(name)
    seeds = seeds_of(tensors, options)
    exact = leaves(tensors, options, torch.float64)
    want = torch.autograd.grad(by_definition(exact, options, seeds), list(differentiated(exact).values()))
    inputs = leaves(tensors, options, torch.float32)
    out, lse = attention(**(options | inputs), return_lse=True)
    got = dict(zip(differentiated(inputs), torch.autograd.grad(loss_of((out, lse), seeds), list(differentiated(inputs).values()))))
    for key, expected in zip(got, want):
        close(got[key], expected, TOLERANCE[torch.float32])
    wanted = {NAMES[key]: True for key in got if key in NAMES}
    given = {key: x.detach() for key, x in inputs.items()}
    d_lse = torch.where(torch.isfinite(lse), seeds[1], 0)
    made = attention_backward(out=out.detach(), lse=lse.detach(), d_out=seeds[0], d_lse=d_lse, **(options | given), **wanted)
    by_name = dict(zip(("q", "k", "v", "sinks", "mask", "alibi_slopes"), made))
    assert {key for key, x in by_name.items() if x is not None} == set(got)
    assert all(torch.equal(by_name[key], got[key]) for key in got)


@pytest.mark.parametrize("name", CASES)
def test_central_differences(name):
    """The derivative along a direction, by differences of the definition in float64."""
    tensors, options = problem(name)
    seeds = seeds_of(tensors, options)
    inputs = leaves(tensors, options, torch.float32)
    loss = loss_of(attention(**(options | inputs), return_lse=True), seeds)
    names = list(differentiated(inputs))
    for key, got in zip(names, torch.autograd.grad(loss, [inputs[key] for key in names])):
        with torch.no_grad():
            exact = {at: x if x.dtype == torch.bool else x.detach().double() for at, x in inputs.items()}
            direction = torch.randn(got.shape, dtype=torch.float64)
            step = 1e-4 / direction.norm()

            def at(distance):
                moved = exact | {key: exact[key] + distance * direction}
                return by_definition(moved, options, seeds).item()

            want = (at(step) - at(-step)) / (2 * step)
            derivative = (got.double() * direction).sum()
            assert abs(derivative - want) <= 1e-4 * max(1.0, abs(want)), f"{key}: {derivative} {want}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    """Gradients have the dtypes of the inputs."""
    tensors, options = problem("kv_lens and all")
    tensors = [x.to(dtype) for x in tensors]
    options["mask"], options["sinks"] = options["mask"].to(dtype), options["sinks"].to(torch.float16)
    seeds = [x.to(dtype) for x in seeds_of(tensors, options)]
    exact = leaves(tensors, options, torch.float64)
    want = torch.autograd.grad(by_definition(exact, options, seeds), list(exact.values()))
    inputs = {name: x.clone().requires_grad_() for name, x in (dict(zip("qkv", tensors)) | {"mask": options["mask"], "sinks": options["sinks"]}).items()}
    got = torch.autograd.grad(loss_of(attention(**(options | inputs), return_lse=True), seeds), [inputs[name] for name in exact])
    for of, (name, expected) in zip(got, zip(exact, want)):
        assert of.dtype == inputs[name].dtype
        close(of, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_errs_at_most_as_much_as_twice_pytorch(dtype, causal):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 300, 64, generator=generator).to(dtype) for _ in range(4)]

    def gradients(attend, dtype):
        q, k, v, d_out = (x.to(dtype) for x in tensors)
        leaves = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
        attend(*leaves).backward(d_out)
        return [x.grad.double() for x in leaves]

    sdpa = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    want, theirs = gradients(sdpa, torch.float64), gradients(sdpa, dtype)
    ours = gradients(lambda q, k, v: attention(q, k, v, causal=causal), dtype)
    for name, want, theirs, ours in zip("qkv", want, theirs, ours):
        errors = [((got - want).norm() / want.norm()).item() for got in (ours, theirs)]
        assert errors[0] <= 2 * errors[1], f"d_{name}: {errors[0]:.2e}, PyTorch {errors[1]:.2e}"



def test_arrays(rng):
    """Arrays of numpy give arrays, with the bits of tensors."""
    q, k, v, d_out = (rng.standard_normal((2, heads, 21, 16), dtype=numpy.float32) for heads in (4, 2, 2, 4))
    options = {"causal": True, "sinks": [0.5, -1.0, 0.0, 2.0], "mask": rng.standard_normal((21, 21), dtype=numpy.float32)}
    out, lse = attention(q, k, v, **options, return_lse=True)
    want = reference(q, k, v, visible=numpy.tri(21, dtype=bool), bias=options["mask"], sinks=options["sinks"])
    assert abs(out - want[0]).max() < 2e-6
    made = attention_backward(q, k, v, out, lse, d_out, **options, d_sinks=True, d_bias=True)
    assert type(made) is flashtile.Gradients and made.d_alibi_slopes is None
    assert all(type(x) is numpy.ndarray and x.dtype == numpy.float32 for x in made[:5])
    assert (made.d_sinks.shape, made.d_bias.shape) == ((4,), (21, 21))
    of_torch = attention_backward(*(torch.from_numpy(x) for x in (q, k, v, out, lse, d_out)), **options, d_sinks=True, d_bias=True)
    assert all(numpy.array_equal(x, y.numpy()) for x, y in zip(made[:5], of_torch))
    # d_score of a row sums to minus what its sink has; so do rows of keys, by the derivative of a shift.
    assert abs(made.d_bias.sum() + made.d_sinks.sum()) < 1e-4
    ml_dtypes = pytest.importorskip("ml_dtypes")
    small = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v, d_out)]
    out, lse = attention(*small[:3], return_lse=True)
    assert attention_backward(*small[:3], out, lse, small[3]).d_k.dtype == ml_dtypes.bfloat16


def test_refusals_of_the_function(rng):
    q, k, v, d_out = (rng.standard_normal((1, 2, 9, 16), dtype=numpy.float32) for _ in range(4))
    out, lse = attention(q, k, v, return_lse=True)
    call = lambda **changed: attention_backward(**({"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out} | changed))
    for changed, error, what in (
        ({"d_sinks": True}, ValueError, "d_sinks was asked for, and there is no option sinks"),
        ({"d_alibi_slopes": True}, ValueError, "d_alibi_slopes was asked for"),
        ({"d_bias": True}, ValueError, "d_bias was asked for, and there is no mask that is added"),
        ({"d_bias": True, "mask": numpy.ones((9, 9), bool)}, ValueError, "d_bias was asked for"),
        ({"mask": [numpy.zeros((9, 9), numpy.float32)]}, ValueError, "mask is a list"),
        ({"lse": lse[:, :, :8]}, ValueError, r"lse has shape \[1, 2, 8\], expected \[1, 2, 9\]"),
        ({"d_lse": lse[0]}, ValueError, "d_lse has shape"),
        ({"lse": lse.astype(numpy.float16)}, BufferError, "lse is not a dense array of float32"),
        ({"d_out": d_out.astype(numpy.float16)}, TypeError, "d_out"),
        ({"d_out": d_out[:, :1]}, ValueError, "d_out"),
        ({"out": out[..., :8]}, ValueError, "out"),
        ({"d_out": numpy.broadcast_to(numpy.float32(1), out.shape)}, BufferError, "d_out has strides"),
        ({"q": q[:, :, :4], "causal": True}, ValueError, "'top_left'"),
    ):
        with pytest.raises(error, match=what):
            call(**changed)
    with pytest.raises(ValueError, match="no gradients of q, which requires one"):
        attention_backward(*(torch.from_numpy(x).requires_grad_() for x in (q, k, v, out, lse, d_out)))


def test_rows_without_keys():
    """They have 0, and so have rows of keys and values that no query sees, whatever is there."""
    q, k, v = qkv(((1, 2, 12, 16), (1, 2, 12, 16), (1, 2, 12, 16)))
    visible = torch.ones(12, 12, dtype=torch.bool).tril(-3)
    for options, no_keys, unseen in (
        ({"mask": visible}, slice(0, 3), slice(9, 12)),
        ({"causal": True, "q_offset": -4}, slice(0, 4), slice(8, 12)),
        ({"kv_lens": [0]}, slice(0, 12), slice(0, 12)),
        ({"kv_lens": [7], "causal": True, "q_offset": "bottom_right"}, slice(0, 5), slice(7, 12)),
        ({"mask": torch.zeros(12, 12).masked_fill(~visible, float("-inf")), "sinks": torch.zeros(2)}, slice(0, 3), slice(9, 12)),
    ):
        of = [x.clone() for x in (q, k, v)]
        if "kv_lens" in options:
            of[1][:, :, unseen], of[2][:, :, unseen] = float("nan"), float("nan")
        of = [x.requires_grad_() for x in of]
        out, lse = attention(*of, **options, return_lse=True)
        (out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum() + out[:, :, no_keys].sum()).backward()
        assert not of[0].grad[:, :, no_keys].any() and not of[1].grad[:, :, unseen].any() and not of[2].grad[:, :, unseen].any()
        assert all(x.grad.isfinite().all() for x in of)
        assert unseen == slice(0, 12) or all(x.grad.any() for x in of)


def test_masks_of_each_sequence():
    """Gradients reach the masks of a list, by the copy to one mask."""
    packed = qkv(((33, 4, 16), (33, 2, 16), (33, 2, 16)))
    masks = [torch.randn(4, 10, 10, requires_grad=True), torch.randn(23, 23, requires_grad=True)]
    got = torch.autograd.grad(attention(*packed, cu_seqlens=[0, 10, 33], mask=masks).square().sum(), masks)
    whole = torch.zeros(2, 4, 23, 23)
    whole[0, :, :10, :10], whole[1] = masks[0].detach(), masks[1].detach()
    want = torch.autograd.grad(attention(*packed, cu_seqlens=[0, 10, 33], mask=whole.requires_grad_()).square().sum(), whole)[0]
    assert torch.equal(got[0], want[0, :, :10, :10]) and not want[0, :, 10:].any() and not want[0, :, :, 10:].any()
    torch.testing.assert_close(got[1], want[1].sum(0))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_some_inputs(name):
    """Inputs that require no gradient get none; the others have the bits that they have among all."""
    tensors, options = qkv(BATCH), {"mask": torch.randn(33, 33), "sinks": torch.randn(4), "alibi_slopes": torch.rand(4)}
    inputs = leaves(tensors, options, torch.float32)
    want = torch.autograd.grad(attention(**inputs).square().sum(), inputs[name])[0]
    only = {key: x.detach() for key, x in inputs.items()} | {name: inputs[name].detach().clone().requires_grad_()}
    for out in (attention(**only), torch.ops.flashtile.attention(**only)[0]):
        only[name].grad = None
        out.square().sum().backward()
        assert torch.equal(only[name].grad, want) and all(x.grad is None for key, x in only.items() if key != name)


def test_nothing_is_recorded_without_gradients():
    q, k, v = (x.requires_grad_() for x in qkv(BATCH))
    want = attention(q, k, v)
    assert want.requires_grad
    with torch.no_grad():
        out, lse = attention(q, k, v, return_lse=True)
    detached = attention(*(x.detach() for x in (q, k, v)))
    assert not (out.requires_grad or lse.requires_grad or detached.requires_grad)
    assert torch.equal(out, want) and torch.equal(detached, want)


def test_either_result_alone():
    """A loss of one result of the two; the empty logsumexp of the operator has no gradient."""
    tensors = qkv(BATCH)
    for at in (0, 1):
        inputs, exact = leaves(tensors, {}, torch.float32), leaves(tensors, {}, torch.float64)
        got = torch.autograd.grad(attention(**inputs, return_lse=True)[at].exp().sum(), list(inputs.values()))
        want = torch.autograd.grad(definition(*exact.values(), {})[at].exp().sum(), list(exact.values()), allow_unused=True)
        for of, expected in zip(got, want):
            close(of, torch.zeros(of.shape) if expected is None else expected, TOLERANCE[torch.float32])
    out, lse = torch.ops.flashtile.attention(**inputs)
    assert out.requires_grad and not lse.requires_grad and lse.numel() == 0


def test_gradients_of_any_strides():
    """Gradients of a sum have strides 0, transposed ones others."""
    inputs = leaves(qkv(BATCH), {}, torch.float32)
    out, lse = attention(**inputs, return_lse=True)
    for d_out, d_lse in (
        (torch.ones(()).expand(out.shape), torch.ones(()).expand(lse.shape)),
        (torch.randn(out.shape).transpose(1, 3).contiguous().transpose(1, 3), torch.randn(33, 2, 4).permute(1, 2, 0)),
        (torch._neg_view(torch.randn(out.shape)), None),
    ):
        seeds = (d_out, d_lse) if d_lse is not None else (d_out,)
        got = torch.autograd.grad((out, lse)[: len(seeds)], list(inputs.values()), seeds, retain_graph=True)
        dense = [x.clone(memory_format=torch.contiguous_format) for x in seeds]
        want = torch.autograd.grad((out, lse)[: len(seeds)], list(inputs.values()), dense, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks", "kv_lens", "out"])
def test_changes_in_place_are_found(name):
    inputs = leaves(qkv(BATCH), {"mask": torch.randn(33, 33), "sinks": torch.randn(4)}, torch.float32)
    given = {key: x * 1 for key, x in inputs.items()} | {"kv_lens": torch.tensor([33, 20])}
    given["out"] = attention(**given)
    loss = given["out"].sum()
    with torch.no_grad():
        given[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_refused():
    q, k, v = (x.requires_grad_() for x in qkv(BATCH))
    (d_q,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flashtile computes no second derivatives"):
        d_q.sum().backward()
    with pytest.raises(ValueError, match="q is differentiated by torch.func, which flashtile does not support: use torch.autograd"):
        torch.func.grad(lambda q: attention(q, k, v).sum())(q)
    with pytest.raises(ValueError, match="k is differentiated by torch.func"):
        torch.func.grad(lambda k: torch.ops.flashtile.attention(q, k, v)[0].sum())(k.detach())
    with pytest.raises(ValueError, match="q has a tangent"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,))
    with pytest.raises(ValueError, match="no gradients of q, which requires one"):
        attention(q, k, v, out=torch.empty(2, 4, 33, 24))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_lens": [5.5]},
        {"cu_seqlens": [0, 4.9, 9]},
        {"q_lens": [2.9, 5]},
        {"causal": 2},
        {"causal": "yes"},
        {"return_lse": 1},
        {"window": 4},
        {"window": (4,)},
        {"window": (4.5, 0)},
        {"scale": "x"},
        {"attention_chunk": 4.0},
        {"causal": True, "q_offset": 2.0},
        {"sinks": "x"},
        {"layout": "sbhd"},
    ],
    ids=str,
)
def test_options_are_refused_as_without_gradients(options):
    q, k, v = qkv(BATCH)
    with pytest.raises((TypeError, ValueError)) as want:
        attention(q, k, v, **options)
    with pytest.raises(want.type) as got:
        attention(q.requires_grad_(), k, v, **options)
    assert str(got.value) == str(want.value)


def test_options_that_are_none():
    q, k, v = qkv(BATCH)
    none = {"layout": None, "window": None, "causal": None, "return_lse": None}
    assert torch.equal(attention(q.requires_grad_(), k, v, **none).detach(), attention(q.detach(), k, v, **none))


def test_lengths_are_no_fractions_beside_tensors():
    """Where other lengths are tensors, lists are still of integers."""
    q, k, v = (x[0].transpose(0, 1) for x in qkv(BATCH))
    starts = torch.tensor([0, 20, 33])
    with pytest.raises(TypeError, match="kv_lens is .* expected integers"):
        attention(q.requires_grad_(), k, v, cu_seqlens=starts, kv_lens=[10.5, 3])


def test_stand_ins_of_a_gpu():
    """Compilers see tensors on a GPU where there is none: both operators say where their results are, and whose gradients there are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 4, 8, device="cuda") for _ in range(3))
        assert not attention(q, k, v).requires_grad
        out, lse = attention(q, k, v.requires_grad_(), sinks=torch.empty(2, device="cuda"), return_lse=True)
        assert (out.requires_grad, lse.requires_grad, out.device.type) == (True, True, "cuda")
        sinks = torch.empty(2, device="cuda")
        made = torch.ops.flashtile.attention_backward(out, None, out, lse, q, k, v, sinks=sinks, d_sinks=True)
        assert [x.device.type for x in made] == ["cuda"] * 6
        assert [x.shape for x in made] == [q.shape, k.shape, v.shape, sinks.shape, (0,), (0,)]


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
def test_transforms():
    """Batched gradients, and gradients through vmap, equal the gradients of each entry."""
    q, k, v = (x.requires_grad_() for x in qkv(((1, 2, 3, 4),) * 3))
    slow, fast = (torch.autograd.functional.jacobian(lambda *x: attention(*x, causal=True), (q, k, v), vectorize=fast) for fast in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(slow, fast))
    both = torch.stack([q.detach(), 2 * q.detach()]).requires_grad_()
    (got,) = torch.autograd.grad(torch.vmap(lambda q: attention(q, k, v))(both).square().sum(), both)
    want = [torch.autograd.grad(attention(x, k, v).square().sum(), x)[0] for x in (both.detach()[0].requires_grad_(), both.detach()[1].requires_grad_())]
    assert torch.equal(got, torch.stack(want))
    recomputed = torch.utils.checkpoint.checkpoint(lambda q: attention(q, k, v, causal=True), q, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(recomputed.sum(), q)[0], torch.autograd.grad(attention(q, k, v, causal=True).sum(), q)[0])


def test_opcheck():
    """The fake of both operators gives what the real ones do, with gradients and for every layout."""
    for name in ("causal", "sinks", "ALiBi", "bias for all", "bshd"):
        tensors, options = problem(name)
        inputs = leaves(tensors, options, torch.float32)
        rest = {key: value for key, value in options.items() if key not in inputs and key != "q_offset"}
        for return_lse in (False, True):
            positional = [inputs.get(key) for key in DIFFERENTIABLE]
            torch.library.opcheck(torch.ops.flashtile.attention.default, tuple(positional), rest | {"q_offset": options.get("q_offset"), "return_lse": return_lse})
        given = [None if x is None else x.detach() for x in positional]
        out, lse = torch.ops.flashtile.attention(*given, **rest, q_offset=options.get("q_offset"), return_lse=True)
        wanted = {NAMES[key]: True for key in inputs if key in NAMES}
        for d_lse in (None, torch.randn_like(lse)):
            arguments = (torch.randn_like(out), d_lse, out, lse, *given)
            torch.library.opcheck(torch.ops.flashtile.attention_backward.default, arguments, rest | wanted | {"q_offset": options.get("q_offset")})


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend):
    """Compilers keep the operators, for shapes that change, and the gradients have the same bits."""

    def loss(q, k, v, mask, sinks, starts):
        out, lse = attention(q * 2, k, v, mask=mask, sinks=sinks, softcap=5.0, return_lse=True)
        packed = attention(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens=starts, causal=True)
        return out.square().sum() + lse.sum() + packed.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=True)
    for length in (33, 21):
        tensors = [x[:, :, :length].contiguous() for x in qkv(BATCH)]
        inputs = leaves(tensors, {"mask": torch.randn(length, length), "sinks": torch.randn(4)}, torch.float32)
        starts = torch.tensor([0, 10, length])
        got, want = (torch.autograd.grad(f(*inputs.values(), starts), list(inputs.values())) for f in (compiled, loss))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Hugging Face transformers.


@pytest.fixture
def one_thread():
    """Steps of small models on one thread: threads that wait for each other take longer than the steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(attn, ids, mask, labels, steps=50):
    """The losses of a small Llama that learns one batch."""
    transformers = pytest.importorskip("transformers")
    import flashtile.transformers

    flashtile.transformers.register()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=97, max_position_embeddings=64)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32).train().to(ids.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    made = []
    for _ in range(steps):
        loss = model(ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        made.append(loss.item())
    return torch.tensor(made, dtype=torch.float64)


def batch(is_padded):
    """Tokens, mask and labels for `losses`."""
    ids = torch.randint(3, 97, (4, 24), generator=torch.Generator().manual_seed(7))
    mask, labels = torch.ones_like(ids), ids.clone()
    if is_padded:
        mask[0, :7], mask[1, 20:] = 0, 0
        # Query 6 sees no key, and predicts token 7.
        labels[0, :8], labels[1, 20:] = -100, -100
    return ids, mask, labels


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
def test_a_model_learns(one_thread, is_padded):
    """The losses of 50 steps are those with `sdpa`, and the batch is learned."""
    given = batch(is_padded)
    got, want = losses("flashtile", *given), losses("sdpa", *given)
    assert want[-1] < 0.1 * want[0]
    assert ((got - want).abs() / want).max() <= 1e-4
