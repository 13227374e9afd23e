#!/usr/bin/env python3
"""Counts words that the field has other words for (docs/glossary.md), and fails where one is used more often than LEFT says.

    .ci/words.py [WORD]        with a WORD, the lines that have it

Looked at are sources, tests, documents and scripts; not this file, the glossary, docs/migration.md, nor recorded benchmarks.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ["*.rs", "*.cu", "*.h", "*.md", "*.py", "*.sh", "*.toml"]
EXCEPT = re.compile(r"^(\.ci/words\.py|docs/(glossary|migration)\.md|benches/record/)")

# How often a word is still used. Counts only shrink: one that is too large is an error too.
LEFT = {
    r"\btops?\b": 126,
    r"\btallies\b": 7,
    r"\bstatistics\b": 30,
    r"\bslots\b": 149,
    r"\bparts left\b": 0,
    r"\bweights\b": 195,
    r"\bcentred?\b": 7,
    r"\btaken out\b": 14,
    r"\bnumbers that are none\b": 0,
    r"\bno numbers?\b": 16,
    r"\b(MOST|LEAST)(_[A-Z]+)*\b": 0,
    r"\bcareful(ly)?\b": 19,
    r"\bwith care\b": 5,
    r"\bclassif(y|ies)\b": 1,
    r"\bclass(es)? of\b": 6,
    r"\bpieces\b": 8,
    r"\bshares\b": 47,
    r"\bitems?\b": 559,
    r"\bmeetings?\b|\bMEETS\b": 34,
    r"\b(capped|sloped|treed)\b": 10,
    r"\bso many\b": 38,
    r"\bthose of\b": 153,
    r"\bThat which\b": 0,
    r"\bhas(n't| not)\b": 20,
    r"\b(Given|Laid|Built|Ran|Places|Refused|NotStored|NotRun|Broken)\b": 21,
    r"\bis_number\b": 2,
}


def hits(word):
    """Lines with a word."""
    pattern = re.compile(word)
    listed = subprocess.run(["git", "ls-files", *FILES], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        path = ROOT / name
        if not EXCEPT.match(name) and path.exists():
            for number, line in enumerate(path.read_text().split("\n"), 1):
                yield from ((name, number, line.strip()) for _ in pattern.finditer(line))


def main():
    if len(sys.argv) > 1:
        for name, number, line in hits(sys.argv[1]):
            print(f"{name}:{number}: {line}")
        return 0
    wrong = []
    for word, left in LEFT.items():
        count = sum(1 for _ in hits(word))
        if count > left:
            wrong.append(f"{word}: {count} times, expected at most {left}; see docs/glossary.md")
        if count < left:
            wrong.append(f"{word}: {count} times, write that instead of {left} into .ci/words.py")
    print("\n".join(wrong) if wrong else f"{sum(LEFT.values())} uses of {sum(map(bool, LEFT.values()))} words are left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
