"""`merge`."""

import flashtile
import numpy
import pytest
from conftest import reference
from flashtile import attention, merge


def chunks(rng, dtype=numpy.float32):
    """q, k and v, and the states of two chunks of the keys."""
    q, k, v = (rng.standard_normal((2, heads, n, 32), dtype=numpy.float32).astype(dtype) for heads, n in ((4, 5), (2, 40), (2, 40)))
    return q, k, v, [attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 23), slice(23, 40))]


def test_chunks_are_the_whole(rng):
    q, k, v, states = chunks(rng)
    want, want_lse = reference(q, k, v)
    out, lse = merge(states)
    numpy.testing.assert_allclose(out, want, rtol=0, atol=2e-6)
    numpy.testing.assert_allclose(lse, want_lse, rtol=0, atol=2e-6)
    into = numpy.empty_like(out)
    again, _ = merge(states, out=into)
    assert again is into and (into == out).all()


def test_layouts(rng):
    *_, states = chunks(rng)
    want, want_lse = merge(states)
    other = [(numpy.ascontiguousarray(out.swapaxes(1, 2)), lse) for out, lse in states]
    out, lse = merge(other, layout="bshd")
    assert (out.swapaxes(1, 2) == want).all() and (lse == want_lse).all()
    # Packed sequences: (total, heads, dim), and (heads, total).
    packed = [(out[0].swapaxes(0, 1), lse[0]) for out, lse in states]
    out, lse = merge(packed)
    assert (out.swapaxes(0, 1) == want[0]).all() and (lse == want_lse[0]).all()


def test_a_state_without_keys_is_not_read(rng):
    *_, states = chunks(rng)
    out, lse = states[0]
    nothing = (numpy.full_like(out, numpy.nan), numpy.full_like(lse, -numpy.inf))
    merged, merged_lse = merge([nothing, states[0]])
    assert (merged == out).all() and (merged_lse == lse).all()
    empty, minus = merge([nothing])
    assert (empty == 0).all() and (minus == -numpy.inf).all()


def test_tensors(rng):
    torch = pytest.importorskip("torch")
    *_, states = chunks(rng, numpy.float16)
    want, want_lse = merge(states)
    out, lse = merge([tuple(map(torch.from_numpy, state)) for state in states])
    assert isinstance(out, torch.Tensor) and out.dtype == torch.float16
    assert (out.numpy() == want).all() and (lse.numpy() == want_lse).all()


def test_refusals(rng):
    *_, states = chunks(rng)
    (out, lse), (_, other) = states
    with pytest.raises(ValueError, match="no states"):
        merge([])
    with pytest.raises(ValueError, match=r"lse has shape \[2, 4, 4\], expected \[2, 4, 5\]"):
        merge([(out, lse[:, :, :4])])
    with pytest.raises(ValueError, match="out of state 1 has shape"):
        merge([(out, lse), (out[:, :, :, :16], other)])
    with pytest.raises(BufferError, match="lse has strides"):
        merge([(out, numpy.ascontiguousarray(lse.swapaxes(0, 2)).swapaxes(0, 2))])
    with pytest.raises(BufferError):
        merge([(out, lse.astype(numpy.float64).astype(numpy.float16))])
    with pytest.raises(BufferError):
        merge(states, out=out)
    assert "merge" in flashtile.__all__


def test_a_mask_of_one_axis_hides_keys(rng):
    q, k, v, _ = chunks(rng)
    mask = rng.random(40) < 0.5
    assert (attention(q, k, v, mask=mask) == attention(q, k, v, mask=mask[None, :])).all()
