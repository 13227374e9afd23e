"""Fused attention for numpy arrays, everything that speaks DLPack, and tensors of PyTorch on CPUs and NVIDIA GPUs.

    import flashtile
    out = flashtile.attention(q, k, v, causal=True)

`attention` computes attention in one call, `attention_backward` its gradients, `attention_with_cache` over pages or slots of your own, `merge` combines results over parts of the keys, `KvCache` keeps keys and values of sequences
that grow, `plan` says what would run, and `kv_report` measures what codecs do to keys and values. `flashtile.transformers.register()` makes `attn_implementation="flashtile"` work
in Hugging Face transformers.

Tensors are read and written where they are, without copies. The interpreter runs other threads during a call: like any function that
computes on arrays, it needs them not to write to its arguments meanwhile.
"""

from ._attention import attention
from ._backward import Gradients, attention_backward
from ._cache import KvCache, Layers, Step
from ._flashtile import Sequence, Snapshot, __version__
from ._merge import merge
from ._plan import plan
from ._quality import key_factors, kv_report
from ._with_cache import attention_with_cache

__all__ = [
    "Gradients",
    "KvCache",
    "Layers",
    "Sequence",
    "Snapshot",
    "Step",
    "__version__",
    "attention",
    "attention_backward",
    "attention_with_cache",
    "key_factors",
    "kv_report",
    "merge",
    "plan",
]
