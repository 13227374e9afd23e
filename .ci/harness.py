"""Runs named steps, measures each with every process that it starts, and closes with a table."""

import argparse
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()


class Skipped(Exception):
    """This machine lacks something that a step needs. The text is the reason."""


class Failed(Exception):
    """A check of a step failed."""


@dataclass
class Step:
    name: str
    title: str
    full: bool
    run: callable


@dataclass
class Result:
    name: str
    status: str
    wall: float
    cpu: float
    note: str


STEPS = []

# Options of the command line.
ARGUMENTS = argparse.Namespace(baseline=None)


def step(name, title, full=False):
    """Adds a step: a function that may return a note for the table. With `full`, it is one of `.ci/full` alone."""

    def add(function):
        STEPS.append(Step(name, title, full, function))
        return function

    return add


def children_cpu():
    """CPU seconds of every process that was started and has ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(function):
    """The result of a function, the seconds that it took, and the CPU seconds of the processes that it started."""
    wall, cpu = time.monotonic(), children_cpu()
    value = function()
    return value, time.monotonic() - wall, children_cpu() - cpu


def environment(extra):
    """The environment with more variables; one that is None is removed."""
    merged = {**os.environ, **(extra or {})}
    return {name: str(value) for name, value in merged.items() if value is not None}


def say(*command):
    print("$", shlex.join(map(str, command)), flush=True)


def start(command, env, cwd=ROOT, **streams):
    """Starts a command. What it prints is read as text."""
    return subprocess.Popen(list(map(str, command)), cwd=cwd, env=environment(env), text=True, errors="replace", **streams)


# Standard output and standard error of a command as one stream that is read here.
CAPTURED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def run(*command, env=None, quiet=False, cwd=ROOT):
    """Runs a command; fails where it fails."""
    say(*command)
    code = start(command, env, cwd, stdout=subprocess.DEVNULL if quiet else None).wait()
    if code != 0:
        raise Failed(f"exit status {code}: {shlex.join(map(str, command))}")


def output(*command, env=None, cwd=ROOT):
    """Exit status of a command, and what it printed on either stream."""
    process = start(command, env, cwd, **CAPTURED)
    printed, _ = process.communicate()
    return process.returncode, printed


def logged(name, *command, env=None, shown=lambda line: True):
    """Runs a command whose output goes to a file, and the lines that `shown` picks to the terminal too; returns all lines. Where it fails,
    the end of the output is printed."""
    say(*command)
    log = TARGET / "ci" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    with open(log, "w", encoding="utf-8") as file:
        process = start(command, env, **CAPTURED)
        for line in process.stdout:
            file.write(line)
            lines.append(line.rstrip("\n"))
            if shown(lines[-1]):
                print(lines[-1], flush=True)
        code = process.wait()
    if code != 0:
        print("\n".join(lines[-200:]), flush=True)
        raise Failed(f"exit status {code}: {shlex.join(map(str, command))} (all output is in {log})")
    return lines


class Scratch:
    """An empty folder below the target folder, removed afterwards."""

    def __enter__(self):
        (TARGET / "ci").mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(dir=TARGET / "ci"))
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)


def perform(step):
    """Runs a step; nothing that goes wrong in it keeps the next one from running."""
    print(f"\n== {step.name}: {step.title}", flush=True)
    wall, cpu, note = time.monotonic(), children_cpu(), ""
    try:
        note, status = step.run() or "", "RAN"
    except Skipped as reason:
        note, status = str(reason), "SKIPPED"
    except Failed as reason:
        note, status = str(reason), "FAILED"
    except (OSError, KeyError, ValueError) as reason:
        note, status = f"{type(reason).__name__}: {reason}", "FAILED"
    wall, cpu = time.monotonic() - wall, children_cpu() - cpu
    result = Result(step.name, status, wall, cpu, note)
    print(f"-- {describe(result)}, {wall:.0f} s, {cpu:.0f} CPU s", flush=True)
    return result


def describe(result):
    match result.status:
        case "SKIPPED":
            return f"{result.name}: SKIPPED({result.note})"
        case _ if result.note:
            return f"{result.name}: {result.status}, {result.note}"
        case _:
            return f"{result.name}: {result.status}"


def table(results, limit):
    """Prints what came of each step. `limit` is how many seconds all of them may take."""
    width = max(len("step"), *(len(result.name) for result in results))
    print(f"\n{'step':<{width}}  {'status':<7}  {'wall s':>7}  {'CPU s':>7}  note")
    for result in results:
        row = f"{result.name:<{width}}  {result.status:<7}  {result.wall:>7.1f}  {result.cpu:>7.1f}  {result.note}"
        print(row.rstrip())
    wall, cpu = (sum(getattr(result, what) for result in results) for what in ("wall", "cpu"))
    note = f"at most {limit} s on 2 cores" if limit else ""
    print(f"{'all':<{width}}  {'':<7}  {wall:>7.1f}  {cpu:>7.1f}  {note}".rstrip())


def names(text, known):
    """Names of steps in a list with commas."""
    wanted = [name for name in text.split(",") if name]
    for name in wanted:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no step {name}, expected some of {', '.join(known)}")
    return wanted


def main(program, full, limit):
    steps = [step for step in STEPS if full or not step.full]
    known = [step.name for step in steps]
    parser = argparse.ArgumentParser(
        prog=program,
        description="Runs every step, or some, in the order of --list. A step that fails does not stop the others; the exit status is 0 "
        "where none failed."
    )
    parser.add_argument("--only", metavar="NAMES", type=lambda text: names(text, known), help="these steps alone: miri,targets")
    parser.add_argument("--skip", metavar="NAMES", type=lambda text: names(text, known), default=[], help="all but these steps")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    if full:
        parser.add_argument("--baseline", metavar="REVISION", help="what the step semver compares with, in place of the last release")
    args = parser.parse_args(namespace=ARGUMENTS)
    chosen = [step for step in steps if (args.only is None or step.name in args.only) and step.name not in args.skip]
    if args.list:
        width = max(map(len, known))
        print("\n".join(f"{step.name:<{width}}  {step.title}" for step in chosen))
        return 0
    if not chosen:
        parser.error("no step is left")
    results = [perform(step) for step in chosen]
    table(results, limit if len(chosen) == len(steps) else None)
    left_out = [name for name in known if name not in {step.name for step in chosen}]
    if left_out:
        print(f"not asked for: {', '.join(left_out)}")
    failed = [result.name for result in results if result.status == "FAILED"]
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0
