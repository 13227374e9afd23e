"""CPU time of shapes that are not long prompts, beside PyTorch: a bias, few keys, decode steps, and rows over quantized caches.

    RAYON_NUM_THREADS=1 python shapes.py [--calls N]

One thread, the minimum of N calls of each library in turn. For a cache the peer is the same cache with at most 16 rows a step.
"""

import argparse
import os
import time

# Read when the library starts its threads.
os.environ.setdefault("RAYON_NUM_THREADS", "1")

import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import flashtile  # noqa: E402


def seconds(calls, *functions):
    """The smallest CPU time of each function."""
    best = [float("inf")] * len(functions)
    for _ in range(calls + 1):
        for n, function in enumerate(functions):
            start = time.process_time()
            function()
            best[n] = min(best[n], time.process_time() - start)
    return best


def row(name, ours, peer):
    print(f"{name:48} {ours * 1e6:10.1f} us {peer * 1e6:10.1f} us {ours / peer:6.2f}")


def biases(calls):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(1, 8, 1024, 64).to(dtype)
        for name, heads in (("no bias", 0), ("a bias for all heads", 1), ("a bias per head", 8)):
            bias = torch.randn(1, heads, 1024, 1024).to(dtype) if heads else None
            ours, peer = lambda: flashtile.attention(x, x, x, mask=bias), lambda: scaled_dot_product_attention(x, x, x, attn_mask=bias)
            row(f"{name}, 8 heads, 1024 x 1024, {dtype}", *seconds(calls // 20, ours, peer))


def few_keys(calls):
    shapes = ((1, 1, 1, 128), (1, 12, 1, 1), (1, 12, 1, 128), (1, 12, 1, 1024), (8, 12, 1, 256), (1, 8, 16, 16), (1, 8, 1024, 1), (1, 8, 1024, 16))
    for dtype in (torch.float32, torch.bfloat16):
        for batch, heads, queries, keys in shapes:
            q, k = torch.randn(batch, heads, queries, 64).to(dtype), torch.randn(batch, heads, keys, 64).to(dtype)
            ours, peer = lambda: flashtile.attention(q, k, k), lambda: scaled_dot_product_attention(q, k, k)
            row(f"{batch} x {heads} heads, {queries} x {keys}, {dtype}", *seconds(calls, ours, peer))


def cache_rows(calls, tokens=8192, heads=8, dim=128):
    for codec in ("bf16", "fp8", "int8", "tq6", "tq5", "tq4", "tq3", "tq2"):
        cache = flashtile.KvCache(1, heads, dim, k=codec, v=codec, pages=600)
        sequence, x = cache.create(), torch.randn(tokens, heads, dim).bfloat16()
        with cache.step([(sequence, tokens)]) as step:
            step.attend(0, x, x, x, window=(0, 0))

        def decode(rows):
            x = torch.randn(rows, heads, dim).bfloat16()

            def run():
                step = cache.step([(sequence, rows)])
                step.attend(0, x, x, x)
                step.cancel()

            return run

        counts = (1, 16, 17, 32, 64, 128, 256)
        times = dict(zip(counts, seconds(calls // 40, *map(decode, counts))))
        for rows in counts[2:]:
            passes = rows // 16 * times[16] + (times[1] if rows % 16 else 0)
            row(f"{rows} rows over {tokens} keys in {codec}, by 16", times[rows], passes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'':48} {'flashtile':>13} {'peer':>13} {'ratio':>6}")
    for part in (biases, few_keys, cache_rows):
        part(calls)


if __name__ == "__main__":
    main()
