"""Writes the files of this folder with PyTorch: small problems, and the gradients that autograd finds in f64.

    make.py            writes the problems and their gradients
    make.py --check    computes the gradients of the stored problems, and fails where a stored one differs
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).resolve().parent
LEAVES = ["q", "k", "v", "sinks", "bias", "alibi_slopes"]
MASKS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BOTTOM_RIGHT = "kv_len - q_len"
# Relative to the largest gradient, or to 1: a BLAS of another machine sums in another order.
TOLERANCE = 1e-12

# Options of a problem, at their defaults. The first seven are stored in the manifest.
OPTIONS = {
    "causal": False,
    "scale": None,
    "softcap": None,
    "window_left": None,
    "window_right": None,
    "chunk": None,
    "q_offset": None,
    # "heads" or "sequences": one slope for each head, or for each head of each sequence.
    "alibi": None,
    "sinks": False,
    # The dtype, and the axes that are not broadcast.
    "mask": None,
    "kv_lens": None,
    # Queries and keys of each sequence.
    "packed": None,
}
STORED = list(OPTIONS)[:7]

# [batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim]; q_len and kv_len of packed sequences follow from their lengths.
CASES = [
    ("plain", [1, 2, 2, 5, 7, 8, 8], {}),
    ("scale", [1, 2, 2, 5, 7, 6, 4], {"scale": 0.375}),
    ("scale_negative", [1, 2, 2, 4, 6, 5, 3], {"scale": -0.75}),
    ("softcap", [1, 2, 2, 5, 7, 5, 4], {"softcap": 1.5}),
    ("softcap_saturated", [1, 1, 1, 5, 7, 8, 4], {"softcap": 0.5, "scale": 4.0}),
    ("one_key", [1, 1, 1, 1, 1, 2, 2], {}),
    ("one_query", [2, 4, 2, 1, 20, 6, 6], {}),
    ("gqa", [2, 4, 2, 3, 6, 12, 12], {}),
    ("mqa", [1, 3, 1, 4, 5, 9, 7], {}),
    ("large", [1, 1, 1, 12, 20, 16, 16], {}),
    ("value_dim_smaller", [1, 2, 1, 4, 9, 15, 2], {}),
    ("value_dim_larger", [1, 2, 1, 4, 9, 3, 16], {}),
    ("causal", [1, 2, 2, 6, 6, 8, 8], {"causal": True}),
    ("causal_top_left", [1, 2, 1, 5, 9, 10, 6], {"causal": True, "q_offset": 0}),
    ("causal_bottom_right", [1, 2, 1, 5, 9, 7, 7], {"causal": True, "q_offset": BOTTOM_RIGHT}),
    ("causal_offset", [1, 2, 1, 4, 12, 16, 16], {"causal": True, "q_offset": 5}),
    ("causal_rows_without_keys", [1, 2, 1, 7, 8, 4, 5], {"causal": True, "q_offset": -3}),
    ("causal_more_queries_than_keys", [2, 2, 1, 9, 4, 4, 3], {"causal": True, "q_offset": BOTTOM_RIGHT}),
    ("window", [1, 2, 2, 8, 10, 8, 12], {"window_left": 2, "window_right": 1, "q_offset": BOTTOM_RIGHT}),
    ("window_left", [1, 2, 1, 6, 12, 5, 5], {"window_left": 3, "q_offset": 4}),
    ("window_right", [1, 2, 1, 6, 9, 8, 2], {"window_right": 2, "q_offset": -2}),
    ("window_causal", [1, 2, 1, 12, 12, 8, 8], {"causal": True, "window_left": 2}),
    ("window_past_the_keys", [1, 2, 1, 4, 6, 4, 4], {"window_left": 1, "q_offset": 5}),
    ("window_without_keys", [1, 1, 1, 3, 5, 4, 4], {"window_left": 1, "q_offset": 9}),
    ("chunks", [1, 2, 1, 7, 18, 6, 6], {"chunk": 4, "q_offset": 3}),
    ("chunks_causal", [1, 2, 1, 7, 9, 16, 4], {"chunk": 3, "causal": True, "q_offset": -1}),
    ("alibi", [1, 4, 2, 5, 17, 8, 8], {"alibi": "heads", "q_offset": BOTTOM_RIGHT}),
    ("alibi_per_sequence", [2, 2, 1, 4, 7, 11, 5], {"alibi": "sequences", "q_offset": 0, "causal": True}),
    ("sinks", [1, 3, 1, 5, 7, 8, 9], {"sinks": True}),
    ("sinks_rows_without_keys", [1, 2, 1, 6, 5, 4, 4], {"sinks": True, "causal": True, "q_offset": -3}),
    ("mask", [2, 2, 1, 5, 6, 8, 8], {"mask": ("bool", "bhqk")}),
    ("mask_of_keys", [2, 2, 2, 4, 17, 6, 6], {"mask": ("bool", "bk")}),
    ("mask_of_queries", [2, 2, 1, 6, 5, 4, 4], {"mask": ("bool", "hq")}),
    ("bias", [2, 2, 1, 4, 17, 8, 8], {"mask": ("f32", "bhqk")}),
    ("bias_of_pairs", [2, 2, 2, 4, 6, 13, 16], {"mask": ("f32", "qk")}),
    ("bias_of_heads", [2, 4, 2, 3, 5, 4, 4], {"mask": ("f32", "hk")}),
    ("bias_of_queries", [2, 2, 1, 5, 4, 4, 4], {"mask": ("f32", "bq"), "softcap": 2.0}),
    ("bias_of_all", [1, 2, 1, 3, 4, 4, 4], {"mask": ("f32", ""), "sinks": True}),
    ("bias_f16", [1, 2, 1, 9, 18, 8, 8], {"mask": ("f16", "hqk")}),
    ("bias_bf16", [2, 2, 1, 4, 16, 7, 4], {"mask": ("bf16", "bqk")}),
    ("padded", [3, 2, 1, 4, 8, 8, 8], {"kv_lens": [8, 1, 5]}),
    ("padded_without_keys", [3, 2, 2, 3, 6, 4, 5], {"kv_lens": [0, 6, 2], "causal": True, "q_offset": BOTTOM_RIGHT}),
    ("padded_bias", [2, 2, 1, 4, 19, 6, 6], {"kv_lens": [19, 3], "mask": ("f32", "bhqk"), "sinks": True}),
    ("packed", [1, 2, 1, 0, 0, 8, 8], {"packed": [(3, 5), (1, 2), (4, 4)]}),
    ("packed_lengths_of_zero", [1, 2, 1, 0, 0, 4, 4], {"packed": [(0, 3), (3, 0), (0, 0), (5, 6), (2, 1)]}),
    (
        "packed_causal",
        [1, 4, 2, 0, 0, 16, 8],
        {"packed": [(2, 6), (5, 3), (0, 2)], "causal": True, "q_offset": BOTTOM_RIGHT, "sinks": True},
    ),
    ("packed_alibi", [1, 2, 1, 0, 0, 4, 4], {"packed": [(4, 4), (0, 1), (3, 7)], "alibi": "sequences", "q_offset": 0}),
    ("packed_bias", [1, 2, 2, 0, 0, 9, 3], {"packed": [(4, 5), (2, 0), (1, 7)], "mask": ("f32", "bhqk")}),
]
MIXED = 60 - len(CASES)


def mixed(random):
    """Sizes and options at random, several of the options at once."""

    def one(of):
        return of[random.integers(len(of))]

    q_heads, kv_heads = one([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
    form = one(["dense", "padded", "packed"])
    batch = 1 if form == "packed" else int(random.integers(1, 3))
    q_len, kv_len, head_dim, value_dim = (int(random.integers(a, b)) for a, b in [(1, 13), (1, 21), (2, 17), (2, 17)])
    options = {"q_offset": one([0, BOTTOM_RIGHT, int(random.integers(-3, 8))])}
    if form == "padded":
        options["kv_lens"] = [int(random.integers(kv_len + 1)) for _ in range(batch)]
    if form == "packed":
        options["packed"] = [(int(random.integers(6)), int(random.integers(7))) for _ in range(3)]
    options["causal"] = one([True, False])
    options["scale"] = one([None, 0.5])
    options["softcap"] = one([None, 0.75, 3.0])
    options["window_left"] = one([None, None, int(random.integers(5))])
    options["window_right"] = one([None, None, int(random.integers(4))])
    options["chunk"] = one([None, None, None, 4])
    options["alibi"] = one([None, "heads", "sequences"])
    options["sinks"] = one([True, False])
    axes = "".join(axis for axis in "bhqk" if random.integers(2))
    options["mask"] = one([None, ("bool", axes), ("f32", axes), ("f32", axes), ("bf16", axes)])
    return [batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim], options


def mask_of(random, kind, axes, shape):
    """A mask that hides some keys and, if it has an axis of queries, all keys of some rows; additive ones of -inf and normal numbers."""
    shape = [n if axis in axes else 1 for n, axis in zip(shape, "bhqk")]
    hidden = random.random(shape) < (0.3 if "k" in axes else 0.15)
    if "q" in axes and shape[2] > 1:
        hidden[..., random.integers(shape[2]), :] = True
    if kind == "bool":
        return torch.from_numpy(~hidden)
    bias = np.where(hidden & (axes != ""), -np.inf, random.standard_normal(shape))
    return torch.from_numpy(bias).to(MASKS[kind])


def inputs(random, dims, options, with_d_lse):
    """The inputs of a problem. Keys and values of padding are NaN: nothing reads them."""
    batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim = dims

    def normal(*shape):
        return torch.from_numpy(random.standard_normal(shape, dtype=np.float32))

    tensors = {}
    if options["packed"]:
        q_lens, kv_lens = np.array(options["packed"]).T
        q_len, kv_len = int(q_lens.sum()), int(kv_lens.sum())
        for name, lens in [("cu_seqlens_q", q_lens), ("cu_seqlens_k", kv_lens)]:
            tensors[name] = torch.from_numpy(np.concatenate([[0], lens.cumsum()]))
        sequences, longest = len(q_lens), [int(q_lens.max()), int(kv_lens.max())]
    else:
        sequences, longest = batch, [q_len, kv_len]
    tensors["q"] = normal(batch, q_heads, q_len, head_dim)
    tensors["k"] = normal(batch, kv_heads, kv_len, head_dim)
    tensors["v"] = normal(batch, kv_heads, kv_len, value_dim)
    tensors["d_out"] = normal(batch, q_heads, q_len, value_dim)
    if with_d_lse:
        tensors["d_lse"] = normal(batch, q_heads, q_len)
    if options["kv_lens"]:
        tensors["kv_lens"] = torch.tensor(options["kv_lens"])
        for b, n in enumerate(options["kv_lens"]):
            tensors["k"][b, :, n:] = tensors["v"][b, :, n:] = torch.nan
    if options["sinks"]:
        tensors["sinks"] = normal(q_heads)
    if options["alibi"]:
        slopes = random.random(q_heads * (sequences if options["alibi"] == "sequences" else 1)) - 0.25
        tensors["alibi_slopes"] = torch.from_numpy(slopes).float()
    if options["mask"]:
        tensors["mask"] = mask_of(random, *options["mask"], [sequences, q_heads, *longest])
    return tensors


def sequences_of(tensors):
    """Batch entry, first query, number of queries, first key and number of keys of each sequence."""
    batch, _, q_len, _ = tensors["q"].shape
    if "cu_seqlens_q" in tensors:
        cu_q, cu_k = tensors["cu_seqlens_q"].tolist(), tensors["cu_seqlens_k"].tolist()
        return [(0, q, q_end - q, k, k_end - k) for q, q_end, k, k_end in zip(cu_q, cu_q[1:], cu_k, cu_k[1:])]
    kv_lens = tensors["kv_lens"].tolist() if "kv_lens" in tensors else [tensors["k"].shape[2]] * batch
    return [(b, 0, q_len, 0, n) for b, n in enumerate(kv_lens)]


def in_sight(options, p, j):
    """True where position p sees key j, masks aside."""
    seen = torch.ones(len(p), j.shape[-1], dtype=torch.bool)
    if options["causal"]:
        seen &= j <= p
    if options["window_left"] is not None:
        seen &= j >= p - options["window_left"]
    if options["window_right"] is not None:
        seen &= j <= p + options["window_right"]
    if options["chunk"] is not None:
        seen &= torch.div(j, options["chunk"], rounding_mode="floor") == torch.div(p, options["chunk"], rounding_mode="floor")
    return seen


def scores(options, leaves, mask, index, s):
    """Scores of the queries and keys of a sequence, and which of them are visible: [q_heads, q_len, kv_len]."""
    b, q_start, q_len, kv_start, kv_len = s
    q, k = leaves["q"][b, :, q_start : q_start + q_len], leaves["k"][b, :, kv_start : kv_start + kv_len]
    q_heads, _, head_dim = q.shape
    scale = options["scale"] or float(np.float32(1 / np.sqrt(head_dim)))
    score = scale * (q @ k.repeat_interleave(q_heads // len(k), 0).mT)
    if options["softcap"] is not None:
        score = options["softcap"] * torch.tanh(score / options["softcap"])
    offset = {None: 0, BOTTOM_RIGHT: kv_len - q_len}.get(options["q_offset"], options["q_offset"])
    p, j = torch.arange(q_len)[:, None] + offset, torch.arange(kv_len)[None]
    visible = in_sight(options, p, j).expand(score.shape)
    if "alibi_slopes" in leaves:
        slopes = leaves["alibi_slopes"].reshape(-1, q_heads)
        score = score - slopes[index % len(slopes), :, None, None] * (p - j).abs()
    if mask is not None:
        here = mask[index % len(mask)]
        here = here.expand(-1, q_len if here.shape[1] == 1 else -1, kv_len if here.shape[2] == 1 else -1)[:, :q_len, :kv_len]
        if mask.dtype == torch.bool:
            visible = visible & here
        else:
            # An infinity would make NaN of the gradients that pass through it.
            visible = visible & (here > -torch.inf)
            score = score + torch.where(here > -torch.inf, here, 0)
    return score, visible


def attend(options, leaves, mask, index, s):
    """Out and lse of a sequence; an lse of 0 stands for the -inf of a row without keys, which has no gradient."""
    b, q_start, q_len, kv_start, kv_len = s
    score, visible = scores(options, leaves, mask, index, s)
    # The sink is one more score, which is hidden where there is none.
    sink = leaves["sinks"] if "sinks" in leaves else torch.zeros(len(score))
    score = torch.cat([score, sink[:, None, None].expand(-1, q_len, 1)], -1)
    visible = torch.cat([visible, torch.full((len(score), q_len, 1), "sinks" in leaves)], -1)
    is_empty = ~visible.any(-1, keepdim=True)
    row_max = torch.where(visible, score, -torch.inf).detach().amax(-1, keepdim=True)
    row_max = torch.where(is_empty, 0, row_max)
    p = torch.where(visible, torch.exp(torch.where(visible, score - row_max, 0)), 0)
    row_sum = torch.where(is_empty, 1, p.sum(-1, keepdim=True))
    v = leaves["v"][b, :, kv_start : kv_start + kv_len]
    out = (p / row_sum)[..., :-1] @ v.repeat_interleave(len(score) // len(v), 0)
    return out, (torch.log(row_sum) + row_max)[..., 0], is_empty[..., 0]


def gradients(options, tensors):
    """Gradients of sum(d_out * out) + sum(d_lse * lse) by autograd in f64, and the number of rows without keys and sink."""
    leaves = {name: tensors[name].double().requires_grad_() for name in LEAVES if name in tensors}
    mask = tensors.get("mask")
    if mask is not None and mask.is_floating_point():
        mask = leaves["bias"] = mask.double().requires_grad_()
    sequences = sequences_of(tensors)
    loss, empty = 0, 0
    for index, s in enumerate(sequences):
        out, lse, is_empty = attend(options, leaves, mask, index, s)
        rows = (s[0], slice(None), slice(s[1], s[1] + s[2]))
        loss = loss + (tensors["d_out"][rows].double() * out).sum()
        if "d_lse" in tensors:
            loss = loss + torch.where(is_empty, 0, tensors["d_lse"][rows].double() * lse).sum()
        empty += int(is_empty.sum())
    loss.backward()
    found = {f"d_{name}": leaf.grad for name, leaf in leaves.items()}
    assert all(gradient.isfinite().all() for gradient in found.values())
    return found, empty


def write():
    cases = [(name, dims, OPTIONS | options) for name, dims, options in CASES]
    random = np.random.default_rng(0)
    for n in range(MIXED):
        dims, options = mixed(random)
        cases.append((f"mixed_{n + 1:02}", dims, OPTIONS | options))
    lines, empty = [], 0
    for n, (name, dims, options) in enumerate(cases):
        tensors = inputs(np.random.default_rng(n + 1), dims, options, with_d_lse=n % 2 == 1)
        found, rows = gradients(options, tensors)
        empty += rows > 0
        save_file({name: tensor.contiguous() for name, tensor in (tensors | found).items()}, FOLDER / f"{name}.safetensors")
        lines.append(json.dumps({"name": name} | {option: options[option] for option in STORED}))
    (FOLDER / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{len(cases)} problems, {empty} of them with rows without keys")


def check():
    worst = 0.0
    for line in map(json.loads, (FOLDER / "manifest.jsonl").read_text().splitlines()):
        tensors = load_file(FOLDER / f"{line['name']}.safetensors")
        for name, gradient in gradients(line, tensors)[0].items():
            difference = (gradient - tensors[name]).abs().max().item() / max(1.0, gradient.abs().max().item())
            worst = max(worst, difference)
            if not difference <= TOLERANCE:
                sys.exit(f"{name} of {line['name']} differs by {difference}")
    print(f"the stored gradients are right, to {worst:.1e} of the largest")


if __name__ == "__main__":
    check() if "--check" in sys.argv[1:] else write()
