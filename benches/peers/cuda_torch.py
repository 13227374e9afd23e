#!/usr/bin/env python3
"""PyTorch's attention and FlashAttention-4 on a CUDA device, for `flashtile bench --vs`.

    cuda_torch.py OUT.jsonl prefill D S [BATCH [HEADS [KV_HEADS [VALUE_DIM [WINDOW]]]]] -- decode D KEYS BATCH HEADS KV_HEADS -- ...

Each group of arguments is one problem in bf16; prefill is measured with and without a causal mask, with a window of WINDOW keys before
a query only with it. Peers are the backends of `scaled_dot_product_attention`, FlashAttention-2 and cuDNN, and FlashAttention-4 for
prefill if its package `flash_attn.cute` is installed (PyPI: flash-attn-4), which alone has windows. Times are medians of graph replays,
before each of which the second-level cache is emptied, as flashtile's are.
"""

import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from flash_attn.cute import flash_attn_func
except ImportError:
    flash_attn_func = None

BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SECONDS = 0.15
flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def seconds(run):
    """Median seconds of a replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    spent = 0.0
    with torch.cuda.stream(stream):
        while len(times) < 10 or (spent < SECONDS and len(times) < 200):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
            spent += times[-1]
    return statistics.median(times)


def peers(problem, causal, q, k, v):
    """Functions that compute one problem, by the name of the peer."""
    window = problem["window"]
    if not window:
        for name, backend in BACKENDS.items():

            def sdpa(backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

            yield name, sdpa
    if flash_attn_func and problem["kind"] == "prefill":
        # Rows of all heads of a token are neighbours there.
        tokens = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        options = {"causal": causal} | ({"window_size": (window, 0)} if window else {})
        yield "fa4", lambda: flash_attn_func(*tokens, **options)


def rows(problem):
    """Rows of one problem, as JSON."""
    d, dv, s, b, h, hkv = (problem[name] for name in ("d", "dv", "s", "b", "h", "hkv"))
    is_prefill = problem["kind"] == "prefill"
    q = torch.randn(b, h, s if is_prefill else 1, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, hkv, s, dim, device="cuda", dtype=torch.bfloat16) for dim in (d, dv))
    both = is_prefill and not problem["window"]
    for causal in (False, True) if both else (is_prefill,):
        for name, run in peers(problem, causal, q, k, v):
            row = problem | {"peer": name, "dtype": "bf16", "causal": causal}
            row["window"] = [problem["window"], None] if problem["window"] else None
            try:
                with torch.no_grad():
                    row["seconds"] = seconds(run)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                print(f"{row}: {(str(error) or repr(error)).splitlines()[0]}", file=sys.stderr)
                continue
            yield row


def main():
    out, problems = sys.argv[1], " ".join(sys.argv[2:]).split(" -- ")
    with open(out, "a") as file:
        for problem in problems:
            kind, *numbers = problem.split()
            d, s, *rest = map(int, numbers)
            b = rest[0] if rest else 1
            h = rest[1] if len(rest) > 1 else 2048 // d
            hkv = rest[2] if len(rest) > 2 else h
            dv = rest[3] if len(rest) > 3 else d
            window = rest[4] if len(rest) > 4 else 0
            for row in rows({"kind": kind, "d": d, "dv": dv, "h": h, "hkv": hkv, "b": b, "s": s, "window": window}):
                print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
