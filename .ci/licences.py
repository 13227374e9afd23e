#!/usr/bin/env python3
"""Checks that every dependency may be used under a licence of the list, and comes from the registry."""

import json
import re
import subprocess
import sys

ALLOWED = {
    "MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Zlib", "0BSD",
    "Unicode-3.0", "Unlicense", "BSL-1.0", "CC0-1.0", "MIT-0",
}

# Another licence is fine for a tool that only tests run, which no package and no program of flashtile contains,
TOOLS = {"cbindgen": "MPL-2.0"}
# and for what burn itself depends on: whoever has tensors of burn has it.
OF_BURN = {"colored": "MPL-2.0"}


def permitted(expression):
    """Evaluates an SPDX expression of OR, AND and parentheses."""
    tokens = re.findall(r"\(|\)|\bOR\b|\bAND\b|[^()\s/]+(?:\s+WITH\s+[^()\s/]+)?", expression.replace("/", " OR "))
    words = {"(": "(", ")": ")", "OR": "or", "AND": "and"}
    return eval(" ".join(words.get(t) or str(t in ALLOWED) for t in tokens))


def packages(kinds):
    """Names and versions of packages that are compiled, for any system: metadata also lists optional ones that no feature asks for."""
    tree = ["cargo", "tree", "--locked", "--workspace", "--all-features", "--target", "all", "--edges", kinds, "--prefix", "none", "--format", "{p}"]
    lines = subprocess.check_output(tree, text=True).split("\n")
    return {tuple(line.split()[:2]) for line in lines if line}


metadata = json.loads(subprocess.check_output(["cargo", "metadata", "--format-version", "1", "--locked"]))
compiled, shipped = packages("normal,build,dev"), packages("normal,build")
bad = []
for package in metadata["packages"]:
    name = f"{package['name']} {package['version']}"
    key = (package["name"], f"v{package['version']}")
    is_tool = TOOLS.get(package["name"]) == package["license"] and key not in shipped
    if is_tool or OF_BURN.get(package["name"]) == package["license"] or key not in compiled:
        continue
    if not package["license"] or not permitted(package["license"]):
        bad.append(f"{name}: licence {package['license']!r} is not on the list")
    if package["source"] and not package["source"].startswith("registry+"):
        bad.append(f"{name}: source {package['source']} is not the registry")
print("\n".join(bad) or f"{len(compiled)} packages, all licences on the list")
sys.exit(bool(bad))
