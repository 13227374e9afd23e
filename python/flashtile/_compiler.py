"""The compiler of CUDA kernels, where PyTorch's packages bring it."""

import ctypes
import functools
import importlib.util
import pathlib


@functools.cache
def load_compiler():
    """Loads NVRTC, which compiles the kernels, from the packages that PyTorch brings: loaders find what is loaded by its name."""
    spec = importlib.util.find_spec("nvidia")
    for folder in map(pathlib.Path, [] if spec is None else spec.submodule_search_locations):
        # The compiler looks for its second part by name, once it needs it.
        for library in [*folder.glob("*/lib/libnvrtc-builtins.so.*"), *folder.glob("*/lib/libnvrtc.so.*")]:
            if ".alt." not in library.name:
                ctypes.CDLL(str(library))
