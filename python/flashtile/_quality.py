"""Errors of codecs on keys and values."""

import json
import re

from . import _flashtile
from ._arrays import is_torch, lent
from ._options import Options

_NAMES = {"k": "k", "key": "k", "keys": "k", "v": "v", "value": "v", "values": "v", "q": "q", "query": "q", "queries": "q"}
_CODECS = ("f16", "bf16", "fp8", "int8", "tq6", "tq5", "tq4", "tq3", "tq2")


def _pairs(tensors):
    """Tensors by prefix and side."""
    found = {}
    for name, tensor in tensors.items():
        prefix, last = re.fullmatch(r"(?:(.*)[./])?([^./]*)", name).groups()
        if last not in _NAMES:
            raise ValueError(f"{name!r} is neither keys, values nor queries: names end in {', '.join(_NAMES)}")
        side = _NAMES[last]
        if side in found.setdefault(prefix or "", {}):
            raise ValueError(f"{name!r} is a second {side} of {prefix!r}")
        found[prefix or ""][side] = tensor
    for prefix, of in found.items():
        if not {"k", "v"} <= of.keys():
            raise ValueError(f"{prefix!r} has {', '.join(sorted(of))}, expected k and v, and q where there are queries")
    return found


def kv_report(tensors, *, causal=False, window=(-1, -1), q_offset=None, scale=None, softcap=None, layout="bhsd", codecs=None, rows=64):
    """Compares attention over keys and values that each codec of a KV cache has stored with attention over the originals.

    Args:
        tensors: keys and values by name, and queries where there are some: `{"layer.0.k": .., "layer.0.v": .., "layer.0.q": ..}`. Names
            that differ in their last component only belong together. k is `(batch, kv_heads, tokens, dim)`, as for `flashtile.attention`.
        codecs: names of codecs; None is all that store any dimension but f32.
        rows: queries that are measured of each query head and batch entry, evenly spaced.

    The other options are as for `flashtile.attention`. They have to be as in the model: a query that sees future keys has other
    probabilities.

    Returns:
        `{"pairs": [..]}`, for each pair `name`, `tokens`, `queries`, and by codec `keys`: `{codec, centered, bits, error, logit_rmse, kl}`,
        `values`: `{codec, bits, error}`, and `nrmse`: for each codec of keys, the errors of the output with each codec of values.
        `error` is a sum of squared errors over the sum of squares, `kl` the Kullback-Leibler divergence of the probabilities in nats,
        averaged over queries, `nrmse` a root mean square error over the root mean square. Where a codec cannot store a row there is
        `refused`, the reason, instead of errors. What needs queries is None without them.

    The command `flashtile kv` prints the same as tables and recommends a pair of codecs.
    """
    options = Options(causal=causal, window=window, q_offset=q_offset, scale=scale, softcap=softcap, layout=layout)
    chosen = list(_CODECS if codecs is None else codecs)
    pairs = []
    for name, of in _pairs(tensors).items():
        # A report is numbers, which no gradient reaches.
        sides = [lent(side, x.detach() if is_torch(x) else x) for side, x in ((side, of.get(side)) for side in "kvq")]
        report = json.loads(_flashtile.kv_pair(sides, options, chosen, rows))
        pairs.append({"name": name, **report})
    return {"pairs": pairs}
