"""Attention of Hugging Face transformers by flashtile."""

from typing import Any

import torch

NAME: str

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
    **_: Any,
) -> tuple[torch.Tensor, None]: ...
