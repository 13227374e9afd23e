#!/usr/bin/env python3
"""Fails where a word stands that the field has another word for (docs/glossary.md), and where a comment does not name its subject first.

    .ci/words.py [PATTERN]        with a PATTERN, the lines that have it

It reads sources, tests, documents and scripts; not this file, the glossary, recorded benchmarks, nor links to files that it reads anyway.
A word that is right elsewhere is looked for only in files whose path matches the third column.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ["*.rs", "*.cu", "*.cuh", "*.h", "*.md", "*.py", "*.sh", "*.toml"]
SKIPPED = re.compile(r"^(\.ci/words\.py|docs/glossary\.md|benches/record/)")

ALL = ""
KERNELS = r"^crates/(cpu|gpu|cuda)/"
COMMENTED = r"\.(rs|cuh?|h|py)$"
WORDS = [
    (r"\btops\b|\btallies\b", "row_max, row_sum, lse", ALL),
    (r"\bstatistics\b", "row_max, row_sum, lse", r"\.(rs|cuh?|md)$"),
    (r"\bpieces\b|\bshares\b", "split, num_splits", ALL),
    (r"\bparts\b", "split, num_splits", r"^crates/(gpu|cuda)/"),
    (r"\bslots\b(?!:)|\b(parts|sums) left\b", "partial_out, partials", KERNELS),
    (r"\bItem\b(?! =)|\bitems?\b", "work_tile", KERNELS),
    (r"\bweights\b", "p, probs", ALL),
    (r"\bclass(es)?\b|\bclassif\w*", "mask_tile: Skip, Full, Partial", r"^(benches/kernels|crates/(core|cpu|gpu|cuda|testkit)|cli|src|tests)/|^docs/"),
    (r"\b[Cc]entr(e|ed|es|ing)\b", "k_mean, centered", ALL),
    (r"\btaken out\b", "subtracted, removed", ALL),
    (r"\bis_number\b|\bPath::Numbers\b", "is_fp8, dequant_f32", ALL),
    (r"\bnumbers that are none\b|\bno numbers?\b", "NaN, non-finite", ALL),
    (r"\b(MOST|LEAST)(_[A-Z]+)*\b", "MAX_, MIN_", ALL),
    (r"\bcareful(ly)?\b|\bwith care\b|\bcomputed again\b", "nonfinite_fallback, recompute", ALL),
    (r"\b(Places|Given|Ran|Laid|Built)\b", "Strides, InputShapes, RunReport", ALL),
    (r"\bmeet(s|ings?)?\b|\bMEETS\b|\bturns\b", "convergent, divergence", r"^crates/kernel/"),
    (r"\bprogram text\b|\bText(Target)\b|\btext of (the |a )?(kernel|program)", "source", ALL),
    (r"\b(Refused|NotStored|NotRun|Broken)\b", "PlanError, EncodeError, ...", ALL),
    (r"\b(capped|sloped|treed)\b", "has_softcap, has_alibi", ALL),
    (r"(?://[/!]?|^\s*#|\"\"\") *(?:What|Whether|The same|Those)\b", "the subject first, True if", COMMENTED),
    (r"\bThat which\b|\bthose of\b|\b[Ss]o many\b|\bhas(n't| not)\b", "the thing itself", ALL),
]

# Where such a word is right: ten at most.
EXCEPTIONS = {
    ("weights", "examples/serve.rs"): "of a model",
    ("/// What", "crates/kernel/tests/guide/language.rs"): "of a program in docs/kernel-language.md",
    ("centre", "cli/src/options.rs"): "the British spelling, an alias",
    ("centre", "cli/tests/it/simulator.rs"): "the alias is tested",
}


def hits(pattern, only=ALL):
    """Lines with a pattern: file, number, line, and what matched."""
    listed = subprocess.run(["git", "ls-files", *FILES], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        path = ROOT / name
        if SKIPPED.match(name) or not re.search(only, name) or not path.exists() or path.is_symlink():
            continue
        for number, line in enumerate(path.read_text().split("\n"), 1):
            yield from ((name, number, line.strip(), found[0]) for found in re.finditer(pattern, line))


def main():
    if len(sys.argv) > 1:
        for name, number, line, _ in hits(sys.argv[1]):
            print(f"{name}:{number}: {line}")
        return 0
    wrong, used = [], set()
    for pattern, say, only in WORDS:
        for name, number, line, found in hits(pattern, only):
            if (found, name) in EXCEPTIONS:
                used.add((found, name))
            else:
                wrong.append(f"{name}:{number}: {found}, say {say}: {line}")
    wrong += [f"{word} in {name} is gone: take it out of EXCEPTIONS" for word, name in EXCEPTIONS if (word, name) not in used]
    if len(EXCEPTIONS) > 10:
        wrong.append(f"{len(EXCEPTIONS)} exceptions, expected at most 10")
    print("\n".join(wrong) if wrong else f"{len(WORDS)} groups of words, {len(EXCEPTIONS)} exceptions")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
