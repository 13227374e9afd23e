"""Tensors that stand for the keys or values of a layer in a cache, where a model passes them from the cache to its attention."""

import torch


class Stored(torch.Tensor):
    """The keys or values of a layer, `(batch, kv_heads, kv_len, dim)`, without elements: the cache has them, as codes. It has the shape, dtype and
    device that a tensor would have. Attention by flashtile reads the cache; every other operation is an error."""

    # Operations reach `__torch_dispatch__`, while the shape and other properties are read at the cost of a tensor's.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise TypeError(
            f"{operation} needs elements, and keys and values in a FlashtileCache are codes, which attention by flashtile alone reads: call "
            "flashtile.transformers.register(), and give the model attn_implementation='flashtile'; where it has that, its own code computes with "
            "cached keys: give it another cache"
        )

    def __repr__(self, **_):
        return f"<Stored {tuple(self.shape)}, {self.dtype}, {self.device}>"


READ_AGAIN = "keys of layer {} are read a second time, or after their forward pass: a FlashtileCache gives them once"


class NewTokens:
    """The keys `(batch, kv_heads, new, dim)` and values `(batch, kv_heads, new, value_dim)` of the new tokens of a layer, until attention stores
    them."""

    __slots__ = ("cache", "k", "layer", "v")

    def __init__(self, cache, layer, k, v):
        self.cache, self.layer, self.k, self.v = cache, layer, k, v

    def stand_ins(self, kv_len):
        """Keys and values of `kv_len` tokens to give to the model."""
        return tuple(self._stand_in(x, kv_len) for x in (self.k, self.v))

    def _stand_in(self, x, kv_len):
        batch, heads, _, dim = x.shape
        made = torch.Tensor._make_wrapper_subclass(Stored, (batch, heads, kv_len, dim), dtype=x.dtype, device=x.device)
        made.tokens = self
        return made


def new_tokens(key, value):
    """The new tokens for which both arguments of attention stand.

    Raises:
        ValueError: where they are of two layers, or one is a tensor with elements; where they are stored already.
    """
    k, v = (getattr(x, "tokens", None) if isinstance(x, Stored) else None for x in (key, value))
    if k is None or k is not v:
        raise ValueError("key and value of attention are not of one layer of a FlashtileCache: give the model another cache")
    if k.k is None:
        raise ValueError(READ_AGAIN.format(k.layer))
    return k
