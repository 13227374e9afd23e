"""Tools that steps need, installed where they are not: by rustup, by pip into the target folder, by apt."""

import os
import shutil
import sys

from harness import TARGET, Skipped, output, run

# The Python package with zig: a clang for every target, with headers and C libraries.
ZIG = "ziglang==0.15.2"

# Packages that build and test the wheel.
NUMPY = "numpy==2.4.6"
PYTEST = "pytest==9.2.0"
WHEEL = ["maturin==1.16.0", "ml_dtypes==0.6.0", NUMPY, PYTEST]

# Workspaces of their own, whose many crates tests of flashtile should not wait for. Most crates of Python's are of candle's too.
OPERATORS = {"CARGO_TARGET_DIR": TARGET / "candle"}


def toolchain(name, *components):
    """A toolchain of rustup with these components."""
    code, installed = output("rustup", "component", "list", "--installed", "--toolchain", name)
    has = [line.startswith(components) for line in installed.split()]
    if code != 0 or sum(has) < len(components):
        run("rustup", "toolchain", "install", name, "--profile", "minimal", *(f"--component={c}" for c in components))
    return name


def rust_targets(names):
    """Adds the standard library of these targets to the default toolchain."""
    installed = output("rustup", "target", "list", "--installed")[1].split()
    missing = [name for name in names if name not in installed]
    if missing:
        run("rustup", "target", "add", *missing)


def pip(package):
    """The folder of a Python package, which is installed into a folder of its own, once."""
    folder = TARGET / "ci" / "tools" / package
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        quiet = ["--quiet", "--disable-pip-version-check", "--root-user-action=ignore"]
        run(sys.executable, "-m", "pip", "install", *quiet, "--no-deps", "--target", part, package)
        part.rename(folder)
    return folder


def pip_of(python):
    """pip for the virtual environment of an interpreter, which has none of its own."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]


def virtual(name, packages):
    """The interpreter of a virtual environment with these packages, installed once."""
    folder = TARGET / "ci" / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    listed = folder / "packages.txt"
    if not listed.exists() or listed.read_text() != "\n".join(packages):
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        run(*pip_of(python), "install", "--quiet", "--no-compile", *packages)
        listed.write_text("\n".join(packages))
    return python


def apt(package, program):
    """A program of a Debian package; skips where it cannot be installed."""
    if shutil.which(program):
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise Skipped(f"{program} is not installed, and there is no apt-get or no right to use it")
    if output("apt-get", "install", "-y", package)[0] != 0:
        output("apt-get", "update")
        code, said = output("apt-get", "install", "-y", package)
        if code != 0:
            raise Skipped(f"{package} cannot be installed: {said.strip().splitlines()[-1]}")
