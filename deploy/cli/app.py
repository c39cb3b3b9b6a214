"""The command tree of `paceline`. Each module of deploy/cli adds its commands to it.

Modules import slow packages (torch, ray, transformers) inside their commands, so that `--help` and
a mistyped flag answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated

import typer

from deploy.cli import (
    apply,
    batch,
    bench,
    certs,
    demo,
    distill,
    down,
    generate,
    keys,
    models,
    plan,
    serve,
    status,
    trace,
    up,
    verify,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {version('paceline')}")
        raise typer.Exit


def build_app(environ: Mapping[str, str]) -> typer.Typer:
    """Build all commands. Only this function and the commands read `environ`."""
    app = typer.Typer(
        name="paceline",
        help="Pipelined speculative decoding of language models across devices.",
        no_args_is_help=True,
        add_completion=False,
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

    demo.add_commands(app, environ)
    up.add_commands(app, environ)
    status.add_commands(app, environ)
    apply.add_commands(app, environ)
    down.add_commands(app, environ)
    serve.add_commands(app, environ)
    generate.add_commands(app, environ)
    batch.add_commands(app, environ)
    verify.add_commands(app, environ)
    trace.add_commands(app, environ)
    bench.add_commands(app, environ)
    distill.add_commands(app, environ)
    plan.add_commands(app, environ)
    models.add_commands(app, environ)
    keys.add_commands(app, environ)
    certs.add_commands(app, environ)
    return app
