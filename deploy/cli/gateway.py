"""`paceline gateway`: serves OpenAI's HTTP interface over running drivers, in the foreground."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deploy.terminal.options import AccessFlags, drain_option
from paceline.address import parse_address
from paceline.errors import InvalidRequestError, UnavailableError
from paceline.text import counted

if TYPE_CHECKING:
    from cluster.access.gate import Gate
    from cluster.gateway.drivers import DriverPool
    from workers.process.server import RunningServer


def _check_addresses(text: str) -> str:
    """Refuse a list with anything but HOST:PORT, before anything starts."""
    for address in _split(text):
        parse_address(address, "address")
    return text


def _split(text: str) -> list[str]:
    return [address.strip() for address in text.split(",")]


def _log_to_stderr(log_format: str) -> None:
    handler = logging.StreamHandler()
    if log_format == "json":
        from workers.process.logs import json_lines

        handler.setFormatter(json_lines("gateway"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


@dataclass(frozen=True, slots=True)
class GatewayFlags:
    """What the command is told, besides how to reach the drivers."""

    address: Annotated[
        str,
        typer.Option(
            callback=_check_addresses,
            metavar="HOST:PORT[,HOST:PORT]",
            help="The drivers: what `paceline up` printed.",
        ),
    ]
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000
    grpc_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve gRPC here too. 0: any free one. Default: no gRPC."
        ),
    ] = None
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model to callers. Default: the driver's.")
    ] = None
    tool_format: Annotated[
        Literal["auto", "hermes", "llama", "none"],
        typer.Option(help="How the model writes tool calls. auto: as its chat template shows it."),
    ] = "auto"
    reasoning_format: Annotated[
        Literal["auto", "think", "none"],
        typer.Option(
            help="Whether the model writes reasoning between <think> and </think>. auto: as "
            "its chat template shows it."
        ),
    ] = "auto"
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="Lines on stderr. json: objects, and one for each HTTP request."),
    ] = "text"
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send traces to this OpenTelemetry receiver."),
    ] = None
    drain: Annotated[
        float, drain_option("On SIGTERM or Ctrl-C, give open requests this long to end.")
    ] = 30.0
    api_keys: Annotated[
        Path | None,
        typer.Option(help="File of API keys (docs/security.md). Default: none are needed."),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Pages of this origin may call (CORS), such as https://chat.example.com. '*': "
            "all pages. Give it again for more.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(help="Serve HTTPS with this certificate chain, in PEM.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, in PEM.")] = None


def gateway(environ: Mapping[str, str], flags: GatewayFlags, access_flags: AccessFlags) -> None:
    """Serve OpenAI's HTTP interface, and gRPC, in front of servers until a signal.

    A second signal ends open requests at once.
    """
    from cluster.access.gate import Gate
    from cluster.config.model import check_origins
    from cluster.gateway.app import Gateway
    from cluster.gateway.drivers import DriverPool
    from cluster.gateway.openai_answers import Formats
    from cluster.gateway.server import listen, raise_file_limit, serve_until_signal
    from workers.process.certificate import Certificate
    from workers.process.tracing import start_tracing

    if (flags.tls_cert is None) != (flags.tls_key is None):
        raise InvalidRequestError("tls-cert", "expected --tls-cert and --tls-key, or neither")
    access = access_flags.check()
    origins = check_origins(flags.cors_origin or ())
    gate = Gate.of(flags.api_keys)
    certificate = Certificate.of(flags.tls_cert, flags.tls_key)
    _log_to_stderr(flags.log_format)
    tracing = start_tracing("paceline-gateway", environ, endpoint=flags.otlp_endpoint)
    raise_file_limit()
    formats = Formats.named(flags.tool_format, flags.reasoning_format)
    name = flags.served_model_name
    pool = DriverPool(_split(flags.address), served_model_name=name, access=access)
    hint = "choose another --host or --port, or end what holds it"
    listener = listen(flags.host, flags.port, hint=hint)
    where = f"[{flags.host}]" if ":" in flags.host else flags.host
    where = f"{'http' if certificate is None else 'https'}://{where}:{listener.getsockname()[1]}"
    number, num_cut = asyncio.run(
        serve_until_signal(
            Gateway(pool, gate, formats=formats, tracing=tracing, cors_origins=origins),
            listener,
            drain_seconds=flags.drain,
            on_ready=partial(_tell_ready, pool, where, gate),
            start_grpc=None if flags.grpc_port is None else partial(_serve_grpc, pool, gate, flags),
            certificate=certificate,
        )
    )
    if num_cut:
        typer.echo(f"{counted(num_cut, 'request')} did not end in time: cut off", err=True)
    raise typer.Exit(128 + signal.Signals(number))


def _tell_ready(
    pool: DriverPool, where: str, gate: Gate | None, grpc_server: RunningServer | None
) -> None:
    if grpc_server is not None:
        typer.echo(f"serving: gRPC at {grpc_server.address}")
    whom = "to everybody who reaches it, without keys" if gate is None else "to API keys"
    typer.echo(f"serving: OpenAI's interface at {where}/v1 {whom}")
    for trouble in pool.troubles():
        typer.echo(f"not serving yet: {trouble}", err=True)


async def _serve_grpc(pool: DriverPool, gate: Gate | None, flags: GatewayFlags) -> RunningServer:
    from cluster.gateway.grpc_front import serve_grpc
    from workers.process.certificate import Certificate

    own, port = Certificate.of(flags.tls_cert, flags.tls_key), flags.grpc_port or 0
    try:
        return await serve_grpc(pool, host=flags.host, port=port, gate=gate, certificate=own)
    except UnavailableError as error:
        raise UnavailableError(f"--grpc-port: {error}") from error
