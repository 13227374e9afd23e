#!/usr/bin/env python3
"""Makes target/patched/objc2-metal: the crate of the registry with one line changed, so that it links where there is no Metal.

    tests/metal/prepare.py

Needs cargo, and the network where the registry's copy is not here yet.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

VERSION = "0.3.2"
FILE = "src/generated/mod.rs"
LINE = '#[link(name = "Metal", kind = "framework")]'
CHANGED = '#[cfg_attr(target_vendor = "apple", link(name = "Metal", kind = "framework"))]'

TO = Path(__file__).resolve().parent / "target" / "patched" / "objc2-metal"


def registry_copy():
    """The folder of the crate in cargo's registry, after it was fetched."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "Cargo.toml"
        manifest.write_text(
            '[package]\nname = "fetch"\nversion = "0.0.0"\nedition = "2024"\n\n[workspace]\n\n'
            f'[dependencies]\nobjc2-metal = {{ version = "={VERSION}", default-features = false }}\n'
        )
        (Path(folder) / "src").mkdir()
        (Path(folder) / "src" / "lib.rs").write_text("")
        command = ["cargo", "metadata", "--quiet", "--format-version", "1", "--manifest-path", manifest]
        found = subprocess.run(command, cwd=folder, env=os.environ, check=True, capture_output=True, text=True).stdout
    packages = [p for p in json.loads(found)["packages"] if p["name"] == "objc2-metal"]
    assert len(packages) == 1 and packages[0]["version"] == VERSION, f"expected objc2-metal {VERSION}, found {packages}"
    return Path(packages[0]["manifest_path"]).parent


def patched(text):
    """The file with its one line changed."""
    lines = text.split("\n")
    at = [n for n, line in enumerate(lines) if line == LINE]
    assert len(at) == 1, f"{FILE} has the line {LINE} {len(at)} times, expected once"
    lines[at[0]] = CHANGED
    return "\n".join(lines)


def main():
    source = registry_copy()
    text = patched((source / FILE).read_text())
    # A copy that is right keeps its times: nothing is built anew.
    if (TO / FILE).exists() and (TO / FILE).read_text() == text:
        return
    part = TO.with_name(TO.name + ".part")
    for old in (part, TO):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(source, part)
    (part / FILE).write_text(text)
    part.rename(TO)


if __name__ == "__main__":
    main()
