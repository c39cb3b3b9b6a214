"""The command tree of `paceline`. Modules of deploy/cli have the commands.

A module is imported when its command is called, and slow packages (torch, ray, transformers) inside
the command, so that `--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from deploy.terminal.usage import as_command

COMMANDS: Mapping[str, str] = {
    "demo": "Fetch the demo models, start a local cluster, answer a question and measure.",
    "up": "Start a cluster and its server; `paceline down` ends it. The last line is its address.",
    "status": "Show the cluster of `paceline up`. Exit code 3: nothing is up, or it does not "
    "answer.",
    "apply": "Change drafters, target groups and defaults of a deployment that serves.",
    "down": "End the cluster of `paceline up`. No error if there is none or parts of it are dead.",
    "serve": "Serve a model over HTTP and gRPC until a signal.",
    "gateway": "Serve OpenAI's HTTP interface, and gRPC, in front of servers until a signal.",
    "drafter": "Serve a drafter until SIGTERM or SIGINT. It prints its address once it serves.",
    "generate": "Decode every row of a file. Exit code 1: some rows failed; the others are "
    "written.",
    "batch": "Answer a batch file. Exit code 1: some rows failed; the output has them too.",
    "verify": "Check that the text equals plain decoding's bit for bit, and transformers' if "
    "greedy.",
    "trace": "Watch rounds of drafting and verification, and draw them on a time line.",
    "chat": "Chat in the terminal. Drafted tokens are in color, the acceptance is below each "
    "answer.",
    "top": "Watch devices, sequences and acceptance until Ctrl-C.",
    "bench": "Measure ratios in one run: ours in turns with each other, and peers beside us.",
    "distill": "Distill a drafter from a target: it samples answers, trains, and reports.",
    "plan": "Simulate layouts and policies: tokens/s, per GPU, latency, and where the time goes.",
    "models": "Models in the cache.",
    "logs": "Show the end of the workers' logs: of what is up, or of the last run here.",
    "config": "Configuration files.",
    "keys": "API keys of a server.",
    "certs": "Make certificates for development: a new authority, a server's, and one for workers.",
}
"""What the help of `paceline` says of each command: the first lines of the command's own help."""
_MODULES = {"apply": "up", "down": "up", "serve": "up", "top": "status"}
"""Modules of the commands that have none of their own names."""


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"paceline {version('paceline')}")
        raise typer.Exit


def load_command(name: str, environ: Mapping[str, str]) -> Any:
    """A command, as typer's group holds it.

    It is the function of this name in its module, of the module's COMMAND_CLASS if it has one, or a
    group of the module's SUBCOMMANDS.
    """
    module = import_module(f"deploy.cli.{_MODULES.get(name, name)}")
    app = typer.Typer()
    if subcommands := getattr(module, "SUBCOMMANDS", None):
        group = typer.Typer(help=COMMANDS[name], no_args_is_help=True)
        for below, function in subcommands.items():
            group.command(below)(as_command(function, environ=environ))
        app.add_typer(group, name=name)
    else:
        function = as_command(getattr(module, name), environ=environ)
        app.command(name, cls=getattr(module, "COMMAND_CLASS", None))(function)
    return get_group(app).commands[name]


def build_app(environ: Mapping[str, str]) -> typer.Typer:
    """Build all commands. Only this function and the commands read `environ`."""

    class Commands(TyperGroup):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.commands = {name: TyperCommand(name, help=said) for name, said in COMMANDS.items()}

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args[0] in COMMANDS:
                self.commands[args[0]] = load_command(args[0], environ)
            return super().resolve_command(ctx, args)

    app = typer.Typer(
        name="paceline",
        help="Pipelined speculative decoding of language models across devices.",
        cls=Commands,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(
        show_version: Annotated[
            bool,
            typer.Option("--version", is_eager=True, callback=_show_version, help="The version."),
        ] = False,
    ) -> None:
        pass

    return app
