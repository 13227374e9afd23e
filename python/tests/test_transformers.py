"""Models of Hugging Face transformers: logits by flashtile against `eager` and `sdpa`. `sweep_transformers.py` has every model class."""

import copy
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
# Models compute the same beside attention: only the rounding of attention differs.
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
def test_a_decoder_whose_layers_call_themselves_not_causal():
    """PEGASUS-X: masks of transformers hide later tokens, also where there is no padding."""
    config, ids, results = transformers.PegasusXConfig(**TOKENS, **BOTH, d_model=64, block_size=8, num_global_tokens=4), prompt(), {}
    for attn in ("flashtile", "eager"):
        torch.manual_seed(7)
        model = transformers.PegasusXModel._from_config(copy.deepcopy(config), attn_implementation=attn).eval()
        results[attn] = model(ids, decoder_input_ids=ids[:, :9]).last_hidden_state
    torch.testing.assert_close(results["flashtile"], results["eager"], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_loaded_model_changes_its_attention(monkeypatch):
    model, ids = decoder("llama", "eager"), prompt()
    model.set_attn_implementation("flashtile")
    counted = calls(monkeypatch)
    assert torch.equal(model(ids).logits, decoder("llama", "flashtile")(ids).logits) and len(counted) == 4


@torch.no_grad()
def test_compile():
    # A graph of another test would be taken, whose compiler is another.
    torch._dynamo.reset()
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


@pytest.mark.parametrize("name", DECODERS)
def test_parameters_have_gradients(name):
    """The gradient of every parameter, with windows, softcap and sinks, from a batch with padding on either side."""
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[1, :6], mask[2, -4:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    # A padded token, whose query sees no key, predicts the first one after it.
    labels[1, 6] = -100
    found = {}
    for attn in ("flashtile", "eager"):
        model = decoder(name, attn).train()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        found[attn] = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert found["flashtile"].keys() == found["eager"].keys()
    assert name != "gpt-oss" or any(key.endswith("sinks") for key in found["flashtile"])
    for key, want in found["eager"].items():
        got, scale = found["flashtile"][key], want.abs().max()
        assert scale > 0 and (got - want).abs().max() <= 1e-5 * scale, key


def test_position_biases_have_gradients():
    """T5 learns a bias of scores, and has it from the mask's gradient."""
    found = {}
    for attn in ("flashtile", "eager"):
        torch.manual_seed(7)
        kind, options, _ = OTHERS["t5"]
        config = getattr(transformers, f"{kind}Config")(**options, decoder_start_token_id=0, dropout_rate=0.0)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attn, dtype=torch.float32).train()
        model(prompt(), labels=prompt()).loss.backward()
        found[attn] = {key: x.grad for key, x in model.named_parameters() if "relative_attention_bias" in key}
    assert len(found["eager"]) == 2
    for key, want in found["eager"].items():
        assert (found["flashtile"][key] - want).abs().max() <= 1e-5 * want.abs().max() > 0


def test_refusals():
    ids = prompt()
    dropping = decoder("llama", "flashtile")
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="dropout is 0.5"):
        dropping.train()(ids)


def test_registering_twice_changes_nothing():
    from transformers.utils import generic

    before = generic.is_flash_attention_requested
    flashtile.transformers.register()
    assert generic.is_flash_attention_requested is before
    asked = {name: before(requested_attention_implementation=name) for name in ("flashtile", "flash_attention_2", "sdpa")}
    assert asked == {"flashtile": False, "flash_attention_2": True, "sdpa": False}


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# Models that add the mask to scores of their own, that choose classes by the name of the attention, and that leave it open whether they are causal.
OWN = {
    "Bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "MPNet": SMALL,
    "RoFormer": SMALL,
    "Mpt": {"vocab_size": 97, "d_model": 32, "n_layers": 1, "n_heads": 4},
    "XGLM": {"vocab_size": 97, "d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 48},
    "Falcon": {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    "GPTNeo": {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "Data2VecVision": {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 32, "patch_size": 16},
    "Splinter": SMALL,
}


def refused(name):
    return pytest.raises(ValueError, match=rf"^{name} does not support attn_implementation='flashtile': ")


@pytest.mark.parametrize("name", OWN)
def test_models_with_attention_of_their_own_are_refused_when_asked_for(name, tmp_path):
    """On each way to ask, with the name of the model."""
    kind, model = getattr(transformers, name + "Config"), getattr(transformers, name + "Model")
    config = kind(**OWN[name])
    for build in (model._from_config, transformers.AutoModel.from_config):
        with refused(name + "Model"):
            build(copy.deepcopy(config), attn_implementation="flashtile")
    by_hand = copy.deepcopy(config)
    by_hand._attn_implementation = "flashtile"
    with refused(name + "Model"):
        model(by_hand)
    built = model(copy.deepcopy(config))
    with refused(name + "Model"):
        built.set_attn_implementation("flashtile")
    assert built.config._attn_implementation != "flashtile"
    built.save_pretrained(tmp_path)
    with refused(name + "Model"):
        model.from_pretrained(tmp_path, attn_implementation="flashtile")


@torch.no_grad()
def test_a_name_written_into_the_configuration_of_a_built_model_is_refused():
    model = transformers.BloomModel(transformers.BloomConfig(**OWN["Bloom"])).eval()
    model.config._attn_implementation = "flashtile"
    with refused("Bloom.*"):
        model(prompt())


PARTS = {"encoder": ("BertConfig", SMALL), "decoder": ("RoFormerConfig", SMALL | {"is_decoder": True, "add_cross_attention": True})}


@torch.no_grad()
def test_a_model_with_one_part_that_cannot():
    """The whole is refused by the name of that part; its other part takes flashtile where it is named, and is right."""
    made = {name: getattr(transformers, kind)(**options) for name, (kind, options) in PARTS.items()}
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(made["encoder"], made["decoder"])
    whole = transformers.EncoderDecoderModel
    with refused("RoFormerForCausalLM"):
        whole._from_config(copy.deepcopy(config), attn_implementation="flashtile")
    torch.manual_seed(7)
    model = whole._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ids, mask = prompt(), torch.ones(3, 21, dtype=torch.long)
    mask[1, 9:] = 0
    want = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5]).logits
    named = whole._from_config(copy.deepcopy(config), attn_implementation={"encoder": "flashtile", "decoder": "eager"})
    assert named.encoder.config._attn_implementation == "flashtile" and named.decoder.config._attn_implementation == "eager"
    for asked in ("flashtile", {"encoder": "flashtile", "decoder": "flashtile"}, {"decoder": "flashtile"}):
        with refused("RoFormer.*"):
            model.set_attn_implementation(asked)
        assert model.encoder.config._attn_implementation == model.decoder.config._attn_implementation == "eager"
    model.set_attn_implementation({"encoder": "flashtile"})
    assert model.encoder.config._attn_implementation == "flashtile"
    got = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5]).logits
    assert 0 < (got - want).abs().max() < 1e-5


# Attention by its definition, for the arguments that models pass.


class Layer(torch.nn.Module):
    """A layer as models have them."""

    def __init__(self, **fields):
        super().__init__()
        for name, value in fields.items():
            setattr(self, name, value)


def tensors(batch=2, heads=4, kv_heads=2, q_len=7, kv_len=7, dim=16):
    torch.manual_seed(3)
    return torch.randn(batch, heads, q_len, dim), torch.randn(batch, kv_heads, kv_len, dim), torch.randn(batch, kv_heads, kv_len, dim)


def defined(q, k, v, visible=None, sinks=None):
    """`(batch, q_len, heads, dim)` by its definition, in float64; sinks `(batch, heads, q_len, 1)`."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2).float()


CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()


@torch.no_grad()
def test_arguments_that_nobody_knows_are_errors():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="Layer passes head_gain, score_shift to attention"):
        flashtile.transformers.attention_forward(Layer(is_causal=True), q, k, v, None, score_shift=1.0, head_gain=2.0, other=None)
    harmless = {name: 1 for name in flashtile.transformers.HARMLESS}
    got, _ = flashtile.transformers.attention_forward(Layer(is_causal=True), q, k, v, None, unknown=None, **harmless)
    torch.testing.assert_close(got, defined(q, k, v, CAUSAL), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@torch.no_grad()
def test_chosen_keys(mask):
    """`indices` of sparse attention: each query sees its keys that are both chosen and visible."""
    q, k, v = tensors()
    indices = torch.stack([torch.randperm(7)[:3].sort().values for _ in range(14)]).view(2, 7, 3)
    indices[..., 0] = 0
    chosen = torch.zeros(2, 7, 7, dtype=torch.bool).scatter(-1, indices, True)[:, None]
    masks = {"none": None, "bool": CAUSAL.expand(2, 1, 7, 7), "additive": torch.zeros(2, 1, 7, 7).masked_fill(~CAUSAL, torch.finfo(q.dtype).min)}
    got, _ = flashtile.transformers.attention_forward(Layer(is_causal=True), q, k, v, masks[mask], indices=indices)
    torch.testing.assert_close(got, defined(q, k, v, chosen & CAUSAL), rtol=0, atol=1e-5)


@torch.no_grad()
def test_sinks_of_queries():
    """A sink for each query and head, and queries that see no key, of which only the sink is left."""
    q, k, v = tensors()
    sinks, visible = torch.randn(2, 4, 7, 1), CAUSAL.expand(2, 1, 7, 7).clone()
    visible[1, :, 2] = False
    got, _ = flashtile.transformers.attention_forward(Layer(is_causal=True), q, k, v, visible, sinks=sinks)
    torch.testing.assert_close(got, defined(q, k, v, visible, sinks), rtol=0, atol=1e-5)
    assert (got[1, 2] == 0).all()


@torch.no_grad()
def test_packed_sequences():
    """`cu_seq_lens_q` of sequences that lie one after another, where no mask tells them apart."""
    q, k, v = tensors(batch=1)
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    of = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for causal in (True, False):
        got, _ = flashtile.transformers.attention_forward(Layer(is_causal=causal), q, k, v, None, **options)
        visible = (of[:, None] == of) & (CAUSAL if causal else True)
        torch.testing.assert_close(got, defined(q, k, v, visible), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="cu_seq_lens_q is given for a batch of 2, expected 1"):
        flashtile.transformers.attention_forward(Layer(is_causal=True), *tensors(), None, **options)


@torch.no_grad()
def test_packed_sequences_of_a_model_that_sees_all_keys():
    """Such a model makes a mask, which hides nothing and does not keep the sequences from being told apart."""
    config = transformers.BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37)
    config._attn_implementation = "flashtile"
    model = transformers.BertModel(config).eval()
    ids = torch.randint(0, 99, (1, 7))
    ends, positions = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = model(ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=4, max_length_k=4)
    apart = [model(ids[:, part]).last_hidden_state for part in (slice(0, 3), slice(3, 7))]
    torch.testing.assert_close(packed.last_hidden_state, torch.cat(apart, 1), rtol=0, atol=1e-5)


@torch.no_grad()
def test_layers_that_call_themselves_causal_in_a_model_that_sees_all_keys():
    q, k, v = tensors()
    make = flashtile.transformers._masks(lambda **_: None)
    for size in ({"q_length": 7}, {"cache_position": torch.arange(7)}):
        mask = make(batch_size=2, kv_length=7, allow_is_bidirectional_skip=True, **size)
        got, _ = flashtile.transformers.attention_forward(Layer(is_causal=True), q, k, v, mask)
        torch.testing.assert_close(got, defined(q, k, v), rtol=0, atol=1e-5)
    assert make(batch_size=2, q_length=7, kv_length=7) is None


@torch.no_grad()
def test_layers_that_do_not_say_whether_they_are_causal():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="Layer does not say whether it is causal, and gives no mask"):
        flashtile.transformers.attention_forward(Layer(), q, k, v, None)
    for options in ({"is_causal": False}, {"attention_mask": torch.ones(2, 1, 7, 7, dtype=torch.bool)}):
        got, _ = flashtile.transformers.attention_forward(Layer(), q, k, v, **{"attention_mask": None} | options)
        torch.testing.assert_close(got, defined(q, k, v), rtol=0, atol=1e-5)


@pytest.mark.parametrize("which", ["queries", "keys"])
@torch.no_grad()
def test_one_batch_for_all(which):
    """Learned queries of batch 1, or keys of batch 1, stand for every entry of the other batch, as in `sdpa`."""
    q, k, v = tensors()
    if which == "queries":
        q = q[:1]
    else:
        k, v = k[:1], v[:1]
    got, _ = flashtile.transformers.attention_forward(Layer(is_causal=False), q, k, v, None)
    q, k, v = (x.expand(2, -1, -1, -1) for x in (q, k, v))
    torch.testing.assert_close(got, defined(q, k, v), rtol=0, atol=1e-5)


@torch.no_grad()
def test_autocast():
    """Tensors of several dtypes are cast as PyTorch casts them for `scaled_dot_product_attention`; without autocast they are refused."""
    q, k, v = tensors()
    v = v.bfloat16()
    layer = Layer(is_causal=True, num_key_value_groups=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = flashtile.transformers.attention_forward(layer, q, k, v, None)
        want, _ = transformers.AttentionInterface()["sdpa"](layer, q, k, v, None)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0, atol=3e-2)
    with pytest.raises(TypeError, match="v is bf16, expected f32"):
        flashtile.transformers.attention_forward(layer, q, k, v, None)


@torch.no_grad()
def test_attentions_are_none_with_a_warning(monkeypatch):
    """As in `sdpa`: a call goes on, a configuration is refused."""
    from transformers.utils import logging

    warned = []
    monkeypatch.setattr(type(logging.get_logger("flashtile.transformers")), "warning_once", lambda _, text: warned.append(text))
    q, k, v = tensors()
    got, probabilities = flashtile.transformers.attention_forward(Layer(is_causal=True), q, k, v, None, output_attentions=True)
    torch.testing.assert_close(got, defined(q, k, v, CAUSAL), rtol=0, atol=1e-5)
    assert probabilities is None and "output_attentions gives None" in warned[0]
    for attn in ("flashtile", "sdpa"):
        with pytest.raises(ValueError, match="output_attentions"):
            decoder("llama", attn).config.output_attentions = True


# Models that once were wrong.

SPARSE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16,
    "first_k_dense_replace": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHARED = {
    **SMALL, "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "sliding_window": 64,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TRAPS = {"DeepseekV32": ("DeepseekV32Config", SPARSE), "Gemma4": ("Gemma4TextConfig", SHARED)}


@pytest.mark.parametrize("name", TRAPS)
@torch.no_grad()
def test_chosen_keys_and_shared_keys_of_models(name):
    """Logits of a prompt, of its end alone, and of tokens after it by caches that grow or have a fixed size."""
    kind, options = TRAPS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    config, ids, results = getattr(transformers, kind)(**options), prompt(2, 24), {}
    for attn in ("eager", "flashtile"):
        torch.manual_seed(0)
        model = getattr(transformers, name + "ForCausalLM")._from_config(copy.deepcopy(config), attn_implementation=attn).eval()
        results[attn] = [model(ids).logits, model(ids, logits_to_keep=3).logits, model(ids, logits_to_keep=1).logits]
        for cache in (None, "static"):
            made = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
            made |= {"cache_implementation": cache, "disable_compile": True}
            results[attn].append(torch.stack(model.generate(ids, attention_mask=torch.ones_like(ids), **made).logits))
    for got, want in zip(results["flashtile"], results["eager"]):
        torch.testing.assert_close(got, want, rtol=0, atol=float(1e-5 * want.abs().max()))
