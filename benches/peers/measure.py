"""Checks and times the peers of the CPU benchmark that are called from Python; prints their rows.

Inputs are numpy arrays of float32, q [b, h, rows, d] and k, v [b, hkv, s, d], whose values the type that the peer stores holds
exactly; of the backward pass also the gradient of the output, [b, h, rows, d].
"""

import dataclasses
import json
import os
import sys
import time

import numpy

import problems

# Largest error of an answer, relative to the largest value of the reference. Sums of f16 leave errors of 1e-2; a wrong mask or a
# wrong layout, errors near 1.
TOLERANCE = {"f32": 1e-5, "f16": 4e-2, "bf16": 4e-2}
# Bytes of an element. q8_0 has a scale of two bytes for 32 elements.
SIZE = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}

# Keys and values of a decode row rotate through copies of this many bytes in all, more than the caches hold.
ROTATED = 128 << 20
COPIES = 32


class Peer:
    """An implementation of attention."""

    # The name in rows, with the version.
    name = ""
    # True if it has a backward pass.
    has_backward = False

    def refuses(self, problem, dtype):
        """Why a problem cannot be computed, or None."""
        raise NotImplementedError

    def call(self, problem, dtype, q, k, v):
        """A function without parameters that computes the answer; what it prepares once is not timed. Peers with a backward pass take
        the gradient of the output as a fourth tensor, and then return the gradients of the others."""
        raise NotImplementedError

    def output(self, result):
        """The result of a call as float32 [b, h, rows, d]; gradients one after another, as rows."""
        raise NotImplementedError

    def stored(self, dtype):
        """The type of the elements of inputs, of SIZE."""
        return dtype

    def row(self, problem, dtype):
        """The fields of a row that state the problem."""
        return dict(dtype=dtype, **dataclasses.asdict(problem))


def rounded(array, stored):
    """The nearest values of a type, ties to even, as float32."""
    if stored == "f32":
        return array
    if stored == "f16":
        return array.astype(numpy.float16).astype(numpy.float32)
    if stored == "q8_0":
        blocks = array.reshape(-1, 32)
        largest = numpy.abs(blocks).max(axis=1, keepdims=True)
        scale = rounded(largest / 127, "f16")
        return (numpy.clip(numpy.rint(blocks / scale), -127, 127) * scale).reshape(array.shape)
    bits = array.view(numpy.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) & 0xFFFF0000).view(numpy.float32)


def inputs(problem, stored, seed):
    random = numpy.random.default_rng(seed)
    shapes = [(problem.h, problem.rows), (problem.hkv, problem.s), (problem.hkv, problem.s)]
    if problem.kind == "backward":
        shapes.append(shapes[0])
    draw = lambda heads, rows: random.standard_normal((problem.b, heads, rows, problem.d), dtype=numpy.float32)
    return [rounded(draw(*shape), stored) for shape in shapes]


def reference(problem, q, k, v, d_out=None):
    """softmax(q k^T / sqrt(d)) v in float64; for the gradient d_out of it, the gradients of q, k and v one after another, as rows."""
    q, k, v = (x.astype(numpy.float64) for x in (q, k, v))
    k, v = (numpy.repeat(x, problem.h // problem.hkv, axis=1) for x in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / numpy.sqrt(problem.d)
    if problem.causal:
        scores[..., numpy.triu(numpy.ones((problem.rows, problem.s), dtype=bool), 1)] = -numpy.inf
    p = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    if d_out is None:
        return p @ v
    # Problems of the backward pass have as many key/value heads as query heads.
    d_p = d_out.astype(numpy.float64) @ v.transpose(0, 1, 3, 2)
    d_scores = p * (d_p - (p * d_p).sum(axis=-1, keepdims=True)) / numpy.sqrt(problem.d)
    transposed = lambda x: x.transpose(0, 1, 3, 2)
    return numpy.concatenate([d_scores @ k, transposed(d_scores) @ q, transposed(p) @ d_out], axis=2)


def check(peer, problem, dtype):
    """The largest error of the answer to a problem, relative to the largest value; ends the program if the answer is wrong."""
    qkv = inputs(problem, peer.stored(dtype), 1)
    expected = reference(problem, *qkv)
    found = peer.output(peer.call(problem, dtype, *qkv)())
    if found.shape != expected.shape:
        raise SystemExit(f"{peer.name}: wrong shape {found.shape} for {dtype} {problem}")
    error = numpy.abs(found - expected).max() / numpy.abs(expected).max()
    if not error <= TOLERANCE[dtype]:
        raise SystemExit(f"{peer.name}: wrong answer, error {error:.2g} for {dtype} {problem}")
    return float(error)


def timed(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def median(calls, args):
    """The median of the seconds of a call, and how many calls were timed. One that takes longer than a row may is timed once."""
    first = timed(calls[0])
    if first > args.longest:
        return first, 1
    timed(calls[-1])
    times, started = [], time.perf_counter()
    spent = lambda: time.perf_counter() - started
    while not times or (spent() < args.longest and (len(times) < 5 or spent() < args.seconds)):
        times.append(timed(calls[len(times) % len(calls)]))
    return sorted(times)[len(times) // 2], len(times)


def measure(peer, problem, dtype, args):
    """The fields of a row that are measured."""
    copies, stored = 1, peer.stored(dtype)
    if problem.kind == "decode":
        size = 2 * problem.hkv * problem.s * problem.d * SIZE[stored]
        copies = min(COPIES, max(1, int(ROTATED // size)))
    calls = [peer.call(problem, dtype, *inputs(problem, stored, seed)) for seed in range(copies)]
    seconds, count = median(calls, args)
    return dict(seconds=seconds, calls=count)


def main(description, peers):
    """Checks all answers, then measures. `peers` makes the peers of a number of threads."""
    args = problems.parser(description).parse_args()
    if args.threads > len(os.sched_getaffinity(0)):
        raise SystemExit(f"--threads {args.threads}: the process may use {len(os.sched_getaffinity(0))} processors")
    todo = []
    for peer in peers(args.threads):
        refused = {}
        for problem in problems.selected(args):
            for dtype in args.dtype:
                backward = problem.kind == "backward" and not peer.has_backward
                why = "it has no backward pass" if backward else peer.refuses(problem, dtype)
                todo += [] if why else [(peer, problem, dtype)]
                refused[why] = refused.get(why, 0) + 1
        for why in filter(None, refused):
            print(f"{peer.name}: {refused[why]} rows left out: {why}", file=sys.stderr)
    small = lambda peer, problem, dtype: (peer, problems.small(problem), dtype)
    errors = {of: check(*of) for of in dict.fromkeys(small(*row) for row in todo)}
    for peer, problem, dtype in todo:
        found = dict(**measure(peer, problem, dtype, args), error=errors[small(peer, problem, dtype)])
        print(json.dumps(dict(peer=peer.name, **peer.row(problem, dtype), **found)), flush=True)
