#!/usr/bin/env python3
"""Checks that every dependency may be used under a licence of the list, and comes from the registry. A tool that only tests run may have
another one: no package and no program of flashtile contains it."""

import json
import re
import subprocess
import sys

ALLOWED = {
    "MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Zlib", "0BSD",
    "Unicode-3.0", "Unlicense", "BSL-1.0", "CC0-1.0", "MIT-0",
}

TOOLS = {"cbindgen": "MPL-2.0"}


def permitted(expression):
    """Evaluates an SPDX expression of OR, AND and parentheses."""
    tokens = re.findall(r"\(|\)|\bOR\b|\bAND\b|[^()\s/]+(?:\s+WITH\s+[^()\s/]+)?", expression.replace("/", " OR "))
    words = {"(": "(", ")": ")", "OR": "or", "AND": "and"}
    return eval(" ".join(words.get(t) or str(t in ALLOWED) for t in tokens))


metadata = json.loads(subprocess.check_output(["cargo", "metadata", "--format-version", "1", "--locked"]))
built = {
    dependency["name"]
    for package in metadata["packages"]
    for dependency in package["dependencies"]
    if dependency["kind"] != "dev"
}
bad = []
for package in metadata["packages"]:
    name = f"{package['name']} {package['version']}"
    if TOOLS.get(package["name"]) == package["license"] and package["name"] not in built:
        continue
    if not package["license"] or not permitted(package["license"]):
        bad.append(f"{name}: licence {package['license']!r} is not on the list")
    if package["source"] and not package["source"].startswith("registry+"):
        bad.append(f"{name}: source {package['source']} is not the registry")
print("\n".join(bad) or f"{len(metadata['packages'])} packages, all licences on the list")
sys.exit(bool(bad))
