#!/usr/bin/env python3
"""Checks that no function is longer than MAX lines, from its first line to its closing brace, and that no code allows functions of more
parameters than clippy.toml says, but for code that macros emit and for functions whose parameters another project chose. Of a kernel the
body is counted: its parameters are the interface of a launch.

    .ci/functions.py [--all]

Functions of crates, command line, tools and examples are counted, in Rust, in macros and in CUDA C++; functions of tests, benches and
fuzz targets are not. --all prints the longest hundred.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX = 80

# Files whose output may have functions of many parameters: entry points of kernels.
EMITS = {"crates/kernel/macros/src/expand.rs"}

# Files of functions with the signatures of candle-flash-attn and candle-nn.
GIVEN = {"crates/candle/src/compat.rs", "crates/candle/examples/adapter.rs"}

FOLDERS = ["src", "crates", "cli/src", "tools", "examples", "python/src"]
SKIPPED = re.compile(r"/(tests|benches|goldens)/|/tests\.rs$")
RUST = re.compile(r"\bfn\s+(\w+)[^;{]*\{")
CUDA = re.compile(r"(?m)^[^\s#/}][^;{}]*?\b(\w+)\((?!\d)[^;{}]*\)\s*(?:const\s*)?\{")


def lines_kept(text):
    """The source without comments, strings and characters, line by line."""
    dropped = r"""//[^\n]*|r#".*?"#|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^']+|[^\\'\n])'"""
    return re.sub(dropped, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)


def tests_of(text):
    """Where test modules lie."""
    for found in re.finditer(r"#\[cfg\((?:test|all\(test[^]]*)\)\]\s*(?:#\[[^]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?(?:mod|fn|impl)\b[^{;]*\{", text):
        yield found.start(), closing(text, found.end())


def closing(text, at):
    """The position after the brace that closes the one before `at`."""
    depth = 1
    while depth and at < len(text):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def is_kernel(text, at):
    """True if the attributes before a function make it a kernel."""
    return "#[kernel" in text[max(text.rfind("}\n", 0, at), text.rfind(";\n", 0, at), 0) : at]


def functions():
    """File, name and lines of every function."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix not in (".rs", ".cu", ".cuh") or SKIPPED.search("/" + name):
                continue
            text = lines_kept(path.read_text())
            tests = list(tests_of(text))
            for found in (RUST if path.suffix == ".rs" else CUDA).finditer(text):
                if any(start <= found.start() < end for start, end in tests) or found[1] in ("if", "for", "while", "switch"):
                    continue
                start = found.end() if is_kernel(text, found.start()) else found.start()
                yield name, found[1], text.count("\n", start, closing(text, found.end())) + 1


def allowing():
    """Files that silence clippy's count of parameters."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.rs")):
            name = path.relative_to(ROOT).as_posix()
            if name not in EMITS | GIVEN and "too_many_arguments" in path.read_text():
                yield name


def main():
    counted = sorted(functions(), key=lambda of: -of[2])
    if "--all" in sys.argv:
        for name, function, lines in counted[:100]:
            print(f"{lines:5} {name} {function}")
        return 0
    wrong = [f"{name} {function}: {lines} lines, expected at most {MAX}" for name, function, lines in counted if lines > MAX]
    wrong += [f"{name}: allows clippy::too_many_arguments, which only code that macros emit and given signatures may" for name in allowing()]
    print("\n".join(wrong) if wrong else f"{len(counted)} functions, none longer than {MAX} lines")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
