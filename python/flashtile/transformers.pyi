"""Attention of Hugging Face transformers by flashtile."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ._stored_keys import NewTokens, Stored

NAME: str
HARMLESS: frozenset[str]

def register() -> None: ...
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    output_attentions: bool = False,
    sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]: ...

class FlashtileCache(Cache):
    """Keys and values of a model of transformers, quantized, for `generate` and for calls of the model with `past_key_values`."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        k: str = "int8",
        v: str = "tq4",
        center: ArrayLike | Sequence[ArrayLike | None] | None = None,
        equalize: ArrayLike | Sequence[ArrayLike | None] | None = None,
        reserve: int = 0,
        **options: Any,
    ) -> None: ...
    def __copy__(self) -> NoReturn: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> FlashtileCache: ...
    @property
    def batch_size(self) -> int: ...
    def memory(self) -> dict[str, int]: ...
    def check_stored(self) -> None: ...
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Stored, Stored]: ...
    def attend(
        self, tokens: NewTokens, query: torch.Tensor, mask: torch.Tensor | None, causal: bool, options: dict[str, Any]
    ) -> torch.Tensor: ...
    def reset(self) -> None: ...
    def crop(self, tokens_to_remove: int) -> None: ...
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None: ...
    def batch_select_indices(self, indices: torch.Tensor) -> None: ...
    def batch_repeat_interleave(self, repeats: int) -> None: ...
