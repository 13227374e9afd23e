"""A cache of Hugging Face transformers over `KvCache`."""

import copy

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from ._batch import Batch
from ._cache import Layers
from ._options import integer
from ._stored_keys import READ_AGAIN, NewTokens
from ._visible import Visible


class FlashtileCache(Cache):
    """Keys and values of a model of transformers, quantized, for `generate` and for calls of the model with `past_key_values`:

        flashtile.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashtile")
        cache = FlashtileCache(model.config, k="int8", v="tq4")
        model.generate(**inputs, past_key_values=cache, max_new_tokens=200)

    Attention runs over the codes; no layer is ever decoded to tensors. A prompt attends to its own codes too. Any number of sequences and
    tokens fits: layers with a sliding window keep their window, and 64 tokens more, in rings; all others have pages for half as many tokens
    again as there are, for 256 at least, and are copied to more where these are used up, which takes both memories meanwhile. Main memory
    is not used before a token is written to it.

    Padding is not stored, and costs nothing later. A mask of transformers that is causal, with padding and windows, becomes options of
    attention; any other one is given to attention as it is. It has to hide padding again in later calls.

    `crop`, `reset`, `reorder_cache`, `batch_select_indices` and `batch_repeat_interleave` are as for a `DynamicCache`: beams share pages. A
    sequence with windows takes back 64 tokens beside the ones of its last call. `copy.deepcopy` copies the codes.

    Args:
        config: the model's, which has the kinds of its layers.
        k, v: codecs of keys and values, as for `flashtile.Layers`.
        center, equalize: key means and factors of key channels, as for `flashtile.KvCache`.
        reserve: tokens of each sequence for which there is memory from the first call on, so that nothing is copied up to there.
        options: further ones of `flashtile.Layers`: `keep_first=4, keep_last=128` takes most of what 2 to 4 bits cost. Layers with a sliding window keep
            no first tokens. With `keep_last`, a call of more than 64 tokens takes no other masks than causal ones, with padding and windows.

    The cache is where the tensors of the model are: in main memory, or on an NVIDIA GPU, whose current stream it follows. All layers are on one
    device. Of a GPU, `check_stored` says whether all rows were stored.

    Raises:
        ValueError: where the model has layers that are neither full attention nor of a sliding window, layers that use keys of others, or an
            encoder. Calls of the model raise it where a mask shows padding, and as `Step.attend`; the tokens of the call are taken back then.
        TypeError: where an option is unknown; by every operation but attention by flashtile on the keys that a model gets.
        RuntimeError: of a call after one that ended before all layers had attended, whose tokens are taken back by then; under `torch.compile` with
            `fullgraph=True`. Without that, layers run as they are, outside of the compiled graphs.
    """

    def __init__(self, config, *, k="int8", v="tq4", center=None, equalize=None, reserve=0, **options):
        options, reserve = {"k": k, "v": v, **options}, integer("reserve", reserve)
        if "keep_slots" in options:
            raise TypeError("keep_slots is of flashtile.Layers: a FlashtileCache has as many slots as sequences")
        # Wrong options are errors here, not where the model first calls.
        keeps = options.get("keep_first") or options.get("keep_last")
        Layers(1, 1, 1, layout="paged", pages=1, page_size=1, keep_slots=1 if keeps else None, **options)
        self._options, self._reserve = options, reserve
        windows = _windows(config)
        kinds = list(dict.fromkeys(windows))
        of_layers = {name: None if of is False else of for name, of in (("center", center), ("equalize", equalize))}
        for name, of in of_layers.items():
            if of is not None and len(of) != len(windows):
                raise ValueError(f"{name} has {len(of)} entries, expected one for each of {len(windows)} layers")
        # For each layer its batch, and its index there.
        self._places = [(kinds.index(window), windows[:layer].count(window)) for layer, window in enumerate(windows)]
        of_kinds = [[layer for layer, window in enumerate(windows) if window == kind] for kind in kinds]
        transforms = [
            {name: None if of is None else [of[layer] for layer in layers] for name, of in of_layers.items()} for layers in of_kinds
        ]
        self._batches = [
            Batch(len(layers), kind, reserve, of, options) for kind, layers, of in zip(kinds, of_kinds, transforms)
        ]
        # Positions of the batch, padding included, and which of them are tokens, `(batch, positions)`: None for all.
        self._positions, self._real = 0, None
        self._forward = None
        super().__init__(layers=[_Layer(self, window) for window in windows])

    def __repr__(self):
        held = f"{self.batch_size} sequences of {self._positions} positions" if self.batch_size > 0 else "empty"
        try:
            memory = self.memory()
            held += f", {memory['bytes_used']} of {memory['bytes_reserved']} bytes"
        except RuntimeError:
            held += ", in a forward pass"
        return f"<FlashtileCache {len(self.layers)} layers, k {self._options['k']}, v {self._options['v']}; {held}>"

    def __copy__(self):
        raise TypeError("two caches cannot have the same tokens: copy.deepcopy copies them")

    def __deepcopy__(self, memo):
        self._settle()
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._batches = [batch.copy() for batch in self._batches]
        made._real = copy.deepcopy(self._real)
        made.layers = [_Layer(made, layer.window) for layer in self.layers]
        return made

    @property
    def batch_size(self):
        """Sequences, or -1 before the first call."""
        return len(self._batches[0]) or -1

    def memory(self):
        """Bytes of the cache, as a dict: `bytes_reserved` for all rows, `bytes_used` by pages and slots of sequences. A copy of a cache has
        memory of its own."""
        parts = [part for part in (batch.memory() for batch in self._batches) if part is not None]
        return {name: sum(part[name] for part in parts) for name in ("bytes_reserved", "bytes_used")}

    def check_stored(self):
        """Checks that all rows were stored, as `KvCache.check_stored`. Waits for a GPU; the CPU refuses such rows at once."""
        for batch in self._batches:
            batch.check_stored()

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Stand-ins for the keys and values of a layer, `(batch, kv_heads, kv_len, dim)`, of which attention by flashtile stores the new ones, and
        reads all. They have no elements: anything else that reads them raises a `TypeError`."""
        if torch.compiler.is_compiling():
            raise RuntimeError("a FlashtileCache grows and cannot be compiled: leave out fullgraph=True, or give the model a StaticCache")
        forward = self._forward
        if forward is None or layer_idx in forward.given:
            self._settle()
            forward = self._forward = _Forward(self, key_states)
        if key_states.shape[::2] != (forward.batch, forward.new) or value_states.shape[:3] != key_states.shape[:3]:
            self._cancel()
            raise ValueError(
                f"layer {layer_idx} has new keys {tuple(key_states.shape)} and values {tuple(value_states.shape)}, expected "
                f"({forward.batch}, heads, {forward.new}, dim)"
            )
        tokens = forward.given[layer_idx] = NewTokens(self, layer_idx, key_states, value_states)
        return tokens.stand_ins(self.layers[layer_idx].get_mask_sizes(forward.new)[0])

    def attend(self, tokens, query, mask, causal, options):
        """Stores the new tokens of a layer, and attends. Called by attention of models.

        `query` is `(batch, q_heads, new, dim)`, the result `(batch, new, q_heads, value_dim)`; rows of padding are 0. `causal` says what a layer
        without a mask sees. `options` are further ones of `Step.attend`.
        """
        forward = self._forward
        if forward is None or forward.given.get(tokens.layer) is not tokens or tokens.layer in forward.attended:
            raise ValueError(READ_AGAIN.format(tokens.layer))
        if query.shape[::2] != (forward.batch, forward.new):
            raise ValueError(f"query is {tuple(query.shape)}, expected ({forward.batch}, heads, {forward.new}, dim) as the new keys have")
        try:
            out = forward.attend(tokens, query, (mask, causal), options)
            forward.attended.add(tokens.layer)
            # The rows are stored: a prompt does not hold the keys of all layers.
            tokens.k = tokens.v = None
            if len(forward.attended) == len(self.layers):
                self._finish()
            return out
        except BaseException:
            self._cancel()
            raise

    def reset(self):
        """Removes all sequences, and keeps the memory for the next ones."""
        self._cancel()
        for batch in self._batches:
            batch.clear()
        self._positions, self._real = 0, None

    def crop(self, tokens_to_remove):
        """Removes the last `-tokens_to_remove` positions.

        Raises:
            ValueError: where it is positive, or there are fewer positions.
            RuntimeError: where a layer has overwritten tokens that its window would then have. Nothing is removed then.
        """
        self._settle()
        if tokens_to_remove > 0 or -tokens_to_remove > self._positions:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}, expected the negative of a number up to {self._positions}")
        if tokens_to_remove == 0:
            return
        positions = self._positions + tokens_to_remove
        real = None if self._real is None else self._real[:, :positions]
        lens = [positions] * self.batch_size if real is None else real.sum(1).tolist()
        for batch in self._batches:
            if not batch.can_truncate(lens):
                raise RuntimeError(
                    f"crop to {positions} positions needs tokens that a window of {batch.window} has overwritten: a sequence takes back the "
                    "tokens of its last call, and 64 of the ones before"
                )
        for batch in self._batches:
            batch.truncate(lens)
        self._positions, self._real = positions, real

    def reorder_cache(self, beam_idx):
        """Makes the batch of these sequences, of which some may be named twice: beams go on from others. Pages are shared."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices):
        """Keeps these sequences, in this order."""
        self._settle()
        if self.batch_size > 0:
            chosen = torch.arange(self.batch_size)[torch.as_tensor(indices).cpu()].tolist()
            for batch in self._batches:
                batch.select(chosen)
            self._real = None if self._real is None else self._real[chosen]

    def batch_repeat_interleave(self, repeats):
        """Repeats each sequence this many times, one after another."""
        self.batch_select_indices(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def _settle(self):
        """Takes back the tokens of a forward pass that ended early, and says so."""
        forward = self._forward
        if forward is not None:
            self._cancel()
            missing = [layer for layer in range(len(self.layers)) if layer not in forward.attended]
            raise RuntimeError(
                f"the last forward pass over this cache ended before layers {missing} attended by flashtile. Its tokens are taken back: where it was "
                "interrupted, call again; else the model does not attend in these layers, and needs another cache"
            )

    def _cancel(self):
        """Takes back the tokens of an open forward pass."""
        forward, self._forward = self._forward, None
        if forward is None:
            return
        for batch, step in zip(self._batches, forward.steps):
            if step is not None:
                step.cancel()
                batch.taken_back(forward.tokens)
        if self._positions == 0:
            for batch in self._batches:
                batch.clear()

    def _finish(self):
        """Keeps the tokens of a forward pass in which all layers have attended."""
        forward, self._forward = self._forward, None
        for batch, step in zip(self._batches, forward.steps):
            if step is not None:
                step.finish()
                batch.kept(forward.tokens)
        self._positions += forward.new
        self._real = forward.real


class _Forward:
    """A forward pass of a model over a `FlashtileCache`.

    `real` `(batch, positions)` says which positions, old and new, are tokens, and is None where all are; `tokens` are the new ones of each
    sequence. The first mask says it.
    """

    def __init__(self, cache, key):
        self.cache, self.batch, self.new = cache, key.shape[0], key.shape[2]
        if cache.batch_size not in (-1, self.batch):
            raise ValueError(f"the batch has {self.batch} sequences, and the cache {cache.batch_size}: reset it, or make another")
        # New tokens by layer, layers that have attended, and the step of each kind of layers.
        self.given, self.attended, self.steps = {}, set(), [None] * len(cache._batches)
        self.real = self.tokens = self.rows = None
        # Masks by identity, with what a layer without one sees, and window; and what became of them.
        self.masks = {}

    def attend(self, tokens, query, mask_causal, options):
        """As `FlashtileCache.attend`."""
        kind, index = self.cache._places[tokens.layer]
        batch = self.cache._batches[kind]
        visible = self._options(*mask_causal, batch.window, query.device)
        if self.steps[kind] is None:
            self.steps[kind] = batch.begin(tokens.k, tokens.v, self.tokens)
        out = self.steps[kind].attend(index, *(self._packed(x) for x in (query, tokens.k, tokens.v)), **visible, **options)
        if self.rows is not None:
            out = out.new_zeros(self.batch * self.new, *out.shape[1:]).index_copy_(0, self.rows, out)
        return out.view(self.batch, self.new, *out.shape[1:])

    def _packed(self, x):
        """The tokens of `(batch, heads, new, dim)`, sequence by sequence: `(tokens, heads, dim)`."""
        # Of one token each the axis is dropped, which costs less.
        x = x.squeeze(2) if self.new == 1 else x.transpose(1, 2).reshape(self.batch * self.new, x.shape[1], x.shape[3])
        x = x if self.rows is None else x[self.rows]
        return x if x.stride(-1) == 1 else x.contiguous()

    def _options(self, mask, causal, window, device):
        """A mask, or what a layer without one sees, as options of a step."""
        kind = id(mask), mask is None and causal, window
        known = self.masks.get(kind)
        if known is None:
            # The mask is kept, so that no other one has its identity.
            known = self.masks[kind] = (mask, self._understood(mask, causal, window, device))
        return known[1]

    def _understood(self, mask, causal, window, device):
        past = self.cache._positions
        visible = None if mask is None else Visible(mask, self.batch, past, self.new)
        self._count(None if visible is None else visible.real(self.batch), device)
        if visible is None:
            if self.real is not None:
                raise ValueError("a layer has no mask, and the cache left out padding of its batch: give the model the attention_mask of all positions")
            if window is not None and past + self.new > window and not (causal and self.new == 1):
                raise ValueError(f"a layer with a window of {window} has no mask for {past + self.new} positions")
            window = (-1 if window is None else window - 1, 0 if causal else -1)
            return {"causal": causal, "window": window}
        if visible.is_causal(self.real, window):
            return {"causal": True, "window": (-1 if window is None else window - 1, 0)}
        masks = visible.masks(self.real, self.batch, device)
        return {"causal": False, "window": (-1 if window is None else window - 1, -1), "mask": masks}

    def _count(self, real, device):
        """Counts the tokens of each sequence among the new positions, of which `real` `(batch, new)` are some, or None for all."""
        past, before = self.cache._positions, self.cache._real
        if self.tokens is not None:
            known = None if self.rows is None else self.real[:, past:]
            if (known is None) != (real is None) or (real is not None and not torch.equal(known, real)):
                raise ValueError("masks of two kinds of layers differ in which positions are padding")
            return
        if real is not None:
            if not real.any():
                raise ValueError("attention_mask hides all new positions, so that there is nothing to attend to")
            self.rows = real.flatten().nonzero()[:, 0].to(device)
        self.tokens = [self.new] * self.batch if real is None else real.sum(1).tolist()
        if real is not None or before is not None:
            before = torch.ones(self.batch, past, dtype=torch.bool) if before is None else before
            real = torch.ones(self.batch, self.new, dtype=torch.bool) if real is None else real
            self.real = torch.cat([before, real], 1)


class _Layer(CacheLayerMixin):
    """A layer of a `FlashtileCache`, of which transformers asks the lengths."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache, window):
        self.cache, self.window = cache, window
        self.is_sliding = window is not None

    @property
    def keys(self):
        """Raises a `TypeError`."""
        raise TypeError("keys and values in a FlashtileCache are codes, which attention by flashtile alone reads: they are no tensors")

    values = keys

    @property
    def is_initialized(self):
        """True once there are sequences."""
        return self.cache.batch_size > 0

    def get_seq_length(self):
        """Positions of the batch, padding included."""
        return self.cache._positions

    def get_max_length(self):
        """The window, or -1 for any length."""
        return self.window or -1

    def get_mask_sizes(self, query_length):
        """Keys that a mask of this many queries has, and the position of the first."""
        past = self.cache._positions
        first = 0 if self.window is None else max(past - self.window + 1, 0)
        return past + query_length - first, first

    def lazy_initialization(self, key_states, value_states):
        """Nothing: the cache makes its layers at the first call."""

    def update(self, key_states, value_states, *args, **kwargs):
        """As `FlashtileCache.update`."""
        return self.cache.update(key_states, value_states, self.cache.layers.index(self))

    def _of_all(self, *_):
        raise RuntimeError("layers of a FlashtileCache have the same sequences: call this of the cache")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _of_all


def _windows(config):
    """For each layer of a model the keys that a query sees, its own included, or None for all."""
    config = config.get_text_config(decoder=True)
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is of a model with an encoder, whose keys a FlashtileCache does not take: use an EncoderDecoderCache")
    types, options = get_layer_types_and_kwargs(config)
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(f"{name} has layers that use keys of others, which a FlashtileCache does not take: use a DynamicCache")
    others = sorted(set(types) - {"full_attention", "sliding_attention"})
    if others:
        raise ValueError(f"{name} has layers of {', '.join(others)}, and a FlashtileCache takes full_attention and sliding_attention: use a DynamicCache")
    return [of.get("sliding_window") for of in options]
