#!/usr/bin/env python3
"""Packages every crate that is published and compiles each from its package, without network and without uploading anything.

    .ci/packages.py [--files | --planted | --docs]

- Every crate of the workspace is published unless its manifest says `publish = false`, and so is flashtile-candle, whose workspace is its
  own. Its manifest has what crates.io and docs.rs show, with keywords that crates.io takes, and crates of the workspace are required
  in exactly the version that is released.
- cargo packages the crates in the order of their dependencies, each against a registry of the packages before it; flashtile-candle
  against the unpacked packages, as it would need crates.io to have them.
- A package holds the sources, the README and both licences, with the text of the repository's own; links of its README work anywhere.
- The unpacked packages compile: the crates that users name by themselves, and every crate with all features.

With --files, nothing is compiled. With --planted, faults are planted in a copy of the tree one after another, and each must be found. With
--docs, the packages are documented as docs.rs does it, without warnings, and pages of items that need a feature must say so.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT, TARGET, environment
from tools import OPERATORS

# Fields of a manifest that crates.io shows.
FIELDS = ["description", "license", "repository", "documentation", "readme", "keywords", "categories", "rust_version"]
LICENCES = ["LICENSE-APACHE", "LICENSE-MIT"]
# crates.io refuses others, and more than five.
KEYWORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,19}")
# Bytes: crates.io takes 10 MiB, and every build of a dependent downloads them.
MAX_PACKAGE = 1 << 20

# Users depend on these crates, or install them: each is compiled alone, with its default features.
NAMED_BY_USERS = ["flashtile-kernel", "flashtile", "flashtile-c", "flashtile-cli"]

# The workspace of flashtile-candle.
CANDLE, BURN = "crates/candle", "crates/burn"

# Pages of items that need a feature.
GATED = {
    "flashtile/cuda/index.html": "cuda",
    "flashtile/kernels/index.html": "gpu",
    "flashtile/struct.CudaPlan.html": "cuda",
    "flashtile/metal/index.html": "metal",
    "flashtile/struct.MetalPlan.html": "metal",
    "flashtile_kernel/simulator/index.html": "simulator",
    "flashtile_testkit/struct.CudaRunner.html": "cuda",
}


class Fault(Exception):
    """cargo refuses, and says why."""


def cargo(folder, *arguments, env=None):
    """The standard output of cargo."""
    done = subprocess.run(["cargo", *map(str, arguments)], cwd=folder, capture_output=True, text=True, env=environment(env))
    if done.returncode != 0:
        raise Fault(f"cargo {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def published(root):
    """Manifests of the crates that are published, dependencies first."""
    members = json.loads(cargo(root, "metadata", "--no-deps", "--offline", "--format-version", "1"))["packages"]
    left = {member["name"]: member for member in members if member["publish"] != []}
    order = []
    while left:
        free = [name for name, member in left.items() if not uses(member) & left.keys()]
        if not free:
            raise Fault(f"dependencies in a cycle: {', '.join(left)}")
        order += [left.pop(name) for name in sorted(free)]
    return order


def uses(member):
    return {dependency["name"] for dependency in member["dependencies"] if dependency["kind"] != "dev"}


def has_library(member):
    return any({"lib", "proc-macro"} & set(target["kind"]) for target in member["targets"])


def manifest(member, names):
    """Faults of a manifest."""
    name = member["name"]
    for field in FIELDS:
        if not member.get(field):
            yield f"{name}: the manifest has no {field}"
    for list_name in ("keywords", "categories"):
        if len(member[list_name]) > 5:
            yield f"{name}: {len(member[list_name])} {list_name}, more than 5"
    yield from (f"{name}: {word} is no keyword" for word in member["keywords"] if not KEYWORD.fullmatch(word))
    docs = ((member["metadata"] or {}).get("docs") or {}).get("rs") or {}
    # docs.rs has no compiler of CUDA, which builds candle with all features.
    everything = has_library(member) and name != "flashtile-candle"
    if everything and (not docs.get("all-features") or docs.get("rustdoc-args") != ["--cfg", "docsrs"]):
        yield f"{name}: [package.metadata.docs.rs] does not ask for all features and the cfg docsrs"
    for dependency in member["dependencies"]:
        of, version = dependency["name"], dependency["req"]
        expected = f"={member['version']}"
        if of in names and dependency["kind"] != "dev" and version != expected:
            yield f"{name}: requires {of} {version}, not {expected}"


def contents(root, member, packages):
    """Faults of the files of a package."""
    name = member["name"]
    stem = f"{name}-{member['version']}"
    size = (packages / f"{stem}.crate").stat().st_size
    if size > MAX_PACKAGE:
        yield f"{name}: the package has {size} bytes, more than {MAX_PACKAGE}"
    for licence in LICENCES:
        file = packages / stem / licence
        if not file.exists() or file.read_bytes() != (root / licence).read_bytes():
            yield f"{name}: the package does not hold {licence} of the repository"
    folder = Path(member["manifest_path"]).parent
    for source in sorted(path.relative_to(folder) for path in (folder / "src").rglob("*") if path.is_file()):
        if not (packages / stem / source).exists():
            yield f"{name}: the package does not hold {source}"
    readme = packages / stem / "README.md"
    if not readme.exists():
        yield f"{name}: the package holds no README.md"
        return
    text = re.sub(r"^```.*?^```", "", readme.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)]+)\)|^\[[^]]+\]: (\S+)", text, re.M):
        if not "".join(link).startswith(("https://", "#")):
            yield f"{name}: README.md links {''.join(link)}, which leads nowhere on docs.rs"


def pack(root, members, packages, *options):
    """Packages these crates and unpacks them again."""
    target = packages / "target"
    selected = [word for member in members for word in ("-p", member["name"])]
    cargo(root, "package", "--offline", "--no-verify", "--allow-dirty", "--target-dir", target, *selected, *options)
    for member in members:
        file = f"{member['name']}-{member['version']}.crate"
        shutil.move(target / "package" / file, packages)
        with tarfile.open(packages / file) as archive:
            # Times of now: those in a package are all the same, and cargo compares them.
            archive.extractall(packages, filter=lambda entry, to: tarfile.data_filter(entry, to).replace(mtime=None))


def unpacked(members, packages):
    """The folder of each crate by its name."""
    return {member["name"]: packages / f"{member['name']}-{member['version']}" for member in members}


def workspace(root, folders, packages):
    """Makes the unpacked crates of a folder a workspace, in which all of these are what the registry would have."""
    members = [folder.name for folder in folders.values() if folder.parent == packages]
    # Dependencies are compiled as everywhere else in CI.
    profiles = re.findall(r"^\[profile\.[^]]*\]\n[^[]*", (root / "Cargo.toml").read_text(), re.M)
    (packages / "Cargo.toml").write_text(
        f'[workspace]\nresolver = "3"\nmembers = {json.dumps(members)}\n\n[patch.crates-io]\n'
        + "".join(f'{name} = {{ path = "{folder.as_posix()}" }}\n' for name, folder in folders.items())
        + "\n"
        + "".join(profiles)
    )
    shutil.copy(root / "Cargo.lock", packages)


def compiles(selections, packages, target=TARGET):
    """Compiles crates from their packages, each selection by itself: its crates get the features that they ask for and no others."""
    for selection in selections:
        try:
            # Each package is compiled once, so that incremental state would be of no use.
            cargo(packages, "check", "-q", "--offline", "--target-dir", target, *selection, env={"CARGO_INCREMENTAL": 0})
        except Fault as why:
            yield f"{' '.join(selection)}: does not compile from its package: {why}"
            return


def apart(root, folder, packages, others):
    """Faults of packages of a workspace of its own, made against the other packages, that are seen without compiling them."""
    packages.mkdir()
    members = published(root / folder)
    patches = [f'--config=patch.crates-io.{name}.path="{folder.as_posix()}"' for name, folder in others.items()]
    lock = root / folder / "Cargo.lock"
    locked = lock.read_bytes()
    try:
        pack(root / folder, members, packages, *patches)
    finally:
        # cargo notes in it that there are patches.
        lock.write_bytes(locked)
    for member in members:
        yield from manifest(member, others.keys())
        yield from contents(root, member, packages)


def check(root, packages):
    """Faults that are seen without compiling."""
    try:
        members = published(root)
        names = {member["name"] for member in members}
        wrong = [line for member in members for line in manifest(member, names)]
        pack(root, members, packages)
        wrong += [line for member in members for line in contents(root, member, packages)]
        return wrong + list(apart(root, CANDLE, packages / "candle", unpacked(members, packages)))
    except Fault as why:
        return [str(why)]


def empty(name):
    """An empty folder. It keeps its name, so that cargo replaces what it compiled there the last time."""
    folder = TARGET / "ci" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def files():
    """Faults of the packages that are seen without compiling them."""
    packages = empty("packages")
    wrong = check(ROOT, packages)
    if not wrong:
        for file in sorted(packages.rglob("*.crate"), key=lambda file: file.name):
            print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB")
    return wrong


def whole():
    """Faults of the packages."""
    wrong = files()
    if wrong:
        return wrong
    packages = TARGET / "ci" / "packages"
    folders = unpacked(published(ROOT), packages)
    workspace(ROOT, folders, packages)
    wrong = list(compiles([["-p", name] for name in NAMED_BY_USERS] + [["--workspace", "--all-features"]], packages))
    wrong += apart(ROOT, BURN, packages / "burn", folders)
    candle = packages / "candle"
    workspace(ROOT / CANDLE, folders | unpacked(published(ROOT / CANDLE), candle), candle)
    return wrong + list(compiles([["--workspace"]], candle, OPERATORS["CARGO_TARGET_DIR"]))


def documented():
    """Faults of the documentation of the packages."""
    packages = empty("packages-docs")
    members = published(ROOT)
    pack(ROOT, members, packages)
    workspace(ROOT, unpacked(members, packages), packages)
    libraries = [word for member in members if has_library(member) for word in ("-p", member["name"])]
    # The pages go where `cargo doc` does not write.
    env = {"RUSTDOCFLAGS": "--cfg docsrs -D warnings", "CARGO_BUILD_BUILD_DIR": TARGET, "CARGO_TARGET_DIR": packages / "target"}
    try:
        cargo(packages, "doc", "-q", "--offline", "--no-deps", "--all-features", *libraries, env=env)
    except Fault as why:
        return [str(why)]
    wrong = []
    for page, feature in GATED.items():
        file = packages / "target" / "doc" / page
        text = re.sub("<[^>]+>", "", file.read_text()) if file.exists() else "there is no such page"
        if f"Available on crate feature {feature} only." not in text:
            wrong.append(f"{page} does not say that it needs the feature {feature}")
    return wrong


@dataclass
class Planted:
    """A mistake: in a file, `old` becomes `new`; the whole text where there is no `old`, and no file is left where there is no `new`."""

    file: str
    expected: str
    old: str | None = None
    new: str | None = None
    # Crates to compile, for a fault that only the compiler finds.
    selection: tuple = ()

    def plant(self, root):
        path = root / self.file
        text = path.read_text()
        path.unlink()
        if self.new is not None:
            if self.old is not None and self.old not in text:
                raise Fault(f"{self.file} does not have {self.old}")
            path.write_text(text.replace(self.old, self.new, 1) if self.old else self.new)


PLANTED = {
    "a licence that is not packaged": Planted(
        "crates/gpu/LICENSE-MIT",
        "flashtile-gpu: the package does not hold LICENSE-MIT",
    ),
    "a link that was checked out as text": Planted(
        "crates/gpu/LICENSE-APACHE",
        "flashtile-gpu: the package does not hold LICENSE-APACHE",
        new="../../LICENSE-APACHE",
    ),
    "a dependency without a version": Planted(
        "crates/cpu/Cargo.toml",
        "dependency `flashtile-core` does not specify a version",
        old='path = "../core", version = "=0.1.0"',
        new='path = "../core"',
    ),
    "a dependency on any compatible version": Planted(
        "crates/cpu/Cargo.toml",
        "flashtile-cpu: requires flashtile-core ^0.1.0, not =0.1.0",
        old='version = "=0.1.0"',
        new='version = "0.1.0"',
    ),
    "a dependency of another workspace on any compatible version": Planted(
        "crates/candle/Cargo.toml",
        "flashtile-candle: requires flashtile ^0.1.0, not =0.1.0",
        old='version = "=0.1.0"',
        new='version = "0.1.0"',
    ),
    "a dependency on a crate that is not published": Planted(
        "crates/core/Cargo.toml",
        "no matching package named `flashtile-core` found",
        old="[package]",
        new="[package]\npublish = false",
    ),
    "a link that leads nowhere on docs.rs": Planted(
        "crates/core/README.md",
        "flashtile-core: README.md links ../../README.md",
        old="https://crates.io/crates/flashtile",
        new="../../README.md",
    ),
    "a source that is not packaged": Planted(
        "crates/kernel/Cargo.toml",
        "flashtile-kernel: the package does not hold src/",
        old='"/src/**"',
        new='"/src/**/*.rs"',
    ),
    "a file of the repository that a source includes": Planted(
        "crates/core/src/lib.rs",
        "-p flashtile-core: does not compile from its package",
        old="\nmod ",
        new='\nconst _: &str = include_str!("../../../rustfmt.toml");\nmod ',
        selection=("-p", "flashtile-core"),
    ),
}


def copy(root):
    """A copy of the tree, without the data of examples and benchmarks."""
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).split("\n")
    for file in filter(lambda file: (ROOT / file).is_file() and not re.match("examples/data/|benches/record/", file), files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, root / file, follow_symlinks=False)


def planted():
    """Plants faults in copies of the tree, each of which must be found."""
    clean = check(ROOT, empty("packages"))
    for what, fault in PLANTED.items():
        folder = empty("planted")
        root, packages = folder / "tree", folder / "packages"
        packages.mkdir()
        copy(root)
        fault.plant(root)
        new = [line for line in check(root, packages) if line not in clean]
        if fault.selection:
            workspace(root, unpacked(published(root), packages), packages)
            new += compiles([fault.selection], packages)
        if any(fault.expected in line for line in new):
            print(f"found, as it must be: {what}")
        else:
            yield f"{what} was planted and not found; found: {new}"


if __name__ == "__main__":
    asked = {"--files": files, "--planted": planted, "--docs": documented}
    wrong = list(next((asked[option] for option in sys.argv[1:]), whole)())
    print("\n".join(wrong) if wrong else "packages: nothing is wrong")
    sys.exit(1 if wrong else 0)
