"""What would run for a problem."""

import json

from . import _flashtile


def plan(
    *,
    heads,
    q_len,
    head_dim,
    batch=1,
    kv_heads=None,
    kv_len=None,
    value_dim=None,
    dtype="f32",
    causal=False,
    window=(-1, -1),
    q_offset=None,
    scale=None,
    softcap=None,
    mask=None,
    alibi=False,
    sinks=False,
    kv_lens=None,
    cu_seqlens=None,
    machine=None,
    splits=None,
):
    """What would run for a problem, as a dict: `kernel`, `isa`, `threads`, `block_k`, `tile_rows`, `task_rows`, `tasks`, `splits`,
    `sequence_splits`, `workspace_bytes`, `idle` (the share of time that threads are estimated to wait), `visible_pairs` (of queries and
    keys, in one head, summed over the batch), `flops`, the `machine` with its caches `l1d`, `l2`, `l3` in bytes, `problem` and `options`. Nothing is computed,
    so that problems and machines may be larger than this one.

    Args:
        heads, q_len, head_dim, batch, kv_heads, kv_len, value_dim: sizes; those that are None equal `heads`, `q_len` and `head_dim`.
        dtype: f32, f16 or bf16.
        mask: the kind of a mask: None, `"bool"`, or the dtype of an additive one.
        alibi, sinks: whether the problem has them.
        machine: the name of a machine to plan for, such as `"avx512-64core"`; None is this one.
        splits: splits into which the keys are divided for parallel work; None leaves it to the planner.

    The other options are as for `flashtile.attention`.

    Raises:
        ValueError: where the problem contradicts itself, or there is no such machine.
    """
    sides = {side: keys for side, keys in zip(("left", "right"), window) if keys != -1}
    if causal:
        sides["right"] = 0
    if isinstance(q_offset, int):
        q_offset = {"at": q_offset}
    desc = {
        "dims": {
            "batch": batch,
            "q_heads": heads,
            "kv_heads": heads if kv_heads is None else kv_heads,
            "q_len": q_len,
            "kv_len": q_len if kv_len is None else kv_len,
            "head_dim": head_dim,
            "value_dim": head_dim if value_dim is None else value_dim,
        },
        "dtype": dtype,
        "visibility": sides,
        "q_offset": q_offset,
        "scale": scale,
        "softcap": softcap,
        "alibi": alibi,
        "sinks": sinks,
        "mask": mask if mask in (None, "bool") else {"additive": mask},
    }
    if kv_lens is not None and cu_seqlens is not None:
        raise ValueError("kv_lens and cu_seqlens were given, expected one of them")
    if kv_lens is not None:
        desc["sequences"] = {"padded": {"kv_lens": [int(n) for n in kv_lens]}}
    if cu_seqlens is not None:
        q, k = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        desc["sequences"] = {"packed": {"cu_seqlens_q": [int(n) for n in q], "cu_seqlens_k": [int(n) for n in k]}}
    return json.loads(_flashtile.plan(json.dumps(desc), machine, splits))
