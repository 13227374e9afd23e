#!/usr/bin/env python3
"""Prints the size of the CPU kernels of each instruction set in a binary, as a markdown table.

    benches/code_bytes.py [BINARY]        default: target/release/flashtile, with its symbols

Functions are counted by their module in crates/cpu/src/isa. It needs nm, of binutils.
"""

import re
import subprocess
import sys
from collections import defaultdict

# Module of an instruction set, and its name.
SETS = {
    "portable": "portable",
    "avx2": "AVX2",
    "avx512::f32_products": "AVX-512",
    "avx512::bf16_products": "AVX-512 with BF16",
    "avx512::amx_products": "AMX",
    "vnni": "AVX-512 with VNNI",
}


def main():
    binary = sys.argv[1] if len(sys.argv) > 1 else "target/release/flashtile"
    symbols = subprocess.run(["nm", "-SC", binary], capture_output=True, text=True, check=True).stdout
    sizes = defaultdict(list)
    for line in symbols.splitlines():
        found = re.match(r"[0-9a-f]+ ([0-9a-f]+) [tT] flashtile_cpu::isa::(.*)", line)
        for module in SETS:
            if found and found[2].startswith(module + "::"):
                sizes[module].append((int(found[1], 16), found[2]))
    if missing := [name for module, name in SETS.items() if not sizes[module]]:
        sys.exit(f"{binary} has no symbols of the kernels for {', '.join(missing)}")
    print("| | KB | functions | the largest, KB |\n|---|---|---|---|")
    for module, name in SETS.items():
        largest, function = max(sizes[module])
        total = sum(size for size, _ in sizes[module])
        print(f"| {name} | {total / 1000:.0f} | {len(sizes[module])} | {largest / 1000:.0f} `{function.removeprefix(module + '::')}` |")


if __name__ == "__main__":
    main()
