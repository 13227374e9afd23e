#!/usr/bin/env python3
"""Seconds per forward of models of transformers, by eager attention, sdpa and flashtile, as a table in Markdown.

    python/benches/models.py [--minilm FOLDER] [--threads N] [--repeats N] [--dtype float32] [--only attention]

It needs the wheel with PyTorch and transformers: pip install "./python[transformers]". The encoder has the configuration of
all-MiniLM-L6-v2, and its parameters where FOLDER has them (examples/candle-minilm/fetch.py FOLDER); the decoder has the sizes of a model
of 0.5 billion parameters, which are random: time does not depend on them. Before a row is measured the results of the three are
compared. They take turns, and the fastest run of each counts, so that what else the machine does counts least.
"""

import argparse
import os
import time

ARGUMENTS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ARGUMENTS.add_argument("--minilm", metavar="FOLDER", help="a folder with all-MiniLM-L6-v2; parameters are random otherwise")
ARGUMENTS.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
ARGUMENTS.add_argument("--repeats", type=int, default=5, help="runs of each, of which the fastest counts")
ARGUMENTS.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
ARGUMENTS.add_argument("--only", choices=["attention", "encoder", "decoder"], help="rows of attention alone, MiniLM, or the decoder")

KINDS = ["eager", "sdpa", "flashtile"]
MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12, "vocab_size": 30522}
DECODER = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
# Of float32 the rounding of a model of 24 layers, of bfloat16 the rounding of its hidden states, relative to the largest element.
FAR = {"float32": 1e-4, "bfloat16": 0.1}


def measure(model, forward, repeats, far):
    """Seconds of each kind of attention. `forward(model)` gives a result that is compared."""

    def run(kind):
        model.set_attn_implementation(kind)
        return lambda: forward(model)

    return fastest_of(run, repeats, far)


def fastest_of(run, repeats, far):
    """Seconds of each kind. `run(kind)` gives a function, whose result is compared."""
    results, fastest = {}, {}
    for kind in KINDS:
        results[kind] = run(kind)().float()
    for kind in KINDS[1:]:
        difference = ((results[kind] - results["eager"]).abs().max() / results["eager"].abs().max()).item()
        if not difference < far:
            raise SystemExit(f"{kind} differs from eager by {difference:.1e} of the largest element")
    for _ in range(repeats):
        for kind in KINDS:
            compute = run(kind)
            begin = time.perf_counter()
            compute()
            fastest[kind] = min(fastest.get(kind, float("inf")), time.perf_counter() - begin)
    return fastest


def row(title, fastest, of=1):
    cells = [f"{fastest[kind] / of * 1e3:.4g}" for kind in KINDS]
    print(f"| {title} | {' | '.join(cells)} | {min(fastest[kind] for kind in KINDS[:2]) / fastest['flashtile']:.2f} |", flush=True)


def attention(torch, asked, dtype):
    import flashtile

    fused = torch.nn.functional.scaled_dot_product_attention
    for batch, heads, kv_heads, queries, keys, dim in [(8, 12, 12, 256, 256, 32), (1, 14, 2, 1024, 1024, 64), (1, 14, 2, 1, 4096, 64)]:
        q = torch.randn(batch, heads, queries, dim, dtype=dtype)
        k, v = (torch.randn(batch, kv_heads, keys, dim, dtype=dtype) for _ in range(2))
        causal = queries > 1 and heads > kv_heads

        def eager():
            k_all, v_all = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            scores = q @ k_all.mT / dim**0.5
            if causal:
                scores += torch.full_like(scores[0, 0], float("-inf")).triu(1)
            return scores.float().softmax(-1).to(dtype) @ v_all

        kinds = {
            "eager": eager,
            "sdpa": lambda: fused(q, k, v, is_causal=causal, enable_gqa=heads > kv_heads),
            "flashtile": lambda: flashtile.attention(q, k, v, causal=causal),
        }
        title = f"attention alone, {batch} x {queries} queries{', causal' if causal else ''}, {keys} keys, {heads}/{kv_heads} heads of {dim}"
        row(title, fastest_of(kinds.get, 4 * asked.repeats, FAR[asked.dtype]))


def encoder(transformers, torch, asked, dtype):
    if asked.minilm:
        model = transformers.BertModel.from_pretrained(asked.minilm, dtype=dtype)
    else:
        model = transformers.BertModel(transformers.BertConfig(**MINILM)).to(dtype)
    model.eval()
    for batch, length, padding in [(1, 32, 0), (8, 256, 0), (8, 256, 64), (1, 512, 0)]:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[1:, length - padding :] = 0
        ids = torch.randint(1000, 20000, (batch, length))
        seen = mask.bool()
        fastest = measure(model, lambda model: model(ids, attention_mask=mask).last_hidden_state[seen], asked.repeats, FAR[asked.dtype])
        padded = f", {padding} of them padding in all but one" if padding else ""
        row(f"MiniLM, {batch} x {length} tokens{padded}", fastest)


def decoder(transformers, torch, asked, dtype):
    model = transformers.Qwen2ForCausalLM._from_config(transformers.Qwen2Config(**DECODER), dtype=dtype).eval()
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    for length in (128, 1024, 4096):
        ids = torch.randint(0, DECODER["vocab_size"], (1, length))
        fastest = measure(model, lambda model: model(ids, use_cache=False, logits_to_keep=1).logits, asked.repeats, FAR[asked.dtype])
        row(f"decoder of {billions:.1f}e9, prompt of {length} tokens", fastest)
        cache, steps = transformers.DynamicCache(config=model.config), 8
        model(ids, past_key_values=cache, logits_to_keep=1)

        def decode(model, cache=cache, ids=ids):
            for _ in range(steps):
                logits = model(ids[:, :1], past_key_values=cache, use_cache=True).logits
            cache.crop(-steps)
            return logits

        row(f"the same, a token after {length}", measure(model, decode, asked.repeats, FAR[asked.dtype]), of=steps)


def main():
    asked = ARGUMENTS.parse_args()
    # Before either starts its threads.
    os.environ["RAYON_NUM_THREADS"] = str(asked.threads)
    import flashtile.transformers
    import torch
    import transformers

    torch.set_num_threads(asked.threads)
    torch.manual_seed(7)
    transformers.logging.set_verbosity_error()
    flashtile.transformers.register()
    print(f"ms, {asked.threads} threads, {asked.dtype}, torch {torch.__version__}, transformers {transformers.__version__}, best of {asked.repeats}\n")
    print(f"| ms per forward | {' | '.join(KINDS)} | faster than the better of the others |\n|---|---|---|---|---|")
    with torch.no_grad():
        dtype = getattr(torch, asked.dtype)
        if asked.only in (None, "attention"):
            attention(torch, asked, dtype)
        if asked.only in (None, "encoder"):
            encoder(transformers, torch, asked, dtype)
        if asked.only in (None, "decoder"):
            decoder(transformers, torch, asked, dtype)


if __name__ == "__main__":
    main()
