"""`paceline keys new | list | revoke`: API keys, of which a file has the hashes."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.terminal.lines import table_of, whole_table
from paceline.errors import ConfigError, InvalidRequestError
from paceline.text import did_you_mean

_MODE = 0o600

FileArgument = Annotated[Path, typer.Argument(help="File of API keys.")]


def new(
    tenant: Annotated[str, typer.Option(help="Whose requests the key sends.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the key. Default: the tenant's and a number.")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="It may also read counters and traces.")
    ] = False,
    concurrency: Annotated[int | None, typer.Option(help="Requests at once. Default: 64.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Default: any number.")] = None,
    priority: Annotated[
        int, typer.Option(help="0 to 100. Waiting requests of higher ones go first.")
    ] = 0,
    append: Annotated[
        Path | None, typer.Option(help="Add the entry to this file; make it if it is absent.")
    ] = None,
) -> None:
    """Make an API key. Stdout has the key, which is kept nowhere, and then its entry.

    With --append, the entry goes to the file instead. A running server reads it within 1 s.
    """
    from cluster.access.keys import KeyEntry, digest_of, new_key

    key = new_key()
    fields = {
        "name": name or f"{tenant}-{secrets.token_hex(3)}",
        "tenant": tenant,
        "sha256": digest_of(key).hex(),
        "role": "operator" if operator else "user",
        "concurrency": concurrency,
        "requests_per_minute": requests_per_minute,
        "priority": priority or None,
    }
    try:
        entry = KeyEntry.model_validate(
            {field: value for field, value in fields.items() if value is not None}
        )
    except ValueError as error:
        wrong = error.errors()[0]  # type: ignore[attr-defined]  # pydantic's ValidationError
        flag = str(wrong["loc"][0]).replace("_", "-")
        expected = wrong["msg"].replace("Input should be", "expected")
        raise InvalidRequestError(flag, f"{expected}, got {wrong['input']!r}") from None
    line = entry.model_dump_json(exclude_unset=True)
    if append is not None:
        _append(append, line, entry.name)
    typer.echo(key)
    if append is None:
        typer.echo(line)


def list_keys(file: FileArgument) -> None:
    """List the keys of a file. It has their hashes, so no key is shown."""
    from cluster.access.keys import read_keys

    table = table_of(("name", "tenant", "role", "at once", "a minute", "priority", "sha256"))
    for entry in read_keys(file).values():
        table.add_row(
            *(entry.name, entry.tenant, entry.role, str(entry.concurrency)),
            *(str(entry.requests_per_minute or "any"), str(entry.priority)),
            f"{entry.sha256[:8]}...",
        )
    whole_table(Console(highlight=False), table)


def revoke(
    file: FileArgument,
    name: Annotated[str, typer.Argument(help="Name of the key, as `keys list` shows it.")],
) -> None:
    """Remove a key from a file. Running servers refuse it within 1 s."""
    _remove(file, name)
    typer.echo(f"revoked: {name}")


SUBCOMMANDS = {"new": new, "list": list_keys, "revoke": revoke}


def _remove(path: Path, name: str) -> None:
    """Remove the line of a key. The other lines, comments among them, stay as they are."""
    from cluster.access.keys import KeyEntry, read_keys

    names = [entry.name for entry in read_keys(path).values()]  # Refuses a file that is broken.
    if name not in names:
        raise InvalidRequestError(
            "name", f"{path} has no key named {name!r}{did_you_mean(name, names)}"
        )
    try:
        with path.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            kept = [
                line
                for line in stream.read().splitlines(keepends=True)
                if not line.strip()
                or line.lstrip().startswith(b"#")
                or KeyEntry.model_validate_json(line).name != name
            ]
            stream.seek(0)
            stream.write(b"".join(kept))
            stream.truncate()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _append(path: Path, line: str, name: str) -> None:
    """Add a line to a file of keys. Raises ConfigError if the file would be refused then."""
    from cluster.access.keys import read_keys

    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
        with os.fdopen(number, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if any(entry.name == name for entry in read_keys(path).values()):
                raise ConfigError(f"{path}: there is a key named {name!r} already; give --name")
            stream.seek(0)
            content = stream.read()
            begin = "\n" if content and not content.endswith(b"\n") else ""
            stream.write(f"{begin}{line}\n".encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
