#!/usr/bin/env python3
"""Times the attention of llama.cpp on the CPU, one JSON line a row, for `flashtile bench --vs FILE`.

    GGML=FOLDER python3 benches/peers/cpu_llama.py [--threads 2] [--seconds 0.5] [prefill|small|decode ...] > llama.jsonl

FOLDER has the shared libraries of ggml, which hold the operators of llama.cpp. Three peers use them as llama.cpp does:

- flash: ggml_flash_attn_ext, what llama.cpp computes by default;
- flash q8_0: the same over a cache of q8_0, blocks of 32 codes of 8 bits with a scale of f16. Its rows are compared with codec
  int8 of flashtile, which stores nearly as many bits;
- matmul: ggml_mul_mat, ggml_soft_max_ext, ggml_mul_mat over transposed values, and the copy into the order of heads, what
  llama.cpp computes with flash attention off.

Queries and results are f32, as in llama.cpp; the dtype of a row is that of keys and values, but for q8_0 that of queries. Keys
are [b, hkv, s, d] in memory.
"""

import ctypes
import os
import pathlib

import numpy

import measure

# enum ggml_type.
TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
SIGNATURES = {
    "ggml_version": (ctypes.c_char_p, ""),
    "ggml_init": (ctypes.c_void_p, "P"),
    "ggml_free": (None, "p"),
    "ggml_tensor_overhead": (ctypes.c_size_t, ""),
    "ggml_graph_overhead": (ctypes.c_size_t, ""),
    "ggml_new_tensor_4d": (ctypes.c_void_p, "pillll"),
    "ggml_new_graph": (ctypes.c_void_p, "p"),
    "ggml_build_forward_expand": (None, "pp"),
    "ggml_flash_attn_ext": (ctypes.c_void_p, "ppppp" + "fff"),
    "ggml_mul_mat": (ctypes.c_void_p, "ppp"),
    "ggml_soft_max_ext": (ctypes.c_void_p, "ppp" + "ff"),
    "ggml_permute": (ctypes.c_void_p, "pp" + "iiii"),
    "ggml_cont": (ctypes.c_void_p, "pp"),
    "ggml_row_size": (ctypes.c_size_t, "il"),
    "ggml_quantize_chunk": (ctypes.c_size_t, "ipp" + "lllp"),
    "ggml_backend_cpu_init": (ctypes.c_void_p, ""),
    "ggml_backend_cpu_set_n_threads": (None, "pi"),
    "ggml_backend_alloc_ctx_tensors": (ctypes.c_void_p, "pp"),
    "ggml_backend_buffer_free": (None, "p"),
    "ggml_backend_tensor_set": (None, "ppzz"),
    "ggml_backend_tensor_get": (None, "ppzz"),
    "ggml_backend_graph_compute": (ctypes.c_int, "pp"),
}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


PARAMETERS = {
    "p": ctypes.c_void_p,
    "P": InitParams,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "z": ctypes.c_size_t,
    "f": ctypes.c_float,
}


class Ggml:
    """The functions of SIGNATURES, without their prefix, and a CPU backend."""

    def __init__(self, folder, threads):
        libraries = []
        # Each needs those before it.
        for name in ("libggml-base.so", "libggml-cpu.so"):
            found = sorted(pathlib.Path(folder).rglob(name))
            if not found:
                raise SystemExit(f"GGML={folder}: no {name} there")
            libraries.append(ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL))
        for name, (result, parameters) in SIGNATURES.items():
            function = next((getattr(of, name) for of in libraries if hasattr(of, name)), None)
            if function is None:
                raise SystemExit(f"GGML={folder}: no function {name}")
            function.restype = result
            function.argtypes = [PARAMETERS[of] for of in parameters]
            setattr(self, name.removeprefix("ggml_"), function)
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, threads)

    def encoded(self, array, stored):
        """The bits of values that a type holds exactly."""
        if stored == "bf16":
            return (array.view(numpy.uint32) >> 16).astype(numpy.uint16)
        if stored == "f16":
            return array.astype(numpy.float16)
        if stored == "f32":
            return array
        kind, length = TYPES[stored], array.shape[-1]
        rows = array.size // length
        codes = numpy.empty(rows * self.row_size(kind, length), dtype=numpy.uint8)
        self.quantize_chunk(kind, array.ctypes.data, codes.ctypes.data, 0, rows, length, None)
        return codes


class Graph:
    """A graph with its tensors, and the arrays that tensors are set to."""

    def __init__(self, ggml):
        self.ggml = ggml
        size = 64 * ggml.tensor_overhead() + ggml.graph_overhead()
        self.context = ggml.init(InitParams(size, None, True))
        self.buffer, self.arrays = None, []

    def __del__(self):
        if self.buffer:
            self.ggml.backend_buffer_free(self.buffer)
        self.ggml.free(self.context)

    def tensor(self, array, stored):
        """A tensor of an array. Its first dimension is the array's last."""
        shape = (1,) * (4 - array.ndim) + array.shape
        tensor = self.ggml.new_tensor_4d(self.context, TYPES[stored], *reversed(shape))
        self.arrays.append((tensor, self.ggml.encoded(numpy.ascontiguousarray(array), stored)))
        return tensor

    def finish(self, result):
        ggml = self.ggml
        self.result = result
        self.graph = ggml.new_graph(self.context)
        ggml.build_forward_expand(self.graph, result)
        self.buffer = ggml.backend_alloc_ctx_tensors(self.context, ggml.backend)
        if not self.buffer:
            raise SystemExit("ggml: no memory for the tensors of a problem")
        for tensor, array in self.arrays:
            ggml.backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
        self.arrays = []

    def compute(self):
        status = self.ggml.backend_graph_compute(self.ggml.backend, self.graph)
        if status != 0:
            raise SystemExit(f"ggml: ggml_backend_graph_compute returned {status}")
        return self

    def read(self, shape):
        array = numpy.empty(shape, dtype=numpy.float32)
        self.ggml.backend_tensor_get(self.result, array.ctypes.data, 0, array.nbytes)
        return array


def mask(problem):
    hidden = numpy.triu(numpy.ones((problem.rows, problem.s), dtype=bool), 1)
    return numpy.where(hidden, numpy.float32("-inf"), numpy.float32(0))


class Flash(measure.Peer):
    kind = "flash"

    def __init__(self, ggml):
        self.ggml = ggml
        self.name = f"llama.cpp {self.kind} (ggml {ggml.version().decode()})"

    def refuses(self, problem, dtype):
        return None

    def call(self, problem, dtype, q, k, v):
        graph = Graph(self.ggml)
        q, masked = graph.tensor(q, "f32"), graph.tensor(mask(problem), "f16") if problem.causal else None
        k, v = self.cache(graph, self.stored(dtype), k, v)
        graph.finish(self.attention(graph.context, q, k, v, (masked, problem.d**-0.5)))
        graph.shape = (problem.b, problem.rows, problem.h, problem.d)
        return graph.compute

    def cache(self, graph, stored, k, v):
        return graph.tensor(k, stored), graph.tensor(v, stored)

    def attention(self, context, q, k, v, softmax):
        return self.ggml.flash_attn_ext(context, q, k, v, *softmax, 0.0, 0.0)

    def output(self, graph):
        return graph.read(graph.shape).transpose(0, 2, 1, 3)


class FlashQ8(Flash):
    kind = "flash q8_0"

    def refuses(self, problem, dtype):
        return None if (problem.kind, dtype) == ("decode", "f32") else "a quantized cache is measured in decode, with queries of f32"

    def stored(self, dtype):
        return "q8_0"

    def row(self, problem, dtype):
        # The row of flashtile has a cache, whose sequences are causal.
        return super().row(problem, dtype) | dict(causal=True, layout="contiguous int8")


class Matmul(Flash):
    kind = "matmul"

    def cache(self, graph, stored, k, v):
        return graph.tensor(k, stored), graph.tensor(v.transpose(0, 1, 3, 2), stored)

    def attention(self, context, q, k, v, softmax):
        p = self.ggml.soft_max_ext(context, self.ggml.mul_mat(context, k, q), *softmax, 0.0)
        result = self.ggml.mul_mat(context, v, p)
        return self.ggml.cont(context, self.ggml.permute(context, result, 0, 2, 1, 3))


def peers(threads):
    if "GGML" not in os.environ:
        raise SystemExit("GGML: expected the folder of the shared libraries of ggml in this variable")
    ggml = Ggml(os.environ["GGML"], threads)
    return [Flash(ggml), FlashQ8(ggml), Matmul(ggml)]


if __name__ == "__main__":
    measure.main(__doc__.split("\n", 1)[0], peers)
