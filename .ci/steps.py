"""The steps of .ci/run and .ci/full, in order. Each of these two scripts calls this file by its own name."""

import ctypes
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import release
from harness import ARGUMENTS, ROOT, TARGET, Failed, Scratch, Skipped, logged, main, measured, output, run, say, start, step
from tools import OPERATORS, WHEEL, ZIG, apt, pip, pip_of, rust_targets, toolchain, virtual

# Nothing here is built a second time after an edit, which is all that the many small units of incremental builds are for.
os.environ.setdefault("CARGO_INCREMENTAL", "0")

MSRV = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
TARGETS = ["aarch64-unknown-linux-gnu", "aarch64-apple-darwin", "x86_64-pc-windows-gnu"]

# The Python package with the compiler of CUDA kernels.
NVRTC = "nvidia-cuda-nvrtc==13.0.88"

# Seconds that a build may take on 2 cores. Machines differ: a step fails at twice as many.
FIRST_COMMAND = {"wall": 90, "CPU": 170}
DEPENDENT = {"CPU": 100}
# From a touched file to the end of a command.
EDITS = [
    ("cli/src/main.rs", {"wall": 8}, ["run", "-p", "flashtile-cli", "--", "--version"]),
    ("crates/core/src/problem/mod.rs", {"wall": 5}, ["check", "-p", "flashtile"]),
    ("crates/cpu/src/kernels/shared/scores.rs", {"wall": 45}, ["build", "--release", "-p", "flashtile"]),
]


# Compilers and devices of GPU kernels.


@functools.cache
def nvrtc():
    """Variables with which tests find the compiler of CUDA kernels. It needs no GPU."""
    if "FLASHTILE_NVRTC" in os.environ:
        return {}
    found = sorted(pip(NVRTC).rglob("libnvrtc.so*"))
    if not found:
        raise Failed(f"{NVRTC} has no libnvrtc.so")
    return {"FLASHTILE_NVRTC": found[0]}


@functools.cache
def clang():
    """Variables with which tests find the compilers of printed Metal, the clang in the package of zig, which needs neither zig nor an
    Apple machine, and of printed CUDA for the host: g++, or else the same clang."""
    if "FLASHTILE_CLANG" in os.environ and "FLASHTILE_CXX" in os.environ:
        return {}
    zig = pip(ZIG) / "ziglang" / "zig"
    compiler = shutil.which("g++")
    if not compiler:
        compiler = TARGET / "ci" / "tools" / "c++"
        compiler.write_text(f'#!/bin/sh\nexec "{zig}" c++ "$@"\n')
        compiler.chmod(0o755)
    found = {"FLASHTILE_CLANG": zig, "FLASHTILE_CXX": compiler}
    return {name: path for name, path in found.items() if name not in os.environ}


@functools.cache
def cuda_devices():
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    usable = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if usable else 0


# Text and types.


@step("format", "formatting")
def formatting():
    run("cargo", "fmt", "--all", "--check")
    run("cargo", "fmt", "--manifest-path", "examples/own-kernel/Cargo.toml", "--check")
    run("cargo", "fmt", "--manifest-path", "fuzz/Cargo.toml", "--check")
    run("cargo", "fmt", "--manifest-path", "crates/burn/Cargo.toml", "--check")
    run("cargo", "fmt", "--all", "--manifest-path", "crates/candle/Cargo.toml", "--check")
    run("cargo", "fmt", "--manifest-path", "examples/candle-minilm/Cargo.toml", "--check")
    run("cargo", "fmt", "--manifest-path", "examples/smollm/Cargo.toml", "--check")
    run("cargo", "fmt", "--manifest-path", "examples/train/Cargo.toml", "--check")
    run("cargo", "fmt", "--manifest-path", "benches/peers/candle/Cargo.toml", "--check")
    run("cargo", "fmt", "--manifest-path", "python/Cargo.toml", "--check")
    # Needs objc2-metal, which `prepare.py` makes, in its place: cargo reads every manifest.
    run(sys.executable, "-B", METAL / "prepare.py")
    run("cargo", "fmt", *(f"-p=flashtile-{name}" for name in ("metal-cases", "metal-candle", "metal-standin", "objc-standin")), "--check", cwd=METAL)


@step("lints", "clippy, on everything")
def lints():
    run("cargo", "clippy", "--workspace", "--all-targets", "--all-features", "--locked", "--", "-D", "warnings")
    # The command line without the test kit.
    run("cargo", "clippy", "-p", "flashtile-cli", "--no-default-features", "--locked", "--", "-D", "warnings")


@step("imports", "who imports whom, and planted faults that must be found")
def imports():
    run(sys.executable, "-B", ".ci/imports.py")
    run(sys.executable, "-B", ".ci/imports.py", "--planted")


@step("functions", "no function is too long, and none has too many parameters")
def functions():
    run(sys.executable, "-B", ".ci/functions.py")


@step("words", "the field's words, in place of others")
def words():
    run(sys.executable, "-B", ".ci/words.py")


@step("licences", "licences of dependencies")
def licences():
    run(sys.executable, ".ci/licences.py")


@step("doc", "documentation of every crate, those that are not published too", full=True)
def documentation():
    flags = {"RUSTDOCFLAGS": "-D warnings"}
    run("cargo", "doc", "--workspace", "--no-deps", "--all-features", "--locked", env=flags)
    run(sys.executable, "-B", METAL / "prepare.py")
    packages = ["--workspace", "--exclude", "flashtile-metal-candle", "--no-deps"]
    run("cargo", "doc", "--locked", "-q", *packages, env=flags | {"CARGO_TARGET_DIR": TARGET / "metal"}, cwd=METAL)


@step("docsrs", "documentation as docs.rs builds it, and which features items need")
def docsrs():
    installed = output("rustup", "toolchain", "list")[1]
    if re.search(r"^nightly", installed, re.M):
        note, env = "on nightly", {"RUSTUP_TOOLCHAIN": "nightly"}
    else:
        note, env = "on stable, with features of nightly", {"RUSTC_BOOTSTRAP": "1"}
    run("cargo", "fetch", "--locked", "--quiet")
    run(sys.executable, "-B", ".ci/packages.py", "--docs", env=env)
    return note


def fetch_packages():
    """Dependencies of every crate that is published, with which packages are made without network."""
    for manifest in ("Cargo.toml", "crates/candle/Cargo.toml"):
        run("cargo", "fetch", "--locked", "--quiet", "--manifest-path", manifest)


@step("packages", "what the package of each published crate holds")
def package_files():
    fetch_packages()
    run(sys.executable, "-B", ".ci/packages.py", "--files")


@step("publish", "each published crate compiles from its package, and planted faults that must be found", full=True)
def publish():
    fetch_packages()
    run(sys.executable, "-B", ".ci/packages.py")
    run(sys.executable, "-B", ".ci/packages.py", "--planted")
    # All but the upload, with the index of crates.io. That the packages compile is known by now.
    run("cargo", "publish", "--workspace", "--dry-run", "--no-verify", "--allow-dirty", "--locked", "--quiet")


def clippy_for_targets(*packages):
    """Checked, not linked: that needs no linker of the target. Clippy is a check that also denies warnings."""
    rust_targets(TARGETS)
    every = [word for target in TARGETS for word in ("--target", target)]
    run("cargo", "clippy", "--locked", *every, *packages, "--", "-D", "warnings")


@step("targets", f"other targets, with every feature: {', '.join(TARGETS)}")
def targets():
    # One command, which checks a crate once for each target. Metal's bindings are compiled for Apple's systems and no others.
    names = ("flashtile", "flashtile-kernel", "flashtile-metal", "flashtile-testkit", "flashtile-cli")
    clippy_for_targets(*(f"-p={name}" for name in names), "--all-features")
    for target, expected in [("aarch64-apple-darwin", True), ("x86_64-unknown-linux-gnu", False)]:
        _, tree = output("cargo", "tree", "--locked", "-p", "flashtile-cli", "-e", "normal", "--target", target)
        if ("objc2" in tree) != expected:
            raise Failed(f"dependencies for {target} {'lack' if expected else 'have'} objc2")


@step("targets-plain", "other targets, without features", full=True)
def targets_plain():
    clippy_for_targets("-p=flashtile", "-p=flashtile-kernel", "--no-default-features")
    clippy_for_targets("-p=flashtile-cli")


# Cost of a build.


def plain():
    """Takes out of the environment what would change the cost of a build."""
    changing = ("CARGO_PROFILE_", "CARGO_BUILD_", "CARGO_INCREMENTAL", "CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS", "RUSTC_WRAPPER")
    return {name: None for name in os.environ if name.startswith(changing)}


def against(figures, wall, cpu):
    """Compares seconds with what they may be."""
    took = {"wall": wall, "CPU": cpu}
    note = ", ".join(f"{took[what]:.0f} {what} s of {most}" for what, most in figures.items())
    if any(took[what] > 2 * most for what, most in figures.items()):
        raise Failed(f"{note}: more than twice as much")
    return note + (": TOO MUCH" if any(took[what] > most for what, most in figures.items()) else "")


@step("readme", "README: first command from a fresh clone with dependencies fetched")
def readme():
    run("cargo", "fetch", "--locked", "--quiet")
    with Scratch() as folder:
        env = plain() | {"CARGO_TARGET_DIR": folder / "target", "CARGO_NET_OFFLINE": "true"}
        command = ["cargo", "run", "--release", "--locked", "-q", "-p", "flashtile-cli", "--"]
        problem = ["run", "examples/data/minilm_attention.safetensors", "-o", folder / "out.safetensors"]
        _, wall, cpu = measured(lambda: run(*command, *problem, env=env))
    return against(FIRST_COMMAND, wall, cpu)


@step("dependent", "an empty crate that depends on flashtile, in release, and README's first program in it", full=True)
def dependent():
    run("cargo", "fetch", "--locked", "--quiet")
    with Scratch() as folder:
        (folder / "src").mkdir()
        (folder / "src" / "lib.rs").write_text("")
        (folder / "Cargo.toml").write_text(
            '[package]\nname = "dependent"\nversion = "0.0.0"\nedition = "2024"\n\n[workspace]\n\n'
            f'[dependencies]\nflashtile = {{ path = "{ROOT.as_posix()}" }}\n'
        )
        # With these versions of dependencies, which are fetched already.
        shutil.copy(ROOT / "Cargo.lock", folder)
        env = plain() | {"CARGO_TARGET_DIR": folder / "target", "CARGO_NET_OFFLINE": "true"}
        _, wall, cpu = measured(lambda: run("cargo", "build", "--release", "-q", cwd=folder, env=env))
        program = re.search(r"```rust\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        (folder / "src" / "main.rs").write_text(program[1])
        code, said = output("cargo", "run", "--release", "-q", cwd=folder, env=env)
        if code != 0 or said.strip() != "0.2":
            raise Failed(f"README's first program gave status {code} and printed {said!r}, expected the value of every element of v, 0.2")
    return against(DEPENDENT, wall, cpu)


# Tests.


@step("nvrtc", "compiler of CUDA kernels")
def fetch_nvrtc():
    nvrtc()


@step("clang", "compiler of Metal kernels, and of CUDA kernels for the host")
def fetch_clang():
    clang()


@functools.cache
def oldest():
    """Variables of what is built with tests. Lines of source in backtraces would cost a tenth of the build; a panic names its own."""
    name = toolchain(MSRV)
    # Tests of macros load rustc's own libraries, which `cargo test` finds and a program that is run by itself does not.
    libraries = output("rustc", "--print", "target-libdir", env={"RUSTUP_TOOLCHAIN": name})[1].strip()
    path = os.pathsep.join(filter(None, [libraries, os.environ.get("LD_LIBRARY_PATH")]))
    return {"RUSTUP_TOOLCHAIN": name, "CARGO_PROFILE_DEV_DEBUG": "none", "LD_LIBRARY_PATH": path}


def test_environment():
    return nvrtc() | clang() | oldest()


# A test that needs a device, or instructions that this processor lacks, prints one of these and passes.
NEEDS_A_DEVICE = ("nothing ran on a GPU", "nothing was launched", "no GPU ran", "this machine has no")


def test(name, *args, env=None):
    """Runs tests with every compiler, and fails where one was skipped for another reason than that there is no device."""

    def shown(line):
        return line.lstrip().startswith(("Compiling flashtile", "Running ", "Doc-tests ", "test result")) or "FAILED" in line

    lines = logged(name, "cargo", "test", "--locked", "--no-fail-fast", *args, "--show-output", env=test_environment() | (env or {}), shown=shown)
    return judged(lines)


def judged(lines):
    """The output of passed tests, in a word; fails where one was skipped for another reason than that there is no device."""
    skipped = [line for line in lines if re.match(r"SKIPPED|skipped:", line)]
    for_a_device = [line for line in skipped if any(why in line for why in NEEDS_A_DEVICE)]
    wrong = skipped if cuda_devices() else [line for line in skipped if line not in for_a_device]
    if wrong:
        raise Failed(f"{len(wrong)} tests did not run, such as: {wrong[0]}")
    passed = sum(int(match[1]) for line in lines if (match := re.match(r"test result: ok\. (\d+) passed", line)))
    if passed == 0:
        raise Failed("no test ran")
    return f"{passed} passed" + (f", {len(for_a_device)} skipped parts that need a CUDA device or other instructions" if for_a_device else "")


WORKSPACE = ("--workspace", "--all-features")

# A process compiles one CUDA kernel at a time, so that its tests leave a core free: programs run two at a time, those with most kernels,
# then those with most simulated threads first.
LANES = 2
LONGEST = ["flashtile_cuda", "kernels"]


@functools.cache
def test_artifacts(*args):
    """Builds tests, and whatever cargo builds with them: its messages about what it has made."""
    command = ["cargo", "test", "--locked", "--no-run", "--message-format=json-render-diagnostics", *args]
    say(*command)
    process = start(command, test_environment(), stdout=subprocess.PIPE)
    made = [message for message in map(json.loads, process.stdout) if message["reason"] == "compiler-artifact"]
    if process.wait() != 0:
        raise Failed(f"exit status {process.returncode}: tests do not compile")
    return made


def test_programs(*args):
    """Builds tests and examples, of which `serve` is a test too. Names of the programs, commands that run them, and the folders where they
    run."""
    found = []
    for message in test_artifacts(*args):
        if message["executable"]:
            name, folder = message["target"]["name"], Path(message["manifest_path"]).parent
            if message["profile"]["test"]:
                found.append((name, [message["executable"], "--show-output"], folder))
            elif name == "serve":
                found.append((name, [message["executable"]], folder))
    if "serve" not in (name for name, _, _ in found):
        raise Failed("cargo did not build the example serve")
    long = {name: n for n, name in enumerate(LONGEST)}
    return sorted(found, key=lambda program: long.get(program[0], len(long)))


@step("tests", f"README: tests, and the example serve, by Rust {MSRV}, the oldest that manifests name")
def tests():
    programs = test_programs(*WORKSPACE)
    programs.append(("documentation", ["cargo", "test", "--locked", "--no-fail-fast", "--doc", *WORKSPACE, "--", "--show-output"], ROOT))

    def perform(program):
        (name, command, folder), begin = program, time.monotonic()
        code, said = output(*command, env=test_environment(), cwd=folder)
        results = [line for line in said.splitlines() if line.startswith("test result") or "FAILED" in line]
        print("\n".join([f"{name} ({folder.relative_to(ROOT)}): {time.monotonic() - begin:.0f} s", *results]), flush=True)
        return name, code, said

    with ThreadPoolExecutor(LANES) as lanes:
        done = list(lanes.map(perform, programs))
    log = TARGET / "ci" / "tests.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"== {name}\n{said}" for name, _, said in done), encoding="utf-8")
    failed = [(name, said) for name, code, said in done if code != 0]
    for name, said in failed:
        print(f"== {name}", *said.splitlines()[-200:], sep="\n", flush=True)
    if failed:
        raise Failed(f"{', '.join(name for name, _ in failed)} (all output is in {log})")
    return judged([line for _, _, said in done for line in said.splitlines()])


# A program in C, and a mistake in it that it must find.
DECODE = ROOT / "examples" / "c" / "decode.c"
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'crates' / 'c'}"]


@functools.cache
def c_library():
    """The static and the dynamic library for C: with the tests of everything, where these were built, or with tests of their own."""
    packages = WORKSPACE if test_artifacts.cache_info().currsize else ("-p", "flashtile-c")
    made = [file for message in test_artifacts(*packages) if message["target"]["name"] == "flashtile_c" for file in message["filenames"]]
    return [next(file for file in made if file.endswith(kind)) for kind in (".a", (".so", ".dylib"))]


def c_program(folder, name, source, library):
    """A program of a source in C and a library."""
    file, program = folder / f"{name}.c", folder / name
    file.write_text(source)
    where = f"-Wl,-rpath,{Path(library).parent}"
    run("cc", "-std=c11", "-g", *STRICT, file, "-o", program, library, where, "-lm", "-lpthread", "-ldl")
    return program


def changed(source, old, new):
    if old not in source:
        raise Failed(f"the source has no {old}")
    return source.replace(old, new)


@step("c", "C: the example, README's program and the header, by a C compiler and, for the header, one for C++")
def c_interface():
    source = DECODE.read_text()
    program = re.search(r"```c\n(.*?)```", (ROOT / "crates" / "c" / "README.md").read_text(), re.DOTALL)
    with Scratch() as folder:
        for library in c_library():
            run(c_program(folder, "decode", source, library))
        run(c_program(folder, "readme", program[1], library))
        code, said = output(c_program(folder, "planted", changed(source, "options.causal = 1;", ""), library))
        if code != 1:
            raise Failed(f"decode.c without causality gave status {code}, expected 1: {said}")
        print("found, as it must be: attention that is not causal")
        compiler = os.environ.get("FLASHTILE_CXX") or clang()["FLASHTILE_CXX"]
        (folder / "header.cpp").write_text('#include "flashtile.h"\nint main() { return flashtile_version() == nullptr; }\n')
        run(compiler, "-fsyntax-only", *STRICT, folder / "header.cpp")


@step("bars", "documentation: pictures of recorded rows are what benches/bars.py draws")
def bars():
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("cli.md", "gallery.md"))
    commands = re.findall(r"^benches/bars.py (?:.*\\\n)*.*", pages, re.M)
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        picture = ROOT / words.pop(words.index("--svg") + 1)
        with Scratch() as folder:
            words.insert(words.index("--svg") + 1, folder / picture.name)
            run(sys.executable, "-B", *words)
            if (folder / picture.name).read_text() != picture.read_text():
                raise Failed(f"{picture} is not what its command draws")
    if len(commands) < 3:
        raise Failed(f"{len(commands)} commands of benches/bars.py in docs/")
    return f"{len(commands)} pictures"


@step("own-kernel", "example: a kernel of one's own")
def own_kernel():
    # A workspace of its own, as a user's is, with the crates that the tests have built.
    env = oldest() | {"CARGO_TARGET_DIR": TARGET}
    run("cargo", "run", "--locked", "-q", "--features", "cuda", "--manifest-path", "examples/own-kernel/Cargo.toml", env=env)


@step("candle", "operators of candle: clippy, tests, documentation and licences")
def candle():
    workspace = ["--locked", "-q", "--workspace", "--manifest-path", "crates/candle/Cargo.toml"]
    run("cargo", "clippy", *workspace, "--all-targets", "--", "-D", "warnings", env=OPERATORS)
    run("cargo", "test", *workspace, env=OPERATORS)
    run("cargo", "doc", *workspace, "--no-deps", env=OPERATORS | {"RUSTDOCFLAGS": "-D warnings"})
    run(sys.executable, "-B", ROOT / ".ci" / "licences.py", cwd=ROOT / "crates" / "candle")


BURN = ["--locked", "-q", "--manifest-path", "crates/burn/Cargo.toml"]


@step("burn", "attention over tensors of burn: tests and licences", full=True)
def burn():
    run("cargo", "test", *BURN, env=OPERATORS)
    run(sys.executable, "-B", ROOT / ".ci" / "licences.py", cwd=ROOT / "crates" / "burn")


@step("burn-lints", "attention over tensors of burn: clippy and documentation", full=True)
def burn_lints():
    run("cargo", "clippy", *BURN, "--all-targets", "--", "-D", "warnings", env=OPERATORS)
    run("cargo", "doc", *BURN, "--no-deps", env=OPERATORS | {"RUSTDOCFLAGS": "-D warnings"})


# The software Metal device: objc2-metal with one line changed, which `prepare.py` makes, and kernels compiled by a clang.
METAL = ROOT / "tests" / "metal"


@step("metal", "Metal hosts on the software device: clippy, tests and licences")
def metal():
    run(sys.executable, "-B", METAL / "prepare.py")
    # Its `.cargo/config.toml` is read by a cargo that is started there.
    env = clang() | {"CARGO_TARGET_DIR": TARGET / "metal"}
    workspace = ["--locked", "-q", "--workspace", "--exclude", "flashtile-metal-candle"]
    run("cargo", "clippy", *workspace, "--all-targets", "--", "-D", "warnings", env=env, cwd=METAL)
    with Scratch() as kernels:
        run("cargo", "test", *workspace, env=env | {"FLASHTILE_CACHE_DIR": kernels}, cwd=METAL)
    run(sys.executable, "-B", ROOT / ".ci" / "licences.py", cwd=METAL)


# A stand-in for NVIDIA's compiler, which answers the build scripts of candle. Its kernels are empty files: nothing is linked or run.
NVCC = """#!/usr/bin/env python3
import pathlib, sys
args = sys.argv[1:]
if "--version" in args:
    print("Cuda compilation tools, release 13.0, V13.0.88")
elif "--list-gpu-code" in args:
    print("sm_90")
for option, value in zip(args, args[1:]):
    if option == "-o":
        pathlib.Path(value).touch()
    elif option in ("--output-directory", "-odir"):
        for name in args:
            if name.endswith(".cu"):
                (pathlib.Path(value) / pathlib.Path(name).stem).with_suffix(".ptx").touch()
"""


@step("candle-cuda", "operators of candle with the feature cuda: clippy, by a stand-in for NVIDIA's compiler", full=True)
def candle_cuda():
    with Scratch() as folder:
        compiler = folder / "bin" / "nvcc"
        compiler.parent.mkdir()
        compiler.write_text(NVCC)
        compiler.chmod(0o755)
        env = {"PATH": f"{compiler.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_HOME": folder, "CUDA_COMPUTE_CAP": "90"}
        # Its empty kernels are not to be found by a later build.
        env["CARGO_TARGET_DIR"] = TARGET / "candle-cuda"
        manifest = ROOT / "crates" / "candle" / "Cargo.toml"
        run("cargo", "clippy", "--locked", "-q", "--all-targets", "--features", "cuda", "--manifest-path", manifest, "--", "-D", "warnings", env=env)


@step("candle-metal", "operators of candle with the feature metal: clippy for Apple's systems", full=True)
def candle_metal():
    target = "aarch64-apple-darwin"
    rust_targets([target])
    manifest = ROOT / "crates" / "candle" / "Cargo.toml"
    options = ["--locked", "-q", "--target", target, "--features", "metal", "--manifest-path", manifest]
    run("cargo", "clippy", *options, "--", "-D", "warnings", env=OPERATORS)


@step("metal-candle", "operators of candle on candle's Metal device, which is the software device", full=True)
def metal_candle():
    run(sys.executable, "-B", METAL / "prepare.py")
    with Scratch() as kernels:
        env = clang() | {"CARGO_TARGET_DIR": TARGET / "metal", "FLASHTILE_CACHE_DIR": kernels}
        run("cargo", "clippy", "--locked", "-q", "-p", "flashtile-metal-candle", "--all-targets", "--", "-D", "warnings", env=env, cwd=METAL)
        run("cargo", "test", "--locked", "-q", "-p", "flashtile-metal-candle", env=env, cwd=METAL)


@step("candle-msrv", "operators of candle with the oldest Rust that their manifest names", full=True)
def candle_msrv():
    manifest = ROOT / "crates" / "candle" / "Cargo.toml"
    oldest = tomllib.loads(manifest.read_text())["package"]["rust-version"]
    env = {"CARGO_TARGET_DIR": TARGET / "candle-msrv", "RUSTUP_TOOLCHAIN": toolchain(oldest)}
    run("cargo", "check", "--locked", "-q", "--manifest-path", manifest, env=env)
    return f"Rust {oldest}"


# Libraries of models that use the wheel: the newest and one minor version before, on one PyTorch.
MODELS_OF = ["torch==2.15.0", "transformers==5.23.0"]
MODELS_BEFORE = "transformers==5.22.2"


@functools.cache
def built(profile):
    """The wheel, which is built once. On Linux that of a release is tested, which others install."""
    if profile == "release" and sys.platform == "linux":
        return release.wheel(release.this_machine())
    options = ["--quiet", "--locked", "--profile", profile, "--manifest-path", "python/Cargo.toml"]
    wheels = TARGET / "ci" / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    run(virtual("python", WHEEL), "-m", "maturin", "build", *options, "--out", wheels, env=OPERATORS)
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1 or "-abi3-" not in found[0].name:
        raise Failed(f"maturin built {[wheel.name for wheel in found]}, expected one wheel of the stable ABI")
    return found[0]


def wheel(python, profile):
    """Installs the wheel in the virtual environment of this interpreter."""
    run(*pip_of(python), "install", "--quiet", "--force-reinstall", "--no-deps", "--no-index", built(profile))


def pytest(python, *tests, but="", env=None):
    """Runs some tests, or all, of the wheel that is installed, not of the folder: the working folder has no package. Tests whose name contains
    `but` are left out."""
    with Scratch() as folder:
        files = [ROOT / "python" / "tests" / test for test in tests or [""]]
        left_out = ["-k", f"not ({but})"] if but else []
        run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *left_out, *files, env={"PYTHONDONTWRITEBYTECODE": "1"} | (env or {}), cwd=folder)


# Tests that need no PyTorch.
OVER_NUMPY = ["test_attention.py", "test_cache.py", "test_merge.py", "test_paged.py", "test_plan.py", "test_docs.py", "test_with_cache.py"]


def sweep(python, *options, env=None):
    """Compares classes of models of transformers, by the wheel that is installed, with `eager`: versions and counts in one line."""
    script = ROOT / "python" / "tests" / "sweep_transformers.py"
    lines = logged("sweep", python, "-B", script, *options, env=env, shown=lambda line: not line.startswith("DONE"))
    return "; ".join(line.strip() for line in lines if not line.startswith("DONE"))


@step("python", "Python: clippy, the wheel, its tests over numpy and DLPack, and licences")
def python():
    manifest = ["--locked", "-q", "--manifest-path", "python/Cargo.toml"]
    run("cargo", "clippy", *manifest, "--", "-D", "warnings", env=OPERATORS)
    interpreter = virtual("python", WHEEL)
    # Clippy and this profile share build scripts and procedural macros.
    wheel(interpreter, "dev")
    pytest(interpreter, *OVER_NUMPY)
    run(sys.executable, "-B", ROOT / ".ci" / "licences.py", cwd=ROOT / "python")


@step("models", "Python: families of models of Hugging Face transformers, by the same wheel")
def models():
    interpreter = virtual("transformers", WHEEL + MODELS_OF)
    wheel(interpreter, "dev")
    return sweep(interpreter, "--part")


@step("gpu", "tests on a CUDA device")
def gpu():
    if not cuda_devices():
        raise Skipped("no CUDA device: kernels for it were compiled, and ran on nothing")
    return test("gpu", "-p", "flashtile", "--test", "it", "--", "backend::", "cuda::", "portable::")


# Miri.

# Miri stops system calls, such as those that ask for the size of caches; there are defaults for what they say. Threads of rayon never end.
MIRI_FLAGS = ["-Zmiri-isolation-error=hide", "-Zmiri-ignore-leaks"]
MODELS = {"Stacked Borrows": [], "Tree Borrows": ["-Zmiri-tree-borrows"]}

# `.ci/full` runs these under both models: arguments of `cargo miri test` for each crate.
LIBRARY = ["-p", "flashtile", "--test", "miri"]
KERNEL = ["-p", "flashtile-kernel", "--lib", "--features", "cuda"]
MIRI_TESTS = [LIBRARY, KERNEL]
# `.ci/run` runs this part of LIBRARY.
MIRI_PART = ["views", "merging", "codecs::rows_of_codes", "caches::contiguous", "kernels::decode", "kernels::prefill_window", "gradients"]
# On threads of rayon runs crossbeam-epoch, which does not obey Stacked Borrows.
NOT_STACKED = ["--skip", "two_threads"]


def miri(flags, tests, *args):
    """Command and variables of tests under Miri. Numbers need no optimisation: Miri interprets them."""
    name = toolchain("nightly", "miri", "rust-src")
    env = {"MIRIFLAGS": " ".join(MIRI_FLAGS + flags), "RUSTUP_TOOLCHAIN": name, "CARGO_PROFILE_DEV_OPT_LEVEL": "0"}
    return ["cargo", "miri", "test", "--locked", *tests, "--", "--test-threads=1", *args], env


@step("miri", "Miri: a part of its tests, and faults that it must find")
def miri_part():
    command, env = miri([], LIBRARY, *MIRI_PART)
    run(*command, env=env)
    planted()


def planted():
    """Runs tests each of which reads outside memory: Miri must say so."""
    for fault in ("an_element_past_a_view", "a_key_past_a_view_in_a_kernel"):
        command, env = miri([], LIBRARY, "--exact", "--ignored", f"planted::{fault}")
        code, said = output(*command, env=env)
        if code == 0 or not re.search(r"Undefined Behavior: .*(beyond the end|from the end) of the allocation", said):
            print(said)
            raise Failed(f"Miri did not find the read outside memory in planted::{fault}")
        print(f"found, as it must be: planted::{fault}")


for model, model_flags in MODELS.items():

    @step(f"miri-{model.split()[0].lower()}", f"Miri: all of its tests, under {model}", full=True)
    def miri_all(flags=model_flags):
        for tests in MIRI_TESTS:
            command, env = miri(flags, tests, *([] if flags else NOT_STACKED))
            run(*command, env=env)


# Steps of .ci/full alone.


@step("edits", "from a touched file to the next result", full=True)
def edits():
    notes = []
    for file, figures, arguments in EDITS:
        command = ["cargo", arguments[0], "--locked", "-q", *arguments[1:]]
        run(*command, env=plain(), quiet=True)
        (ROOT / file).touch()
        _, wall, cpu = measured(lambda: run(*command, env=plain(), quiet=True))
        notes.append(f"{file} {against(figures, wall, cpu)}")
    return "; ".join(notes)


@step("release-wheels", "release: wheels for Linux, and the source of the Python package", full=True)
def release_wheels():
    return release.sizes([*map(release.wheel, release.MACHINES), release.source()])


@step("release-programs", "release: the command line for Linux, dynamic and static", full=True)
def release_programs():
    return release.sizes(release.programs())


@step("release-here", "release: what is for this machine runs, and pip builds the source", full=True)
def release_here():
    machine = release.this_machine()
    interpreter = release.clean()
    pytest(interpreter, *OVER_NUMPY)
    with Scratch() as folder:
        for library in release.LIBRARIES:
            release.tried([], release.packed(release.triple(machine, library), folder), [])
        # The dynamic program finds a driver and a compiler where there are any.
        apt("g++", "g++")
        dynamic = release.packed(release.triple(machine, "gnu"), folder)
        run(ROOT / "tools" / "cuda-standin" / "run.sh", dynamic, "check", "--backend", "cuda", "--filter", "gqa_2_of_4")
        from_source = release.wheel_of_source(folder)
        run(*pip_of(interpreter), "install", "--quiet", "--force-reinstall", "--no-deps", "--no-index", from_source)
        pytest(interpreter, "test_merge.py")


@step("release-aarch64", "release: what is for aarch64 runs under qemu", full=True)
def release_aarch64():
    emulator = release.emulator()
    interpreter, env = release.python_of_aarch64()
    # These set limits of memory, which qemu does not obey.
    pytest(interpreter, *OVER_NUMPY, but="threads_that_cannot_start or cache_without_memory", env=env)
    with Scratch() as folder:
        for library, part in zip(release.LIBRARIES, ([], ["--filter", "gqa,decode_"]), strict=True):
            release.tried(emulator, release.packed(release.triple("aarch64", library), folder), part)


@step("minilm", "example: sentence embeddings by all-MiniLM-L6-v2 in candle", full=True)
def minilm():
    model = TARGET / "ci" / "minilm"
    run(sys.executable, "-B", "examples/candle-minilm/fetch.py", model)
    manifest = ["--manifest-path", "examples/candle-minilm/Cargo.toml"]
    run("cargo", "run", "--release", "--locked", "-q", *manifest, "--", model, "LICENSE-APACHE", env=OPERATORS)


@step("smollm", "example: SmolLM2 in candle over quantized caches, against attention in candle's operations", full=True)
def smollm():
    folder = TARGET / "ci" / "smollm"
    run(sys.executable, "-B", "examples/smollm/fetch.py", folder)
    model = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    options = ["--release", "--locked", "-q", "--manifest-path", "examples/smollm/Cargo.toml"]
    run("cargo", "test", *options, env=OPERATORS)
    run("cargo", "run", *options, "--", model, "--check", env=OPERATORS)


@step("train", "example: a character transformer trained in candle, beside PyTorch", full=True)
def train():
    options = ["--release", "--locked", "-q", "--manifest-path", "examples/train/Cargo.toml"]
    run("cargo", "run", *options, env=OPERATORS)
    folder = TARGET / "ci" / "train"
    run("cargo", "run", *options, "--", "--steps", "200", "--batch", "4", "--twin", folder, env=OPERATORS)
    run(virtual("transformers", WHEEL + MODELS_OF), "-B", "examples/train/compare.py", folder)


@step("transformers", "Python: tensors of PyTorch, its operator, and every model class of Hugging Face transformers", full=True)
def transformers():
    interpreter = virtual("transformers", WHEEL + MODELS_OF)
    wheel(interpreter, "release")
    model = TARGET / "ci" / "minilm"
    run(sys.executable, "-B", "examples/candle-minilm/fetch.py", model)
    pytest(interpreter, env={"FLASHTILE_MINILM": model})
    notes = []
    for version, env in ((MODELS_OF[1], {}), (MODELS_BEFORE, {"PYTHONPATH": pip(MODELS_BEFORE)})):
        notes.append(sweep(interpreter, "--out", TARGET / "ci" / f"{version}.json", env=env))
    return "; ".join(notes)


@step("memcheck", "valgrind, on a part of the catalogue", full=True)
def memcheck():
    apt("valgrind", "valgrind")
    return memory("memcheck")


@step("c-memcheck", "C: the example under valgrind, and a leak that it must find", full=True)
def c_memcheck():
    apt("valgrind", "valgrind")
    valgrind = ["valgrind", "--quiet", "--error-exitcode=99", "--partial-loads-ok=no", "--leak-check=full"]
    valgrind += ["--show-leak-kinds=definite,indirect", "--errors-for-leak-kinds=definite,indirect"]
    library, source = c_library()[0], DECODE.read_text()
    with Scratch() as folder:
        run(*valgrind, c_program(folder, "decode", source, library))
        leak = c_program(folder, "planted", changed(source, "flashtile_text_free(text);", ""), library)
        code, said = output(*valgrind, leak)
        if code != 99 or "definitely lost" not in said:
            raise Failed(f"valgrind gave status {code}, expected 99 for a text that is not freed: {said}")
        print("found, as it must be: a text that is not freed")


@step("asan", "address sanitizer, on the whole catalogue", full=True)
def asan():
    return memory("asan")


def memory(checker):
    skipped = [line for line in logged(checker, "tests/memory.sh", checker) if line.startswith("SKIPPED")]
    if any(line.startswith("SKIPPED: address sanitizer") for line in skipped):
        raise Skipped(skipped[0].removeprefix("SKIPPED: "))
    return "; ".join(skipped)


@step("seeds", "random problems, many", full=True)
def seeds():
    return test("seeds", "-p", "flashtile", "--test", "it", "properties", "--", env={"FLASHTILE_SEEDS": "1000..9000"})


@step("metal-all", "the whole catalogue on the software Metal device", full=True)
def metal_all():
    run(sys.executable, "-B", METAL / "prepare.py")
    with Scratch() as kernels:
        env = clang() | {"CARGO_TARGET_DIR": TARGET / "metal", "FLASHTILE_METAL_CASES": "all", "FLASHTILE_CACHE_DIR": kernels}
        run("cargo", "test", "--locked", "-q", "--test", "host", "--", "conformance", env=env, cwd=METAL)


@step("cuda-standin", "native CUDA kernels on the software device: the catalogue with tiles of wgmma", full=True)
def cuda_standin():
    wgmma = ["cargo", "test", "--locked", "-q", "--all-features", "--test", "it", "--",
             "the_catalogue_passes_with_tiles_of_wgmma", "tiles_of_wgmma_have_any_number_of_splits",
             "blocks_of_threads_take_work_tiles_from_a_queue", "native_gradients"]
    run(ROOT / "tools" / "cuda-standin" / "run.sh", *wgmma)


@step("instances", "kernels for every device, and every instance of the portable ones, through NVRTC and as Metal", full=True)
def instances():
    return test("instances", "-p", "flashtile-cuda", "-p", "flashtile-gpu", "--", "--ignored")


@step("lengths", "codes of every number of keys, non-finite keys by every tiling, and the whole catalogue, simulated", full=True)
def lengths():
    return test("lengths", "-p", "flashtile-kernel-cases", "--", "--ignored")


@step("bits", "bits of the whole catalogue by every instruction set and plan", full=True)
def bits():
    return test("bits", "-p", "flashtile", "--test", "it", "invariance::", "--", "--ignored")


@step("fuzz", "fuzz targets: types", full=True)
def fuzz():
    # libfuzzer is C++.
    if not shutil.which("c++"):
        apt("g++", "c++")
    run("cargo", "check", "--locked", "--manifest-path", "fuzz/Cargo.toml", env={"CARGO_TARGET_DIR": TARGET})


@step("semver", "public interface against the last release, or --baseline REVISION", full=True)
def semver():
    if not shutil.which("cargo-semver-checks"):
        raise Skipped("cargo-semver-checks is not installed: cargo install cargo-semver-checks --locked, about ten minutes")
    code, tag = output("git", "-C", ROOT, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
    baseline = ARGUMENTS.baseline or (tag.strip() if code == 0 else None)
    if not baseline:
        raise Skipped("there is no release to compare with, and no --baseline REVISION")
    run(sys.executable, "-B", ".ci/semver.py", baseline)
    return f"against {baseline}"


if __name__ == "__main__":
    which = sys.argv.pop(1)
    sys.exit(main(f".ci/{which}", full=which == "full", limit=1800 if which == "run" else None))
