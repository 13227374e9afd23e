#!/usr/bin/env python3
"""Checks who imports whom.

    .ci/imports.py [--planted]

- Crates depend on each other only as ALLOWED says; dependencies of tests are free.
- Inside a crate, a path names the module that defines an item, not the crate's root or another module's re-export.
- Modules import each other in one direction: there is no cycle between the modules of a folder, nor between a folder and its files.

Test code is not looked at. With --planted, a forbidden dependency, a cycle and an import from the root are planted one after another, and
each must be found.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The crates that each crate may depend on.
ALLOWED = {
    "flashtile-core": set(),
    "flashtile-kernel-macros": set(),
    "flashtile-kernel": {"flashtile-kernel-macros"},
    "flashtile-cpu": {"flashtile-core"},
    "flashtile-gpu": {"flashtile-core", "flashtile-kernel"},
    "flashtile-cuda": {"flashtile-core", "flashtile-kernel", "flashtile-gpu"},
    "flashtile-metal": {"flashtile-core", "flashtile-kernel", "flashtile-gpu"},
    "flashtile-testkit": {"flashtile-core", "flashtile-cpu", "flashtile-kernel", "flashtile-gpu", "flashtile-cuda", "flashtile-metal"},
    "flashtile": {"flashtile-core", "flashtile-cpu", "flashtile-kernel", "flashtile-gpu", "flashtile-cuda", "flashtile-metal"},
    "flashtile-bench": {"flashtile-core"},
    "flashtile-cli": {"flashtile", "flashtile-bench", "flashtile-testkit"},
    "flashtile-burn": {"flashtile"},
    "flashtile-c": {"flashtile"},
    "flashtile-candle": {"flashtile"},
    "flashtile-msl-standin": set(),
    "flashtile-objc-standin": set(),
    "flashtile-metal-standin": {"flashtile-msl-standin", "flashtile-objc-standin"},
}

# Tests and benchmarks may depend on anything.
FREE = {"flashtile-kernel-bench", "flashtile-kernel-cases"}


class Tree:
    """The files of the working tree, some of them replaced."""

    def __init__(self, replaced=()):
        self.replaced = {ROOT / path: text for path, text in dict(replaced).items()}

    def read(self, path):
        return self.replaced.get(path) or path.read_text()

    def glob(self, folder, pattern):
        found = set(folder.rglob(pattern)) | {path for path in self.replaced if path.is_relative_to(folder) and path.match(pattern)}
        return sorted(found)


def members(tree):
    """Folder of each crate of the workspace."""
    workspace = tomllib.loads(tree.read(ROOT / "Cargo.toml"))["workspace"]
    folders = [ROOT] + [path for pattern in workspace["members"] for path in sorted(ROOT.glob(pattern))]
    manifests = {folder: tomllib.loads(tree.read(folder / "Cargo.toml")) for folder in folders if (folder / "Cargo.toml").exists()}
    return {manifest["package"]["name"]: (folder, manifest) for folder, manifest in manifests.items()}


def crates(tree):
    """Dependencies that are not allowed."""
    all_members = members(tree)
    for name, (_, manifest) in all_members.items():
        tables = [manifest] + list(manifest.get("target", {}).values())
        used = {of for table in tables for kind in ("dependencies", "build-dependencies") for of in table.get(kind, {}) if of in all_members}
        if name in FREE:
            continue
        if name not in ALLOWED:
            yield f"{name} is not in ALLOWED of .ci/imports.py"
            continue
        for forbidden in sorted(used - ALLOWED[name]):
            yield f"{name} depends on {forbidden}, which DESIGN does not allow"


def code(text):
    """A source without comments, the contents of strings, test modules, and paths of visibilities."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|b?"(?:\\.|[^"\\])*"', lambda m: '""' if m[0].endswith('"') else "", text, flags=re.S)
    while found := re.search(r"#\[cfg\((?:test|all\(test[^]]*)\)\]\s*(?:#\[[^]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?(?:mod|fn|use|const|impl)\b[^{;]*[{;]", text):
        end = found.end()
        depth = 1 if text[end - 1] == "{" else 0
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[: found.start()] + text[end:]
    return re.sub(r"pub\(in [^)]*\)", "pub(crate)", text)


def leaves(tree, prefix=()):
    """The paths of a use tree, each with whether it names a module or a glob."""
    tree = tree.strip()
    group = re.fullmatch(r"((?:\w+::)*)\{(.*)\}", tree, re.S)
    if not group:
        path = (*prefix, *re.sub(r"\s+as\s+\w+$", "", tree).split("::"))
        yield tuple(part.strip() for part in path if part.strip() != "self")
        return
    inner, depth, start = group[2], 0, 0
    for at, char in enumerate(inner + ","):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            if inner[start:at].strip():
                yield from leaves(inner[start:at], (*prefix, *(part for part in group[1].split("::") if part)))
            start = at + 1


class Crate:
    """The modules of one crate and the paths in them."""

    def __init__(self, tree, folder):
        source = folder / "src"
        self.modules = {}
        for path in tree.glob(source, "*.rs"):
            relative = path.relative_to(source).with_suffix("")
            name = relative.parts[:-1] if relative.name in ("mod", "lib", "main") else relative.parts
            if "tests" not in relative.parts:
                self.modules[name] = code(tree.read(path))
        self.exports = {module: self.exports_of(module) for module in self.modules}
        # `#[macro_export]` puts macros at the root, wherever they are defined.
        self.macros = set(re.findall(r"#\[macro_export\]\s*(?:#\[[^]]*\]\s*)*macro_rules!\s+(\w+)", "".join(self.modules.values())))

    def inline(self, module):
        """Where the inline modules of a file begin and end."""
        text = self.modules[module]
        for found in re.finditer(r"\bmod\s+\$?\w+\s*\{", text):
            end, depth = found.end(), 1
            while depth and end < len(text):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            yield found.end(), end

    def absolute(self, module, path, depth=0):
        """A path from the crate's root, or None where it is of another crate; `depth` inline modules are around it."""
        path, at = list(path), list(module)
        if path[0] == "crate":
            return tuple(path[1:])
        if path[0] in ("super", "self"):
            while path and path[0] in ("super", "self"):
                if path.pop(0) == "super":
                    at, depth = (at, depth - 1) if depth else (at[:-1], 0)
            return None if depth else (*at, *path)
        if path[0] and (*at, path[0]) in self.modules:
            return (*at, *path)
        return None

    def uses(self, module):
        """Every path of a use, and whether it is a re-export."""
        text, inline = self.modules[module], list(self.inline(module))
        for found in re.finditer(r"\b(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", text):
            depth = sum(start <= found.start() < end for start, end in inline)
            for path in leaves(found[2]):
                if absolute := self.absolute(module, path, depth):
                    yield absolute, bool(found[1])

    def exports_of(self, module):
        """Items that a module re-exports, with where each is from."""
        return {path[-1]: path for path, public in self.uses(module) if public}

    def paths(self, module):
        """Every path of a module that stays in the crate, and whether it is a re-export."""
        yield from self.uses(module)
        inline = list(self.inline(module))
        text = re.sub(r"\buse\s+[^;]+;", lambda use: " " * len(use[0]), self.modules[module])
        for found in re.finditer(r"(?<![\w:$])((?:crate|super|self)(?:::\w+)+)", text):
            depth = sum(start <= found.start() < end for start, end in inline)
            if absolute := self.absolute(module, found[1].split("::"), depth):
                yield absolute, False
        for path in re.findall(r"(?<![\w:$.])([a-z]\w*(?:::\w+)+)", text):
            first = path.split("::")
            if first[0] not in ("crate", "super", "self") and (*module, first[0]) in self.modules:
                yield (*module, *first), False

    def resolve(self, path):
        """The module that defines an item, and whether the path names it."""
        module = ()
        for at, part in enumerate(path):
            if (*module, part) in self.modules:
                module = (*module, part)
                continue
            origin = self.exports[module].get(part)
            if origin and origin != path[: at + 1]:
                return self.resolve(origin)[0], False
            return module, True
        return module, True

    def edges(self):
        """Imports: from a module to a module, and those that name another module than the defining one."""
        for module in self.modules:
            for path, public in self.paths(module):
                target, direct = self.resolve(path)
                if target != module:
                    yield module, target, public, (path if not direct else None)


def imports(name, tree, folder):
    """Faults inside a crate."""
    crate = Crate(tree, folder)
    found = set(crate.edges())
    for module, _, _, indirect in sorted(found, key=str):
        # The face of a folder may be used from outside it, the root's only from outside the crate.
        if indirect and len(indirect) == 1:
            yield f"{name}: {'::'.join(module) or 'the root'} imports {indirect[0]} from the crate's root"
    for module in crate.modules:
        # Items of the root itself, and what it re-exports of other crates.
        of_root = {path[0] for path, _ in crate.paths(module) if path and crate.resolve(path) == ((), True) and path[0] not in crate.macros | {"*"}}
        yield from (f"{name}: {'::'.join(module)} imports {item} from the crate's root" for item in sorted(of_root) if module)
    graph = {}
    for module, target, public, _ in found:
        if public:
            continue
        # Between children of the folder that both are in, or between a folder's own file and a child.
        common = 0
        while common < min(len(module), len(target)) and module[common] == target[common]:
            common += 1
        ends = [(*side[:common], side[common] if len(side) > common else "mod") for side in (module, target)]
        if not module:
            continue
        graph.setdefault(ends[0], set()).add(ends[1])
    yield from (f"{name}: modules in a cycle: {' -> '.join('::'.join(part) for part in cycle)}" for cycle in cycles(graph))


def cycles(graph):
    """A cycle through each strongly connected component, if any."""
    done = set()
    for start in sorted(graph):
        if start in done:
            continue
        # The shortest way back to the start.
        before, queue = {}, [start]
        while queue and start not in before:
            node = queue.pop(0)
            for to in sorted(graph.get(node, ())):
                if to not in before:
                    before[to] = node
                    queue.append(to)
        if start in before:
            cycle, node = [start], before[start]
            while node != start:
                cycle.append(node)
                node = before[node]
            done.update(cycle)
            yield [start, *reversed(cycle)]


def check(tree=None):
    tree = tree or Tree()
    wrong = list(crates(tree))
    for name, (folder, _) in members(tree).items():
        if (folder / "src").exists():
            wrong += imports(name, tree, folder)
    return wrong


def planted():
    """Plants faults, each of which must be found."""
    core = tomllib.loads((ROOT / "crates/core/Cargo.toml").read_text())["package"]["name"]
    manifest = (ROOT / "crates/core/Cargo.toml").read_text()
    tensor = (ROOT / "crates/core/src/tensor.rs").read_text()
    faults = {
        "a dependency of the core on a backend": (
            {"crates/core/Cargo.toml": manifest.replace("[dependencies]", '[dependencies]\nflashtile-cpu = { path = "../cpu" }')},
            f"{core} depends on flashtile-cpu",
        ),
        "a cycle of modules": (
            {"crates/core/src/tensor.rs": tensor + "\nuse crate::cache::KvCache;\n"},
            "-> tensor -> cache ->",
        ),
        "an import from a crate's root": (
            {
                "crates/core/src/lib.rs": (ROOT / "crates/core/src/lib.rs").read_text() + "\npub use tensor::TensorView;\n",
                "crates/core/src/cache/kv.rs": (ROOT / "crates/core/src/cache/kv.rs").read_text() + "\nuse crate::TensorView;\n",
            },
            "imports TensorView from the crate's root",
        ),
        "a path through a crate's root to another crate": (
            {
                "crates/core/src/lib.rs": (ROOT / "crates/core/src/lib.rs").read_text() + "\npub use half::f16;\n",
                "crates/core/src/cache/kv.rs": (ROOT / "crates/core/src/cache/kv.rs").read_text() + "\nuse crate::f16;\n",
            },
            "imports f16 from the crate's root",
        ),
    }
    clean = check()
    for what, (files, expected) in faults.items():
        new = [line for line in check(Tree(files)) if line not in clean]
        if not any(expected in line for line in new):
            yield f"{what} was planted and not found; found: {new}"
        else:
            print(f"found, as it must be: {what}")


if __name__ == "__main__":
    wrong = list(planted()) if "--planted" in sys.argv else check()
    print("\n".join(wrong) if wrong else "imports: as designed")
    sys.exit(1 if wrong else 0)
