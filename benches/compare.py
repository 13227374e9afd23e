#!/usr/bin/env python3
"""Compares two builds of the command line on the kernels of the CPU, or of a CUDA device, and prints a markdown table.

    benches/compare.py OLD NEW [--isa ISA | cuda]... [--rounds N] [--threads N] [--only TEXT] [--min-time S]

OLD and NEW are binaries. Each row runs old, new, new, old, N times (default 7), and prints the median of the ratios new / old and their
quartiles: whatever else the machine does slows both, and so does what one run leaves to the next. Every run checks its answer against
the oracle first. Without --isa, every instruction set of the CPU is measured; an instruction set or device that the machine lacks is
named as skipped. The exit status is 1 where a median is above 1.03.
"""

import argparse
import json
import statistics
import subprocess
import sys

LIMIT = 1.03

# Options of `flashtile bench` of each row.
ROWS = {
    "prefill": "prefill --dtype {dtype} --head-dim {d} --seq 1024",
    "decode": "decode --dtype {dtype} --head-dim {d} --seq 16384 --cache contiguous",
}
CODES = "decode --dtype bf16 --head-dim 128 --seq 16384 --cache contiguous --codec int8,tq6,tq5,tq4,tq3,tq2,fp8"
DTYPES = {
    "portable": ["f32", "f16", "bf16"],
    "avx2": ["f32", "f16", "bf16"],
    "avx512": ["f32", "f16", "bf16"],
    "avx512vnni": [],
    "avx512bf16": ["bf16"],
    "amx": ["bf16"],
}
CUDA = [
    *(f"prefill --dtype {dtype} --head-dim {d} --seq 4096 --heads {4096 // d}" for dtype, d in
      (("bf16", 64), ("bf16", 128), ("bf16", 256), ("f16", 128), ("f32", 128))),
    *(f"decode --dtype {dtype} --head-dim {d} --batch 16 --seq 8192 --heads 32 --kv-heads 8" for dtype, d in
      (("bf16", 64), ("bf16", 128), ("bf16", 256), ("f16", 128), ("f32", 128))),
    "decode --dtype bf16 --head-dim 128 --seq 131072 --heads 32 --kv-heads 8",
    "decode --dtype bf16 --head-dim 128 --batch 64 --seq 4096 --heads 32 --kv-heads 8 --cache paged --page 16",
    *(f"decode --dtype {dtype} --head-dim 128 --batch 16 --seq 8192 --heads 32 --kv-heads 8 --kernels portable" for dtype in ("bf16", "f32")),
    "prefill --dtype bf16 --head-dim 128 --seq 4096 --heads 32 --kernels portable",
]


def commands(isa):
    if isa == "cuda":
        yield from CUDA
        return
    for dtype in DTYPES[isa]:
        for form in ROWS.values():
            for d in (64, 128):
                yield form.format(dtype=dtype, d=d)
    if isa in ("avx2", "avx512", "avx512vnni"):
        yield CODES


def seconds(binary, command, isa, args):
    where = ["--backend", "cuda"] if isa == "cuda" else ["--isa", isa, "--threads", str(args.threads)]
    words = [binary, "bench", *command.split(), *where, "--json"]
    words += ["--min-time", str(args.min_time)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(done.stderr.strip())
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    name = lambda row: row["kernel"] + ("" if row["kind"] == "decode" else " causal" if row["causal"] else " full")
    return {name(row): row["seconds"] for row in rows if row["peer"] == "flashtile"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", action="append", choices=[*DTYPES, "cuda"])
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose command has this text, such as 'prefill --dtype bf16'")
    parser.add_argument("--min-time", type=float, default=0.3, metavar="S", help="seconds that a row is measured in each run")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds is 2 or more: quartiles need two ratios")
    print("| kernel | new / old, median | quartiles | old, ms |\n|---|---|---|---|", flush=True)
    slower = []
    for isa in args.isa or DTYPES:
        for command in filter(lambda command: args.only in command, commands(isa)):
            ratios, old_ms = {}, {}
            for _ in range(args.rounds):
                try:
                    order = [args.old, args.new, args.new, args.old]
                    old, new, new_again, old_again = (seconds(binary, command, isa, args) for binary in order)
                except OSError as error:
                    print(f"| {isa}: skipped, {error} | | | |", flush=True)
                    break
                for name in old:
                    both = old[name] + old_again[name]
                    ratios.setdefault(name, []).append((new[name] + new_again[name]) / both)
                    old_ms.setdefault(name, []).append(both / 2 * 1e3)
            for name, of_row in ratios.items():
                low, middle, high = statistics.quantiles(of_row, n=4, method="inclusive")
                print(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {statistics.median(old_ms[name]):.3f} |", flush=True)
                if middle > LIMIT:
                    slower.append(name)
    if slower:
        print(f"\nslower by more than {LIMIT - 1:.0%}: " + ", ".join(slower))
    return bool(slower)


sys.exit(main())
