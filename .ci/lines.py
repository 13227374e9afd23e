#!/usr/bin/env python3
"""Counts lines by part of the tree.

    .ci/lines.py [COMMIT]

The product is crates, src, cli and python without tests: files and modules of tests, goldens and benches do not count, blank lines and
comments do. `cfg(feature` is counted in its sources, without manifests. With a COMMIT, also its counts, and the percentage that is left.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from functions import lines_kept, tests_of

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".rs", ".cu", ".cuh", ".h", ".py", ".pyi", ".metal", ".swift")
TESTS = re.compile(r"(^|/)(tests|benches|goldens?|fuzz)/|(^|_)tests\.rs$|/tests\.rs$")


def room(path):
    """The part that a file counts to, or None."""
    first = path.split("/")[0]
    if path.endswith(".md"):
        return "documents"
    if not path.endswith(SOURCES):
        return None
    if TESTS.search(path):
        return "tests, benches, fuzzing"
    if first in ("src", "cli", "python"):
        return f"product: {first}"
    if first == "crates":
        return f"product: crates/{path.split('/')[1]}"
    return {".ci": "checks", "tools": "tools", "examples": "examples"}.get(first, "other")


def counted(files):
    """Lines by part. `files` are pairs of a path and its text."""
    lines = Counter()
    for path, text in files:
        of = room(path)
        if of is None:
            continue
        total = text.count("\n")
        if of.startswith("product") and path.endswith(".rs"):
            inner = sum(text.count("\n", start, end) for start, end in tests_of(lines_kept(text)))
            lines["tests, benches, fuzzing"] += inner
            total -= inner
        lines[of] += total
        if of.startswith("product"):
            lines["product"] += total
            lines["cfg(feature"] += text.count("cfg(feature") if path.endswith(".rs") else 0
    return lines


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def now():
    for path in git("ls-files", "-z").decode().split("\0"):
        if path and (ROOT / path).is_file():
            yield path, (ROOT / path).read_text(errors="replace")


def at(commit):
    for path in git("ls-tree", "-r", "-z", "--name-only", commit).decode().split("\0"):
        if path and room(path):
            yield path, git("show", f"{commit}:{path}").decode(errors="replace")


def main():
    found = counted(now())
    before = counted(at(sys.argv[1])) if len(sys.argv) > 1 else None
    for name in sorted(found | (before or {}), key=lambda name: (name != "product", name)):
        row = f"{name:26} {found[name]:8}"
        if before:
            percent = f"{100 * found[name] / before[name]:6.1f} %" if before[name] else ""
            row += f" {before[name]:8} {percent}"
        print(row)


if __name__ == "__main__":
    main()
