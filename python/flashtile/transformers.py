"""Attention of Hugging Face transformers by flashtile, on CPUs and NVIDIA GPUs:

    import flashtile.transformers
    flashtile.transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="flashtile")

Prefill and decoding, grouped queries, windows, softcap, sinks, padding, position biases and chosen keys are computed as the model asks, with
the masks of `sdpa`. A model whose code computes attention by itself is refused when flashtile is asked for. Models train.
Dropout inside attention is refused, and so are gradients over a `FlashtileCache`. Probabilities are never
stored: `output_attentions` warns and gives None, as `sdpa` does.
"""

import functools
import inspect
import re
import sys

import torch

from . import _torch  # noqa: F401  registers the operators before a compiler traces a call
from ._attention import attention
from ._stored_keys import Stored, new_tokens
from ._tensors import needs_grad

NAME = "flashtile"


def __getattr__(name):
    # Its base is a class of transformers, which this module imports where it is needed alone.
    if name == "FlashtileCache":
        from ._generation import FlashtileCache

        return FlashtileCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register():
    """Makes `attn_implementation="flashtile"` known to transformers. A second call changes nothing.

    transformers 5 takes every name with `flash` in it for the package flash-attn, and would load that, or choose other masks. `register`
    therefore replaces its function `is_flash_attention_requested` by one that answers no for this name, and the same for all others. It
    accepts every registered name for every model: `register` replaces two methods of `PreTrainedModel` by ones that raise a `ValueError` where
    flashtile is asked for and the model cannot have it, and do the same as before otherwise.

    Raises:
        ImportError: where transformers is not installed, or has no registries of attention and masks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask
    from transformers.utils import generic

    original = getattr(generic, "is_flash_attention_requested", None)
    if original is not None and not hasattr(original, "_of_flashtile"):
        _replace(original)
    if not hasattr(PreTrainedModel.set_attn_implementation, "_of_flashtile"):
        _check(PreTrainedModel)
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, _masks(sdpa_mask))


def _replace(original):
    """Puts a function that knows flashtile where transformers has `is_flash_attention_requested`."""

    @functools.wraps(original)
    def is_flash_attention_requested(config=None, requested_attention_implementation=None, version=None):
        asked = requested_attention_implementation if config is None else config._attn_implementation
        if asked == NAME:
            return False
        return original(config, requested_attention_implementation, version)

    is_flash_attention_requested._of_flashtile = True
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformers" and vars(module).get(original.__name__) is original:
            setattr(module, original.__name__, is_flash_attention_requested)


# Models that can have another attention, and models that cannot.

# Classes of configurations of models that transformers does not claim to be right with `sdpa`: whether their layers are causal, by their own
# words, is unproved there, and a mask says it.
_always_masked = set()


def _check(base):
    """Makes models refuse flashtile, when they are built and when their attention is changed."""
    correct, change = base.get_correct_attn_implementation, base.set_attn_implementation

    @functools.wraps(correct)
    def get_correct_attn_implementation(self, requested_attention, *args, **options):
        if requested_attention == NAME:
            _refuse(type(self))
            if not self._supports_sdpa:
                _always_masked.add(type(self.config))
        return correct(self, requested_attention, *args, **options)

    @functools.wraps(change)
    def set_attn_implementation(self, attn_implementation, *args, **options):
        # transformers itself passes over models that cannot change.
        asked = dict(_requests(self.config, attn_implementation))
        for model in self.modules():
            if isinstance(model, base) and asked.get(id(model.config), asked[id(self.config)]) == NAME:
                _refuse(type(model))
        return change(self, attn_implementation, *args, **options)

    set_attn_implementation._of_flashtile = True
    base.get_correct_attn_implementation = get_correct_attn_implementation
    base.set_attn_implementation = set_attn_implementation


def _requests(config, asked):
    """The attention that `asked`, a name or a dict by sub-configuration, means for a configuration and all inside it, by `id`."""
    by_part = isinstance(asked, dict)
    yield id(config), asked.get("") if by_part else asked
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _requests(inner, asked.get(name) if by_part else asked)


def _refuse(kind):
    """Raises where a class of models cannot have flashtile's attention."""
    why = _own_attention(kind)
    claims = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    if why is None and not any(getattr(kind, claim, False) for claim in claims) and _attends(kind.__module__):
        why = "transformers claims for no attention but 'eager' that the model is right with it"
    if why is not None:
        raise ValueError(
            f"{kind.__name__} does not support attn_implementation='{NAME}': {why}. Use 'eager'. Where it is a part of a model, name the "
            f"parts that shall have flashtile, such as attn_implementation={{'text_config': '{NAME}'}}"
        )


def _own_attention(kind):
    """Why a model computes attention by its own code, or None: it does not ask the registry, or chooses classes by the name of the attention."""
    for name, table in vars(sys.modules[kind.__module__]).items() if kind.__module__ in sys.modules else ():
        if isinstance(table, dict) and "eager" in table and NAME not in table:
            return f"{name} has classes for {', '.join(map(repr, table))} alone"
    return None if kind._can_set_attn_implementation() else "its code computes attention by itself"


@functools.lru_cache(None)
def _attends(module):
    """True if the code of a module has attention at all: convolutions and recurrences can be parts of any model."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return True
    return re.search(r"softmax|ALL_ATTENTION_FUNCTIONS|scaled_dot_product|MultiheadAttention", source) is not None


# Classes of configurations whose models ask the registry.
_asking = set()


def _refuse_by_hand(config):
    """Raises where flashtile was written into the configuration of a model that cannot have it, after the model was built."""
    kind = type(config)
    if kind in _asking:
        return
    name = kind.__module__.replace(".configuration_", ".modeling_")
    found = (x for x in vars(sys.modules[name]).values() if getattr(x, "__module__", "") == name) if name in sys.modules else ()
    for model in (x for x in found if hasattr(x, "_can_set_attn_implementation")):
        if _own_attention(model) is not None:
            _refuse(model)
        _asking.add(kind)
        return


# The functions that models call.

# Arguments of models that change nothing in attention once masks are made. A window is in the mask; the lengths of packed sequences are in
# `cu_seq_lens_q` and `cu_seq_lens_k`.
HARMLESS = frozenset(
    """cache_position deterministic grid_thw logits_to_keep max_length_k max_length_q num_items_in_batch output_hidden_states output_router_logits
    position_embeddings position_ids return_dict seq_idx sliding_window token_type_ids use_cache""".split()
)


def _masks(sdpa_mask):
    """Masks as `sdpa` has them: True is visible, and there is none where a layer is causal."""

    @functools.wraps(sdpa_mask)
    def mask(*args, config=None, allow_is_causal_skip=True, **options):
        if config is not None and not torch.compiler.is_compiling():
            _refuse_by_hand(config)
        # Layers that share the keys of earlier ones compute the last queries alone, and only a mask has the positions of these.
        if config is not None and (type(config) in _always_masked or getattr(config.get_text_config(), "num_kv_shared_layers", None)):
            allow_is_causal_skip = False
        made = sdpa_mask(*args, config=config, allow_is_causal_skip=allow_is_causal_skip, **options)
        return _of_all_keys(*args, **options) if made is None and options.get("allow_is_bidirectional_skip") else made

    return mask


def _of_all_keys(batch_size=1, q_length=None, kv_length=1, cache_position=None, device="cpu", **_):
    """The mask of a model that sees all keys. Without one, layers whose `is_causal` nobody set would hide some."""
    if q_length is None:
        q_length = cache_position.shape[0]
    mask = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
    if not torch.compiler.is_compiling():
        mask._hides_nothing = True
    return mask


def attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    is_causal=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    cache=None,
    output_attentions=False,
    sinks=None,
    indices=None,
    block_indices=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    **others,
):
    """Attention of a layer, as transformers calls it.

    Query `(batch, q_heads, q_len, dim)`, key and value `(batch, kv_heads, kv_len, dim)` give `(batch, q_len, q_heads, value_dim)`,
    and no probabilities. Windows are in the mask; without a mask, a layer that is causal hides the keys after each query.
    """
    unknown = sorted(name for name, value in others.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to attention, and flashtile does not know how that changes the result: use "
            "attn_implementation='eager'"
        )
    if dropout > 0.0:
        raise ValueError(f"dropout is {dropout}, flashtile has none: call model.eval(), or set the model's dropout of attention to 0")
    if cache is not None:
        raise ValueError("continuous batching has a cache of its own, which flashtile does not read: use attn_implementation='sdpa'")
    is_stored = isinstance(key, Stored) or isinstance(value, Stored)
    tokens = new_tokens(key, value) if is_stored else None
    if output_attentions:
        from transformers.utils import logging

        logging.get_logger(__name__).warning_once("flashtile stores no probabilities: output_attentions gives None, use attn_implementation='eager'")
    if is_stored:
        unread = {"position_bias": position_bias, "sinks": sinks, "indices": indices, "block_indices": block_indices, "cu_seq_lens_q": cu_seq_lens_q}
        return _over_cache(module, query, tokens, attention_mask, is_causal, {"scale": scaling, "softcap": softcap, "sinks": s_aux}, unread), None
    query, key, value = _as_sdpa(query, key, value)
    if not torch.compiler.is_compiling() and getattr(attention_mask, "_hides_nothing", False):
        attention_mask, is_causal = None, False
    is_causal = _is_causal(module, is_causal, query.shape[2], attention_mask)
    mask = attention_mask
    if indices is not None:
        mask = _only(mask, indices, key.shape[2])
    if block_indices is not None:
        mask = _only_blocks(module, mask, block_indices, (query, key), others.get("position_ids"))
    if position_bias is not None:
        mask = _with_bias(position_bias, mask)
    options = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "causal": is_causal}
    if cu_seq_lens_q is not None and mask is None:
        return _packed(query, key, value, options | {"cu_seqlens": (cu_seq_lens_q, cu_seq_lens_k)}), None
    out = attention(
        *(_rows(x.transpose(1, 2)) for x in (query, key, value)),
        mask=None if mask is None else _rows(mask),
        # Queries of a prompt begin at key 0, also where a static cache has room for more keys.
        q_offset="top_left" if is_causal else None,
        layout="bshd",
        return_lse=sinks is not None,
        **options,
    )
    return (out if sinks is None else _with_sinks(*out, sinks)), None


def _over_cache(module, query, tokens, mask, is_causal, options, unread):
    """Attention of a layer whose keys are in a `FlashtileCache`, by its arguments. `unread` are arguments that have to be None."""
    if any(needs_grad(x) for x in (query, tokens.k, tokens.v, *options.values(), *unread.values())):
        raise ValueError("a FlashtileCache has no gradients: call the model under torch.no_grad()")
    given = [name for name, value in unread.items() if value is not None]
    if given:
        raise ValueError(f"{type(module).__name__} passes {', '.join(given)} to attention, which a FlashtileCache does not take: use a DynamicCache")
    if getattr(mask, "_hides_nothing", False):
        mask, is_causal = None, False
    causal = query.shape[2] == 1 or _is_causal(module, is_causal, query.shape[2], mask)
    query, tokens.k, tokens.v = _as_sdpa(query, tokens.k, tokens.v)
    return tokens.cache.attend(tokens, query, mask, causal, options)


def _is_causal(module, asked, q_len, mask):
    """True if queries see only the keys up to their own. False with a mask, which hides later keys already."""
    if q_len == 1 or mask is not None:
        return False
    if asked is None:
        asked = getattr(module, "is_causal", None)
    if asked is None:
        raise ValueError(f"{type(module).__name__} does not say whether it is causal, and gives no mask: use attn_implementation='eager'")
    return bool(asked)


def _as_sdpa(query, key, value):
    """Arguments as PyTorch's `scaled_dot_product_attention` takes them: of one dtype under autocast, and one batch for all where it is 1."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    batch = max(query.shape[0], key.shape[0])
    return (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 < batch else x for x in (query, key, value))


def _rows(x):
    """A tensor with its rows in one piece: itself, unless a model has permuted it."""
    return x if x.stride(-1) in (0, 1) else x.contiguous()


def _only(mask, indices, kv_len):
    """A mask that leaves each query the keys in `indices` `(batch, q_len, chosen)` alone."""
    chosen = torch.zeros(*indices.shape[:2], kv_len, dtype=torch.bool, device=indices.device).scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, float("-inf"))


def _only_blocks(module, mask, blocks, query_key, position_ids):
    """A mask that leaves each query the blocks of keys that the module's indexer has chosen, by the indexer's own function."""
    query, key = query_key
    q_len, kv_len = query.shape[2], key.shape[2]
    if position_ids is None:
        position_ids = torch.arange(kv_len - q_len, kv_len, device=query.device)
    position_ids = (position_ids if position_ids.ndim > 1 else position_ids[None]).expand(query.shape[0], -1)
    return module.indexer.build_block_mask(blocks, mask, kv_len, query.dtype, query.device, position_ids)


def _with_bias(bias, mask):
    """A position bias, as T5 learns it, and a mask as one mask that is added to scores."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return bias + mask


def _packed(query, key, value, options):
    """Sequences that lie one after another in a batch of 1, which `options` tell apart."""
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is given for a batch of {query.shape[0]}, expected 1")
    q, k, v = (_rows(x[0].transpose(0, 1)) for x in (query, key, value))
    return attention(q, k, v, q_offset="top_left" if options["causal"] else None, **options)[None]


def _with_sinks(out, lse, sinks):
    """Attention with a sink for each query, `(batch, q_heads, q_len, 1)`, from one without: a sink joins the denominator alone."""
    kept = torch.sigmoid(lse - sinks[..., 0].float())
    return out * kept.transpose(1, 2)[..., None].to(out.dtype)
