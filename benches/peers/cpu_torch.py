#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention on the CPU, one JSON line a row, for `flashtile bench --vs FILE`.

    python3 benches/peers/cpu_torch.py [--threads 2] [--seconds 0.5] [prefill|small|decode|backward ...] > torch.jsonl

Rows of the group backward are the time of the backward pass alone: the gradients of q, k and v by autograd, over a graph that one forward
pass made and that is kept.
"""

import torch
import torch.nn.functional as F

import measure

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Torch(measure.Peer):
    name = f"torch {torch.__version__.split('+')[0]}"
    has_backward = True

    def refuses(self, problem, dtype):
        return None

    def call(self, problem, dtype, *tensors):
        q, k, v, *d_out = (torch.from_numpy(x).to(DTYPES[dtype]) for x in tensors)
        options = dict(is_causal=problem.causal, enable_gqa=problem.h != problem.hkv)
        if not d_out:
            return lambda: F.scaled_dot_product_attention(q, k, v, **options)
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = F.scaled_dot_product_attention(*leaves, **options)
        # out.backward(d_out) computes the same, and adds it to the gradients of the call before.
        return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    def output(self, result):
        result = torch.cat(result, dim=2) if isinstance(result, tuple) else result
        return result.float().numpy()


def peers(threads):
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return [Torch()]


if __name__ == "__main__":
    measure.main(__doc__.split("\n", 1)[0], peers)
