"""Gradients of the operator for autograd, by a second operator, which torch.compile keeps as it is too."""

import torch

from . import _flashtile
from ._arrays import checked, lent, maker
from ._operator import INPUTS, OPTIONS, TENSORS, cuda, named, options_of
from ._tensors import check_tangent

# Inputs of the operator that have gradients, which the backward operator returns in the order of GRADIENTS.
DIFFERENTIABLE = ("q", "k", "v", "mask", "alibi_slopes", "sinks")
GRADIENTS = ("q", "k", "v", "sinks", "mask", "alibi_slopes")


@torch.library.custom_op(
    "flashtile::attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {INPUTS}, *, {OPTIONS}, bool d_sinks=False, bool d_bias=False, "
    "bool d_alibi_slopes=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward_operator(d_out, d_lse, out, lse, *tensors, **options):
    """d_q, d_k and d_v in the dtype of q, then d_sinks, d_bias and d_alibi_slopes in float32, empty where they are not asked for."""
    given = named(tensors)
    q = given["q"]
    # Gradients that autograd makes have any strides: 0 for a sum.
    d_out = _rows(lent("d_out", d_out))
    d_lse = None if d_lse is None else lent("d_lse", d_lse).contiguous()
    read = [*(lent(name, given[name]) for name in ("q", "k", "v")), lent("out", out), lent("lse", lse), d_out, d_lse]
    wanted = (options.get(name, False) for name in ("d_sinks", "d_bias", "d_alibi_slopes"))
    compute = cuda().attention_backward if q.is_cuda else _flashtile.attention_backward
    made = compute(read, checked(options_of(given, options)), maker(q), *wanted)
    return tuple(q.new_empty([0], dtype=torch.float32) if x is None else x for x in made)


@backward_operator.register_fake
def _(d_out, d_lse, out, lse, *tensors, **options):
    given = named(tensors)

    def sums(name, like):
        shape = given[like].shape if options.get(name) else [0]
        return given["q"].new_empty(shape, dtype=torch.float32)

    rows = (given["q"].new_empty(given[name].shape) for name in ("q", "k", "v"))
    return *rows, sums("d_sinks", "sinks"), sums("d_bias", "mask"), sums("d_alibi_slopes", "alibi_slopes")


def _refuse_second(ctx, *_):
    raise RuntimeError("flashtile computes no second derivatives: a gradient of attention was differentiated")


backward_operator.register_autograd(_refuse_second)


def _rows(x):
    """A tensor with its rows in one piece: itself, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    """Attention recorded by autograd. The logsumexp is kept for the backward pass also where the call does not ask for it."""

    @staticmethod
    def forward(ctx, keyset, options, *tensors):
        with torch._C._AutoDispatchBelowAutograd():
            keys = keyset & torch._C._after_autograd_keyset
            out, lse = _OVERLOAD.redispatch(keys, *tensors, **(options | {"return_lse": True}))
            ctx.options = {name: value for name, value in options.items() if name != "return_lse"}
            ctx.save_for_backward(*tensors, out, lse)
            ctx.set_materialize_grads(False)
            if options.get("return_lse"):
                return out, lse
            empty = lse.new_empty([0])
            ctx.mark_non_differentiable(empty)
            return out, empty

    @staticmethod
    def backward(ctx, d_out, d_lse):
        *tensors, out, lse = ctx.saved_tensors
        needs = dict(zip(TENSORS, ctx.needs_input_grad[2:]))
        wanted = {name: needs.get(of, False) for name, of in (("d_sinks", "sinks"), ("d_bias", "mask"), ("d_alibi_slopes", "alibi_slopes"))}
        if d_out is None:
            if d_lse is None:
                return (None,) * len(ctx.needs_input_grad)
            d_out = torch.zeros_like(out)
        made = torch.ops.flashtile.attention_backward(d_out, d_lse, out, lse, *tensors, **ctx.options, **wanted)
        by_name = dict(zip(GRADIENTS, made))
        # Lists of numbers may be on another device than q.
        return None, None, *(by_name[name].to(x) if needs[name] else None for name, x in zip(TENSORS, tensors))


_OVERLOAD = torch.ops.flashtile.attention.default


def _autograd(keyset, *tensors, **options):
    """The autograd kernel of the operator. It refuses derivatives of forward mode, which the operator by itself would drop silently."""
    inputs = [(name, x) for name, x in zip(DIFFERENTIABLE, tensors) if x is not None]
    for name, x in inputs:
        check_tangent(name, x, level=0)
    needing = [name for name, x in inputs if x.requires_grad] if torch.is_grad_enabled() else []
    if not needing:
        with torch._C._AutoDispatchBelowAutograd():
            return _OVERLOAD.redispatch(keyset & torch._C._after_autograd_keyset, *tensors, **options)
    if torch._C._are_functorch_transforms_active():
        raise ValueError(f"{needing[0]} is differentiated by torch.func, which flashtile does not support: use torch.autograd")
    return _Attention.apply(keyset, options, *tensors)


_LIBRARY = torch.library.Library("flashtile", "FRAGMENT")
for _key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):
    _LIBRARY.impl("attention", _autograd, _key, with_keyset=True)
