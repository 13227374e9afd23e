"""Attention by its definition, in float64, which the tests share."""

import numpy
import pytest


def reference(q, k, v, *, visible=None, bias=None, scale=None, softcap=None, sinks=None):
    """Out and logsumexp of q `(batch, heads, q_len, dim)`; `visible` and `bias` broadcast to `(batch, heads, q_len, kv_len)`."""
    q, k, v = (numpy.asarray(x).astype(numpy.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (numpy.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * numpy.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = numpy.where(visible, scores, -numpy.inf)
    if sinks is not None:
        column = numpy.asarray(sinks, numpy.float64)[None, :, None, None]
        scores = numpy.concatenate([scores, numpy.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    top = scores.max(axis=-1, keepdims=True, initial=-numpy.inf)
    exp = numpy.exp(scores - numpy.where(numpy.isfinite(top), top, 0))
    total = exp.sum(axis=-1, keepdims=True)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        lse = (numpy.log(total) + top)[..., 0]
        probs = numpy.where(total > 0, exp / total, 0)
    return probs[..., : k.shape[2]] @ v, lse


@pytest.fixture
def rng():
    return numpy.random.default_rng(7)
