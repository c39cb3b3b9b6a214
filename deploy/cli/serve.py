"""`paceline serve`: serves OpenAI's HTTP interface over running drivers, in the foreground."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from typing import Annotated

import typer

from paceline.address import parse_address
from paceline.text import counted


def _check_addresses(text: str) -> str:
    """Refuse a list with anything but HOST:PORT, before anything starts."""
    for address in _split(text):
        parse_address(address, "address")
    return text


def _split(text: str) -> list[str]:
    return [address.strip() for address in text.split(",")]


def add_commands(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Add `serve` to the command tree."""

    @app.command("serve")
    def serve(
        address: Annotated[
            str,
            typer.Option(
                callback=_check_addresses,
                metavar="HOST:PORT[,HOST:PORT]",
                help="The drivers: what `paceline up` printed.",
            ),
        ],
        host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
        served_model_name: Annotated[
            str | None, typer.Option(help="Name of the model to callers. Default: the driver's.")
        ] = None,
        drain: Annotated[
            float,
            typer.Option(
                min=0,
                max=3600,
                metavar="SECONDS",
                help="On SIGTERM or Ctrl-C, give open requests this long to end.",
            ),
        ] = 30.0,
    ) -> None:
        """Serve OpenAI's HTTP interface until a signal. A second one ends open requests at once."""
        from cluster.gateway.app import Gateway
        from cluster.gateway.drivers import DriverPool
        from cluster.gateway.server import listen, raise_file_limit, serve_until_signal

        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        raise_file_limit()
        pool = DriverPool(_split(address), served_model_name=served_model_name)
        listener = listen(host, port)
        where = f"[{host}]" if ":" in host else host
        where = f"http://{where}:{listener.getsockname()[1]}"

        def on_ready() -> None:
            typer.echo(f"serving: OpenAI's interface at {where}/v1")
            for trouble in pool.troubles():
                typer.echo(f"not serving yet: {trouble}", err=True)

        number, num_cut = asyncio.run(
            serve_until_signal(Gateway(pool), listener, drain_seconds=drain, on_ready=on_ready)
        )
        if num_cut:
            typer.echo(f"{counted(num_cut, 'request')} did not end in time: cut off", err=True)
        raise typer.Exit(128 + signal.Signals(number))
