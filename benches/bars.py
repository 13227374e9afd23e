#!/usr/bin/env python3
"""Draws the speed of recorded rows beside that of peers, as bars in an SVG: GFLOP/s of prefill and of the
backward pass, GB/s of decode.

    benches/bars.py ROWS.jsonl --svg speed.svg [--kind prefill] [--dtype f32,bf16] [--title TEXT] ...

ROWS.jsonl has rows of `flashtile bench --json-lines` and rows of peers, as `benches/cpu.sh` collects them. Options select rows. Problems
without a peer are left out if others have one.
"""

import argparse
import json
import math
import sys
from collections import namedtuple
from pathlib import Path

# A problem; a peer's row stands beside ours where these are equal.
Key = namedtuple("Key", "kind dtype d dv h hkv b s causal window layout shared lens")
# A row of flashtile: its line in the file, rates in flop/s or bytes/s, and seconds by peer as the row was compared with them.
Ours = namedtuple("Ours", "line key seconds rate limit unit threads compared")
# One group of bars: `speeds` are (name, rate), flashtile first.
Case = namedtuple("Case", "key unit threads limit speeds")

KINDS, DTYPES = ("prefill", "backward", "decode"), ("f32", "f16", "bf16")
NAMES = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "fa2": "FlashAttention-2", "fa4": "FlashAttention-4", "cudnn": "cuDNN", "flashinfer": "FlashInfer"}

# Colours on a light page, and on a dark one where a colour would not stand out from it.
PAGE, INK, MUTED, GRID, AXIS = "#ffffff", "#1f2328", "#59636e", "#e7eaed", "#8c959f"
DARK = {PAGE: "#0d1117", INK: "#e6edf3", MUTED: "#9da7b1", GRID: "#262c34", AXIS: "#6e7681", "#1f618d": "#3f93cc"}
OURS = "#d4611c"
PEERS = ("#7f93a8", "#aebbc8", "#5f7388", "#c9a86a", "#8fb39a", "#b08fb3", "#b3a28f", "#6fa3a0", "#9fae7a")

# In pixels: the picture, its margins, words, lines of words, the title, a bar, gaps, and the room for words beside bars.
WIDTH, MARGIN, SIZE, LINE, TITLE = 800, 20, 13, 18, 17
BAR, GAP, BETWEEN_GROUPS, VALUES, LABELS = 14, 2, 13, 112, 330
# Limits up to this factor beyond the fastest bar are drawn; a farther one would leave no room for the bars.
FAR = {"prefill": 1.7, "backward": 1.7, "decode": 3}
# The bar of a row with a shared prefix that is read once for each of the sequences.
APART = "flashtile, the prefix read for each sequence"


class RowError(Exception):
    """A row or an option that means nothing here."""


def demand(holds, what):
    if not holds:
        raise RowError(what)


# Rows.


def number(row, name, default=None):
    found = row.get(name)
    if found is None:
        demand(default is not None, f"expected a whole number {name}")
        return default
    demand(type(found) is int and found >= 0, f"expected a whole number {name}")
    return found


def positive(row, name, of=""):
    found = row.get(name)
    demand(type(found) in (int, float) and 0 < found < math.inf, f"expected a positive number {name}{of}")
    return float(found)


def text(row, name, default=None):
    found = row.get(name) if row.get(name) is not None else default
    demand(isinstance(found, str), f"expected a text {name}")
    return found


def key_of(row):
    d, h = number(row, "d"), number(row, "h")
    causal, lens, window = row.get("causal") or False, row.get("lens") or [], row.get("window")
    demand(causal in (True, False), "expected true or false causal")
    kind = text(row, "kind")
    demand(kind in KINDS, f'kind "{kind}", expected {" or ".join(KINDS)}')
    return Key(
        kind, text(row, "dtype"), d, number(row, "dv", d), h, number(row, "hkv", h), number(row, "b", 1), number(row, "s"), causal,
        tuple(window) if window else None, text(row, "layout", "dense"), number(row, "shared", 0),
        tuple(lens) if len(set(lens)) > 1 else None,
    )


def ours_of(line, key, row):
    rate = 1e9 * positive(row, "gbytes_per_s" if key.kind == "decode" else "gflops")
    # A peer of this name is an earlier build.
    peers = (row.get("peers") or {}).items()
    compared = {"flashtile, earlier" if name == "flashtile" else name: positive(of, "seconds", f" of {name}") for name, of in peers}
    if row.get("seconds_apart") is not None:
        compared[APART] = positive(row, "seconds_apart")
    unit = text(row, "unit", row.get("isa"))
    threads = None if row.get("threads") is None else number(row, "threads")
    return Ours(line, key, positive(row, "seconds"), rate, positive(row, "limit_per_s"), unit, threads, compared)


def read(path, options):
    """The rows that the options select: ours, and (name, key, seconds) of peers."""
    ours, peers, names = [], [], set()
    selected = lambda name: not options.peers or name.startswith((*options.peers, APART))
    for line, written in enumerate(path.read_text().splitlines(), 1):
        if not written.strip():
            continue
        try:
            row = json.loads(written)
            if row.get("kind") == "visibility":
                continue
            key, seconds, name = key_of(row), positive(row, "seconds"), text(row, "peer")
            of = ours_of(line, key, row) if name == "flashtile" else None
        except (RowError, ValueError, AttributeError, TypeError) as why:
            raise RowError(f"{path} line {line}: {why}") from None
        names.update([name] if of is None else of.compared)
        lists = {"kind": key.kind, "dtype": key.dtype, "head_dim": key.d, "kv_heads": key.hkv, "batch": key.b, "seq": key.s}
        if any(getattr(options, option) and value not in getattr(options, option) for option, value in lists.items()):
            continue
        if of is None and selected(name):
            peers.append((name, key, seconds))
        elif of and options.unit in (None, of.unit) and options.threads in (None, of.threads):
            ours.append(of._replace(compared={name: s for name, s in of.compared.items() if selected(name)}))
    for first in options.peers:
        demand(any(name.startswith(first) for name in names), f"--peers {first}: no peer name in {path} starts with it, found {', '.join(sorted(names)) or 'none'}")
    return ours, peers


def cases(path, ours, peers, options):
    keys = list(dict.fromkeys(row.key for row in ours))
    demand(keys, f"{path}: no row of flashtile that these options select")
    theirs = {key for _, key, _ in peers} | {row.key for row in ours if row.compared}
    demand(theirs or not options.peers, f"{path}: --peers selects no row beside a row of flashtile")
    beside = [key for key in keys if key in theirs]
    return [case(path, key, ours, peers) for key in beside or keys]


def case(path, key, ours, peers):
    """The last row of a problem, preferably one that was measured together with peers."""
    same = [row for row in ours if row.key == key]
    same = [row for row in same if row.compared] or same
    for row in same[1:]:
        demand(
            (row.unit, row.threads) == (same[0].unit, same[0].threads),
            f"{path} line {row.line}: the problem of line {same[0].line} on another processor or with other threads, expected --unit or --threads to choose one",
        )
    row = same[-1]
    # The last of several rows of a peer counts, unless one was measured in the same run.
    seconds = {name: s for name, of, s in peers if of == key} | row.compared
    speeds = [("flashtile", row.rate), *((name, row.rate * row.seconds / s) for name, s in seconds.items())]
    return Case(key, row.unit, row.threads, row.limit, speeds)


# Words.


def significant(x):
    """Three significant digits."""
    return f"{x:.{0 if x >= 99.95 else 1 if x >= 9.995 else 2}f}"


def rate(kind, x):
    unit = "B/s" if kind == "decode" else "FLOP/s"
    scale, prefix = next(((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if x >= s), (1e6, "M"))
    return f"{significant(x / scale)} {prefix}{unit}"


def shown(name):
    """The name of an implementation as its authors write it."""
    first, space, rest = name.partition(" ")
    return NAMES.get(first, first) + space + rest


def facts(of):
    """Facts about a case, which stand beside its bars where cases differ in them, and otherwise above all bars."""
    key = of.key
    side = lambda n: "all" if n is None else str(n)
    if key.window:
        left, right = map(side, key.window)
        visibility = f"causal, window {left}" if key.causal else f"window {left} left, {right} right"
    else:
        visibility = "causal" if key.causal else "" if key.kind == "decode" else "full"
    threads = "" if of.threads is None else f", {of.threads} thread" + "s" * (of.threads != 1)
    return [
        f"head dim {key.d}" if key.d == key.dv else f"head dim {key.d}/{key.dv}",
        visibility,
        f"{'at most ' if key.lens else ''}{key.s} keys",
        "" if key.b == 1 else f"batch {key.b}",
        f"{key.h} heads" if key.h == key.hkv else f"{key.h}/{key.hkv} heads",
        "" if key.layout == "dense" else key.layout,
        f"{key.shared} tokens shared" if key.shared else "",
        of.unit + threads,
    ]


def listed(some):
    return ", ".join(fact for fact in some if fact)


# Shapes.


def px(x):
    return f"{x:.1f}".removesuffix(".0")


def width(words, size=SIZE):
    """An upper estimate of the width of words, whose font is the viewer's."""
    return len(words) * size * 0.6


def escaped(words):
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\ufffd" if ord(c) < 32 or 127 <= ord(c) < 160 or c in "\ufffe\uffff" else c for c in words)


class Svg:
    """A picture that grows downwards."""

    def __init__(self):
        self.body = []

    def words(self, words, x, y, size=SIZE, colour=INK, anchor="", bold=False):
        anchor = f' text-anchor="{anchor}"' if anchor else ""
        weight = ' font-weight="600"' if bold else ""
        self.body.append(f'<text x="{px(x)}" y="{px(y)}" font-size="{px(size)}" fill="{colour}"{anchor}{weight}>{escaped(words)}</text>')

    def rectangle(self, colour, left, top, width, height):
        """Its edges lie on whole pixels of the screen."""
        self.body.append(f'<g fill="{colour}" shape-rendering="crispEdges">')
        self.body.append(f'<rect x="{px(left)}" y="{px(top)}" width="{px(width)}" height="{px(height)}"/>\n</g>')

    def line(self, colour, x, top, bottom):
        self.body.append(f'<path d="M{px(x)} {px(top)}L{px(x)} {px(bottom)}" fill="none" stroke="{colour}" stroke-width="1"/>')

    def document(self, title, description, height):
        high = px(math.ceil(height))
        dark = "".join(f'[{paint}="{light}"]{{{paint}:{colour}}}' for light, colour in DARK.items() for paint in ("fill", "stroke"))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{high}" viewBox="0 0 {WIDTH} {high}" role="img" '
            "font-family=\"system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif\">\n"
            f"<title>{escaped(title)}</title>\n<desc>{escaped(description)}</desc>\n"
            f"<style>@media(prefers-color-scheme:dark){{{dark}}}</style>\n"
            f'<rect width="{WIDTH}" height="{high}" fill="{PAGE}"/>\n' + "\n".join(self.body) + "\n</svg>\n"
        )


def ticks(end, count=6):
    """Numbers from 0 to `end` at equal, round distances: 1, 2 or 5 times a power of ten, at most `count` steps."""
    power = 10.0 ** math.floor(math.log10(end / count))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= end / count * (1 - 1e-9))
    return [n * step for n in range(count + 1) if n * step <= end * (1 + 1e-9)]


# The picture.


def document(all_cases, title):
    panel = lambda of: (KINDS.index(of.key.kind), DTYPES.index(of.key.dtype) if of.key.dtype in DTYPES else -1, of.key.dtype)
    all_cases = sorted(all_cases, key=lambda of: (panel(of), of.key[2:6], of.key.b, of.key.s, of.key.causal))
    names = list(dict.fromkeys(name for of in all_cases for name, _ in of.speeds))
    all_cases = [of._replace(speeds=sorted(of.speeds, key=lambda speed: names.index(speed[0]))) for of in all_cases]
    named = f"Speed of attention: {', '.join(map(shown, names))}"
    title = title or (named if width(named, TITLE) <= WIDTH - 2 * MARGIN else "Speed of attention")
    of_panel = {}
    for of in all_cases:
        of_panel.setdefault(panel(of), []).append(of)
    panels = [Panel(some, names) for some in of_panel.values()]
    longest = max(width(label) for panel in panels for label in panel.labels)
    svg = Svg()
    svg.words(title, MARGIN, 30, TITLE, bold=True)
    top = legend(svg, names, any(panel.has_limit for panel in panels))
    for panel in panels:
        top = panel.draw(svg, top, longest)
    said = [f"{of.key.kind} {of.key.dtype}, {listed(facts(of))}: " + ", ".join(f"{shown(n)} {rate(of.key.kind, r)}" for n, r in of.speeds) for of in all_cases]
    return svg.document(title, "; ".join(said), top)


def colour(names, name):
    peers = [of for of in names if of != "flashtile"]
    return PEERS[peers.index(name) % len(PEERS)] if name in peers else OURS


def legend(svg, names, has_limit):
    """Draws the names of the colours; returns where panels may begin."""
    x, y = MARGIN, 54
    entries = [(colour(names, name), shown(name)) for name in names]
    for paint, label in entries + [(GRID, "measured limit of the instructions of flashtile")] * has_limit:
        wide = 29 + width(label)
        if x > MARGIN and x + wide > WIDTH - MARGIN:
            x, y = MARGIN, y + LINE
        svg.rectangle(paint, x, y - 11, 22, 13)
        svg.words(label, x + 29, y)
        x += wide + 20
    if len(names) == 1:
        return y + 12
    beside = "without sharing" if names == ["flashtile", APART] else "the fastest peer"
    svg.words(f"Longer bars are faster. In brackets: how many times as fast as {beside}.", MARGIN, y + 22, colour=MUTED)
    return y + 32


class Panel:
    """Cases of one kind and dtype."""

    def __init__(self, some, names):
        self.cases, self.names, self.kind = some, names, some[0].key.kind
        columns = list(zip(*map(facts, some)))
        self.common = listed(column[0] for column in columns if len(set(column)) == 1)
        self.labels = [listed(row) for row in zip(*(column for column in columns if len(set(column)) > 1))] or [""] * len(some)
        self.fastest = max(speed for of in some for _, speed in of.speeds)
        self.limits = min(of.limit for of in some), max(of.limit for of in some)
        self.has_limit = self.limits[1] <= FAR[self.kind] * self.fastest
        end = max(self.fastest, self.limits[1] if self.has_limit else 0)
        self.scale, prefix = (1e12, "T") if end >= 2e12 else (1e9, "G")
        self.unit, self.end = prefix + ("B/s" if self.kind == "decode" else "FLOP/s"), end / self.scale

    def draw(self, svg, top, longest):
        """Draws the panel below `top`, and returns where it ends. Labels of the picture are at most `longest` wide."""
        top += 26
        svg.words(f"{self.kind}, {self.cases[0].key.dtype}", MARGIN, top, 15, bold=True)
        for line in self.about():
            top += LINE
            svg.words(line, MARGIN, top, colour=MUTED)
        left, top = MARGIN + min(max(longest, 40), LABELS) + 10, top + 12
        size = SIZE * min(LABELS / longest, 1) if longest else SIZE
        across = WIDTH - left - VALUES
        bottom = top + sum(map(height, self.cases))
        for tick in ticks(self.end):
            x = left + across * tick / self.end
            svg.line(GRID, x, top, bottom + 4)
            svg.words(f"{round(tick, 6):.10g}", x, bottom + 18, anchor="middle")
        svg.words(self.unit, left + across / 2, bottom + 36, colour=MUTED, anchor="middle")
        y = top
        for of, label in zip(self.cases, self.labels):
            self.group(svg, of, left, y, across)
            svg.words(label, left - 10, y + height(of) / 2 + 4.5, size, anchor="end")
            y += height(of)
        svg.line(AXIS, left, top, bottom)
        return bottom + 48

    def about(self):
        """The common facts and the limits, in lines that fit."""
        low, high = (rate(self.kind, limit) for limit in self.limits)
        limits = high if low == high else f"{low} to {high}"
        name = "read bandwidth" if self.kind == "decode" else "arithmetic limit"
        lines = [""]
        for word in f"{self.common}; {name} {limits}{'' if self.has_limit else ', beyond the axis'}".split(" "):
            if not lines[-1]:
                lines[-1] = word
            elif width(lines[-1]) + width(" ") + width(word) <= WIDTH - 2 * MARGIN:
                lines[-1] += " " + word
            else:
                lines.append(word)
        return lines

    def group(self, svg, of, left, top, across):
        """Bars of one case, on a bar that reaches to the limit."""
        bars = height(of) - BETWEEN_GROUPS
        top += BETWEEN_GROUPS / 2
        position = lambda speed: across * (speed / self.scale / self.end)
        if self.has_limit:
            svg.rectangle(GRID, left, top - 3, position(of.limit), bars + 6)
        fastest = max((speed for _, speed in of.speeds[1:]), default=None)
        for at, (name, speed) in enumerate(of.speeds):
            svg.rectangle(colour(self.names, name), left, top, position(speed), BAR)
            value = significant(speed / self.scale) + (f" ({speed / fastest:.2f}x)" if fastest and at == 0 else "")
            svg.words(value, left + position(speed) + 6, top + 11.5, colour=MUTED if at else INK, bold=at == 0)
            top += BAR + GAP


def height(of):
    return len(of.speeds) * (BAR + GAP) - GAP + BETWEEN_GROUPS


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names, numbers = (lambda text: text.split(",")), (lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl")
    parser.add_argument("--svg", type=Path, required=True, metavar="FILE")
    parser.add_argument("--title", metavar="TEXT")
    parser.add_argument("--kind", type=names, default=[], metavar="LIST", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--dtype", type=names, default=[], metavar="LIST")
    parser.add_argument("--peers", type=names, default=[], metavar="LIST", help="peers whose names start with one of these")
    for option in ("--head-dim", "--seq", "--kv-heads", "--batch"):
        parser.add_argument(option, type=numbers, default=[], metavar="LIST")
    parser.add_argument("--unit", metavar="NAME", help="instruction set or device of the rows of flashtile")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the rows of flashtile")
    options = parser.parse_args()
    try:
        ours, peers = read(options.rows, options)
        picture = document(cases(options.rows, ours, peers, options), options.title)
        options.svg.write_text(picture)
    except (RowError, OSError) as why:
        sys.exit(f"bars.py: {why}")
    alone = len([key for _, key, _ in peers if key not in {row.key for row in ours}])
    if alone:
        print(f"note: {alone} peer rows without a row of flashtile beside, not drawn", file=sys.stderr)


if __name__ == "__main__":
    main()
