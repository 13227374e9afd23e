#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention on the CPU, one JSON line a row, for `flashtile bench --vs FILE`.

    python3 benches/peers/cpu_torch.py [--threads 2] [--seconds 0.5] [prefill|small|decode ...] > torch.jsonl

Keys and values of a decode row rotate through copies larger than the caches, as in `flashtile bench`.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F

PREFILL = [(d, 8, 1, s) for d in (32, 64, 128, 256) for s in (2048, 4096)]
SMALL = [(d, 12, 4, 128) for d in (32, 64)]
DECODE = [(d, h, hkv, s) for d, h, hkv in ((128, 32, 8), (64, 32, 8), (256, 16, 2)) for s in (1024, 32768)]
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def median_seconds(calls, least):
    for call in calls[:2]:
        call()
    times, started, n = [], time.perf_counter(), 0
    while len(times) < 5 or time.perf_counter() - started < least:
        begin = time.perf_counter()
        calls[n % len(calls)]()
        times.append(time.perf_counter() - begin)
        n += 1
    return sorted(times)[len(times) // 2]


def row(**fields):
    print(json.dumps(dict(peer=f"torch {torch.__version__.split('+')[0]}", **fields)), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="*", default=["prefill", "small", "decode"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    prefill = (PREFILL if "prefill" in args.groups else []) + (SMALL if "small" in args.groups else [])
    with torch.no_grad():
        for d, h, b, s in prefill:
            for name, dtype in DTYPES.items():
                q, k, v = (torch.randn(b, h, s, d).to(dtype) for _ in range(3))
                for causal in (False, True):
                    call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                    seconds = median_seconds([call], args.seconds)
                    row(kind="prefill", dtype=name, d=d, h=h, hkv=h, b=b, s=s, causal=causal, seconds=seconds)
        for d, h, hkv, s in DECODE if "decode" in args.groups else []:
            for name, dtype in DTYPES.items():
                bytes_each = 2 * hkv * s * d * torch.finfo(dtype).bits // 8
                copies = min(32, max(1, (128 << 20) // bytes_each))
                q = torch.randn(1, h, 1, d).to(dtype)
                kv = [tuple(torch.randn(1, hkv, s, d).to(dtype) for _ in range(2)) for _ in range(copies)]
                calls = [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=h != hkv) for k, v in kv]
                seconds = median_seconds(calls, args.seconds)
                row(kind="decode", dtype=name, d=d, h=h, hkv=hkv, b=1, s=s, causal=False, seconds=seconds)


if __name__ == "__main__":
    main()
