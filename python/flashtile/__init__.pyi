"""Fused attention for numpy arrays, everything that speaks DLPack, and tensors of PyTorch on CPUs and NVIDIA GPUs."""

from collections.abc import Mapping, Sequence as List
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

import numpy
from numpy.typing import ArrayLike, NDArray

from ._flashtile import Sequence as Sequence
from ._flashtile import Snapshot as Snapshot

__version__: str

class Dlpack(Protocol):
    """A tensor of any library."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# Arrays of numpy and tensors of PyTorch: the result has the type of q.
Array = TypeVar("Array", bound=Dlpack)
Layout = Literal["bhsd", "bshd"]
CacheLayout = Literal["paged", "contiguous", "ring"]
Offset = Literal["top_left", "bottom_right"] | int
Numbers = List[float] | Dlpack
Lengths = List[int] | Dlpack

@overload
def attention(
    q: Array,
    k: Dlpack,
    v: Dlpack,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    q_offset: Offset | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Dlpack | List[Dlpack] | None = None,
    alibi_slopes: Numbers | List[List[float]] | None = None,
    sinks: Numbers | None = None,
    q_lens: Lengths | None = None,
    kv_lens: Lengths | None = None,
    cu_seqlens: Lengths | tuple[Lengths, Lengths] | None = None,
    layout: Layout = "bhsd",
    return_lse: Literal[False] = False,
    out: Dlpack | None = None,
) -> Array: ...
@overload
def attention(
    q: Array,
    k: Dlpack,
    v: Dlpack,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    q_offset: Offset | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Dlpack | List[Dlpack] | None = None,
    alibi_slopes: Numbers | List[List[float]] | None = None,
    sinks: Numbers | None = None,
    q_lens: Lengths | None = None,
    kv_lens: Lengths | None = None,
    cu_seqlens: Lengths | tuple[Lengths, Lengths] | None = None,
    layout: Layout = "bhsd",
    return_lse: Literal[True],
    out: Dlpack | None = None,
) -> tuple[Array, Array]: ...
class Gradients(NamedTuple):
    """Gradients of a loss with respect to the inputs of `attention`."""

    d_q: Any
    d_k: Any
    d_v: Any
    d_sinks: Any = None
    d_bias: Any = None
    d_alibi_slopes: Any = None

def attention_backward(
    q: Array,
    k: Dlpack,
    v: Dlpack,
    out: Dlpack,
    lse: Dlpack,
    d_out: Dlpack,
    *,
    d_lse: Dlpack | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    q_offset: Offset | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Dlpack | None = None,
    alibi_slopes: Numbers | List[List[float]] | None = None,
    sinks: Numbers | None = None,
    q_lens: Lengths | None = None,
    kv_lens: Lengths | None = None,
    cu_seqlens: Lengths | tuple[Lengths, Lengths] | None = None,
    layout: Layout = "bhsd",
    d_sinks: bool = False,
    d_bias: bool = False,
    d_alibi_slopes: bool = False,
) -> Gradients: ...
@overload
def attention_with_cache(
    q: Array,
    k_cache: Dlpack,
    v_cache: Dlpack,
    *,
    cache_lens: Lengths | None = None,
    block_table: ArrayLike | Dlpack | tuple[Lengths, Lengths] | None = None,
    cache_batch_idx: Lengths | None = None,
    k: Dlpack | None = None,
    v: Dlpack | None = None,
    q_lens: Lengths | None = None,
    cu_seqlens: Lengths | tuple[Lengths, Lengths] | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    q_offset: Offset = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    mask: Dlpack | List[Dlpack] | None = None,
    alibi_slopes: Numbers | List[List[float]] | None = None,
    sinks: Numbers | None = None,
    layout: Layout = "bhsd",
    return_lse: Literal[False] = False,
    out: Dlpack | None = None,
) -> Array: ...
@overload
def attention_with_cache(
    q: Array,
    k_cache: Dlpack,
    v_cache: Dlpack,
    *,
    cache_lens: Lengths | None = None,
    block_table: ArrayLike | Dlpack | tuple[Lengths, Lengths] | None = None,
    cache_batch_idx: Lengths | None = None,
    k: Dlpack | None = None,
    v: Dlpack | None = None,
    q_lens: Lengths | None = None,
    cu_seqlens: Lengths | tuple[Lengths, Lengths] | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    q_offset: Offset = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    mask: Dlpack | List[Dlpack] | None = None,
    alibi_slopes: Numbers | List[List[float]] | None = None,
    sinks: Numbers | None = None,
    layout: Layout = "bhsd",
    return_lse: Literal[True],
    out: Dlpack | None = None,
) -> tuple[Array, Array]: ...
def merge(
    states: List[tuple[Array, Array]], *, layout: Layout = "bhsd", out: Dlpack | None = None
) -> tuple[Array, Array]: ...
def plan(
    *,
    heads: int,
    q_len: int,
    head_dim: int,
    batch: int = 1,
    kv_heads: int | None = None,
    kv_len: int | None = None,
    value_dim: int | None = None,
    dtype: Literal["f32", "f16", "bf16"] = "f32",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    q_offset: Offset | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Literal["bool", "f32", "f16", "bf16"] | None = None,
    alibi: bool = False,
    sinks: bool = False,
    kv_lens: List[int] | NDArray[Any] | None = None,
    cu_seqlens: List[int] | NDArray[Any] | tuple[List[int], List[int]] | None = None,
    machine: str | None = None,
    backend: str | None = None,
    splits: int | None = None,
) -> dict[str, Any]: ...
def kv_report(
    tensors: Mapping[str, Dlpack],
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    q_offset: Offset | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: Layout = "bhsd",
    codecs: List[str] | None = None,
    rows: int = 64,
    equalize: float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
) -> dict[str, Any]: ...
def key_factors(k: ArrayLike, mean: ArrayLike, power: float = 0.5) -> NDArray[numpy.float32]: ...

class Layers:
    """A number of layers of a `KvCache` that follow each other and are alike."""

    def __init__(
        self,
        count: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layout: CacheLayout = "paged",
        pages: int = 1024,
        page_size: int = 16,
        slots: int | None = None,
        capacity: int | None = None,
        k: str = "int8",
        v: str = "tq4",
        keep_first: int = 0,
        keep_last: int = 0,
        keep_slots: int | None = None,
    ) -> None: ...

class KvCache:
    """Keys and values of many sequences, for all layers of a model, as elements or quantized."""

    @overload
    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layout: CacheLayout = "paged",
        pages: int = 1024,
        page_size: int = 16,
        slots: int | None = None,
        capacity: int | None = None,
        k: str = "int8",
        v: str = "tq4",
        keep_first: int = 0,
        keep_last: int = 0,
        keep_slots: int | None = None,
        center: ArrayLike | List[ArrayLike | None] | None = None,
        equalize: ArrayLike | List[ArrayLike | None] | None = None,
        device: Any = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        layers: List[Layers],
        *,
        center: ArrayLike | List[ArrayLike | None] | None = None,
        equalize: ArrayLike | List[ArrayLike | None] | None = None,
        device: Any = None,
    ) -> None: ...
    def create(self) -> Sequence: ...
    def fork(self, sequence: Sequence) -> Sequence: ...
    def snapshot(self, sequence: Sequence) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> Sequence: ...
    def remove(self, sequence: Sequence) -> None: ...
    def len(self, sequence: Sequence) -> int: ...
    def truncate(self, sequence: Sequence, length: int) -> None: ...
    def forget(self, sequence: Sequence, before: int) -> None: ...
    def memory(self) -> dict[str, int]: ...
    def check_stored(self) -> None: ...
    def step(self, batch: List[tuple[Sequence, int]]) -> Step: ...

class Step:
    """A step of a batch over a cache, begun by `KvCache.step`."""

    @overload
    def attend(
        self,
        layer: int,
        q: Array,
        k: Dlpack,
        v: Dlpack,
        *,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        attention_chunk: int | None = None,
        q_offset: Offset | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        mask: Dlpack | List[Dlpack] | None = None,
        alibi_slopes: Numbers | List[List[float]] | None = None,
        sinks: Numbers | None = None,
        return_lse: Literal[False] = False,
        out: Dlpack | None = None,
    ) -> Array: ...
    @overload
    def attend(
        self,
        layer: int,
        q: Array,
        k: Dlpack,
        v: Dlpack,
        *,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        attention_chunk: int | None = None,
        q_offset: Offset | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        mask: Dlpack | List[Dlpack] | None = None,
        alibi_slopes: Numbers | List[List[float]] | None = None,
        sinks: Numbers | None = None,
        return_lse: Literal[True],
        out: Dlpack | None = None,
    ) -> tuple[Array, Array]: ...
    def lens(self) -> list[tuple[int, int]]: ...
    def finish(self) -> None: ...
    def cancel(self) -> None: ...
    def __enter__(self) -> Step: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
