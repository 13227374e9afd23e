#!/usr/bin/env python3
"""Installs the peers of the CPU benchmark and measures each on the same processors. benches/cpu.sh calls it.

    python3 benches/peers/run.py OUT [--only torch,llama] [--cpus 0,1] [OPTION or GROUP of problems.py ...]

Rows go to OUT/peers.jsonl. Everything is installed under target/peers ($CARGO_TARGET_DIR/peers), once: Python packages into a virtual
environment, the shared libraries of ggml and candle's program. A peer that cannot be installed or run is named with the reason, here
and in OUT/missing.txt; the others go on, and the exit status is 1.

docs/kernels/cpu.md says what each peer computes.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "peers"
PYTHON = TARGET / "venv" / "bin" / "python"

NUMPY = "numpy==2.4.6"
TORCH = [NUMPY, "torch==2.15.0"]
ONNX = [NUMPY, "onnx==1.23.2", "onnxruntime==1.32.0"]
# The source distribution has the sources of llama.cpp.
LLAMA = "llama-cpp-python==0.3.36"
LLAMA_TOOLS = [NUMPY, "cmake==4.4.4", "ninja==1.13.2"]


class Failed(Exception):
    """Why a peer cannot be measured."""


def run(log, *command, **options):
    """Runs a command of an installation; what it prints goes to a file."""
    with open(log, "a") as file:
        file.write(f"$ {' '.join(map(str, command))}\n")
        file.flush()
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, **options).returncode
        except OSError as error:
            raise Failed(f"{command[0]}: {error.strerror}") from error
    if code != 0:
        raise Failed(f"{pathlib.Path(command[0]).name} failed: {reason(log)}")


def reason(log):
    """The first line of a log that says error, or else the last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return f"{(errors[:1] or lines[-1:] or ['it said nothing'])[0][:300]} ({log})"


def pip(log, *arguments):
    if not PYTHON.exists():
        run(log, sys.executable, "-m", "venv", TARGET / "venv")
    run(log, PYTHON, "-m", "pip", *arguments, "--disable-pip-version-check", "--progress-bar=off")


def install_torch(log):
    pip(log, "install", *TORCH)
    return [PYTHON, HERE / "cpu_torch.py"], {}


def install_onnx(log):
    pip(log, "install", *ONNX)
    return [PYTHON, HERE / "cpu_onnx.py"], {}


def install_llama(log):
    pip(log, "install", *LLAMA_TOOLS)
    folder = TARGET / LLAMA.replace("==", "-")
    if not (folder / "built").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pip(log, "download", "--no-deps", "--no-binary=llama-cpp-python", f"--dest={folder}", LLAMA)
        build_ggml(log, folder)
        (folder / "built").touch()
    return [PYTHON, HERE / "cpu_llama.py"], {"GGML": str(folder / "build")}


def build_ggml(log, folder):
    """ggml with the defaults of llama.cpp: all instructions of this machine, OpenMP."""
    packed = next(folder.glob("*.tar.gz"))
    with tarfile.open(packed) as archive:
        wanted = [member for member in archive if "/vendor/llama.cpp/" in member.name]
        archive.extractall(folder, members=wanted, filter="data")
    packed.unlink()
    source = next(folder.glob("*/vendor/llama.cpp"))
    off = [f"-DLLAMA_BUILD_{name}=OFF" for name in ("TESTS", "TOOLS", "EXAMPLES", "SERVER", "COMMON", "APP")]
    shared = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DGGML_CCACHE=OFF"]
    path = {**os.environ, "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"}
    cmake = PYTHON.parent / "cmake"
    run(log, cmake, "-S", source, "-B", folder / "build", "-G", "Ninja", *off, *shared, env=path)
    run(log, cmake, "--build", folder / "build", "--parallel", "2", "--target", "ggml-cpu", env=path)


def install_candle(log):
    # candle chooses AVX2 at run time, but converts f16 by instructions only where the compiler may use them.
    native = {**os.environ, "RUSTFLAGS": "-C target-cpu=native", "CARGO_TARGET_DIR": str(TARGET / "candle")}
    run(log, "cargo", "build", "--release", "--locked", f"--manifest-path={HERE / 'candle' / 'Cargo.toml'}", env=native)
    return [TARGET / "candle" / "release" / "peer-candle"], {}


PEERS = {"torch": install_torch, "llama": install_llama, "onnx": install_onnx, "candle": install_candle}


def measure(name, rows, log, args):
    """Appends the rows of a peer to a file."""
    command, variables = PEERS[name](log.with_name(f"{name}-install.log"))
    options = [f"--threads={args.threads}", f"--seconds={args.seconds}", f"--longest={args.longest}"]
    variables = {**os.environ, "RAYON_NUM_THREADS": str(args.threads), **variables}
    source, problems = None, [*args.problems]
    if name == "candle":
        listed = [sys.executable, HERE / "problems.py", *problems]
        source, problems = subprocess.run(listed, check=True, capture_output=True).stdout, []
        options = [part for option in options for part in option.split("=")]
    command = ["taskset", "-c", args.cpus, *command, *options, *problems]
    with open(rows, "ab") as file, open(log, "wb") as said:
        code = subprocess.run(command, input=source, stdout=file, stderr=said, env=variables).returncode
    sys.stderr.write(log.read_text(errors="replace"))
    if code != 0:
        raise Failed(f"exit status {code}: {reason(log)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(PEERS), help=f"of {','.join(PEERS)}")
    parser.add_argument("--cpus", default="0,1", help="processors, as taskset -c takes them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a row is measured, at least")
    parser.add_argument("--longest", type=float, default=5.0, help="no call of a row begins later than this many seconds after the first")
    args, args.problems = parser.parse_known_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"--only {unknown[0]}: expected {', '.join(PEERS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    TARGET.mkdir(parents=True, exist_ok=True)
    rows, missing = args.out / "peers.jsonl", {}
    rows.write_bytes(b"")
    for name in names:
        print(f"peer {name}", file=sys.stderr)
        try:
            measure(name, rows, args.out / f"{name}.log", args)
        except Failed as error:
            missing[name] = str(error)
            print(f"PEER {name} FAILED: {error}", file=sys.stderr)
    (args.out / "missing.txt").write_text("".join(f"{name}: {why}\n" for name, why in missing.items()))
    raise SystemExit(1 if missing else 0)


if __name__ == "__main__":
    main()
