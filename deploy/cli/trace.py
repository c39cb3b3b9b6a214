"""`paceline trace`: draws what the devices do, round by round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console

from cluster.gateway.console import told_round, trace_page
from deploy.cli.reach import reach_cluster, running_server
from deploy.rows.batch import Failure, answers_in_order
from deploy.rows.inputs import BadRow, InputRow, read_rows
from deploy.rows.outputs import check_writable, write_json
from deploy.terminal.options import (
    AccessFlags,
    BranchesOption,
    ConfigOption,
    LimitOption,
    MaxTokensOption,
    SeedOption,
    ServerOption,
    TemperatureOption,
    check_at_least_one,
    check_request,
)
from paceline.access import Access, Credentials
from paceline.client import UNARY_SECONDS
from paceline.errors import InvalidRequestError
from paceline.options import GenerateOptions
from paceline.status import error_of
from paceline.text import counted
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2, trace_pb2_grpc
from workers.emulated.latency_profiles import EMULATED

USUAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TraceFlags:
    """What the command is told, besides how to reach the server."""

    html_path: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="The time line as a page of its own. Default without --output: trace.html.",
        ),
    ] = None
    output_path: Annotated[
        Path | None,
        typer.Option("--output", help="JSON for ui.perfetto.dev or chrome://tracing."),
    ] = None
    input_path: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="JSON lines to decode. Without it, watch whatever a running server does.",
        ),
    ] = None
    config_path: ConfigOption = None
    seconds: Annotated[float, typer.Option(help="Without --input: seconds to watch.")] = (
        USUAL_SECONDS
    )
    max_tokens: MaxTokensOption = 64
    temperature: TemperatureOption = None
    seed: SeedOption = 0
    policy: Annotated[str | None, typer.Option(help="Default: the server's.")] = None
    window: Annotated[int | None, typer.Option(help="Maximum candidates that a step verifies.")] = (
        None
    )
    branches: BranchesOption = None
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 1
    limit: LimitOption = 4
    server: ServerOption = None

    def options(self) -> GenerateOptions:
        """Of the rows that are decoded."""
        return GenerateOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            policy=self.policy,
            window=self.window,
            branches=self.branches,
        )


def trace(environ: Mapping[str, str], flags: TraceFlags, access_flags: AccessFlags) -> None:
    """Watch rounds of drafting and verification, and draw them on a time line.

    Each device has a row. Windows and verdicts are slices; arrows go from proposals to their
    verdicts. With --input it decodes the first rows of a file, else it watches a server.
    """
    from cluster.config.load import load_config

    options, access, server = flags.options(), access_flags.check(), flags.server
    check_at_least_one("concurrency", flags.concurrency)
    check_at_least_one("limit", flags.limit)
    if not 0 < flags.seconds < float("inf"):
        raise InvalidRequestError("seconds", f"expected a duration above 0, got {flags.seconds:g}")
    output_path = flags.output_path
    html_path = flags.html_path or (Path("trace.html") if output_path is None else None)
    for name, path in (("html", html_path), ("output", output_path)):
        if path is not None:
            check_writable(name, path)
    config = load_config(flags.config_path, environ)
    rows = None
    if flags.input_path is not None:
        check_request(options, config, server=server)
        rows = read_rows(flags.input_path, limit=flags.limit)
    elif server is None:
        server = running_server(environ, "or give --input to decode on a private one")
    console = Console(stderr=True)
    with reach_cluster(config, environ, console=console, server=server, access=access) as address:
        drawn = asyncio.run(_watch(address, rows, flags, access))
    told = (
        f"{counted(drawn.num_steps, 'step')}, {drawn.num_passes} passes of drafters, "
        f"{counted(drawn.num_arrows, 'arrow')}"
    )
    if html_path is not None:
        html_path.write_text(trace_page(drawn.rounds), encoding="utf-8")
        typer.echo(f"{html_path}: {told}; open it in a browser")
    if output_path is not None:
        write_json(output_path, drawn.document())
        typer.echo(f"{output_path}: {told}; open it at https://ui.perfetto.dev")
    if not drawn.num_steps:
        typer.echo(
            f"nothing was decoded in {flags.seconds:g} s: send requests meanwhile, as with "
            "`paceline chat`, or name rows to decode with --input",
            err=True,
        )


async def _watch(
    address: str, rows: Sequence[InputRow | BadRow] | None, flags: TraceFlags, access: Access
) -> TraceFile:
    """What a server does: while it decodes `rows`, or for the seconds that were asked for."""
    async with tracing(address, access) as drawn:
        if rows is None:
            await asyncio.sleep(flags.seconds)
            return drawn
        async for answer in answers_in_order(
            address, rows, flags.options(), concurrency=flags.concurrency, access=access
        ):
            if isinstance(answer.outcome, Failure):
                raise InvalidRequestError("input", answer.outcome.message)
    return drawn


_DEVICES, _SEQUENCES = 1, 2
_REPLICA_ROWS = 1000
"""First row of further target groups. The first group has row 0, and drafters follow it."""
_REPLICA_SEQUENCES = 1_000_000_000
"""Distance between the rows of a sequence on one target group and on the next."""
_LEAST_US = 1.0
"""The shortest slice. A slice of no length cannot be seen, and no arrow can end there."""
_LAST_SECONDS = 0.2
"""Seconds to wait for messages that are on their way when the block ends."""
Event = dict[str, Any]


class TraceFile:
    """Takes the messages of TraceService in order. `document` is the result, a Chrome trace.

    Each device has a row. The row of a target group shows each step, from its start to the end of
    its pass, and then the verdicts. The row of a drafter shows its passes. An arrow goes from the
    pass that proposed candidates to the verdict on them. Each sequence has a row for each target
    group that verified it. It shows each window from the time when it was sent to its verdict.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._begun = 0.0
        self._model = ""
        self._drafter_rows: dict[str, int] = {}
        self._num_groups = 1
        self._busy_until: dict[int, float] = {}
        self._pass_ends: dict[int, tuple[int, float]] = {}
        self._sequence_rows: dict[int, str] = {}
        self.rounds: list[Event] = []
        """What was added, as the page of the console reads it."""
        self.num_steps = 0
        self.num_passes = 0
        self.num_arrows = 0

    def add(self, message: trace_pb2.TraceResponse) -> None:
        self.rounds.append(told_round(message))
        match message.WhichOneof("message"):
            case "begun":
                self._begun, self._model = message.begun.now, message.begun.model
            case "step":
                self._add_step(message.step)
            case "drafting":
                self._add_pass(message.drafting)

    def document(self) -> dict[str, object]:
        """The trace as a JSON object (the Trace Event Format)."""
        names = [
            _name("process_name", _DEVICES, 0, "devices"),
            _name("process_name", _SEQUENCES, 0, "sequences"),
            _name("thread_name", _DEVICES, 0, f"target {self._model}"),
        ]
        names += [
            _name("thread_name", _DEVICES, row, f"replica {group} of target {self._model}")
            for group, row in ((one, _target_row(one)) for one in range(1, self._num_groups))
        ]
        names += [
            _name("thread_name", _DEVICES, row, name) for name, row in self._drafter_rows.items()
        ]
        names += [
            _name("thread_name", _SEQUENCES, row, name)
            for row, name in sorted(self._sequence_rows.items())
        ]
        return {
            "traceEvents": [*names, *self._events],
            "displayTimeUnit": "ms",
            "otherData": {"model": self._model, "emulated": self._model.startswith(EMULATED)},
        }

    def _add_step(self, step: trace_pb2.TracedStep) -> None:
        self.num_steps += 1
        self._num_groups = max(self._num_groups, step.group + 1)
        row = _target_row(step.group)
        end = self._us(step.answered_at)
        begin = self._begin(row, end - step.step_seconds * 1e6)
        verdict_at = min(begin + step.forward_seconds * 1e6, end - _LEAST_US)
        verdict_at = max(verdict_at, begin + _LEAST_US)
        end = max(end, verdict_at + _LEAST_US)
        drafted = sum(window.window for window in step.windows)
        accepted = sum(window.accepted for window in step.windows)
        committed = sum(window.committed for window in step.windows)
        counts = {
            "sequences": len(step.windows),
            "tokens fed": sum(window.fed for window in step.windows),
            "candidates": drafted,
        }
        label = f"step {step.step}: {counted(drafted, 'candidate')}"
        self._slice(row, label, begin, verdict_at - begin, counts)
        outcome = {"accepted": accepted, "committed": committed}
        self._slice(row, f"verdict: +{committed}", verdict_at, end - verdict_at, outcome)
        self._busy_until[row] = end
        for number in sorted({one for window in step.windows for one in window.passes}):
            self._arrow(number, row, verdict_at)
        for window in step.windows:
            self._add_window(step, window, end)

    def _add_window(
        self, step: trace_pb2.TracedStep, window: trace_pb2.TracedWindow, end: float
    ) -> None:
        sent = self._us(step.sent_at)
        row = self._sequence_row(window.sequence_id, step.group)
        drafting = window.committed > 0
        kind = f"window {window.window}: {window.accepted} accepted" if drafting else "prefill"
        self._events.append(
            {
                "ph": "X",
                "name": kind,
                "pid": _SEQUENCES,
                "tid": row,
                "ts": sent,
                "dur": max(end - sent, _LEAST_US),
                "args": {
                    "step": step.step,
                    "replica": step.group,
                    "position": window.start,
                    "tokens fed": window.fed,
                    "candidates": window.window,
                    "accepted": window.accepted,
                    "committed": window.committed,
                },
            }
        )

    def _sequence_row(self, sequence_id: int, group: int) -> int:
        """The row of a sequence. Windows that several groups verify at a time have rows each."""
        row = group * _REPLICA_SEQUENCES + sequence_id
        name = f"sequence {sequence_id}"
        self._sequence_rows.setdefault(row, f"{name}, replica {group}" if group else name)
        return row

    def _add_pass(self, one: trace_pb2.TracedPass) -> None:
        self.num_passes += 1
        row = self._drafter_rows.setdefault(one.drafter, 1 + len(self._drafter_rows))
        end = self._us(one.received_at)
        begin = self._begin(row, end - one.pass_seconds * 1e6)
        end = max(end, begin + _LEAST_US)
        candidates = sum(proposal.num_candidates for proposal in one.proposals)
        positions = {
            f"sequence {proposal.sequence_id}": f"{proposal.num_candidates} from position "
            f"{proposal.base_length}"
            for proposal in one.proposals
        }
        counts = {"tokens fed": one.tokens_fed, "candidates": candidates, **positions}
        self._slice(row, f"pass: {counted(candidates, 'candidate')}", begin, end - begin, counts)
        self._busy_until[row] = end
        self._pass_ends[one.number] = (row, end - _LEAST_US / 2)

    def _begin(self, row: int, wanted: float) -> float:
        """The start of a slice, moved behind the slice before it if its message was late."""
        return max(wanted, self._busy_until.get(row, wanted))

    def _arrow(self, number: int, target_row: int, to: float) -> None:
        if number not in self._pass_ends:
            return
        self.num_arrows += 1
        row, at = self._pass_ends[number]
        common = {"cat": "proposal", "name": "proposal", "id": self.num_arrows, "pid": _DEVICES}
        self._events.append({"ph": "s", "tid": row, "ts": at, **common})
        self._events.append(
            {"ph": "f", "bp": "e", "tid": target_row, "ts": to + _LEAST_US / 2, **common}
        )

    def _slice(
        self, row: int, name: str, begin: float, duration: float, args: Mapping[str, object]
    ) -> None:
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "pid": _DEVICES,
                "tid": row,
                "ts": begin,
                "dur": duration,
                "args": dict(args),
            }
        )

    def _us(self, seconds: float) -> float:
        return (seconds - self._begun) * 1e6


def _target_row(group: int) -> int:
    return _REPLICA_ROWS + group if group else 0


def _name(kind: str, process: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}


@asynccontextmanager
async def tracing(address: str, access: Access | None = None) -> AsyncIterator[TraceFile]:
    """Trace the server at "host:port" while the block runs. Raises the server's PacelineError."""
    drawn = TraceFile()
    credentials = Credentials.of(**(access or {}))
    async with credentials.async_channel(address) as channel:
        stub: Any = credentials.stub(trace_pb2_grpc.TraceServiceStub, channel)
        call = stub.Trace(trace_pb2.TraceRequest())
        try:
            messages = aiter(call)
            drawn.add(await anext(messages))  # From now on the server reports rounds.
            reader = asyncio.create_task(_read(messages, drawn))
            try:
                yield drawn
                await _all_is_told(credentials, channel)
                await asyncio.wait([reader], timeout=_LAST_SECONDS)
                if reader.done():
                    reader.result()
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
        except grpc.RpcError as error:
            raise error_of(error, address) from error
        finally:
            call.cancel()


async def _all_is_told(credentials: Credentials, channel: grpc.aio.Channel) -> None:
    """Wait until all earlier rounds were reported: a later call is answered after them."""
    stub: Any = credentials.stub(inference_pb2_grpc.InferenceServiceStub, channel)
    with suppress(grpc.RpcError):  # A server that is gone also ends the stream, with the reason.
        await stub.Stats(inference_pb2.StatsRequest(), timeout=UNARY_SECONDS)


async def _read(messages: AsyncIterator[trace_pb2.TraceResponse], drawn: TraceFile) -> None:
    async for message in messages:
        drawn.add(message)
