"""Models of Hugging Face transformers: logits by flashtile against `eager` and `sdpa`."""

import os

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import flashtile.transformers  # noqa: E402

flashtile.transformers.register()

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ["sliding_attention", "full_attention"]
DECODERS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": LAYERS}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24, "layer_types": LAYERS}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 24, "layer_types": LAYERS}),
    "gpt-oss": ("GptOssConfig", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": LAYERS}),
}
# What the models compute beside attention is the same: only the rounding of attention differs.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2}

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {name: SIZES[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
BOTH = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in [("layers", 2), ("attention_heads", 4), ("ffn_dim", 128)]}
# Class, configuration, and how many layers attend.
OTHERS = {
    "bert": ("Bert", {**WIDTHS, **TOKENS}, 2),
    "modernbert": ("ModernBert", {**WIDTHS, **TOKENS, "local_attention": 8, "global_attn_every_n_layers": 2}, 2),
    "t5": ("T5", {**TOKENS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}, 6),
    "bart": ("Bart", {**TOKENS, **BOTH, "d_model": 64, "max_position_embeddings": 128}, 6),
}


def decoder(name, attn, dtype=torch.float32):
    """A model with random parameters, the same for every attention."""
    config, options = DECODERS[name]
    config = getattr(transformers, config)(**SIZES, **options)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=dtype).eval()
    assert model.config._attn_implementation == attn
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Initial parameters are small: scores would be nearly equal, and no option of attention would matter.
            if "_proj" in parameter_name and parameter.ndim == 2:
                parameter.mul_(8)
            if parameter_name.endswith("sinks"):
                parameter.normal_()
    return model


def others(name):
    # Each has a reference that knows its options: sdpa has neither softcap nor sinks.
    return ["eager"] if name in ("gpt-oss", "gemma2") else ["eager", "sdpa"]


def prompt(batch=3, length=21):
    torch.manual_seed(1)
    return torch.randint(3, SIZES["vocab_size"], (batch, length))


def calls(monkeypatch):
    """Counts what flashtile computes."""
    counted, real = [], flashtile._torch.attention

    def attention(q, k, v, options, out=None):
        counted.append((tuple(q.shape), k.shape[2], options))
        return real(q, k, v, options, out)

    monkeypatch.setattr(flashtile._torch, "attention", attention)
    return counted


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_logits(monkeypatch, name, dtype):
    ids, counted = prompt(), calls(monkeypatch)
    # Padding on the left and on the right.
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    mask[2, -4:] = 0
    ours = decoder(name, "flashtile", dtype)
    for inputs in ({}, {"attention_mask": mask}):
        got = ours(ids, **inputs).logits.float()
        assert len(counted) == 2, "a layer was computed by something else"
        counted.clear()
        for other in others(name):
            want = decoder(name, other, dtype)(ids, **inputs).logits.float()
            seen = mask.bool() if inputs else torch.ones_like(ids, dtype=torch.bool)
            scale = want[seen].abs().max()
            difference = (got - want)[seen].abs().max() / scale
            assert difference < TOLERANCE[dtype], f"{difference:.2e} from {other}"
            assert got[seen].std() > 0


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_generation(name, cache):
    """64 greedy tokens of a batch with padding on the left, by a cache that grows or one of fixed size."""
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    ids[mask == 0] = 0
    options = {"attention_mask": mask, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    options |= {"max_new_tokens": 64, "min_new_tokens": 64}
    got = decoder(name, "flashtile").generate(ids, **options)
    for other in others(name):
        assert torch.equal(got, decoder(name, other).generate(ids, **options))
    assert got.shape[1] == ids.shape[1] + 64 and len(got[:, ids.shape[1] :].unique()) > 8


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_decoding_is_prefill(name):
    """Logits token by token through a cache equal the ones of the whole prompt."""
    model, ids = decoder(name, "flashtile"), prompt(2, 15)
    want = model(ids).logits
    past = model(ids[:, :9], use_cache=True)
    logits, cache = [past.logits], past.past_key_values
    for at in range(9, 15):
        step = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        logits.append(step.logits)
        cache = step.past_key_values
    torch.testing.assert_close(torch.cat(logits, 1), want, rtol=0, atol=float(2e-5 * want.abs().max()))


@torch.no_grad()
def test_the_window_matters():
    """Without its window a model gives other logits, so that the tests above see it."""
    ids = prompt()
    model = decoder("qwen3", "flashtile")
    windowed = model(ids).logits
    wide = decoder("qwen3", "flashtile")
    wide.config.sliding_window = 200
    assert (wide(ids).logits - windowed).abs().max() > 1e-2 * windowed.abs().max()


@torch.no_grad()
def test_minilm():
    """Sentence embeddings by the parameters of all-MiniLM-L6-v2, with padding, where FLASHTILE_MINILM names a folder with them."""
    folder = os.environ.get("FLASHTILE_MINILM")
    if not folder:
        pytest.skip("FLASHTILE_MINILM names no folder")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "tokenizer.json"), pad_token="[PAD]")
    sentences = ["A cat sits on the mat.", "Attention is a mean of values by the softmax of their scores.", "Rain."]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    seen = inputs["attention_mask"].bool()
    results = {}
    for attn in ("flashtile", "eager", "sdpa"):
        model = transformers.BertModel.from_pretrained(folder, attn_implementation=attn).eval()
        results[attn] = model(**inputs).last_hidden_state
    for other in ("eager", "sdpa"):
        assert (results["flashtile"] - results[other])[seen].abs().max() < 1e-5
    assert results["flashtile"][seen].std() > 0.1


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_encoders(monkeypatch, name):
    """Attention to both sides, within windows, with position biases, and from decoders to encoders of another length."""
    kind, options, layers = OTHERS[name]
    config = getattr(transformers, kind + "Config")(**options)
    ids, counted, results = prompt(), calls(monkeypatch), {}
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    inputs = {"decoder_input_ids": ids[:, :9]} if config.is_encoder_decoder else {}
    for attn in ("flashtile", "eager", "sdpa"):
        torch.manual_seed(7)
        model = transformers.AutoModel.from_config(config, attn_implementation=attn).eval()
        results[attn] = model(ids, attention_mask=mask, **inputs).last_hidden_state
    assert len(counted) == layers
    seen = torch.ones(3, 9, dtype=torch.bool) if inputs else mask.bool()
    for other in ("eager", "sdpa"):
        assert (results["flashtile"] - results[other])[seen].abs().max() < 1e-5
    assert results["flashtile"][seen].std() > 0.1


@torch.no_grad()
def test_a_loaded_model_changes_its_attention(monkeypatch):
    model, ids = decoder("llama", "eager"), prompt()
    model.set_attn_implementation("flashtile")
    counted = calls(monkeypatch)
    assert torch.equal(model(ids).logits, decoder("llama", "flashtile")(ids).logits) and len(counted) == 4


@torch.no_grad()
def test_compile():
    model, ids = decoder("llama", "flashtile"), prompt()
    want = model(ids, use_cache=False).logits
    targets = []

    def backend(module, _):
        targets.extend(node.target for node in module.graph.nodes)
        return module.forward

    got = torch.compile(model, backend=backend, fullgraph=True)(ids, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    kept = [target for target in targets if "flashtile" in str(target)]
    assert len(kept) == 2, targets


def test_refusals():
    model, ids = decoder("llama", "flashtile"), prompt()
    with pytest.raises(ValueError, match="flashtile computes no gradients"):
        model(ids)
    config, _ = DECODERS["llama"]
    dropping = decoder("llama", "flashtile")
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad(), pytest.raises(ValueError, match="dropout is 0.5"):
        dropping.train()(ids)


def test_registering_twice_changes_nothing():
    from transformers.utils import generic

    before = generic.is_flash_attention_requested
    flashtile.transformers.register()
    assert generic.is_flash_attention_requested is before
    asked = {name: before(requested_attention_implementation=name) for name in ("flashtile", "flash_attention_2", "sdpa")}
    assert asked == {"flashtile": False, "flash_attention_2": True, "sdpa": False}
