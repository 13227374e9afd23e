"""A cache of Hugging Face transformers over codes: generation by small models against `eager` with transformers' own cache."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import flashtile._batch  # noqa: E402
from flashtile.transformers import FlashtileCache  # noqa: E402
from test_transformers import DECODERS, SIZES, TRAPS, decoder, prompt  # noqa: E402

PLAIN = {"k": "f32", "v": "f32"}
WINDOWED = [name for name in DECODERS if name != "llama"]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def padded(ids):
    """A mask of a batch of 3 with padding on the left of one sequence."""
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    ids[mask == 0] = 0
    return mask


def options(ids, mask=None, tokens=24, **others):
    mask = torch.ones_like(ids) if mask is None else mask
    return {"attention_mask": mask, "do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, **others}


def pair(name, **codecs):
    """A model with flashtile's attention, an empty cache for it, and the model with `eager`."""
    model = decoder(name, "flashtile")
    return model, FlashtileCache(model.config, **PLAIN | codecs), decoder(name, "eager")


def close(got, want, atol=2e-5):
    torch.testing.assert_close(got, want, rtol=0, atol=float(atol * want.abs().max()))


# generate().


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("length", [21, 90])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy(name, length, is_padded):
    """A batch, with prompts that fit into a ring and longer ones."""
    ids = prompt(3, length)
    mask = padded(ids) if is_padded else None
    model, cache, eager = pair(name)
    got = model.generate(ids, past_key_values=cache, **options(ids, mask))
    assert torch.equal(got, eager.generate(ids, **options(ids, mask)))
    assert cache.get_seq_length() == length + 23 and len(got[:, length:].unique()) > 4


def test_greedy_in_f16():
    ids = prompt()
    model, cache, eager = pair("llama", k="f16", v="f16")
    assert torch.equal(model.generate(ids, past_key_values=cache, **options(ids, padded(ids))), eager.generate(ids, **options(ids, padded(ids))))


@pytest.mark.parametrize("codecs, bound", [(("f16", "bf16"), 0.02), (("int8", "int8"), 0.05), (("int8", "tq4"), 0.3)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_over_codes(name, codecs, bound):
    """Over codes results differ, by as much as codes do, in a prompt and in the tokens after it."""
    ids = prompt(2, 40)
    model, cache, eager = pair(name, k=codecs[0], v=codecs[1])
    want = eager(ids).logits
    got = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([30, 1, 9], 1)], 1)
    difference = ((got - want).square().mean() / want.square().mean()).sqrt()
    assert 1e-5 < difference < bound


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt-oss"])
def test_beam_search(name):
    """Beams go on from others: pages are shared, and rings copied."""
    ids = prompt()
    given = options(ids, padded(ids), num_beams=4, num_return_sequences=2)
    model, cache, eager = pair(name)
    assert torch.equal(model.generate(ids, past_key_values=cache, **given), eager.generate(ids, **given))
    assert cache.batch_size == 12


def test_samples():
    ids, results = prompt(), []
    given = options(ids, padded(ids), num_return_sequences=3) | {"do_sample": True}
    model, cache, eager = pair("llama")
    for run in (lambda: model.generate(ids, past_key_values=cache, **given), lambda: eager.generate(ids, **given)):
        torch.manual_seed(3)
        results.append(run())
    assert torch.equal(*results) and len(results[0]) == 9


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("by", ["prompt lookup", "assistant"])
def test_candidates_are_cropped(name, by, monkeypatch):
    """Speculative decoding takes back the candidates that the model does not choose."""
    cropped, crop = [], FlashtileCache.crop
    monkeypatch.setattr(FlashtileCache, "crop", lambda self, n: (cropped.append(n), crop(self, n)))
    ids = prompt(1, 40)
    ids[:, 20:] = ids[:, :20]
    model, cache, eager = pair(name)
    helper = {"prompt_lookup_num_tokens": 5} if by == "prompt lookup" else {"assistant_model": decoder("qwen3", "sdpa")}
    got = model.generate(ids, past_key_values=cache, **options(ids, tokens=40), **helper)
    assert torch.equal(got, eager.generate(ids, **options(ids, tokens=40)))
    assert min(cropped) < 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_turns(name):
    """A conversation goes on in its cache; after `reset` the cache is as a new one, for another batch too."""
    model, cache, eager = pair(name)
    theirs = transformers.DynamicCache(config=eager.config)
    ids = prompt(1, 11)
    for turn in range(3):
        got = model.generate(ids, past_key_values=cache, **options(ids))
        assert torch.equal(got, eager.generate(ids, past_key_values=theirs, **options(ids)))
        ids = torch.cat([got, prompt(1, 9 + 60 * turn)], 1)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1 and cache.memory()["bytes_used"] == 0
    ids = prompt(3, 12)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options(ids)), eager.generate(ids, **options(ids)))


def test_generation_that_returns_its_cache():
    ids = prompt()
    model, cache, _ = pair("llama")
    made = model.generate(ids, past_key_values=cache, return_dict_in_generate=True, **options(ids, tokens=3))
    assert made.past_key_values is cache


# Padding.


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_padding_is_not_stored(name):
    """Rows of padding are NaN in the model, and change nothing: logits are the ones of each sequence alone."""
    ids = prompt(3, 90)
    mask = padded(ids)
    mask[2, :50], ids[2, :50] = 0, 0
    model, cache, _ = pair(name)
    alone = [model(each[None, seen.bool()], past_key_values=FlashtileCache(model.config, **PLAIN)).logits[0] for each, seen in zip(ids, mask)]
    embed = model.get_input_embeddings()
    real_forward = embed.forward
    embed.forward = lambda x: real_forward(x).masked_fill((x == 0)[..., None], float("nan"))
    cut = 80
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    first = model(ids[:, :cut], attention_mask=mask[:, :cut], position_ids=positions[:, :cut], past_key_values=cache).logits
    rest = [
        model(ids[:, at : at + 1], attention_mask=mask[:, : at + 1], position_ids=positions[:, at : at + 1], past_key_values=cache).logits
        for at in range(cut, 90)
    ]
    logits = torch.cat([first, *rest], 1)
    for got, seen, want in zip(logits, mask.bool(), alone):
        close(got[seen], want)
    full = next(batch for batch in cache._batches if batch.window is None)
    assert full._lens == mask.sum(1).tolist() and cache.get_seq_length() == 90
    assert all(batch.window is not None or batch.memory()["pages"] - batch.memory()["pages_free"] == 6 + 6 + 3 for batch in cache._batches)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_padding_between_turns(name):
    """Padding in a later turn, within windows of transformers, which count it."""
    ids = prompt(3, 30)
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, 12:17] = mask[2, 28:] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model, cache, eager = pair(name)
    want = eager(ids, attention_mask=mask, position_ids=positions).logits
    got, at = [], 0
    for length in (12, 7, 1, 10):
        part = slice(at, at + length)
        got.append(model(ids[:, part], attention_mask=mask[:, : at + length], position_ids=positions[:, part], past_key_values=cache).logits)
        at += length
    close(torch.cat(got, 1)[mask.bool()], want[mask.bool()])


def test_masks_that_do_not_hide_padding_are_refused():
    ids = prompt()
    mask = padded(ids)
    model, cache, _ = pair("llama")
    model(ids, attention_mask=mask, past_key_values=cache)
    one = ids[:, :1]
    with pytest.raises(ValueError, match="no mask, and the cache left out padding"):
        model(one, past_key_values=cache)
    shown = torch.ones(3, 22, dtype=torch.long)
    shown[0, 0] = 0
    with pytest.raises(ValueError, match="lets sequence 1 see positions of padding"):
        model(one, attention_mask=shown, past_key_values=cache)
    with pytest.raises(ValueError, match="hides all new positions"):
        model(one, attention_mask=torch.cat([mask, torch.zeros_like(one)], 1), past_key_values=cache)
    assert cache.get_seq_length() == 21
    got = model(one, attention_mask=torch.cat([mask, torch.ones_like(one)], 1), past_key_values=cache).logits
    assert got.isfinite().all() and cache.get_seq_length() == 22


# Masks of the caller.


@pytest.mark.parametrize("kind", ["bool", "additive", "bias"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_masks_of_the_caller(name, kind):
    """Four axes, neither causal nor of windows, for all layers: a prompt that sees itself in both directions, then tokens that see a part."""
    torch.manual_seed(5)
    ids = prompt(2, 12)
    visible = torch.rand(2, 1, 12, 12) < 0.6
    # Later tokens come in another call; layers with a window of 8 have no others.
    query, key = torch.arange(12)[:, None], torch.arange(12)
    visible &= (query - key < 8) & ((key < 9) | (key <= query))
    visible |= torch.eye(12, dtype=torch.bool)
    mask = torch.zeros(visible.shape) if kind != "bias" else torch.randn(visible.shape)
    mask = mask.masked_fill(~visible, torch.finfo(torch.float32).min)
    model, cache, eager = pair(name)
    want = eager(ids, attention_mask=mask).logits
    ours = visible if kind == "bool" else mask
    got = [model(ids[:, :9], attention_mask=ours[:, :, :9, :9], past_key_values=cache).logits]
    for at in range(9, 12):
        # Layers with windows and layers without get one mask.
        got.append(model(ids[:, at : at + 1], attention_mask=ours[:, :, at : at + 1, : at + 1], past_key_values=cache).logits)
    close(torch.cat(got, 1), want)


def test_masks_of_other_sizes_are_refused():
    ids = prompt()
    model, cache, _ = pair("llama")
    for shape in ((2, 1, 21, 21), (3, 1, 20, 21), (3, 1, 21, 22), (3, 1, 21, 20)):
        with pytest.raises(ValueError, match=r"attention_mask of a layer is \(.*\), expected \(3, heads, 21, 21 to 21 keys\)"):
            model(ids, attention_mask=torch.ones(shape, dtype=torch.bool), past_key_values=cache)
    assert cache.get_seq_length() == 0


# Sequences.


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_memory_grows(name, monkeypatch):
    """Few tokens at first: pages and rings are copied to more, and nothing changes. `reserve` has them from the start."""
    monkeypatch.setattr(flashtile._batch, "MIN_ROOM", 4)
    monkeypatch.setattr(flashtile._batch, "SLACK", 4)
    moves, move = [], flashtile._batch.Batch._move
    monkeypatch.setattr(flashtile._batch.Batch, "_move", lambda self, *sizes, **named: (moves.append(self.window), move(self, *sizes, **named)))
    ids = prompt(2, 50)
    eager = decoder(name, "eager")
    model = decoder(name, "flashtile")
    want = eager(ids).logits
    for reserve in (0, 50):
        cache = FlashtileCache(model.config, reserve=reserve, **PLAIN)
        parts = ids.split([3, 1, 1, 20, 5, 1, 1, 18], 1)
        close(torch.cat([model(part, past_key_values=cache).logits for part in parts], 1), want)
        assert (None in moves) == (reserve == 0) and (8 in moves) == (name == "gemma3")
        moves.clear()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_kept_tokens(name):
    """The more tokens stay in 16 bits, the smaller the error: that of 16 bits where all do."""
    ids = prompt(2, 60)
    model, _, eager = pair(name)
    want = eager(ids).logits

    def error(**kept):
        cache = FlashtileCache(model.config, k="tq3", v="tq2", **kept)
        got = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([40, 1, 19], 1)], 1)
        return (got - want).norm() / want.norm()

    none, last, both, everything = error(), error(keep_last=4), error(keep_first=8, keep_last=4), error(keep_last=64)
    assert none > 1.1 * last > 1.1 * 1.02 * both and both > 100 * everything and everything < 0.002


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_kept_tokens_move_with_their_sequences(name, monkeypatch):
    """Memory that grows, sequences that are repeated, chosen and copied, and a crop: as a cache that got the same tokens at once."""
    monkeypatch.setattr(flashtile._batch, "MIN_ROOM", 4)
    model, ids = decoder(name, "flashtile"), prompt(2, 90)
    codes = {"k": "tq3", "v": "tq3", "keep_first": 4, "keep_last": 8}

    def results(tokens, reserve=0, change=lambda cache: cache):
        cache = FlashtileCache(model.config, reserve=reserve, **codes)
        got = [model(part, past_key_values=cache).logits for part in tokens.split([50, 1, 9], 1)]
        cache = change(cache)
        return torch.cat([*got, model(ids[:, 60:].repeat(len(tokens) // 2, 1), past_key_values=cache).logits], 1)

    def chosen(cache):
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0, 3, 1, 5]))
        cache.reorder_cache(torch.tensor([2, 1]))
        return copy.deepcopy(cache)

    def cropped(cache):
        model(prompt(2, 30), past_key_values=cache)
        cache.crop(-30)
        return cache

    want = results(ids[:, :60])
    for other in (results(ids[:, :60], reserve=200), results(ids[:, :60], change=chosen), results(ids[:, :60], change=cropped)):
        close(other, want, 1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sequences_are_chosen_and_copied(name):
    """As a `DynamicCache`: repeated, selected and reordered; a deep copy goes on by itself."""
    ids = prompt(2, 12)
    model, cache, eager = pair(name)
    theirs = transformers.DynamicCache(config=eager.config)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    eager(ids, attention_mask=mask, past_key_values=theirs)

    def step(tokens, mask):
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        close(model(tokens, attention_mask=mask, past_key_values=cache).logits, eager(tokens, attention_mask=mask, past_key_values=theirs).logits)
        return mask

    for of in (cache, theirs):
        of.batch_repeat_interleave(3)
    mask = step(prompt(6, 2), mask.repeat_interleave(3, 0))
    twin, before = copy.deepcopy(cache), mask
    for indices in (torch.tensor([5, 0, 0, 3]), torch.tensor([True, False, True, True])):
        for of in (cache, theirs):
            of.batch_select_indices(indices)
        mask = step(prompt(len(mask[indices]), 1), mask[indices])
    order = torch.tensor([2, 0, 0])
    for of in (cache, theirs):
        of.reorder_cache(order)
    step(prompt(3, 1), mask[order])
    assert (twin.batch_size, twin.get_seq_length(), cache.batch_size, cache.get_seq_length()) == (6, 14, 3, 17)
    cache, mask = twin, before
    theirs = transformers.DynamicCache(config=eager.config)
    model_ids = torch.cat([ids.repeat_interleave(3, 0), prompt(6, 2)], 1)
    eager(model_ids, attention_mask=mask, past_key_values=theirs)
    step(prompt(6, 1), mask)


def test_crop():
    model, cache, eager = pair("gemma3")
    ids = prompt(2, 100)
    mask = torch.ones_like(ids)
    mask[0, 90:95] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    want = eager(ids[:, :89], position_ids=positions[:, :89]).logits[:, 80:]
    model(ids[:, :80], past_key_values=cache)
    model(ids[:, 80:], attention_mask=mask, position_ids=positions[:, 80:], past_key_values=cache)
    cache.crop(0)
    cache.crop(-20)
    assert cache.get_seq_length() == 80 and cache._batches[1]._lens == [80, 80]
    close(model(ids[:, 80:89], position_ids=positions[:, 80:89], past_key_values=cache).logits, want)
    with pytest.raises(ValueError, match="tokens_to_remove is 5, expected the negative of a number up to 89"):
        cache.crop(5)
    with pytest.raises(RuntimeError, match="crop to 5 positions needs tokens that a window of 8 has overwritten"):
        cache.crop(-84)
    assert cache.get_seq_length() == 89


# Refusals.


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_other_attention_is_refused(name, attn):
    model, ids = decoder(name, attn), prompt()
    cache = FlashtileCache(model.config)
    with pytest.raises(TypeError, match="attention by flashtile alone reads"):
        model.generate(ids, past_key_values=cache, **options(ids))
    assert cache.get_seq_length() == 0
    with pytest.raises(TypeError, match="they are no tensors"):
        cache.layers[0].keys  # noqa: B018


MIXED = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
NOT_TAKEN = {
    "encoder": ("T5Config", {}, "an encoder"),
    "linear": ("Qwen3NextConfig", MIXED, "layers of linear_attention"),
    "shared": (TRAPS["Gemma4"][0], TRAPS["Gemma4"][1], "use keys of others"),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_models_that_are_not_taken(name):
    kind, sizes, text = NOT_TAKEN[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    with pytest.raises(ValueError, match=text):
        FlashtileCache(getattr(transformers, kind)(**sizes))


def test_options_that_are_wrong():
    config = decoder("llama", "flashtile").config
    with pytest.raises(ValueError, match="k is 'int9', expected a codec"):
        FlashtileCache(config, k="int9")
    for unknown in ({"bits": 4}, {"layout": "ring"}, {"pages": 3}):
        with pytest.raises(TypeError, match=next(iter(unknown))):
            FlashtileCache(config, **unknown)
    with pytest.raises(ValueError, match="center has 1 entries, expected one for each of 2 layers"):
        FlashtileCache(config, center=[None])
    with pytest.raises(TypeError, match="keep_slots is of flashtile.Layers"):
        FlashtileCache(config, keep_last=8, keep_slots=2)
    with pytest.raises(TypeError, match=r"copy\.deepcopy"):
        copy.copy(FlashtileCache(config))


def test_means_of_keys():
    """A mean for each layer reaches its kind of layers: layer 1 of the model is the first one of those without a window."""
    ids = prompt(2, 40)
    _, _, eager = pair("gemma3")
    model, want = decoder("gemma3", "flashtile"), eager(ids).logits
    mean = torch.full((2, 16), 3.0)
    results = [model(ids, past_key_values=FlashtileCache(model.config, center=center)).logits for center in (None, [None, mean], [mean, None])]
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])
    assert all((got - want).norm() < 0.3 * want.norm() for got in results)
    factors = torch.linspace(0.5, 2, 16).repeat(2, 1)
    results = [model(ids, past_key_values=FlashtileCache(model.config, equalize=equalize)).logits for equalize in (None, [factors, factors])]
    assert not torch.equal(*results) and (results[1] - want).norm() < 0.3 * want.norm()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_forward_passes_that_end_early(name, monkeypatch):
    """An interrupted pass, one that fails in attention, and another batch: tokens are taken back, the next call says so, and then all is as before."""
    ids = prompt(2, 90)
    model, cache, eager = pair(name)
    want = eager(ids).logits
    model(ids[:, :30], past_key_values=cache)
    layer = model.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 30:40], past_key_values=cache)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"ended before layers \[1\] attended"):
        model(ids[:, 30:40], past_key_values=cache)
    with pytest.raises(ValueError, match="the batch has 3 sequences, and the cache 2"):
        model(prompt(3, 4), past_key_values=cache)
    with torch.enable_grad(), pytest.raises(ValueError, match="no gradients"):
        model(ids[:, 30:40], past_key_values=cache)
    cache.crop(0) if cache._forward is None else cache._cancel()
    assert cache.get_seq_length() == 30
    close(model(ids[:, 30:], past_key_values=cache).logits, want[:, 30:])


def test_keys_are_read_once():
    model, cache, _ = pair("llama")
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    keys, values = cache.update(k, k, 0)
    assert (tuple(keys.shape), keys.dtype, repr(keys)) == ((1, 2, 3, 16), torch.float32, "<Stored (1, 2, 3, 16), torch.float32, cpu>")
    forward, module = flashtile.transformers.attention_forward, model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="not of one layer"):
        forward(module, q, keys, k, None)
    with pytest.raises(ValueError, match="passes indices to attention, which a FlashtileCache does not take"):
        forward(module, q, keys, values, None, indices=torch.zeros(1, 3, 1, dtype=torch.long))
    forward(module, q, keys, values, None)
    assert repr(cache) == "<FlashtileCache 2 layers, k f32, v f32; 1 sequences of 0 positions, in a forward pass>"
    with pytest.raises(ValueError, match="keys of layer 0 are read a second time"):
        forward(module, q, keys, values, None)


def test_compiled_models():
    """A whole graph is refused; otherwise the cache breaks graphs, and results are right."""
    model, cache, eager = pair("llama")
    ids = prompt()
    with pytest.raises(Exception, match="cannot be compiled"):
        torch.compile(model, backend="eager", fullgraph=True)(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0 and not cache.is_compileable
    close(torch.compile(model, backend="eager")(ids, past_key_values=cache).logits, eager(ids).logits)
    assert cache.get_seq_length() == 21


def test_autocast():
    model, ids = decoder("llama", "flashtile"), prompt()
    results = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for cache in (FlashtileCache(model.config, k="bf16", v="bf16"), transformers.DynamicCache()):
            results.append([model(part, past_key_values=cache).logits.float() for part in ids.split([20, 1], 1)])
    for got, want in zip(*results):
        assert (got - want).norm() < 0.02 * want.norm()


def test_what_a_cache_says_of_itself():
    model, cache, _ = pair("gemma3", k="int8", v="tq4")
    assert repr(cache) == "<FlashtileCache 2 layers, k int8, v tq4; empty, 0 of 0 bytes>"
    model(prompt(), past_key_values=cache)
    cache.check_stored()
    memory = cache.memory()
    assert repr(cache) == (
        f"<FlashtileCache 2 layers, k int8, v tq4; 3 sequences of 21 positions, {memory['bytes_used']} of {memory['bytes_reserved']} bytes>"
    )
    assert cache.is_sliding == [True, False] and (cache.get_max_length(0), cache.get_max_length(1)) == (8, -1)
    assert SIZES["num_hidden_layers"] == len(cache)
