"""Artifacts of a release besides its crates, built into `target/dist` and inspected: wheels and source of the Python package, and the
command line for Linux."""

import functools
import hashlib
import io
import platform
import re
import shutil
import sys
import tarfile
import tomllib

from harness import ROOT, TARGET, Failed, Scratch, Skipped, output, run
from tools import NUMPY, OPERATORS, PYTEST, WHEEL, ZIG, apt, pip, pip_of, rust_targets, virtual

DIST = TARGET / "dist"
VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
MACHINES = ["x86_64", "aarch64"]

# The oldest glibc that Rust's own library works with, and the name that wheels have for it.
GLIBC = (2, 17)
MANYLINUX = "manylinux2014"

# A dynamic program can load NVIDIA's driver; a static one, by musl, runs on every Linux and cannot.
LIBRARIES = ["gnu", "musl"]

ZIGBUILD = "cargo-zigbuild==0.24.1"
AUDITS = ["abi3audit==0.0.26", "auditwheel==6.8.2", "twine==7.0.0"]


def this_machine():
    """The processor of this machine, for which artifacts can be run here."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise Skipped(f"a release has nothing for {platform.machine()} {sys.platform}")
    return platform.machine()


def zig():
    """Variables with which maturin and cargo-zigbuild find zig, which links for every target."""
    return {"CARGO_ZIGBUILD_ZIG_PATH": pip(ZIG) / "ziglang" / "zig"}


def triple(machine, library):
    return f"{machine}-unknown-linux-{library}"


def cleared(pattern):
    """The folder of artifacts, without what an earlier build left."""
    DIST.mkdir(parents=True, exist_ok=True)
    for old in DIST.glob(pattern):
        old.unlink()
    return DIST


def sums():
    """Writes the SHA-256 of every artifact, as `sha256sum --check` reads it."""
    files = sorted(file for file in DIST.iterdir() if file.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (DIST / "SHA256SUMS").write_text("".join(lines))


def sizes(files):
    return ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in files)


# Inspection.


def elf(file, static):
    """Fails where a file needs a newer glibc than GLIBC, or libraries that are not part of glibc; where it is static, any at all."""
    apt("binutils", "readelf")
    code, said = output("readelf", "--wide", "--program-headers", "--dynamic", "--version-info", file)
    if code != 0 or "Program Headers" not in said:
        raise Failed(f"readelf cannot read {file}: {said.strip()}")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", said)
    if static:
        if needed or re.search(r"^\s*INTERP\b", said, re.M):
            raise Failed(f"{file.name} is not static: it has an interpreter or needs {needed}")
        return
    foreign = [name for name in needed if not re.match(r"(libc|libm|libdl|libpthread|librt|ld-linux-[\w-]+)\.so\.\d+$", name)]
    if not needed or foreign:
        raise Failed(f"{file.name} needs {foreign or 'no library, not even glibc'}")
    newest = max(tuple(map(int, version.split("."))) for version in re.findall(r"\bGLIBC_([\d.]+)", said))
    if newest > GLIBC:
        raise Failed(f"{file.name} needs glibc {'.'.join(map(str, newest))}")


def audited(machine, file):
    """Fails where the tags of a wheel promise more than its module keeps: a later glibc, or functions outside the stable ABI."""
    stem = f"flashtile-{VERSION}-cp310-abi3-"
    if not file.name.startswith(stem) or f"{MANYLINUX}_{machine}" not in file.name:
        raise Failed(f"the wheel is {file.name}, expected {stem}..{MANYLINUX}_{machine}")
    programs = virtual("audits", AUDITS).parent
    tag = f'"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"'
    code, said = output(programs / "auditwheel", "show", file)
    if code != 0 or f"platform tag: {tag}" not in " ".join(said.split()):
        raise Failed(f"auditwheel does not find {tag}: {said}")
    run(programs / "abi3audit", "--strict", file)
    run(programs / "twine", "check", "--strict", file)
    with Scratch() as folder:
        shutil.unpack_archive(file, folder, "zip")
        elf(folder / "flashtile" / "_flashtile.abi3.so", static=False)


# The Python package.


@functools.cache
def wheel(machine):
    """The wheel for Linux on this machine, which is built once."""
    target = triple(machine, "gnu")
    rust_targets([target])
    folder = cleared(f"flashtile-*_{machine}.whl")
    options = ["--locked", "--zig", "--compatibility", MANYLINUX, "--target", target, "--manifest-path", "python/Cargo.toml"]
    run(virtual("python", WHEEL), "-m", "maturin", "build", "--quiet", *options, "--out", folder, env=OPERATORS | zig())
    found = sorted(folder.glob(f"flashtile-*_{machine}.whl"))
    if len(found) != 1:
        raise Failed(f"maturin built {[file.name for file in found]}, expected one wheel")
    audited(machine, found[0])
    sums()
    return found[0]


@functools.cache
def source():
    """The source distribution, which is made once."""
    folder = cleared(f"flashtile-{VERSION}.tar.gz")
    run(virtual("python", WHEEL), "-m", "maturin", "sdist", "--manifest-path", "python/Cargo.toml", "--out", folder)
    file = folder / f"flashtile-{VERSION}.tar.gz"
    without_tests(file)
    run(virtual("audits", AUDITS).parent / "twine", "check", "--strict", file)
    sums()
    return file


def without_tests(file):
    """Takes tests and benchmarks, whose sources are not in a source distribution, out of the manifest of the crate `flashtile` in it. maturin
    does so with every manifest but that of a workspace's root, and cargo refuses a manifest that names missing files."""
    manifest = f"flashtile-{VERSION}/Cargo.toml"
    whole = file.with_suffix(".part")
    with tarfile.open(file) as old, tarfile.open(whole, "w:gz") as new:
        for entry in old:
            content = old.extractfile(entry).read() if entry.isfile() else b""
            if entry.name == manifest:
                content = re.sub(rb"^\[\[(test|bench)\]\]\n((?!\[).*\n)*", b"", content, flags=re.M)
                entry.size = len(content)
            new.addfile(entry, io.BytesIO(content))
    whole.replace(file)


def wheel_of_source(folder):
    """A wheel that pip builds from the source distribution alone, as it does where no wheel fits."""
    # The debug profile, whose dependencies the step `python` has built.
    options = ["--quiet", "--no-deps", "--config-settings", "build-args=--profile=dev", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *options, source(), env=OPERATORS)
    return next(folder.glob("*.whl"))


# The command line.


@functools.cache
def programs():
    """Archives of the command line for every machine and library, which are built once."""
    targets = [triple(machine, library) for library in LIBRARIES for machine in MACHINES]
    rust_targets(targets)
    asked = [f"{target}.{GLIBC[0]}.{GLIBC[1]}" if target.endswith("gnu") else target for target in targets]
    options = [word for target in asked for word in ("--target", target)]
    command = [pip(ZIGBUILD) / "bin" / "cargo-zigbuild", "zigbuild", "--release", "--locked", "--quiet", "-p", "flashtile-cli"]
    run(*command, *options, env=zig() | {"CARGO_TARGET_DIR": TARGET})
    folder = cleared("flashtile-*-unknown-linux-*.tar.gz")
    for target in targets:
        program = TARGET / target / "release" / "flashtile"
        elf(program, static=target.endswith("musl"))
        name = f"flashtile-{VERSION}-{target}"
        with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
            for file in (program, ROOT / "cli" / "README.md", ROOT / "LICENSE-APACHE", ROOT / "LICENSE-MIT"):
                archive.add(file, f"{name}/{file.name}", filter=owned_by_nobody)
    sums()
    return sorted(folder.glob("flashtile-*-unknown-linux-*.tar.gz"))


def owned_by_nobody(entry):
    """A file of an archive without the name of the user who packed it."""
    return entry.replace(uid=0, gid=0, uname="", gname="", deep=False)


def packed(target, folder):
    """The command line, unpacked from its archive."""
    programs()
    name = f"flashtile-{VERSION}-{target}"
    with tarfile.open(DIST / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name / "flashtile"


def tried(emulator, program, checks):
    """Runs the command line: its version, attention over real tensors, a part of the conformance suite, and its word about CUDA."""
    code, said = output(*emulator, program, "--version")
    if code != 0 or said.strip() != f"flashtile {VERSION}":
        raise Failed(f"{program} --version gave status {code} and printed {said!r}")
    with Scratch() as folder:
        run(*emulator, program, "run", "examples/data/minilm_attention.safetensors", "-o", folder / "out.safetensors")
    run(*emulator, program, "check", "--backend", "cpu", *checks)
    code, said = output(*emulator, program, "info", "--no-measure")
    is_static = re.search(r"^cuda .*this program is linked statically", said, re.M)
    if code != 0 or bool(is_static) != ("musl" in program.parent.name):
        raise Failed(f"{program} info gave status {code} and printed {said}")


# Another machine.


# Debian's Python with what it needs. numpy needs libstdc++.
DEBIAN = ["python3-minimal", "libpython3-stdlib", "libstdc++6"]


@functools.cache
def debian():
    """A folder with Debian's Python for arm64, and the version of it. apt works in folders of its own, so that this machine is left as
    it is."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise Skipped("there is no apt-get to fetch Debian's Python for arm64")
    folder = TARGET / "ci" / "arm64"
    root = folder / "root"
    if not root.exists():
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("state/lists/partial", "cache/archives/partial", "part"):
            (folder / name).mkdir(parents=True)
        (folder / "state" / "status").touch()
        settings = {
            "APT::Architecture": "arm64", "APT::Architectures::": "arm64", "APT::Sandbox::User": "", "Debug::NoLocking": "true",
            "Dir::Cache": folder / "cache", "Dir::State": folder / "state", "Dir::State::status": folder / "state" / "status",
        }
        command = ["apt-get", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
        # Some of the machine's sources may have nothing for arm64.
        output(*command, "update")
        code, said = output(*command, "install", "--download-only", "--no-install-recommends", "-y", *DEBIAN)
        if code != 0:
            raise Skipped(f"Debian's Python for arm64 cannot be fetched: {said.strip().splitlines()[-1]}")
        for package in sorted((folder / "cache" / "archives").glob("*.deb")):
            run("dpkg-deb", "--extract", package, folder / "part", quiet=True)
        (folder / "part").rename(root)
    found = [match[1] for path in (root / "usr" / "bin").iterdir() if (match := re.fullmatch(r"python(3\.\d+)", path.name))]
    if len(found) != 1:
        raise Failed(f"Debian's packages have Python {found}, expected one version")
    return root, found[0]


def emulator():
    """The start of a command that runs a program for aarch64 Linux."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise Skipped(f"programs for aarch64 are run by qemu on x86-64 Linux, and this is {platform.machine()} {sys.platform}")
    apt("qemu-user", "qemu-aarch64")
    return ["qemu-aarch64", "-L", debian()[0]]


def python_of_aarch64():
    """A command that starts Python for aarch64 with numpy, pytest and the wheel, and nothing else."""
    prefix = emulator()
    root, version = debian()
    folder = TARGET / "ci" / "arm64"
    site, command = folder / "site", folder / "python"
    platforms = [f"--platform={tag}_aarch64" for tag in ("manylinux_2_28", "manylinux_2_27", MANYLINUX)]
    options = ["--target", site, *platforms, "--python-version", version, "--only-binary=:all:"]
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--root-user-action=ignore"]
    shutil.rmtree(site, ignore_errors=True)
    run(*install, *options, NUMPY, PYTEST)
    # The tag of the wheel is compared with what the others need.
    run(*install, *options, "--no-deps", "--no-index", wheel("aarch64"))
    command.write_text(f'#!/bin/sh\nexec {" ".join(map(str, prefix))} {root}/usr/bin/python{version} "$@"\n')
    command.chmod(0o755)
    # Tests start further interpreters by this name.
    (site / "sitecustomize.py").write_text(f"import sys\n\nsys.executable = {str(command)!r}\n")
    return command, {"PYTHONPATH": site}


def clean():
    """An interpreter with numpy, pytest and the wheel, and nothing else."""
    python = virtual("clean", [NUMPY, PYTEST])
    run(*pip_of(python), "install", "--quiet", "--force-reinstall", "--no-deps", "--no-index", wheel(this_machine()))
    run(*pip_of(python), "check")
    return python
