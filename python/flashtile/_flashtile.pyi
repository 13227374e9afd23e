"""The extension module, which the Python files beside it call."""

from collections.abc import Callable
from typing import Any

__version__: str

def attention(
    tensors: list[Any], options: dict[str, Any], make: Callable[[str, list[int]], Any]
) -> tuple[Any, Any]: ...
