"""Masks of transformers, over the positions of a padded batch, as options of a step over sequences without padding."""

import torch


class Visible:
    """A mask of transformers: the keys that each query of a forward pass sees.

    Args:
        mask: `(batch or 1, heads or 1, new, width)`, the last `width` of the `past + new` positions: bool, True is visible, or floating-point,
            added to scores. Scores of `finfo.min` or less hide, as in masks that transformers makes.
        past: positions in the cache.

    Raises:
        ValueError: where the mask has other axes.
    """

    def __init__(self, mask, batch, past, new):
        self.past, self.new = past, new
        self.first = past + new - mask.shape[-1]
        if mask.ndim != 4 or mask.shape[0] not in (1, batch) or mask.shape[2] != new or not 0 <= self.first <= past:
            raise ValueError(
                f"attention_mask of a layer is {tuple(mask.shape)}, expected ({batch}, heads, {new}, {new} to {past + new} keys): {new} new "
                f"positions after {past} in the cache"
            )
        mask = mask.detach().cpu()
        # An axis that was expanded is read once.
        if mask.shape[0] > 1 and mask.stride(0) == 0:
            mask = mask[:1]
        self.bias = None
        if mask.dtype == torch.bool:
            self.visible = mask
        else:
            self.visible = mask > torch.finfo(mask.dtype).min
            if mask[self.visible].any():
                self.bias = mask.masked_fill(~self.visible, float("-inf"))

    def real(self, batch):
        """Which new positions are tokens, `(batch, new)`, or None where all are: padding is hidden from every query, from its own too."""
        real = self.visible[..., self.past - self.first :].any(2).any(1)
        return None if real.all() else real.expand(batch, -1)

    def is_causal(self, real, window):
        """True if each token sees the tokens up to its own, and no others but for `window`: the number of the last ones that a layer with
        a window sees, or None. `real` `(batch, past + new)` are the positions that are tokens, or None for all."""
        if self.bias is not None:
            return False
        past, first = self.past, self.first
        beyond = window is not None and past - first + 1 >= window
        if first > 0 and not beyond and (real is None or real[:, :first].any()):
            return False
        # Padding between tokens counts in a window of transformers; the cache counts tokens alone.
        if window is not None and real is not None:
            before, after = real.cummax(1).values, real.flip(1).cummax(1).values.flip(1)
            if (before & after & ~real).any():
                return False
        query = torch.arange(past, past + self.new)[:, None]
        key = torch.arange(first, past + self.new)
        causal = key <= query
        if window is not None:
            causal &= query - key < window
        for at in range(1 if real is None else len(real)):
            visible = self.visible if real is None else self.visible[at % len(self.visible)]
            expected = causal if real is None else causal & real[at, first:]
            differs = visible != expected
            if real is not None:
                differs &= real[at, past:, None]
            if differs.any():
                return False
        return True

    def masks(self, real, batch, device):
        """A mask `(heads, new tokens, tokens)` for each sequence that has new tokens. Positions before the first of the mask are hidden.

        Raises:
            ValueError: where a token sees padding, whose key is not in the cache.
        """
        whole = self.visible if self.bias is None else self.bias
        hidden = False if self.bias is None else float("-inf")
        whole = torch.nn.functional.pad(whole, (self.first, 0), value=hidden)
        made = []
        for at in range(batch):
            each = whole[at % len(whole)]
            if real is not None:
                each = each[:, real[at, self.past :]]
                padding = each[..., ~real[at]]
                if (padding if self.bias is None else padding > float("-inf")).any():
                    raise ValueError(f"attention_mask lets sequence {at} see positions of padding, which are not in the cache")
                each = each[..., real[at]]
            if each.shape[1]:
                made.append(each.to(device))
        return made
