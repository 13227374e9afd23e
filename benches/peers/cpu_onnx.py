#!/usr/bin/env python3
"""Times the attention of ONNX Runtime on the CPU, one JSON line a row, for `flashtile bench --vs FILE`.

    python3 benches/peers/cpu_onnx.py [--threads 2] [--seconds 0.5] [prefill|small|decode ...] > onnx.jsonl

Three operators are peers; each is the only node of its model, and its inputs and outputs are bound to memory that calls share:

- com.microsoft MultiHeadAttention: equal numbers of query and key/value heads, so no decode row;
- com.microsoft GroupQueryAttention: always causal. Keys and values of a decode row, but for the last, are in the cache, which the
  operator extends in place;
- ai.onnx Attention of opset 23.
"""

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper

import measure

ELEMENTS = {"f32": (TensorProto.FLOAT, numpy.float32), "f16": (TensorProto.FLOAT16, numpy.float16)}
OPSETS = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
# The oldest version of the format with these opsets.
FORMAT = 10


class Onnx(measure.Peer):
    operator = domain = ""

    def __init__(self, threads):
        self.name = f"onnxruntime {self.operator} {onnxruntime.__version__}"
        self.options = onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = threads

    def refuses(self, problem, dtype):
        if dtype not in ELEMENTS:
            return f"{self.operator} has no {dtype} on the CPU"
        return self.refuses_problem(problem)

    def refuses_problem(self, problem):
        return None

    def session(self, dtype, attributes, ranks):
        """A model of one node. `ranks`: names of inputs and of outputs with the number of dimensions; int32 where it is negative."""
        element = ELEMENTS[dtype][0]

        def value(name, rank):
            kind = element if rank > 0 else TensorProto.INT32
            return helper.make_tensor_value_info(name, kind, [None] * (rank if rank > 0 else -1 - rank))

        inputs, outputs = ([value(*of) for of in ranks[way].items()] for way in ("inputs", "outputs"))
        node = helper.make_node(self.operator, [*ranks["inputs"]], [*ranks["outputs"]], domain=self.domain, **attributes)
        graph = helper.make_graph([node], "attention", inputs, outputs)
        model = helper.make_model(graph, opset_imports=OPSETS, ir_version=FORMAT)
        providers = ["CPUExecutionProvider"]
        return onnxruntime.InferenceSession(model.SerializeToString(), self.options, providers=providers)

    def bound(self, session, inputs, outputs):
        """A call that reads and writes these arrays, by name, and returns the output `o`."""
        binding = session.io_binding()
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        # A value uses the memory of its array and does not keep it alive.
        held = [(array, value(array)) for array in (*inputs.values(), *outputs.values())]
        values = [value for _, value in held]
        for name, of in zip(inputs, values):
            binding.bind_ortvalue_input(name, of)
        for name, of in zip(outputs, values[len(inputs) :]):
            binding.bind_ortvalue_output(name, of)

        def call(held=held):
            session.run_with_iobinding(binding)
            return outputs["o"]

        return call


def cast(arrays, dtype):
    return [numpy.ascontiguousarray(array, dtype=ELEMENTS[dtype][1]) for array in arrays]


def packed(array):
    """[b, heads, rows, d] as [b, rows, heads * d]."""
    b, heads, rows, d = array.shape
    return array.transpose(0, 2, 1, 3).reshape(b, rows, heads * d)


class Packed(Onnx):
    """Operators of com.microsoft, whose heads are packed in rows."""

    domain = "com.microsoft"

    def output(self, result):
        found, d = result
        b, rows, width = found.shape
        return found.astype(numpy.float32).reshape(b, rows, width // d, d).transpose(0, 2, 1, 3)


class MultiHeadAttention(Packed):
    operator = "MultiHeadAttention"

    def refuses_problem(self, problem):
        return "MultiHeadAttention has no fewer key/value heads than query heads" if problem.h != problem.hkv else None

    def call(self, problem, dtype, q, k, v):
        attributes = dict(num_heads=problem.h, unidirectional=int(problem.causal))
        session = self.session(dtype, attributes, dict(inputs=dict(q=3, k=3, v=3), outputs=dict(o=3)))
        q, k, v = cast((packed(x) for x in (q, k, v)), dtype)
        call = self.bound(session, dict(q=q, k=k, v=v), dict(o=numpy.empty_like(q)))
        return lambda: (call(), problem.d)


class GroupQueryAttention(Packed):
    operator = "GroupQueryAttention"

    def refuses_problem(self, problem):
        causal = problem.causal or problem.rows == 1
        return None if causal else "GroupQueryAttention is always causal"

    def call(self, problem, dtype, q, k, v):
        attributes = dict(num_heads=problem.h, kv_num_heads=problem.hkv)
        cache, integers = dict(past_k=4, past_v=4), dict(last=-2, total=-1)
        outputs = dict(o=3, present_k=4, present_v=4)
        session = self.session(dtype, attributes, dict(inputs=dict(q=3, k=3, v=3, **cache, **integers), outputs=outputs))
        new_k, new_v = (packed(x[:, :, -problem.rows :]) for x in (k, v))
        q, new_k, new_v, k, v = cast((packed(q), new_k, new_v, k, v), dtype)
        # Inputs and outputs are the same memory, so the operator appends in place.
        inputs = dict(q=q, k=new_k, v=new_v, past_k=k, past_v=v)
        inputs["last"] = numpy.full(problem.b, problem.s - 1, dtype=numpy.int32)
        inputs["total"] = numpy.array(problem.s, dtype=numpy.int32)
        call = self.bound(session, inputs, dict(o=numpy.empty_like(q), present_k=k, present_v=v))
        return lambda: (call(), problem.d)


class Attention(Onnx):
    operator = "Attention"

    def call(self, problem, dtype, q, k, v):
        session = self.session(dtype, dict(is_causal=int(problem.causal)), dict(inputs=dict(q=4, k=4, v=4), outputs=dict(o=4)))
        q, k, v = cast((q, k, v), dtype)
        return self.bound(session, dict(q=q, k=k, v=v), dict(o=numpy.empty_like(q)))

    def output(self, result):
        return result.astype(numpy.float32)


def peers(threads):
    return [peer(threads) for peer in (MultiHeadAttention, GroupQueryAttention, Attention)]


if __name__ == "__main__":
    measure.main(__doc__.split("\n", 1)[0], peers)
