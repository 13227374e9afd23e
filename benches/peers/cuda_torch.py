#!/usr/bin/env python3
"""PyTorch's attention, FlashAttention-4, FlashInfer and flashtile's Python package on a CUDA device, in turns.

    cuda_torch.py OUT.jsonl prefill D S [BATCH [HEADS [KV_HEADS [VALUE_DIM [WINDOW]]]]] -- decode D KEYS BATCH HEADS KV_HEADS -- ...

Each group of arguments is one problem in bf16; prefill is measured with and without a causal mask, with a window of WINDOW keys before
a query only with it. `backward` takes the numbers of prefill, and is the backward pass alone: the gradients of q, k and v by autograd, over
a graph that one forward pass made and that is kept. Measured are the backends of `scaled_dot_product_attention`, FlashAttention-2 and cuDNN;
FlashAttention-4 for prefill and backward if its package `flash_attn.cute` is installed (PyPI: flash-attn-4), which alone has windows;
FlashInfer over pages of 16 tokens for decode if its package is (PyPI: flashinfer-python; it compiles its kernels first, by nvcc and ninja); and
flashtile if its package is.
A round replays one CUDA graph of each in random order, so that all of them find the device at the same temperature and power; the
second-level cache is emptied before each replay. Times are medians over all rounds.

OUT.jsonl gets the peers' rows, for `flashtile bench --vs`. A line for each problem, with and without a mask, goes to standard output: TFLOP/s of
visible pairs, and flashtile's speed relative to the fastest peer. The exit status is 1 where answers differ or flashtile fails.
"""

import json
import random
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from flash_attn.cute import flash_attn_func
except ImportError:
    flash_attn_func = None
try:
    import flashinfer
except ImportError:
    flashinfer = None
try:
    import flashtile
except ImportError:
    flashtile = None

BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# Replays take SECONDS per implementation on average, in at least MIN_ROUNDS rounds and at most MAX_ROUNDS.
SECONDS, MIN_ROUNDS, MAX_ROUNDS = 0.15, 24, 200
# Each answer is rounded to bf16, and so are the probabilities.
TOLERANCE = 1e-2
flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


PAGE_SIZE = 16


def over_pages(q, k, v):
    """A call of FlashInfer's decode over the keys and values in pages."""
    b, hkv, s, d = k.shape
    pages = s // PAGE_SIZE
    # [pages, keys and values, tokens of a page, heads, dim]
    pool = torch.stack([x.transpose(1, 2).reshape(b * pages, PAGE_SIZE, hkv, d) for x in (k, v)], dim=1).contiguous()
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    ends = torch.arange(b + 1, dtype=torch.int32, device="cuda") * pages
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=ends.clone(),
        paged_kv_indices_buffer=torch.arange(b * pages, dtype=torch.int32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.full((b,), PAGE_SIZE, dtype=torch.int32, device="cuda"),
    )
    indices = torch.arange(b * pages, dtype=torch.int32, device="cuda")
    full = torch.full((b,), PAGE_SIZE, dtype=torch.int32, device="cuda")
    types = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    wrapper.plan(ends, indices, full, q.shape[1], hkv, d, PAGE_SIZE, pos_encoding_mode="NONE", **types)
    rows = q[:, :, 0].contiguous()
    return lambda: wrapper.run(rows, pool)[:, :, None]


def implementations(problem, causal, q, k, v):
    """Functions that compute one problem: names, functions, and the tensors to differentiate by."""
    window = problem["window"]
    if flashtile:
        options = {"causal": causal} | ({"window": (window, 0)} if window else {})
        yield "flashtile", lambda: flashtile.attention(q, k, v, **options), (q, k, v)
    if not window:
        for name, backend in BACKENDS.items():

            def sdpa(backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

            yield name, sdpa, (q, k, v)
    if flashinfer and problem["kind"] == "decode" and problem["d"] == problem["dv"] and problem["s"] % PAGE_SIZE == 0:
        yield "flashinfer", over_pages(q, k, v), (q, k, v)
    if flash_attn_func and problem["kind"] != "decode":
        # Rows of all heads of a token are neighbours there.
        tokens = [x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad) for x in (q, k, v)]
        of_tokens = {"causal": causal} | ({"window_size": (window, 0)} if window else {})

        def fa4():
            out = flash_attn_func(*tokens, **of_tokens)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        yield "fa4", fa4, tokens


def backward_of(forward, leaves, d_out, of_tokens):
    """A function that computes the gradients of a forward pass, [batch, heads, rows, dim]. Its first call runs the forward pass, on whose
    stream autograd computes the gradients."""
    kept = []

    def run():
        if not kept:
            with torch.enable_grad():
                kept.append(forward())
        gradients = torch.autograd.grad(kept[0], leaves, d_out, retain_graph=True)
        return tuple(gradient.transpose(1, 2) if of_tokens else gradient for gradient in gradients)

    return run


def flat(out):
    """An answer, or several one after another."""
    return torch.cat([x.flatten() for x in out]) if isinstance(out, tuple) else out


def captured(run, stream):
    """A graph of one call, and its answer."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    return graph, out


def seconds(graphs, stream):
    """Median seconds of a replay of each graph, in turns."""
    names, times = list(graphs), {name: [] for name in graphs}
    order = random.Random(0)
    rounds, spent = 0, 0.0
    with torch.cuda.stream(stream):
        while rounds < MIN_ROUNDS or (spent < SECONDS * len(names) and rounds < MAX_ROUNDS):
            order.shuffle(names)
            for name in names:
                flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graphs[name].replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) / 1e3)
                spent += times[name][-1]
            rounds += 1
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def operations(problem, causal):
    """Multiplications and additions over visible pairs."""
    d, dv, s, b, h = (problem[name] for name in ("d", "dv", "s", "b", "h"))
    products = 5 if problem["kind"] == "backward" else 2
    if problem["kind"] == "decode":
        pairs = s
    elif causal:
        before = problem["window"] or s
        pairs = sum(min(row, before) + 1 for row in range(s))
    else:
        pairs = s * s
    return products * (d + dv) * h * b * pairs


def difference(out, want):
    """Root mean square of the difference, relative to the wanted answer."""
    want = want.float()
    return ((out.float() - want).square().mean() / want.square().mean()).sqrt().item()


def measured(problem):
    """Measures one problem: peers' rows, the lines of a table, and whether answers agree."""
    d, dv, s, b, h, hkv = (problem[name] for name in ("d", "dv", "s", "b", "h", "hkv"))
    is_prefill, is_backward = problem["kind"] != "decode", problem["kind"] == "backward"
    q = torch.randn(b, h, s if is_prefill else 1, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, hkv, s, dim, device="cuda", dtype=torch.bfloat16) for dim in (d, dv))
    d_out = torch.randn(b, h, s, dv, device="cuda", dtype=torch.bfloat16) if is_backward else None
    for x in (q, k, v):
        x.requires_grad_(is_backward)
    both = is_prefill and not problem["window"]
    rows, lines, agree = [], [], True
    for causal in (False, True) if both else (is_prefill,):
        stream, graphs, want, errors = torch.cuda.Stream(), {}, None, {}
        for name, run, leaves in implementations(problem, causal, q, k, v):
            if is_backward:
                run = backward_of(run, leaves, d_out, of_tokens=name == "fa4")
            try:
                with torch.no_grad():
                    graphs[name], out = captured(run, stream)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                print(f"{problem}: {name}: {(str(error) or repr(error)).splitlines()[0]}", file=sys.stderr)
                agree &= name != "flashtile"
                continue
            out = flat(out)
            want = out.clone() if want is None else want
            errors[name] = difference(out, want)
        if not graphs:
            continue
        times = seconds(graphs, stream)
        of_problem = problem | {"dtype": "bf16", "causal": causal}
        of_problem["window"] = [problem["window"], None] if problem["window"] else None
        rows += [of_problem | {"peer": name, "seconds": time} for name, time in times.items() if name != "flashtile"]
        rate = {name: operations(problem, causal) / time / 1e12 for name, time in times.items()}
        heads = f"{h}/{hkv} heads of {d}" + (f"/{dv}" if dv != d else "")
        window = f", window {problem['window']}" if problem["window"] else ""
        line = f"{problem['kind']}, {b} x {s}, {heads}{window}, {'causal' if causal else 'full'}: "
        line += ", ".join(f"{name} {of_name:.0f}" for name, of_name in rate.items())
        others = [of_name for name, of_name in rate.items() if name != "flashtile"]
        if "flashtile" in rate and others:
            line += f"; {rate['flashtile'] / max(others):.3f} of the fastest peer"
        lines.append(f"{line}; answers differ by {max(errors.values()):.0e}")
        agree &= all(error < TOLERANCE for error in errors.values())
    return rows, lines, agree


def main():
    out, problems = sys.argv[1], " ".join(sys.argv[2:]).split(" -- ")
    all_agree = True
    with open(out, "a") as file:
        for problem in problems:
            kind, *numbers = problem.split()
            d, s, *rest = map(int, numbers)
            b = rest[0] if rest else 1
            h = rest[1] if len(rest) > 1 else 2048 // d
            hkv = rest[2] if len(rest) > 2 else h
            dv = rest[3] if len(rest) > 3 else d
            window = rest[4] if len(rest) > 4 else 0
            shape = {"kind": kind, "d": d, "dv": dv, "h": h, "hkv": hkv, "b": b, "s": s, "window": window}
            rows, lines, agree = measured(shape)
            for row in rows:
                print(json.dumps(row), file=file, flush=True)
            for line in lines:
                print(line, flush=True)
            all_agree &= agree
    sys.exit(not all_agree)


if __name__ == "__main__":
    main()
