#!/usr/bin/env python3
"""The problems that peers of the CPU benchmark are measured with, which are rows of `flashtile bench` too, and the options of all peers.

    python3 benches/peers/problems.py [--head-dim 64] [--seq 2048] [prefill|small|decode|backward ...]

prints them as JSON lines, for a peer that is not written in Python.
"""

import argparse
import dataclasses
import json

FORWARD = ("prefill", "small", "decode")
# Few peers have a backward pass: its rows are measured where the group is named.
GROUPS = (*FORWARD, "backward")
DTYPES = ("f32", "f16", "bf16")


@dataclasses.dataclass(frozen=True)
class Problem:
    kind: str
    d: int
    h: int
    hkv: int
    b: int
    s: int
    causal: bool

    @property
    def rows(self):
        """Number of queries."""
        return 1 if self.kind == "decode" else self.s


def problems(group):
    if group == "decode":
        shapes = ((64, 32, 8), (128, 32, 8), (256, 16, 2))
        return [Problem("decode", d, h, hkv, 1, s, False) for d, h, hkv in shapes for s in (1024, 32768)]
    if group == "backward":
        return [Problem("backward", d, 8, 8, 1, 2048, causal) for d in (64, 128) for causal in (False, True)]
    shapes = [(d, 8, 1, s) for d in (32, 64, 128, 256) for s in (2048, 4096)]
    if group == "small":
        shapes = [(d, 12, 4, 128) for d in (32, 64)]
    return [Problem("prefill", d, h, h, b, s, causal) for d, h, b, s in shapes for causal in (False, True)]


def parser(description):
    def list_of(kind):
        return lambda text: [kind(part) for part in text.split(",")]

    options = argparse.ArgumentParser(description=description)
    options.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all but backward by default")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--seconds", type=float, default=0.5, help="how long a row is measured, at least")
    options.add_argument("--longest", type=float, default=5.0, help="no call of a row begins later than this many seconds after the first")
    options.add_argument("--head-dim", type=list_of(int), help="only these, such as 64,128")
    options.add_argument("--seq", type=list_of(int), help="only these numbers of keys")
    options.add_argument("--dtype", type=list_of(str), default=list(DTYPES), help="only these")
    return options


def selected(args):
    """Problems that the options select, in the order of the groups."""
    unknown = sorted({*args.groups} - {*GROUPS}) + sorted({*args.dtype} - {*DTYPES})
    if unknown:
        raise SystemExit(f"{unknown[0]}: expected a group of {', '.join(GROUPS)} or a dtype of {', '.join(DTYPES)}")
    groups = [group for group in GROUPS if group in (args.groups or FORWARD)]
    found = [problem for group in groups for problem in problems(group)]
    found = [of for of in found if not args.head_dim or of.d in args.head_dim]
    return [of for of in found if not args.seq or of.s in args.seq]


def small(problem):
    """A problem of the same kind, heads and mask for which the answer is soon checked."""
    return dataclasses.replace(problem, s=700 if problem.kind == "decode" else 150)


if __name__ == "__main__":
    args = parser(__doc__.split("\n", 1)[0]).parse_args()
    for problem in selected(args):
        for dtype in args.dtype:
            print(json.dumps(dict(dtype=dtype, **dataclasses.asdict(problem))))
