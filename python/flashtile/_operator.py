"""Attention as an operator of PyTorch, which torch.compile keeps as it is."""

import torch
from torch import Tensor

from . import _flashtile
from ._arrays import checked, lent, maker
from ._options import Options

# Tensors of the operator and, beside them, its options. The backward operator takes the same.
TENSORS = ("q", "k", "v", "mask", "alibi_slopes", "sinks", "q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_k")
INPUTS = ", ".join(f"Tensor {name}" if name in ("q", "k", "v") else f"Tensor? {name}=None" for name in TENSORS)
OPTIONS = (
    "bool causal=False, int left=-1, int right=-1, int? attention_chunk=None, str? q_offset_name=None, int? q_offset=None, "
    "float? scale=None, float? softcap=None, str layout='bhsd', int[]? mask_lens=None"
)


def check_devices(named):
    """Refuses tensors on other devices than q's. Lists of numbers are moved there, from wherever their elements are."""
    expected = named["q"].device
    for name, x in named.items():
        if isinstance(x, Tensor) and x.device != expected and (name in ("k", "v", "mask") or x.device.type == "meta"):
            raise BufferError(f'{name} is on {x.device}, expected {expected}: move it, as .to("{expected}") does')


def call(q, k, v, options, out=None):
    """Computes from tensors of any kind."""
    tensors = [lent(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))]
    compute = cuda().attention if q.is_cuda else _flashtile.attention
    return compute(tensors, checked(options), maker(q))


def cuda():
    from . import _cuda

    return _cuda


def named(tensors):
    """The tensors of a call by name. The dispatcher leaves out the last ones that are None."""
    return dict.fromkeys(TENSORS) | dict(zip(TENSORS, tensors))


def options_of(given, options):
    """The options of `flashtile.attention` from the tensors by name and the options of a call. The dispatcher leaves out defaults."""
    starts = given["cu_seqlens_q"], given["cu_seqlens_k"]
    return Options(
        causal=options.get("causal", False),
        window=(options.get("left", -1), options.get("right", -1)),
        q_offset=options.get("q_offset") if options.get("q_offset_name") is None else options["q_offset_name"],
        cu_seqlens=None if starts[0] is None else starts,
        layout=options.get("layout", "bhsd"),
        return_lse=options.get("return_lse", False),
        **{name: options.get(name) for name in ("attention_chunk", "scale", "softcap", "mask_lens")},
        **{name: given[name] for name in ("mask", "alibi_slopes", "sinks", "q_lens", "kv_lens")},
    )


@torch.library.custom_op(
    "flashtile::attention", mutates_args=(), schema=f"({INPUTS}, *, {OPTIONS}, bool return_lse=False) -> (Tensor, Tensor)"
)
def operator(*tensors, **options):
    """Out and the logsumexp, which is empty where it is not asked for."""
    given = named(tensors)
    q = given["q"]
    out, lse = call(q, given["k"], given["v"], options_of(given, options))
    return out, q.new_empty([0], dtype=torch.float32) if lse is None else lse


@operator.register_fake
def _(*tensors, **options):
    given = named(tensors)
    check_devices(given)
    q = given["q"]
    out = q.new_empty([*q.shape[:-1], given["v"].shape[-1]])
    if not options.get("return_lse"):
        return out, q.new_empty([0], dtype=torch.float32)
    rows = list(q.shape[:-1])
    if given["cu_seqlens_q"] is not None or options.get("layout") == "bshd":
        rows[-2:] = rows[:-3:-1]
    return out, q.new_empty(rows, dtype=torch.float32)
