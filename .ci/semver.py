#!/usr/bin/env python3
"""Compares the public interface with a revision of the repository: fails where the version does not allow what has changed.

    .ci/semver.py REVISION

cargo-semver-checks compares each crate that defines items of `flashtile`. It does not follow re-exports from other crates, of which
`flashtile` mostly consists, so the paths that `flashtile` offers are compared here. It cannot tell which items of a crate are
re-exported: a break of another one, which no promise covers, is reported too.
"""

import json
import subprocess
import sys
import tomllib

from harness import ROOT, TARGET, Scratch, environment

# The crates that define public items, with the features that the items need.
DEFINING = [
    ["--default-features", "-p", "flashtile-core", "-p", "flashtile-cpu", "-p", "flashtile-cuda", "-p", "flashtile-metal"],
    ["--all-features", "-p", "flashtile-kernel", "-p", "flashtile"],
]


def offered(folder, pages):
    """The public paths of `flashtile` in a checkout. Its documentation goes to a folder of its own: cargo leaves what is up to date."""
    options = ["-Z", "unstable-options", "--output-format", "json"]
    command = ["cargo", "rustdoc", "-q", "--offline", "-p", "flashtile", "--lib", "--all-features", "--", *options]
    # Only this form of the documentation needs more than stable Rust.
    env = environment({"RUSTC_BOOTSTRAP": "1", "CARGO_BUILD_BUILD_DIR": TARGET, "CARGO_TARGET_DIR": pages})
    subprocess.run(command, cwd=folder, env=env, check=True)
    crate = json.loads((pages / "doc" / "flashtile.json").read_text())
    return set(paths(crate["index"], crate["root"], ()))


def paths(index, item, prefix):
    """The paths of the items of a module, of whatever crate they are."""
    for child in index[str(item)]["inner"]["module"]["items"]:
        entry = index[str(child)]
        if entry["visibility"] != "public":
            continue
        name = entry["inner"].get("use", entry)["name"]
        yield "::".join((*prefix, name))
        if "module" in entry["inner"]:
            yield from paths(index, child, (*prefix, name))


def version(folder):
    return tomllib.loads((folder / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def compatible(version):
    """The leading numbers of a version. Cargo takes one version for another where they are equal."""
    major, minor, _ = version.split(".", 2)
    return (major, minor) if major == "0" else (major,)


def removed(revision):
    """Paths that the revision offered and that are gone, where the version promises them."""
    with Scratch() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
        if compatible(version(folder)) != compatible(version(ROOT)):
            return []
        before = offered(folder, folder / "pages")
    return sorted(before - offered(ROOT, TARGET / "ci" / "interface"))


def main(revision):
    wrong = [f"flashtile::{path} was public in {revision}" for path in removed(revision)]
    print("\n".join(wrong) or f"flashtile offers every path of {revision}", flush=True)
    results = [subprocess.run(["cargo", "semver-checks", "--baseline-rev", revision, *which], cwd=ROOT) for which in DEFINING]
    return 1 if wrong or any(result.returncode for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
