"""Fused attention on CPUs for numpy arrays, PyTorch tensors, and everything that speaks DLPack."""

from collections.abc import Sequence as List
from typing import Any, Literal, Protocol, TypeVar, overload

__version__: str

class Dlpack(Protocol):
    """A tensor of any library."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# Arrays of numpy and tensors of PyTorch: the result has the type of q.
Array = TypeVar("Array", bound=Dlpack)
Layout = Literal["bhsd", "bshd"]
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
    q_offset: Offset | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Dlpack | None = None,
    alibi_slopes: Numbers | None = None,
    sinks: Numbers | None = None,
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
    q_offset: Offset | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Dlpack | None = None,
    alibi_slopes: Numbers | None = None,
    sinks: Numbers | None = None,
    kv_lens: Lengths | None = None,
    cu_seqlens: Lengths | tuple[Lengths, Lengths] | None = None,
    layout: Layout = "bhsd",
    return_lse: Literal[True],
    out: Dlpack | None = None,
) -> tuple[Array, Array]: ...
