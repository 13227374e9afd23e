"""Every model class of the installed transformers, with small random configurations, by flashtile against `eager`:

    python sweep_transformers.py [--out FILE] [--jobs N] [--limit SECONDS] [--part] [NAME ...]

A class is right, refused by name when flashtile is asked for, not built (with the reason), or wrong; wrong ones fail. Generation over a
`FlashtileCache` is right, or refused by its name, which the outcome says. NAME is a folder of
`transformers/models`; `--part` takes a fixed list of them. FILE has the classes by outcome, in an order that `diff` can compare.
"""

import argparse
import copy
import dataclasses
import functools
import importlib
import inspect
import json
import math
import os
import pathlib
import re
import select
import signal
import sys
import time
import warnings

os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import PreTrainedConfig, PreTrainedModel  # noqa: E402

import flashtile.transformers  # noqa: E402

# Families with a trap each, and common decoders.
PART = """bart beit bert bigbird_pegasus bloom data2vec deepseek_v2 deepseek_v32 encoder_decoder falcon gemma2 gemma3 gemma4 gpt2 gpt_neo gpt_oss led
llama llava longformer minimax_m3_vl mpnet mpt nllb_moe qwen3 sam splinter t5 whisper xglm""".split()

# Models compute the same beside attention; rounding of attention grows through layers and norms.
TOLERANCE = 2e-4
BATCH, LENGTH, VOCAB = 3, 12, 99
PADDED = {"left": (0, 5), "right": (8, 12)}


# Configurations.


def shrunk(config):
    """A configuration of the same kind with small sizes: its constructor gets those that change."""
    sizes, old = {}, {k: v for k, v in vars(config).items() if not k.startswith("_")}
    layers = layers_of(old)
    for name, value in old.items():
        if isinstance(value, PreTrainedConfig):
            sizes[name] = shrunk(value)
        elif name not in ("id2label", "label2id", "transformers_version", "model_type"):
            new = size(name, value, old, layers)
            if new is not None and new != value:
                sizes[name] = new
    if isinstance(old.get("rope_parameters"), dict) and "mrope_section" in code_of(type(config)):
        sizes["rope_parameters"] = with_sections(sizes.get("rope_parameters", old["rope_parameters"]))
    sizes |= KINDS.get(type(config).__name__, {})
    fields = accepted(type(config))
    return type(config)(**{k: v for k, v in sizes.items() if fields is None or k in fields})


# Kinds of layers that no layer has by default.
KINDS = {"MiniMaxM3VLTextConfig": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2}}


def accepted(kind):
    """Names that a constructor takes, or None where it takes all."""
    names = set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "__dataclass_fields__", ()))
    return None if len(names) < 5 else names


def layers_of(old):
    """How many layers: one of each kind, and two at least."""
    kinds = max((len({str(x) for x in old[name]}) for name in old if name.endswith("layer_types") and old[name]), default=1)
    return 6 if "num_kv_shared_layers" in old else max(2, kinds)


LAYERS = re.compile(r"(^|_)(layers?|depth|num_blocks|num_hidden_groups)$")
HIDDEN = re.compile(r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|(^|_)dim|width|hidden_channels|projection_dim|emb_dim|output_size)$")
INNER = re.compile(r"(intermediate_size|ffn\w*|d_ff|mlp_dim|n_inner|inner_dim|ff_dim|feed_forward\w*)$")
HEADS = re.compile(r"(^|_)(n_heads?|num_heads|\w*attention_heads|heads)$")
HEAD_DIM = re.compile(r"(head_dim|d_kv|dim_head|head_size|attention_head_size|d_head)$")
EXPERTS = re.compile(r"^(n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts)$")
FIXED = {
    "sliding_window": 6, "attention_chunk_size": 6, "local_attention": 6, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "top_k_experts": 2,
    "moe_topk": 2, "moe_k": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "index_topk": 4, "index_n_heads": 2, "index_head_dim": 32, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "max_source_positions": 32, "codebook_size": 64, "num_codevectors_per_group": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "num_queries": 6, "first_k_dense_replace": 1, "global_head_dim": 16, "swa_head_dim": 16, "num_global_key_value_heads": 2,
    "vocab_size_per_layer_input": VOCAB, "num_position_embeddings": 64, "classifier_proj_size": 16, "xvector_output_dim": 16, "full_attention_interval": 2,
    "image_seq_length": 16, "mamba_chunk_size": 8, "chunk_size": 8, "index_topk_blocks": 1, "index_block_size": 4, "index_local_blocks": 1,
    "upsample_groups": 64,
}  # fmt: skip
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# Fields that have no value by default, and that a model needs.
UNSET = {
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "vocab_size": VOCAB, "n_routed_experts": 4, "n_shared_experts": 1, "prediction_length": 4,
    "attn_layer_indices": [1], "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
SPECIAL = re.compile(r"_token_(id|index)$")


def size(name, value, old, layers):
    """The small value of a field, or None for the one that it has."""
    if isinstance(value, bool):
        return None
    if name in IDS:
        return IDS[name]
    if value is None:
        return UNSET.get(name)
    if SPECIAL.search(name) and isinstance(value, int):
        return VOCAB - 1 - sorted(n for n in old if SPECIAL.search(n)).index(name) % 9
    if name in FIXED and isinstance(value, (int, float)) and (value > 0 or name == "num_kv_shared_layers"):
        return FIXED[name]
    if isinstance(value, int):
        return number(name, value, old, layers)
    if isinstance(value, dict) and name.startswith("rope"):
        return rope(value)
    if isinstance(value, (list, tuple)) and value:
        return row(name, value, old, layers)
    return None


def number(name, value, old, layers):
    small = lambda most: min(value, most)  # noqa: E731
    if "vocab_size" in name:
        return small(VOCAB)
    if "max" in name and "position" in name or name in ("n_positions", "n_ctx", "block_size", "max_seq_len"):
        return small(128)
    if "key_value_heads" in name or name in ("num_kv_heads", "kv_heads", "n_kv_heads"):
        heads = next((old[n] for n in ("num_attention_heads", "num_heads", "n_heads") if isinstance(old.get(n), int)), 0)
        return 4 if value == heads else small(2)
    if EXPERTS.search(name):
        return small(4)
    if HEAD_DIM.search(name):
        return small(16)
    if HEADS.search(name):
        return small(4)
    if INNER.search(name):
        return small(96)
    if LAYERS.search(name) and "per" not in name:
        return small(layers)
    if name == "image_size":
        return 64 if old.get("window_size") or isinstance(old.get("depths"), (list, tuple)) else 32
    if name == "patch_size":
        return small(8)
    if HIDDEN.search(name) and value >= 16:
        return small(64)
    return None


def rope(value):
    """Factors of rotary embeddings of heads of 16 elements."""
    if any(isinstance(x, dict) for x in value.values()):
        return {k: rope(v) if isinstance(v, dict) else v for k, v in value.items()}
    new = dict(value)
    if "xdrope_section" in new:
        new["xdrope_section"] = [2, 2, 2, 2]
    for name in ("short_factor", "long_factor"):
        if name in new:
            new[name] = new[name][:8]
    return new


def code_of(config):
    """The code of the models of a class of configurations."""
    path = pathlib.Path(inspect.getfile(config))
    path = path.with_name(path.name.replace("configuration_", "modeling_"))
    return path.read_text() if path.exists() else ""


def with_sections(value):
    """Three sections of what is rotated of 16 elements: models have their own, of larger heads, where a configuration has none."""
    pairs = int(8 * value.get("partial_rotary_factor", 1))
    return value | {"mrope_section": [pairs - 2 * (3 * pairs // 8), 3 * pairs // 8, 3 * pairs // 8]}


def row(name, value, old, layers):
    """A list, one entry for each layer, stage or convolution."""
    kind = type(value)
    counts = [old.get(n) for n in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers")]
    if not all(isinstance(x, (int, float, str, bool)) for x in value):
        return None
    if name.endswith(("layer_types", "block_types", "indexer_types")) or len(value) in counts and len(value) > 6:
        distinct = list(dict.fromkeys(value))
        return kind((distinct * layers)[:layers] if name.endswith("types") else value[:layers])
    if name == "depths" or name == "blocks_per_stage":
        return kind(1 for _ in value)
    if name == "image_size":
        return kind(32 for _ in value)
    if re.search(r"(indexes|indices|indexs|_layers|layer_idx)$", name) and all(isinstance(x, int) for x in value):
        small = [x for x in value if x < layers]
        return kind(small) if small and not name.startswith("_") else None
    if not all(isinstance(x, int) for x in value):
        return None
    if "heads" in name:
        return kind(max(1, x * 8 // max(value)) for x in value) if max(value) > 8 else None
    if name in ("conv_dim", "tdnn_dim"):
        return kind(32 for _ in value)
    if re.search(r"(hidden_sizes|embed_dims?|dims|channels|sizes|dim_per_stage)$", name) and max(value) > 128 and "kernel" not in name:
        return kind(max(8, x * 128 // max(value)) for x in value)
    return None


# Inputs.


def text(length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB - 12, (BATCH, length), generator=generator)


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def found(config, *names):
    """A field of a configuration, or of one inside it."""
    for name in names:
        if isinstance(getattr(config, name, None), (int, list, tuple)):
            return getattr(config, name)
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            value = found(inner, *names)
            if value is not None:
                return value
    return None


def candidates(config, names):
    """Inputs to try, the first that a model takes."""
    ids = {"input_ids": text()}
    if "decoder_input_ids" in names:
        ids["decoder_input_ids"] = text(7)
    side = found(config, "image_size")
    sides = list(side) if isinstance(side, (list, tuple)) else [side or 32] * 2
    pixels = noise(BATCH, found(config, "num_channels", "in_channels", "in_chans") or 3, *sides[-2:])
    mels = found(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "mel_bins") or 80
    frames = 2 * (found(config, "max_source_positions") or 32)
    decoder = {"decoder_input_ids": ids["decoder_input_ids"]} if "decoder_input_ids" in names else {}
    options = [
        ids,
        {"input_ids": text()[:, None].repeat(1, 2, 1)},
        {"pixel_values": pixels},
        ids | {"pixel_values": pixels},
        {"input_features": noise(BATCH, mels, frames)} | decoder,
        {"input_features": noise(BATCH, frames, mels)} | decoder,
        {"input_values": noise(BATCH, 1600)} | decoder,
        {"input_values": noise(BATCH, frames, mels)} | decoder,
        {"input_values": noise(BATCH, 1, 1600)},
        {"inputs_embeds": noise(BATCH, LENGTH, found(config, "hidden_size", "d_model") or 64)},
        {"hidden_states": noise(BATCH, LENGTH, found(config, "hidden_size", "d_model") or 64)},
        {"pixel_values": pixels[:, None].expand(-1, found(config, "num_frames") or 2, -1, -1, -1)},
        {"pixel_values_videos": pixels[:, None].expand(-1, found(config, "num_frames", "frames_per_clip") or 2, -1, -1, -1)},
        {"past_values": noise(BATCH, found(config, "context_length") or 32, found(config, "num_input_channels") or 1)},
    ]
    patch = found(config, "patch_size")
    if isinstance(patch, int):
        # Two images of 4 by 4 patches.
        rows = noise(32, pixels.shape[1] * (found(config, "temporal_patch_size") or 1) * patch * patch)
        options += [{name: rows, "grid_thw": torch.tensor([[1, 4, 4]] * 2)} for name in ("hidden_states", "pixel_values")]
    extra = {"bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)} if "bbox" in names else {}
    for option in options:
        if set(option) <= names:
            yield option | (extra if "input_ids" in option else {})


# Models.


def model_of(kind, config, attn):
    torch.manual_seed(7)
    return kind._from_config(copy.deepcopy(config), attn_implementation=attn).eval()


# Parameters that are exponents, steps or scales of recurrences.
KEPT = re.compile(r"A_log|dt_|\.D$|norm|scale|temperature|running|gamma|alpha|beta")


@torch.no_grad()
def spread(model):
    """Larger parameters: with initial ones scores are nearly equal, and no option of attention would matter."""
    generator = torch.Generator().manual_seed(5)
    for name, x in model.named_parameters():
        if KEPT.search(name) or not x.is_floating_point():
            continue
        if x.ndim >= 2:
            deviation = 1.0 if "embed" in name or "bias" in name else 1.2 / math.sqrt(max(1, x[0].numel() if x.ndim != 3 else x.shape[-1]))
        else:
            deviation = 0.3
        x.copy_(torch.randn(x.shape, generator=generator) * deviation)


def outputs(result):
    """Tensors of a result, without caches."""
    if torch.is_tensor(result):
        return [result] if result.is_floating_point() else []
    if isinstance(result, dict):
        result = [v for k, v in result.items() if "past_key_values" not in k and "cache" not in k and "attentions" not in k]
    if isinstance(result, (list, tuple)):
        return [x for part in result for x in outputs(part)]
    return []


def difference(got, want, seen=None, also=None):
    """The largest difference of two results, by the largest value of the second; of its elements that are the same in `also` alone, if given."""
    got, want = outputs(got), outputs(want)
    if [x.shape for x in got] != [x.shape for x in want]:
        return math.inf
    worst = 0.0
    for a, b, c in zip(got, want, outputs(also) if also is not None else want):
        if seen is not None and a.shape[:2] == seen.shape:
            a, b, c = a[seen], b[seen], c[seen]
        elif seen is not None and a.ndim > 1 and a.shape[1] == seen.shape[1]:
            continue
        finite = torch.isfinite(b)
        if b[finite].numel() == 0:
            continue
        if not torch.equal(finite, torch.isfinite(a)):
            return math.inf
        largest = b[finite].abs().max().clamp_min(1e-6)
        finite &= (b - c).abs() <= TOLERANCE * largest
        worst = max(worst, float((a[finite] - b[finite]).abs().max() / largest) if finite.any() else 0.0)
    return worst


def typical(got, want, _):
    """The median difference of two results: rounding to 8 bits flips choices of experts, for some of the tokens."""
    pairs = [(a.double(), b.double()) for a, b in zip(outputs(got), outputs(want)) if a.shape == b.shape and b.isfinite().all()]
    return max((float((a - b).abs().median() / b.abs().mean().clamp_min(1e-6)) for a, b in pairs), default=0.0)


def padding(side):
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    start, end = PADDED[side]
    mask[1, start:end] = 0
    return mask


def cases(inputs, names):
    """Calls to compare: arguments, and which tokens count."""
    yield "plain", inputs, None
    if "input_ids" not in inputs or inputs["input_ids"].ndim != 2 or "attention_mask" not in names:
        return
    for side in PADDED:
        mask = padding(side)
        seen = None if "decoder_input_ids" in inputs else mask.bool()
        yield side, inputs | {"attention_mask": mask}, seen
    if "logits_to_keep" in names and "decoder_input_ids" not in inputs:
        yield "logits_to_keep", inputs | {"logits_to_keep": 3}, None
    if "past_key_values" in names and "decoder_input_ids" not in inputs:
        allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1).clone()
        allowed[1, :, 4:, :3] = False
        yield "mask of 4 axes", inputs | {"attention_mask": torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)}, None


STORED = "FlashtileCache"
GENERATION = {"grown": {}, "static": {"cache_implementation": "static", "disable_compile": True}, "beams": {"num_beams": 3}, STORED: {}}


def generated(model, options, is_stored):
    if is_stored and model.config._attn_implementation == "flashtile":
        options = {"past_key_values": flashtile.transformers.FlashtileCache(model.config, k="f32", v="f32")} | options
    mask = padding("left")
    ids = text().masked_fill(mask == 0, 0)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0} | options
    made = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)
    return torch.stack(made.logits) if not options.get("num_beams") else made.sequences_scores


# Outcomes.

AUTOCAST = "autocast"
REFUSED, RIGHT, WRONG, NOT_BUILT, UNUSED = "refused", "right", "wrong", "not built", "right, without attention of its own"


def reason(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def counted():
    """Counts calls of flashtile."""
    real, calls = flashtile.transformers.attention, []

    @functools.wraps(real)
    def attention(*args, **options):
        calls.append(None)
        return real(*args, **options)

    flashtile.transformers.attention = attention
    return calls


@torch.no_grad()
def outcome(kind, calls):
    """The outcome for a class, and its detail."""
    try:
        config = shrunk(kind.config_class())
        eager = model_of(kind, config, "eager")
    except Exception as error:
        return NOT_BUILT, reason(error)
    if sum(x.numel() for x in eager.parameters()) > 3e7:
        return NOT_BUILT, f"{sum(x.numel() for x in eager.parameters()) / 1e6:.0f} million parameters"
    names = set(inspect.signature(eager.forward).parameters)
    refusal = refused(kind, config)
    if refusal is not None:
        return refusal
    inputs, error = run_first(eager, config, names)
    if inputs is None:
        return NOT_BUILT, "no inputs: " + error
    ours = model_of(kind, config, "flashtile")
    try:
        ours.load_state_dict(eager.state_dict())
    except Exception as error:
        return NOT_BUILT, "its parameters cannot be copied: " + reason(error)
    models = {"eager": eager, "flashtile": ours}
    done, wrong = [], []
    for call in calls_of(eager, inputs, names):
        verdict = compared(kind, config, models, call)
        (wrong if verdict not in ("right", "as sdpa", "no eager", REFUSED) else done).append(f"{call.name}: {verdict}")
    if wrong:
        return WRONG, "; ".join(wrong)
    return (RIGHT if calls else UNUSED), ", ".join(x.replace(": right", "") for x in done)


def refused(kind, config):
    """The outcome of a class that flashtile refuses when it is asked for, or None."""
    try:
        model_of(kind, config, "flashtile")
    except ValueError as error:
        if "flashtile" in str(error) and "does not" in str(error):
            return REFUSED, str(error)
        return WRONG, "when built: " + reason(error)
    except Exception as error:
        return WRONG, "when built: " + reason(error)
    return None


def run_first(model, config, names):
    """The first inputs that a model takes."""
    first_error = None
    for scaled in (True, False):
        for inputs in candidates(config, names):
            before = {k: v.clone() for k, v in model.state_dict().items()}
            try:
                if scaled:
                    spread(model)
                first = model(**inputs)
                again = model(**inputs)
            except Exception as error:
                first_error = first_error or reason(error)
                model.load_state_dict(before)
                continue
            tensors = outputs(first)
            if tensors and all(x.isfinite().any() for x in tensors) and difference(again, first) == 0:
                return inputs, None
            first_error = first_error or "results are not finite, or differ from call to call"
            model.load_state_dict(before)
    return None, first_error or "none that it takes are known"


@dataclasses.dataclass
class Call:
    """A call to compare: of a model, `make` returns a result and the tokens that count."""

    name: str
    make: object
    other: object = None


def calls_of(eager, inputs, names):
    for name, arguments, seen in cases(inputs, names):
        other = None
        if name in PADDED:
            ids = inputs["input_ids"]
            changed = arguments | {"input_ids": torch.where(arguments["attention_mask"] == 0, (ids + 5) % (VOCAB - 16) + 3, ids)}
            other = functools.partial(made_of, changed, seen)
        yield Call(name, functools.partial(made_of, arguments, seen), other)
    if eager.can_generate() and set(inputs) == {"input_ids"}:
        for name, options in GENERATION.items():
            yield Call(name, lambda model, n=name, o=options: (generated(model, o, n == STORED), None))
    yield Call(AUTOCAST, lambda model: (autocast(model, inputs), None))


def made_of(arguments, seen, model):
    return model(**arguments), seen


def autocast(model, inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return [x.float() for x in outputs(model(**inputs))]


def compared(kind, config, models, call):
    """The verdict of one call. A row that sees no key is a mean in `eager` and 0 in flashtile; what of a result has such rows in it changes with
    the tokens that are padding, which `call.other` has instead, and means nothing."""
    tolerance = 0.1 if call.name == AUTOCAST else TOLERANCE
    far = typical if tolerance != TOLERANCE else difference
    try:
        want, seen = call.make(models["eager"])
    except Exception:
        return "no eager"
    try:
        got, _ = call.make(models["flashtile"])
    except Exception as error:
        if call.name == STORED and STORED in str(error):
            return REFUSED
        verdict = reason(error)
    else:
        worst = far(got, want, seen)
        if worst > tolerance and call.other is not None:
            worst = difference(got, want, seen, call.other(models["eager"])[0])
        if worst <= tolerance:
            return "right"
        verdict = f"{worst:.1e} from eager"
    try:
        if "sdpa" not in models:
            models["sdpa"] = model_of(kind, config, "sdpa")
            models["sdpa"].load_state_dict(models["eager"].state_dict())
        theirs, _ = call.make(models["sdpa"])
    except Exception as error:
        return f"{verdict} (sdpa: {reason(error)[:60]})"
    if "from eager" in verdict and far(got, theirs, seen) <= tolerance:
        return "as sdpa"
    return f"{verdict} (sdpa: {far(theirs, want, seen):.1e})"


# The sweep.


def folders():
    root = pathlib.Path(transformers.__file__).parent / "models"
    return sorted({p.parent.name for p in root.glob("*/modeling_*.py")})


def classes(folder):
    """Model classes of a folder."""
    root = pathlib.Path(transformers.__file__).parent / "models"
    for path in sorted((root / folder).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{folder}.{path.stem}")
        for name, kind in vars(module).items():
            model = inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__
            # Bases have no forward.
            if model and kind.forward is not torch.nn.Module.forward and kind.config_class is not None:
                yield name, kind


class Late(BaseException):
    """A class has had its time; no handler of errors stops this."""


def sweep(folder, limit, write):
    """Outcomes of the classes of one folder, written one by one."""
    torch.set_num_threads(1)
    flashtile.transformers.register()
    calls = counted()

    def late(*_):
        raise Late(f"more than {limit} s of CPU time")

    signal.signal(signal.SIGPROF, late)
    try:
        every = list(classes(folder))
    except Exception as error:
        return write([folder, NOT_BUILT, reason(error)])
    for name, kind in every:
        calls.clear()
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            result = outcome(kind, calls)
        except Late as error:
            result = NOT_BUILT, reason(error)
        except Exception as error:
            result = WRONG, reason(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        write([f"{folder}.{name}", *result])


def child(folder, limit):
    """A process that sweeps one folder, and the pipe on which it writes lines of JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    with os.fdopen(writer, "w") as pipe:
        sweep(folder, limit, lambda line: print(json.dumps(line), file=pipe, flush=True))
    os._exit(0)


def run(names, jobs, limit):
    """Outcomes of all classes of some folders: each folder in a process of its own, which is ended after a while."""
    waiting, running, results = list(names), {}, {}
    while waiting or running:
        while waiting and len(running) < jobs:
            folder = waiting.pop(0)
            pid, reader = child(folder, limit)
            running[reader] = (folder, pid, time.monotonic(), bytearray())
        ready, _, _ = select.select(list(running), [], [], 1)
        for reader, (folder, pid, start, read) in list(running.items()):
            data = os.read(reader, 1 << 16) if reader in ready else b""
            read += data
            over = time.monotonic() - start > 20 * limit
            if (reader in ready and not data) or over:
                if over:
                    os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                os.close(reader)
                del running[reader]
                for line in read.decode().splitlines():
                    name, what, detail = json.loads(line)
                    results[name] = (what, detail)
                    print(f"DONE {what:9} {name} {detail}", flush=True)
                if status:
                    results[folder] = (WRONG, f"the process ended with status {status}")
    return results


def report(results, out):
    """Prints counts and what is wrong, and writes the classes by outcome."""
    by = {}
    for name, (what, detail) in sorted(results.items()):
        by.setdefault(what, {})[name] = detail
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {len(results)} classes")
    for what, named in sorted(by.items()):
        print(f"  {what}: {len(named)} classes in {len({n.partition('.')[0] for n in named})} folders")
    for name, detail in by.get(WRONG, {}).items():
        print(f"WRONG {name}: {detail}")
    if out:
        pathlib.Path(out).write_text(json.dumps(by, indent=1, sort_keys=True) + "\n")
    return 1 if by.get(WRONG) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int, default=60, help="seconds for a class")
    parser.add_argument("--part", action="store_true")
    options = parser.parse_args()
    names = options.names or (PART if options.part else folders())
    return report(run(names, options.jobs, options.limit), options.out)


if __name__ == "__main__":
    sys.exit(main())
