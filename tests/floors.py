"""The rules of the floors and their rooms, and a reader of imports that finds violations.

A module imports its own floor and those below (paceline < workers < cluster < deploy), and
paceline_vllm, which runs inside vLLM, those below deploy. A room is a
folder of a floor. Within its floor it imports only the rooms that ARROWS names, so no two rooms
depend on each other (docs/architecture.md draws them). Some folders do not import some libraries.
Imports inside functions and under TYPE_CHECKING count. `__import__("name")` and
`importlib.import_module("name")` count too; `f"package.{name}"` is a module of that package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FLOORS = ("paceline", "workers", "cluster", "deploy", "paceline_vllm")
WITH_ROOMS = FLOORS[1:4]
NEVER_IMPORTED = ("tests", "scripts", "proto")
_PURE = ("ray", "grpc", "asyncio", "time", "random")
BANS = {
    "paceline": ("torch", "ray"),
    "workers": ("ray",),
    "paceline_vllm": ("deploy", "transformers", "ray"),
    "workers.verification": _PURE,
    "cluster.simulation": ("ray", "grpc", "asyncio", "time"),
    "cluster.decoding": (*_PURE, "torch", "transformers", "google.protobuf", "paceline.v1"),
}
ARROWS = {
    "workers.process": (),
    "workers.verification": ("process",),
    "workers.engine": ("process", "verification"),
    "workers.models": ("engine", "process"),
    "workers.distillation": ("engine", "models", "process"),
    "workers.drafting": ("engine", "models", "process", "verification"),
    "workers.target": ("drafting", "engine", "process", "verification"),
    "workers.emulated": ("drafting", "engine", "models", "process", "target", "verification"),
    "cluster.decoding": (),
    "cluster.access": (),
    "cluster.driver": ("access", "decoding"),
    "cluster.config": ("decoding", "driver"),
    "cluster.gateway": ("access",),
    "cluster.placement": ("access", "config", "decoding", "driver", "gateway"),
    "cluster.simulation": ("config", "decoding"),
    "deploy.terminal": (),
    "deploy.session": ("terminal",),
    "deploy.rows": ("terminal",),
    "deploy.bench": ("rows", "session", "terminal"),
    "deploy.batch": ("rows", "terminal"),
    "deploy.jobs": ("batch", "session", "terminal"),
    "deploy.cli": ("batch", "bench", "rows", "session", "terminal"),
}
"""For each room, the rooms of its floor that it may import."""


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


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


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
    if top == own and _room(found.module) in ARROWS and (room := _room(target)) in ARROWS:
        allowed = ARROWS[_room(found.module)]
        if room != _room(found.module) and room.partition(".")[2] not in allowed:
            return f"imports {target}; {_room(found.module)} does without {room}"
    for package, banned in BANS.items():
        if _is_within(found.module, package):
            for library in banned:
                if _is_within(target, library):
                    return f"imports {target}; {package} does without {library}"
    return None


def violations(root: Path) -> list[str]:
    """The violations below `root`, one line each."""
    found = ((each, _complaint(each)) for each in imports_of(root))
    return [f"{each.module}:{each.line} {wrong}" for each, wrong in found if wrong is not None]


def loose_modules(root: Path) -> list[str]:
    """Files beside the rooms of a floor that has rooms."""
    return [
        str(path.relative_to(root))
        for floor in WITH_ROOMS
        for path in sorted((root / floor).glob("*.py"))
        if path.name != "__init__.py"
    ]


def import_cycle(root: Path) -> list[str]:
    """Modules that import one another in a ring when they are loaded; empty if there are none.

    Imports inside functions and under TYPE_CHECKING run later or never, and do not count.
    """
    imports: dict[str, set[str]] = {}
    for floor in FLOORS:
        for path in (root / floor).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            package = ".".join(parts[:-1])
            loaded = ast.parse(path.read_text(), str(path)).body
            found = (target for node in loaded for target in _targets(node, package) if target)
            imports[module] = {name for target in found for name in (target, _parent(target))}
    return _ring({module: imports[module] & imports.keys() for module in imports})


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _ring(imports: dict[str, set[str]]) -> list[str]:
    """The rest of a graph without everything that leads to no ring."""
    left = {module: targets - {module} for module, targets in imports.items()}
    while True:
        leaves = {module for module, targets in left.items() if not targets}
        if not leaves:
            return sorted(left)
        left = {
            module: targets - leaves for module, targets in left.items() if module not in leaves
        }


def unexported(root: Path) -> list[str]:
    """Imports of another room's file that this room's `__all__` does not name, one line each, and
    names there without a file.

    Each folder's `__init__.py` names those of its files that other rooms may import. A name that
    begins with "_" is its file's own. `paceline/` has no rooms: every floor may import its files.
    """
    exports: dict[str, list[str]] = {}
    modules: set[str] = set()
    for floor in WITH_ROOMS:
        for path in (root / floor).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__":
                exports[".".join(parts[:-1])] = _all_of(path)
            else:
                modules.add(".".join(parts))
    found = [
        f"{folder} exports {name}, of which there is no file"
        for folder, names in exports.items()
        for name in names
        if f"{folder}.{name}" not in modules | exports.keys()
    ]
    for each in imports_of(root):
        target = each.target or ""
        module = target if target in modules else _parent(target)
        if module not in modules or module == each.module:
            continue
        folder, _, name = module.rpartition(".")
        if target != module and target.removeprefix(f"{module}.").startswith("_"):
            found.append(f"{each.module}:{each.line} imports {target}, which is its file's own")
        elif _room(each.module) != _room(module) and name not in exports[folder]:
            found.append(f"{each.module}:{each.line} imports {module}; {folder} does not export it")
    return found


def _all_of(path: Path) -> list[str]:
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names: list[str] = ast.literal_eval(value)
                return names
    return []


@dataclass(frozen=True, slots=True)
class _Class:
    path: Path
    bases: frozenset[str]
    own: frozenset[str]
    """Private names that it defines."""
    used: Mapping[str, int]
    """Private names of `self` that it uses, each with a line."""


def borrowed(root: Path) -> list[str]:
    """Uses of a base class's private names where the base is in another file, one line each."""
    classes: dict[str, list[_Class]] = {}
    for floor in FLOORS:
        for path in sorted((root / floor).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, []).append(_class_of(node, path))
    found = []
    for name, same_name in classes.items():
        for each in same_name:
            bases = [one for base in _ancestors(each, classes) for one in classes[base]]
            lent = {key for one in bases if one.path != each.path for key in one.own}
            found += [
                f"{each.path.relative_to(root)}:{line} {name} uses {key} of a base in another file"
                for key, line in each.used.items()
                if key in lent - each.own
            ]
    return found


def _ancestors(one: _Class, classes: Mapping[str, list[_Class]]) -> set[str]:
    known: set[str] = set()
    to_do = list(one.bases & classes.keys())
    while to_do:
        name = to_do.pop()
        if name not in known:
            known.add(name)
            to_do += [base for each in classes[name] for base in each.bases & classes.keys()]
    return known


def _class_of(node: ast.ClassDef, path: Path) -> _Class:
    bases, own, used = set(), set(), dict[str, int]()
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        bases.add(base.id if isinstance(base, ast.Name) else getattr(base, "attr", ""))
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=context):
                used.setdefault(name, each.lineno)
                if isinstance(context, ast.Store):
                    own.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                own.add(name)
    private = {name for name in own | used.keys() if re.match("_[^_]", name)}
    return _Class(
        path,
        frozenset(bases),
        frozenset(own & private),
        {name: line for name, line in used.items() if name in private},
    )
