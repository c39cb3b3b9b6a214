"""The rules of the floors, and a reader of imports that finds what breaks them.

A module imports its own floor and those below (paceline < workers < cluster < deploy), and some
folders do without some libraries. Imports inside functions and under TYPE_CHECKING count, and so
do `importlib.import_module("name")` and `__import__("name")`, and f"package.{name}" in its place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FLOORS = ("paceline", "workers", "cluster", "deploy")
NEVER_IMPORTED = ("tests", "scripts", "proto")
_PURE = ("ray", "grpc", "asyncio", "time", "random")
BANS = {
    "paceline": ("torch", "ray"),
    "workers": ("ray",),
    "workers.verification": _PURE,
    "cluster.simulation": ("ray", "grpc", "asyncio", "time"),
    "cluster.decoding": (*_PURE, "torch", "transformers", "google.protobuf", "paceline.v1"),
}


@dataclass(frozen=True, slots=True)
class Import:
    """`module` imports `target`, at `line` of its file. An unreadable target is None."""

    module: str
    line: int
    target: str | None


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _targets(node: ast.AST, package: str) -> list[str | None]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=base, names=names, level=level):
            if level:
                parts = package.split(".")[: len(package.split(".")) - level + 1]
                base = ".".join([*parts, base] if base else parts)
            # `from google import protobuf` may name a module or a value: both spellings count.
            return [f"{base}.{alias.name}".lstrip(".") for alias in names]
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module")):
            pass
        case ast.Call(func=ast.Name(id="__import__")):
            pass
        case _:
            return []
    match node.args[:1]:
        case [ast.Constant(value=str(name))]:
            return [name]
        case [ast.JoinedStr(values=[ast.Constant(value=str(start)), *_])] if "." in start:
            return [start.rpartition(".")[0]]  # f"package.{name}": a module of that package
    return [None]


def imports_of(root: Path) -> Iterator[Import]:
    """Every import of every module of the floors below `root`."""
    for floor in FLOORS:
        for path in sorted((root / floor).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            package = ".".join(parts[:-1])
            for node in ast.walk(ast.parse(path.read_text(), str(path))):
                for target in _targets(node, package):
                    yield Import(module, getattr(node, "lineno", 0), target)


def _complaint(found: Import) -> str | None:
    target = found.target
    if target is None:
        return "imports a module whose name cannot be read"
    top = target.partition(".")[0]
    own = found.module.partition(".")[0]
    if top in NEVER_IMPORTED:
        return f"imports {target}, which is on no floor"
    if top in FLOORS and FLOORS.index(top) > FLOORS.index(own):
        return f"climbs to {target}"
    for package, banned in BANS.items():
        if _is_within(found.module, package):
            for library in banned:
                if _is_within(target, library):
                    return f"imports {target}; {package} does without {library}"
    return None


def violations(root: Path) -> list[str]:
    """What breaks the rules below `root`, one line each."""
    found = ((each, _complaint(each)) for each in imports_of(root))
    return [f"{each.module}:{each.line} {wrong}" for each, wrong in found if wrong is not None]
