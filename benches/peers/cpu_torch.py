#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention on the CPU, one JSON line a row, for `flashtile bench --vs FILE`.

    python3 benches/peers/cpu_torch.py [--threads 2] [--seconds 0.5] [prefill|small|decode ...] > torch.jsonl
"""

import torch
import torch.nn.functional as F

import measure

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Torch(measure.Peer):
    name = f"torch {torch.__version__.split('+')[0]}"

    def refuses(self, problem, dtype):
        return None

    def call(self, problem, dtype, q, k, v):
        q, k, v = (torch.from_numpy(x).to(DTYPES[dtype]) for x in (q, k, v))
        options = dict(is_causal=problem.causal, enable_gqa=problem.h != problem.hkv)
        return lambda: F.scaled_dot_product_attention(q, k, v, **options)

    def output(self, result):
        return result.float().numpy()


def peers(threads):
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return [Torch()]


if __name__ == "__main__":
    measure.main(__doc__.split("\n", 1)[0], peers)
