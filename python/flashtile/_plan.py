"""Plans of problems."""

import json
from numbers import Integral

from . import _flashtile
from ._compiler import load_compiler
from ._options import integer, one_of

_DTYPES = ("f32", "f16", "bf16")


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
    attention_chunk=None,
    q_offset=None,
    scale=None,
    softcap=None,
    mask=None,
    alibi=False,
    sinks=False,
    kv_lens=None,
    cu_seqlens=None,
    machine=None,
    backend=None,
    splits=None,
):
    """Plans a problem, and describes the plan as a dict.

    The dict has the `summary` of the plan in one line, `kernel`, `tasks` (work tiles or threadgroups of a GPU), `splits`,
    `workspace_bytes`, `visible_pairs` (of queries and keys, in one head, summed over the batch), `flops`, the `backend`,
    `backend_reason` (why this one), the `machine` with its cache `l2` in bytes, `problem` and `options`. Attention
    is not computed: the problem may be too large for this machine, and the machine may be absent.

    Plans of the CPU also have `isa`, `threads`, `block_k`, `tile_rows`, `task_rows`, `sequence_splits`, `idle` (the share of time that
    threads are estimated to wait) and the caches `l1d` and `l3`. Plans of CUDA have the `kernels`, each with its `tile_rows`, `block_k`, `threads`,
    `resident` (blocks of threads of a multiprocessor) and `shared_bytes`, the device's `capability` and its `multiprocessors`.

    Args:
        heads, q_len, head_dim, batch, kv_heads, kv_len, value_dim: sizes; those that are None equal `heads`, `q_len` and `head_dim`.
        dtype: f32, f16 or bf16.
        mask: the kind of a mask: None, `"bool"`, or the dtype of an additive one.
        alibi, sinks: whether the problem has them.
        machine: the name of a machine to plan for, such as `"avx512-64core"` or `"h200"`; None is this one.
        backend: of this machine: `"cpu"`, which `flashtile.attention` takes for arrays in host memory, and which is what None means;
            `"cuda"` or `"cuda:1"`, which it takes for tensors on that device; `"auto"`, the faster one for arrays in host memory, copies
            included.
        splits: splits into which the keys are divided for parallel work; None leaves it to the planner.

    The other options are as for `flashtile.attention`.

    Raises:
        ValueError: where the problem contradicts itself, there is no such machine or backend, or both are given.
        RuntimeError: where the backend is a CUDA device that this machine lacks, or the plan is for this machine, in a process that was forked
            off one that has computed or planned.
    """
    sides = {side: integer("window", keys) for side, keys in zip(("left", "right"), window) if keys != -1}
    if causal:
        sides["right"] = 0
    if attention_chunk is not None and (chunk := integer("attention_chunk", attention_chunk)):
        sides["chunk"] = chunk
    if isinstance(q_offset, Integral):
        q_offset = {"at": int(q_offset)}
    elif q_offset not in (None, "top_left", "bottom_right"):
        raise ValueError(f"q_offset is {q_offset!r}, expected 'top_left', 'bottom_right' or the key position of query 0")
    dims = {
        "batch": batch,
        "q_heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "q_len": q_len,
        "kv_len": q_len if kv_len is None else kv_len,
        "head_dim": head_dim,
        "value_dim": head_dim if value_dim is None else value_dim,
    }
    desc = {
        "dims": {name: integer("heads" if name == "q_heads" else name, size) for name, size in dims.items()},
        "dtype": one_of("dtype", dtype, _DTYPES),
        "visibility": sides,
        "q_offset": q_offset,
        "scale": scale,
        "softcap": softcap or None,
        "alibi": alibi,
        "sinks": sinks,
        "mask": mask if mask in (None, "bool") else {"additive": one_of("mask", mask, ("bool", *_DTYPES))},
    }
    if kv_lens is not None and cu_seqlens is not None:
        raise ValueError("kv_lens and cu_seqlens were given, expected one of them")
    if kv_lens is not None:
        desc["sequences"] = {"padded": {"kv_lens": [int(n) for n in kv_lens]}}
    if cu_seqlens is not None:
        q, k = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        desc["sequences"] = {"packed": {"cu_seqlens_q": [int(n) for n in q], "cu_seqlens_k": [int(n) for n in k]}}
    if machine is not None and backend is not None:
        raise ValueError("machine and backend were given, expected one of them")
    if backend not in (None, "cpu"):
        load_compiler()
    return json.loads(_flashtile.plan(json.dumps(desc), machine, backend or "cpu", splits))
