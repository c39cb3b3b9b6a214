"""Write docs/configuration.md from the configuration model, docs/cli.md from the commands' help.

    python scripts/generate_docs.py            write both pages
    python scripts/generate_docs.py --check    exit code 1 if a page is not what would be written

A key's description is the docstring below its field (cluster/config/model.py, plan_question.py).
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import model, plan_question
from deploy.cli.app import build_app

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOT_FOR_HANDS = "Generated from the code by `python scripts/generate_docs.py`: do not edit."

TABLES: Mapping[str, type[BaseModel]] = {
    "[target]": model.TargetConfig,
    "[[drafters]]": model.DrafterConfig,
    "[pool]": model.PoolConfig,
    "[speculation]": model.SpeculationConfig,
    "[server]": model.ServerConfig,
    "[workers]": model.WorkersConfig,
    "[plan]": plan_question.PlanConfig,
    "[plan.rent]": plan_question.RentConfig,
    "[plan.rent.models.NAME]": plan_question.ModelConfig,
}
CONFIGURATION = f"""# Configuration

{NOT_FOR_HANDS}

One TOML file: `paceline up paceline.toml`. An empty file is the local demo. An unknown key is an
error that names the nearest one.

`PACELINE_SECTION__KEY` overrides a key: `PACELINE_SPECULATION__WINDOW=4`,
`PACELINE_DRAFTERS__0__COUNT=2` (single underscores are refused). Other variables:

| variable | |
| --- | --- |
| `PACELINE_HOME` | the folder of models and logs; by default `paceline` in the user's cache folder. For a host without a package index, copy its folder `models` from another host |
| `PACELINE_API_KEY`, `PACELINE_CA` | a command's key at a server, and the authority of its certificate ([security](security.md)) |
| `RAY_ADDRESS` | a running Ray cluster to use |
| `GRPC_EXPERIMENTS`, `GRPC_VERBOSITY` | gRPC's own. Unless you set them, Paceline's processes do: messages pass one thread less, and gRPC writes only errors |
"""  # noqa: E501
CLI = f"""# Commands

{NOT_FOR_HANDS}

An error is one line, `error: ...`, on stderr. Progress goes to stderr: in a terminal continuously,
elsewhere a line now and then, with `--quiet` not at all. A row that fails is named by its file and
line. Exit codes:

| code | |
| --- | --- |
| 0 | done |
| 1 | the command found what it looks for, such as a row that failed |
| 2 | bad usage or configuration |
| 3 | a model, a server or a cluster could not be reached |
| 130, 143 | interrupted (Ctrl-C, SIGTERM); what it had started has ended |

An input file is JSON lines. A row has one of `prompt` (text to continue), `question`, `messages` (a
chat as OpenAI's) or `turns` (the first is used), and may have an `id`.
"""


def descriptions(table: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field, by name. Raises KeyError for a field without one."""
    (cls,) = ast.parse(inspect.getsource(table)).body
    assert isinstance(cls, ast.ClassDef)
    found = {}
    for node, following in zip(cls.body, cls.body[1:], strict=False):
        match node, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return {name: found[name] for name in table.model_fields}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return "none"
    return f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    """A text in a table, where pages that it names are links."""
    text = re.sub(r"docs/(([\w-]+)\.md(#[\w-]+)?)", r"[\2](\1)", text)
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text.replace("None: ", "Without it: ")


def configuration_page() -> str:
    """docs/configuration.md."""
    parts = [CONFIGURATION]
    for heading, table in TABLES.items():
        told = descriptions(table)
        parts.append(f"\n## `{heading}`\n\n| key | default | |\n| --- | --- | --- |\n")
        for name, field in table.model_fields.items():
            parts.append(f"| `{name}` | {_default(field)} | {_cell(told[name])} |\n")
    return "".join(parts)


def commands(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    """Each command below a group, and its context."""
    if not hasattr(command, "list_commands"):
        yield command, context
        return
    for name in command.list_commands(context):
        _, below, _ = command.resolve_command(context, [name])
        if not below.hidden:
            inner = below.context_class(below, parent=context, info_name=name)
            yield from commands(below, inner)


def cli_page() -> str:
    """docs/cli.md."""
    root = typer.main.get_command(build_app({}))
    parts = [CLI]
    for command, context in commands(root, root.context_class(root, info_name="paceline")):
        usage = command.get_usage(context).removeprefix("Usage: ")
        parts.append(f"\n## `{context.command_path}`\n\n    {' '.join(usage.split())}\n\n")
        parts.append(inspect.cleandoc(command.help or "").replace("\b\n", "") + "\n")
        rows = [one.get_help_record(context) for one in command.get_params(context)]
        if told := [row for row in rows if row is not None and not row[0].startswith("--help")]:
            parts.append("\n| | |\n| --- | --- |\n")
        for names, help_text in told:
            names = names.replace("|", "\\|")
            parts.append(f"| `{names}` | {_cell(' '.join(help_text.split()))} |\n")
    return "".join(parts)


PAGES = {"configuration.md": configuration_page, "cli.md": cli_page}


def main(arguments: Sequence[str]) -> int:
    """Write or compare both pages. Returns the exit code."""
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if "--check" in arguments and stale:
        print(f"not current: {', '.join(stale)}; run python scripts/generate_docs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
