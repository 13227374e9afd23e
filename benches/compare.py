#!/usr/bin/env python3
"""Compares two builds of the command line on the kernels of the CPU, and prints a markdown table.

    benches/compare.py OLD NEW [--rounds N] [--threads N] [--isa ISA]... [--only TEXT] [--min-time S]

OLD and NEW are binaries. Each row runs old, new, new, old, N times (default 7), and prints the median of the ratios new / old and their
quartiles: what else the machine does reaches both, and so does what one run leaves to the next. Every run checks its answer against
the oracle first. Instruction sets that the machine lacks are named as skipped. Ends with 1 where a median is above
1.03.
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


def commands(isa):
    for dtype in DTYPES[isa]:
        for form in ROWS.values():
            for d in (64, 128):
                yield form.format(dtype=dtype, d=d)
    if isa in ("avx2", "avx512", "avx512vnni"):
        yield CODES


def seconds(binary, command, isa, args):
    words = [binary, "bench", *command.split(), "--isa", isa, "--threads", str(args.threads), "--json"]
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
    parser.add_argument("--isa", action="append", choices=DTYPES)
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose command has this text, such as 'prefill --dtype bf16'")
    parser.add_argument("--min-time", type=float, default=0.3, metavar="S", help="seconds that a row is measured in each run")
    args = parser.parse_args()
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
