"""Attention of Hugging Face transformers by flashtile, on CPUs and NVIDIA GPUs:

    import flashtile.transformers
    flashtile.transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="flashtile")

Prefill and decoding, grouped queries, windows, softcap, sinks, padding and position biases are computed as the model asks. Masks are those
of `sdpa`. For inference: dropout and gradients are refused, and `output_attentions` is, as probabilities are never stored.
"""

import functools
import sys

import torch

from . import _torch  # noqa: F401  registers the operator before a compiler traces a call
from ._attention import attention

NAME = "flashtile"


def register():
    """Makes `attn_implementation="flashtile"` known to transformers. A second call changes nothing.

    transformers 5 takes every name with `flash` in it for the package flash-attn, and would load that, or choose other masks. `register`
    therefore replaces its function `is_flash_attention_requested` by one that answers no for this name, and the same for all others.

    Raises:
        ImportError: where transformers is not installed, or has no registries of attention and masks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    from transformers.utils import generic

    original = getattr(generic, "is_flash_attention_requested", None)
    if original is not None and not hasattr(original, "_of_flashtile"):
        _replace(original)
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


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
    **_,
):
    """What transformers calls in each layer: query `(batch, q_heads, q_len, dim)`, key and value `(batch, kv_heads, kv_len, dim)` give
    `(batch, q_len, q_heads, value_dim)`, and no probabilities. Windows are in the mask; without one, a layer that is causal hides the keys
    after each query.
    """
    if dropout > 0.0:
        raise ValueError(f"dropout is {dropout}, flashtile has none: call model.eval()")
    if output_attentions:
        raise ValueError("output_attentions is set, and flashtile stores no probabilities: use attn_implementation='eager'")
    if cache is not None:
        raise ValueError("continuous batching has a cache of its own, which flashtile does not read: use attn_implementation='sdpa'")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ValueError("flashtile computes no gradients: call the model under torch.no_grad()")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    q_len = query.shape[2]
    is_causal = q_len > 1 and attention_mask is None and is_causal
    mask = attention_mask if position_bias is None else _with_bias(position_bias, attention_mask)
    q, k, v = (_rows(x.transpose(1, 2)) for x in (query, key, value))
    out = attention(
        q,
        k,
        v,
        causal=is_causal,
        # Queries of a prompt begin at key 0, also where a static cache has room for more keys.
        q_offset="top_left" if is_causal else None,
        scale=scaling,
        softcap=softcap,
        mask=None if mask is None else _rows(mask),
        sinks=s_aux,
        layout="bshd",
    )
    return out, None


def _rows(x):
    """A tensor with its rows in one piece: itself, unless a model has permuted it."""
    return x if x.stride(-1) in (0, 1) else x.contiguous()


def _with_bias(bias, mask):
    """A position bias, as T5 learns it, and a mask as one mask that is added to scores."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return bias + mask
