#!/usr/bin/env python3
"""Trains the model of this example in PyTorch, in f32 and f64, from the parameters and on the tokens of a run with --twin.

    cargo run --release --manifest-path examples/train/Cargo.toml -- --steps 200 --twin FOLDER
    examples/train/compare.py FOLDER

It needs torch and safetensors. It prints how far each f32 curve is from its f64 twin at most, and fails if flashtile's is farther than twice
PyTorch's.
"""

import argparse
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

HEADS, KV_HEADS = 4, 2
# Twins in f64 are the same model if they stay this close.
SAME = 1e-8


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def logits(p, tokens):
    batch, length = tokens.shape
    x = p["tokens"][tokens] + p["positions"][:length]
    width = x.shape[-1]
    layers = sum(name.endswith(".q") for name in p)
    for layer in range(layers):
        of = {name.split(".")[1]: value for name, value in p.items() if name.startswith(f"{layer}.")}
        y = normed(x, of["norm1"])
        split = lambda y, heads: y.view(batch, length, heads, width // HEADS).transpose(1, 2)  # noqa: E731
        q, k, v = split(y @ of["q"].T, HEADS), split(y @ of["k"].T, KV_HEADS), split(y @ of["v"].T, KV_HEADS)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + out.transpose(1, 2).reshape(batch, length, width) @ of["o"].T
        y = normed(x, of["norm2"])
        x = x + (F.silu(y @ of["gate"].T) * (y @ of["up"].T)) @ of["down"].T
    return normed(x, p["norm"]) @ p["head"].T


def losses(first, batches, rate, dtype):
    p = {name: value.to(dtype).clone().requires_grad_() for name, value in first.items()}
    optimizer = torch.optim.AdamW(p.values(), lr=rate, betas=(0.9, 0.99), weight_decay=0.01)
    curve = []
    for tokens in batches.long():
        loss = F.cross_entropy(logits(p, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return torch.tensor(curve, dtype=torch.float64)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=pathlib.Path)
    asked = arguments.parse_args()
    tensors = load_file(asked.folder / "train.safetensors")
    batches, rate, ours, twin = (tensors.pop(name) for name in ("batches", "rate", "losses.f32", "losses.f64"))
    of_f32, of_f64 = (losses(tensors, batches, rate.item(), dtype) for dtype in (torch.float32, torch.float64))
    far = lambda a, b: (a - b).abs().max().item()  # noqa: E731
    print(f"{len(ours)} steps, loss {ours[0]:.4f} to {ours[-1]:.4f}")
    print(f"twins in f64, candle's and PyTorch's: {far(twin, of_f64):.2e} apart")
    print(f"flashtile in f32 from its twin: {far(ours, twin):.2e} at most")
    print(f"PyTorch in f32 from its twin: {far(of_f32, of_f64):.2e} at most")
    if not far(twin, of_f64) <= SAME:
        raise SystemExit(f"the twins in f64 are no twins, expected within {SAME}")
    # A NaN is far.
    if not far(ours, twin) <= 2 * far(of_f32, of_f64):
        raise SystemExit("flashtile is farther from its twin than twice PyTorch is")


if __name__ == "__main__":
    main()
