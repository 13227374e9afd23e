"""Errors of codecs on keys and values."""

import json
import re

import numpy

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


def kv_report(tensors, *, causal=False, window=(-1, -1), q_offset=None, scale=None, softcap=None, layout="bhsd", codecs=None, rows=64, equalize=None, keep_first=0, keep_last=0):
    """Compares attention over keys and values that each codec of a KV cache has stored with attention over the originals.

    Args:
        tensors: keys and values by name, and queries where there are some: `{"layer.0.k": .., "layer.0.v": .., "layer.0.q": ..}`. Names
            that differ in their last component only belong together. k is `(batch, kv_heads, tokens, dim)`, as for `flashtile.attention`.
        codecs: names of codecs; None is all that store any dimension but f32.
        equalize: also measures keys in int8 and tq6 to tq2 that are centered and divided by factors, as `key_factors` gives them with this
            power, a number from 0 to 2 such as 0.5, for the first 256 keys.
        keep_first: keys below this position, and their values, count as exact: a cache keeps them in 16 bits.
        keep_last: the number of last keys, of the ones that a query sees, that count as exact as well.
        rows: queries that are measured of each query head and batch entry, evenly spaced.

    The other options are as for `flashtile.attention`. They have to be as in the model: a query that sees future keys has other
    probabilities.

    Returns:
        `{"pairs": [..]}`, for each pair `name`, `tokens`, `queries`, and by codec `keys`: `{codec, centered, equalized, bits, error, logit_rmse, kl}`,
        `values`: `{codec, bits, error}`, and `nrmse`: for each codec of keys, the errors of the output with each codec of values.
        `error` is a sum of squared errors over the sum of squares, `kl` the Kullback-Leibler divergence of the probabilities in nats,
        averaged over queries, `nrmse` a root mean square error over the root mean square. Where a codec cannot store a row there is
        `refused`, the reason, instead of errors. What needs queries is None without them.

    `bits` counts codes alone.

    The command `flashtile kv` prints the same as tables and recommends a pair of codecs.
    """
    options = Options(causal=causal, window=window, q_offset=q_offset, scale=scale, softcap=softcap, layout=layout)
    if equalize is not None and not 0 <= equalize <= 2:
        raise ValueError(f"equalize is {equalize}, expected a power from 0 to 2, or None")
    for name, count in (("keep_first", keep_first), ("keep_last", keep_last)):
        if count < 0:
            raise ValueError(f"{name} is {count}, expected at least 0")
    chosen = list(_CODECS if codecs is None else codecs)
    pairs = []
    for name, of in _pairs(tensors).items():
        # A report is numbers, which no gradient reaches.
        sides = [lent(side, x.detach() if is_torch(x) else x) for side, x in ((side, of.get(side)) for side in "kvq")]
        report = json.loads(_flashtile.kv_pair(sides, options, chosen, rows, equalize, [keep_first, keep_last]))
        pairs.append({"name": name, **report})
    return {"pairs": pairs}


def key_factors(k, mean, power=0.5):
    """Factors of keys for `KvCache(equalize=...)`: a power of the deviation of each channel around the mean.

        means = [k.mean(axis=0) for k in keys_of_layers]  # keys (tokens, kv_heads, head_dim) of a representative prompt
        factors = [key_factors(k, mean) for k, mean in zip(keys_of_layers, means)]
        cache = KvCache(..., k="tq3", center=means, equalize=factors)

    Args:
        k: keys `(tokens, kv_heads, head_dim)` of one layer, as floats, that numpy converts.
        mean: `(kv_heads, head_dim)`.
        power: 0.5 moves half of the difference between channels to the queries, 1 all of it.

    Returns:
        An array `(kv_heads, head_dim)` of float32: `deviation ** power`, divided by its geometric mean over the head. Deviations below 1/256 of the
        root mean square of the head's deviations count as that; all factors of a head without deviations are 1.

    Raises:
        ValueError: where shapes differ, there are no keys, or keys are not finite.
    """
    k, mean = numpy.asarray(k, numpy.float64), numpy.asarray(mean, numpy.float64)
    if k.ndim != 3 or k.shape[1:] != mean.shape:
        raise ValueError(f"k has shape {k.shape} and mean {mean.shape}, expected (tokens, kv_heads, head_dim) and (kv_heads, head_dim)")
    if not len(k) or not numpy.isfinite(k).all():
        raise ValueError("k has no tokens, or holds a NaN or an infinity")
    deviation = numpy.sqrt(((k - mean) ** 2).mean(axis=0))
    rms = numpy.sqrt((deviation**2).mean(axis=-1, keepdims=True))
    deviation = numpy.where(rms > 0, numpy.maximum(deviation, rms / 256), 1.0)
    logs = power * numpy.log(deviation)
    return numpy.exp(logs - logs.mean(axis=-1, keepdims=True)).astype(numpy.float32)
