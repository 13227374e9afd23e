#!/usr/bin/env python3
"""Says of every name that a release publishes whether it is free on crates.io and PyPI, ours, or somebody else's.

    .ci/names.py

It asks cargo and pip, so that it goes where they are configured to go. A name is ours where its repository is ours. The exit status is 1 where
a name is somebody else's. Where some crates of the workspace have this version, it prints the command that publishes the rest. PyPI also
refuses a name that differs from another one only by separators and by letters that look alike (1, l and i, 0 and o); a name that it
keeps back without files looks free.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib

from harness import ROOT, Failed, output
from packages import BURN, CANDLE, published

WORKSPACE = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]


def of_crate(name, folder):
    """Version and repository of a crate of crates.io; None where there is none. The folder is outside our workspace, whose own crates
    `cargo info` would show."""
    code, said = output("cargo", "info", name, "--registry", "crates-io", cwd=folder)
    if code != 0:
        if f"could not find `{name}`" not in said:
            raise Failed(f"cargo info {name}: {said.strip()}")
        return None
    fields = dict(re.findall(r"^(version|repository): (\S+)", said, re.M))
    return fields["version"], fields.get("repository")


def of_project(name, folder):
    """Version and repository of a project of PyPI; None where there is none. A project without wheels has no repository here: pip would
    have to run its build to know."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # Lists the page of the project, whatever its files are for.
    _, said = output(*pip, "index", "versions", "-vv", name, cwd=folder)
    if re.search(rf"404 Client Error.*/{name}/", said):
        return None
    if f"/{name}/" not in said or "Could not fetch URL" in said:
        raise Failed(f"pip index versions {name}: {said.strip()}")
    report = ["install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--report=-", name]
    found = subprocess.run([*pip, *report], cwd=folder, capture_output=True, text=True)
    if found.returncode != 0:
        return "without a wheel for this machine", None
    metadata = json.loads(found.stdout)["install"][0]["metadata"]
    addresses = [address.split(", ")[-1] for address in metadata.get("project_url", [])]
    return metadata["version"], next((address for address in addresses if address == WORKSPACE["repository"]), None)


def main():
    crates = [member["name"] for folder in (ROOT, ROOT / CANDLE, ROOT / BURN) for member in published(folder)]
    project = tomllib.loads((ROOT / "python" / "pyproject.toml").read_text())["project"]["name"]
    questions = [("crates.io", name, of_crate) for name in crates] + [("PyPI", project, of_project)]
    others, free, done = 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        for registry, name, ask in questions:
            found = ask(name, folder)
            if found is None:
                free += 1
                print(f"{registry:<9}  {name:<24}  free", flush=True)
                continue
            version, repository = found
            ours = repository == WORKSPACE["repository"]
            others += not ours
            if ask is of_crate and ours and version == WORKSPACE["version"]:
                done.append(name)
            print(f"{registry:<9}  {name:<24}  {'ours' if ours else 'TAKEN'}, {version}, {repository}", flush=True)
    print(f"{len(questions)} names: {free} free, {others} taken by others, {len(done)} crates have version {WORKSPACE['version']}")
    members = [member["name"] for member in published(ROOT)]
    if 0 < len(set(done) & set(members)) < len(members):
        print("the rest: cargo publish --workspace --locked", *(f"--exclude {name}" for name in members if name in done))
    return 1 if others else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as why:
        sys.exit(f"names: {why}")
