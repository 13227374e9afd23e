#!/usr/bin/env python3
"""PyTorch's attention on a CUDA device, for `flashtile bench --vs`.

    cuda_torch.py OUT.jsonl prefill D S [BATCH [HEADS [KV_HEADS]]] -- decode D KEYS BATCH HEADS KV_HEADS -- ...

Each group of arguments is one problem in bf16; prefill is measured with and without a causal mask. Peers are the backends of
`scaled_dot_product_attention`: FlashAttention-2 and cuDNN. Times are medians of graph replays, before each of which the
second-level cache is emptied, as flashtile's are.
"""

import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def rows(kind, d, s, b, h, hkv):
    """Rows of one problem, as JSON."""
    q_len = s if kind == "prefill" else 1
    q = torch.randn(b, h, q_len, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, hkv, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for causal in (False, True) if kind == "prefill" else (False,):
        for name, backend in BACKENDS.items():
            row = {"peer": name, "kind": kind, "dtype": "bf16", "d": d, "h": h, "hkv": hkv, "b": b, "s": s, "causal": causal}
            try:
                with sdpa_kernel(backend), torch.no_grad():
                    row["seconds"] = seconds(
                        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=h != hkv)
                    )
            except RuntimeError as error:
                print(f"{row}: {str(error).splitlines()[0]}", file=sys.stderr)
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
            for row in rows(kind, d, s, b, h, hkv):
                print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
