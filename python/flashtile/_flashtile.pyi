"""The extension module, which the Python files beside it call."""

from collections.abc import Callable
from typing import Any, final

__version__: str
OPTIONS: tuple[str, ...]
CODECS: tuple[str, ...]

@final
class Sequence:
    """A sequence of a cache."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Snapshot:
    """The stored rows of a sequence in all layers, in main memory. Its length is the sequence's, in tokens."""

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class Cache:
    def __new__(
        cls,
        layers: str,
        means: list[list[float] | None],
        factors: list[list[float] | None],
        stream: tuple[int, int] | None,
    ) -> Cache: ...
    def create(self) -> Sequence: ...
    def fork(self, sequence: Sequence, stream: tuple[int, int] | None) -> Sequence: ...
    def snapshot(self, sequence: Sequence, stream: tuple[int, int] | None) -> Snapshot: ...
    def restore(self, snapshot: Snapshot, stream: tuple[int, int] | None) -> Sequence: ...
    def remove(self, sequence: Sequence) -> None: ...
    def len(self, sequence: Sequence) -> int: ...
    def truncate(self, sequence: Sequence, len: int) -> None: ...
    def forget(self, sequence: Sequence, before: int) -> None: ...
    def check_stored(self, stream: tuple[int, int] | None) -> None: ...
    def memory(self) -> dict[str, int]: ...
    def step(self, batch: list[tuple[Sequence, int]], stream: tuple[int, int] | None) -> Step: ...

@final
class Step:
    def attend(
        self, layer: int, tensors: list[Any], options: tuple[Any, ...], make: Callable[[str, tuple[int, ...]], Any]
    ) -> tuple[Any, Any]: ...
    def finish(self) -> None: ...
    def cancel(self) -> None: ...
    def lens(self) -> list[tuple[int, int]]: ...

def attention(
    tensors: list[Any], options: tuple[Any, ...], make: Callable[[str, tuple[int, ...]], Any]
) -> tuple[Any, Any]: ...
def attention_backward(
    tensors: list[Any],
    options: tuple[Any, ...],
    make: Callable[[str, tuple[int, ...]], Any],
    d_sinks: bool,
    d_bias: bool,
    d_alibi_slopes: bool,
) -> list[Any]: ...
def attention_plain(
    tensors: list[Any],
    options: tuple[Any, ...],
    make: Callable[[str, tuple[int, ...]], Any],
    classes: tuple[type, ...],
    records: bool,
) -> tuple[Any, Any] | None: ...
def attention_with_cache(
    tensors: list[Any],
    new: list[Any] | None,
    args: tuple[Any, ...],
    options: tuple[Any, ...],
    make: Callable[[str, tuple[int, ...]], Any],
) -> tuple[Any, Any]: ...
def merge(
    states: list[tuple[Any, Any]], out: Any, options: tuple[Any, ...], make: Callable[[str, tuple[int, ...]], Any]
) -> tuple[Any, Any]: ...
def plan(desc: str, machine: str | None, backend: str, splits: int | None) -> str: ...
def kv_pair(
    tensors: list[Any],
    options: tuple[Any, ...],
    codecs: list[str],
    rows: int,
    equalize: float | None,
    keep: list[int],
) -> str: ...
