"""Runs a command line. Bad usage is one line: which option, what was given, what is expected."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any

import typer
import typer.main
from typer.exceptions import TyperException

from paceline.errors import PacelineError, outward
from paceline.text import did_you_mean

_BAD_USAGE = 2
_EXPECTED: Mapping[str, str] = {"int": "a whole number", "float": "a number", "bool": "yes or no"}
"""What an option expects, by the first part of pydantic's name for the error."""


def run_app(build: Callable[[], typer.Typer], name: str) -> int:
    """Build a command tree and run this process's command line on it. Returns the exit code.

    Our errors and bad usage are one line on stderr, never a box or a traceback.
    """
    try:
        code = typer.main.get_command(build()).main(prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except PacelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return outward(error).exit_code
    except TyperException as error:
        # A command without its subcommand has shown its help; then there is nothing to add.
        if complaint := _complaint(error):
            sys.stderr.write(f"error: {complaint}\n")
        return _BAD_USAGE


def as_command(function: Callable[..., None], **known: Any) -> Callable[..., None]:
    """What typer makes a command of: a function whose other parameters are flags.

    A parameter whose name is in `known` gets that value. Each field of a parameter whose type is a
    dataclass is a flag.
    """
    parameters = dict(signature(function, eval_str=True).parameters)
    given_here = {name: known[name] for name in known if parameters.pop(name, None)}
    groups: dict[str, Any] = {
        name: one.annotation for name, one in parameters.items() if is_dataclass(one.annotation)
    }
    flags: list[Parameter] = []
    for name, one in parameters.items():
        of_group = signature(groups[name], eval_str=True).parameters if name in groups else {}
        flags += of_group.values() or [one]

    def command(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        function(**given_here, **given)

    command.__doc__ = function.__doc__
    ordered = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in flags]
    command.__signature__ = Signature(ordered)  # type: ignore[attr-defined]  # typer reads it
    return command


def _complaint(error: Any) -> str:
    """The line for an error. Typer's types of bad usage are not public; fields tell them apart."""
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "paceline"
    parameter = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    cause = error.__cause__
    from pydantic import ValidationError  # Help does without it.

    if parameter is not None and isinstance(cause, ValidationError):
        found = cause.errors()[0]
        said = found["msg"].removeprefix("Input should be ")
        expected = _EXPECTED.get(found["type"].partition("_")[0], said)
        return f"{_flag(parameter)}: expected {expected}, got {found['input']!r}"
    if parameter is not None and not error.message:
        return f"{_flag(parameter)}: is missing; see `{path} --help`"
    if parameter is not None:
        return f"{_flag(parameter)}: {error.message}"
    if option is not None and ctx is not None:
        known = [flag for one in ctx.command.get_params(ctx) for flag in _flags(one)]
        hint = did_you_mean(option, known) if option.startswith("--") else ""
        return f"no such option: {option}{hint or f'; see `{path} --help`'}"
    if option is not None:
        needs_one = "requires" in error.message
        return f"{option}: " + ("expected a value" if needs_one else "takes no value, got one")
    message: str = error.format_message().rstrip(".")
    if not message:
        return ""
    message = message[0].lower() + message[1:]
    return message if "id you mean" in message else f"{message}; see `{path} --help`"


def _flags(parameter: Any) -> list[str]:
    names = [*parameter.opts, *parameter.secondary_opts]
    return [name for name in names if name.startswith("--")]


def _flag(parameter: Any) -> str:
    """The option as it is typed, or the argument's name as the help shows it."""
    longest: str = max(parameter.opts, key=len)
    return longest if longest.startswith("-") else longest.upper()
