"""Results of attention over parts of the keys, merged."""

from . import _flashtile
from ._arrays import lent, maker, written
from ._options import Options


def merge(states, *, layout="bhsd", out=None):
    """Combines the results of the same queries over disjoint keys: chunks of a long context, or a shared prefix and the keys after it::

        lse = log(sum(exp(lse_i)))        out = sum(exp(lse_i - lse) * out_i)

    Args:
        states: pairs `(out, lse)` as `flashtile.attention` gives them with `return_lse=True`, on the CPU: out `(batch, q_heads, q_len,
            value_dim)` in any strides, lse `(batch, q_heads, q_len)` in float32, dense, natural logarithm; of packed sequences `(total,
            q_heads, value_dim)` and `(q_heads, total)`. One state at most may include sinks.
        layout: `"bhsd"`, or `"bshd"` for out as `(batch, seq, heads, dim)`.
        out: where to write the result. It overlaps no state in memory.

    Returns:
        `(out, lse)`, in the dtype of the first state and the kind of array that it is. Rows in which the lse of a state is `-inf` are not
        read there; rows that no state has are 0, with lse `-inf`.

    Raises:
        ValueError: where there are no states, or their shapes differ.
        TypeError: where a dtype or a layout is wrong.
        BufferError: where memory cannot be used as it is, as for `flashtile.attention`.
    """
    states = [(lent("out", of), lent("lse", lse)) for of, lse in states]
    if not states:
        raise ValueError("merge of no states")
    made, lse = _flashtile.merge(states, lent("out", out), Options(layout=layout, return_lse=True), maker(states[0][0]))
    return (made if out is None else written(out)), lse
