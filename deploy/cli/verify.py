"""`paceline verify`: compares the text with plain decoding and with Hugging Face transformers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.config.model import Config
from cluster.decoding.policy import POLICIES, policy_named
from deploy.cli.reach import reach_cluster, target_folder
from deploy.rows.batch import Failure, announce, row_progress
from deploy.rows.comparison import Comparison, Divergence, Matrix, check_text, variants_of
from deploy.rows.inputs import DEFAULT_INPUT, read_rows
from deploy.rows.outputs import check_writable, write_json
from deploy.terminal.lines import plain, table_of, whole_table
from deploy.terminal.options import (
    AccessFlags,
    ConfigOption,
    DraftingFlags,
    JsonOption,
    LimitOption,
    MaxTokensOption,
    QuietOption,
    SamplingFlags,
    ServerOption,
    VerificationOption,
    check_at_least_one,
    check_request,
    parse_list,
)
from paceline.limits import MAX_WINDOW
from paceline.options import GenerateOptions
from paceline.text import counted
from workers.models.catalog import STAND_IN, default_home, resolve_model
from workers.verification.rule import rule_named

if TYPE_CHECKING:
    from deploy.rows.peers import TransformersPeer
    from deploy.rows.verifier import FileReport, MarginMeter, PeerReport


def parse_matrix(
    policy: str, window: str | None, concurrency: str, temperature: str | None
) -> Matrix:
    """The runs that the comma-separated flags ask for. Raises InvalidRequestError."""
    policies = parse_list("policy", policy, str, "policies, such as lockstep,chain")
    concurrencies = parse_list("concurrency", concurrency, int, "whole numbers, such as 1,4")
    windows: Sequence[int | None] = [None]
    if window is not None:
        windows = parse_list("window", window, int, "whole numbers, such as 1,2,4,8")
    temperatures: Sequence[float | None] = [None]
    if temperature is not None:
        temperatures = parse_list("temperature", temperature, float, "numbers, such as 0,0.7")
    for name in policies:
        policy_named(name)
    for number in concurrencies:
        check_at_least_one("concurrency", number)
    return Matrix(temperatures, variants_of(policies, windows, concurrencies))


def checked_options(
    matrix: Matrix, options: GenerateOptions, config: Config, *, server: str | None
) -> GenerateOptions:
    """`options`, those of all runs, with branches where the user gave none; they name a rule.

    Raises InvalidRequestError, which names the flag, for a run that would be refused.
    """
    for temperature in matrix.temperatures:
        # Plain decoding has no window. With the widest window, any number of branches is valid.
        plain = replace(options, temperature=temperature, policy="off", window=MAX_WINDOW)
        check_request(plain, config, server=server)
        if temperature is not None:
            check_text(options.rule, temperature)
    for variant in matrix.variants:
        run = replace(options, policy=variant.policy, window=variant.window)
        if policy_named(variant.policy).drafts:
            check_request(run, config, server=server)
    if options.branches is not None:
        return options
    assert options.rule is not None
    chain_only = rule_named(options.rule).chain_only
    return replace(options, branches=1 if chain_only else config.speculation.branches)


def verify(
    environ: Mapping[str, str],
    *,
    input_paths: Annotated[
        list[Path] | None,
        typer.Option("--input", help="JSON lines; may be repeated. Default: our own prompts."),
    ] = None,
    config_path: ConfigOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: Annotated[str | None, typer.Option(help="One or several, such as 0,0.7.")] = None,
    sampling: SamplingFlags,
    policy: Annotated[
        str, typer.Option(help=f"One or several of {', '.join(POLICIES)}.")
    ] = "chain",
    verification: VerificationOption = None,
    window: Annotated[str | None, typer.Option(help="One or several, such as 1,2,4,8.")] = None,
    drafting: DraftingFlags,
    concurrency: Annotated[str, typer.Option(help="One or several, such as 1,4.")] = "1",
    limit: LimitOption = None,
    server: ServerOption = None,
    access_flags: AccessFlags,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Check that the text equals plain decoding's bit for bit, and transformers' if greedy.

    Exit code 1: a divergence, or a row that failed. Where transformers' logits of the two
    tokens differ by less than 1e-4 there is a tie, which is reported and counted but is no
    divergence. The same holds where trees were verified (--branches) and plain decoding's own
    logits are that close; the rest of that row is not compared then. Exit code 2: rules other
    than coupled promise the text only at temperature 0.
    """
    from cluster.config.load import load_config

    config = load_config(config_path, environ)
    matrix = parse_matrix(policy, window, concurrency, temperature)
    rule = verification or config.speculation.verification
    own = asdict(sampling) | asdict(drafting)
    options = GenerateOptions(max_tokens=max_tokens, rule=rule, **own)
    options = checked_options(matrix, options, config, server=server)
    access = access_flags.check()
    check_at_least_one("limit", limit)
    if json_path is not None:
        check_writable("json", json_path)
    files = [(path, read_rows(path, limit=limit)) for path in input_paths or [DEFAULT_INPUT]]
    console = Console(stderr=True, quiet=quiet)
    with reach_cluster(config, environ, console=console, server=server, access=access) as address:
        from deploy.rows.verifier import Verifier

        replays = config.target.model == STAND_IN
        runs = len(matrix.temperatures) * (1 + len(matrix.variants))
        announce(
            console,
            f"verifying: {counted(sum(len(rows) for _, rows in files), 'row')} in "
            f"{counted(runs, 'run')} on the server at {address}",
        )
        if replays:
            announce(
                console,
                "verifying: the target is emulated, so there is no text of transformers",
            )
        began = time.monotonic()
        with row_progress(console) as progress:
            verifier = Verifier(
                address,
                matrix,
                options,
                progress=progress,
                make_peer=None if replays else partial(_make_peer, config, environ),
                make_meter=None if replays else partial(_make_meter, config, environ),
                access=access,
            )
            reports = [verifier.verify_file(path, rows) for path, rows in files]
    announce(console, f"verified after {time.monotonic() - began:.1f} s")
    print_report(Console(), Console(stderr=True), reports)
    if config.target.emulated is not None and server is None:
        typer.echo(f"EMULATED: times are those of {config.target.emulated}")
    if json_path is not None:
        write_json(json_path, report_json(reports, model=config.target.model))
    raise typer.Exit(0 if all(report.ok for report in reports) else 1)


def _make_peer(config: Config, environ: Mapping[str, str]) -> TransformersPeer:
    from deploy.rows.peers import TransformersPeer

    return TransformersPeer(target_folder(config, environ))


def _make_meter(config: Config, environ: Mapping[str, str]) -> MarginMeter:
    from deploy.rows.verifier import MarginMeter

    model = resolve_model(config.target.model, home=default_home(environ))
    return MarginMeter(model, threads=len(os.sched_getaffinity(0)))


def print_report(console: Console, errors: Console, reports: Sequence[FileReport]) -> None:
    """Print the runs of each file, then each divergence, then a line with the outcome.

    Failed rows are named on `errors`, once each.
    """
    for report in reports:
        whole_table(console, _runs_table(report))
        for _, message in sorted(_failures(report.comparisons).items()):
            plain(errors, f"error: {message}")
        for line in _findings(report):
            plain(console, line)
    plain(console, _verdict(reports))


def report_json(reports: Sequence[FileReport], *, model: str) -> dict[str, object]:
    """The document of `verify --json`."""
    return {
        "model": model,
        "ok": all(report.ok for report in reports),
        "files": [
            {
                "input": report.path,
                "rows": len(report.rows),
                "runs": [_run_json(comparison) for comparison in report.comparisons],
                "transformers": None if report.peer is None else _peer_json(report.peer),
            }
            for report in reports
        ],
    }


def _runs_table(report: FileReport) -> Table:
    figures = ("temperature", "rows", "tokens", "tokens/s", "acceptance", "differ")
    table = table_of(("run",), figures)
    table.title, table.title_justify = report.path, "left"
    for comparison in report.comparisons:
        run = comparison.run
        temperature = comparison.temperature
        table.add_row(
            str(run.variant),
            "default" if temperature is None else f"{temperature:g}",
            str(len(run.answers) - len(run.failures)),
            str(run.tokens),
            f"{run.tokens / run.seconds:.1f}",
            f"{run.tokens / run.steps:.2f}" if run.steps else "",
            str(len(comparison.divergences) - comparison.ties),
        )
    if report.peer is not None:
        peer = report.peer
        differ = len(peer.other_prompts) + len(peer.departures) - peer.ties
        table.add_row("transformers", "0", str(peer.rows), str(peer.tokens), "", "", str(differ))
    return table


def _findings(report: FileReport) -> Iterator[str]:
    for comparison in report.comparisons:
        for found in comparison.divergences:
            yield (
                f"row {found.row}, {comparison.run.variant}: at output token {found.position} "
                f"plain decoding has {_token(found.expected)}, this run {_token(found.got)}"
                f"{_margin(found)}"
            )
    if report.peer is None:
        return
    for index in report.peer.other_prompts:
        yield f"row {index}: transformers encodes the prompt differently"
    for index, departure in report.peer.departures:
        margin = "no margin" if departure.margin is None else f"margin {departure.margin:.1e}"
        yield (
            f"row {index}, transformers: at output token {departure.position} it has "
            f"{_token(departure.theirs)}, we have {_token(departure.ours)}, {margin}"
            f"{' (a tie)' if departure.tie else ''}"
        )


def _verdict(reports: Sequence[FileReport]) -> str:
    comparisons = [comparison for report in reports for comparison in report.comparisons]
    ties = sum(comparison.ties for comparison in comparisons)
    differ = sum(len(comparison.divergences) for comparison in comparisons) - ties
    failed = sum(len(_failures(report.comparisons)) for report in reports)
    tokens = sum(comparison.run.tokens for comparison in comparisons)
    parts = [f"{counted(differ, 'divergence')} among our policies in {counted(tokens, 'token')}"]
    if ties:
        parts.append(f"{counted(ties, 'tie')} of trees")
    peers = [report.peer for report in reports if report.peer is not None]
    if peers:
        peer_ties = sum(peer.ties for peer in peers)
        real = sum(len(peer.departures) + len(peer.other_prompts) for peer in peers) - peer_ties
        compared = sum(peer.tokens for peer in peers)
        parts.append(
            f"{real} from transformers in {counted(compared, 'token')}, "
            f"and {counted(peer_ties, 'tie')}"
        )
    if failed:
        parts.append(f"{counted(failed, 'row')} failed")
    outcome = "same text" if all(report.ok for report in reports) else "NOT the same text"
    if failed and not differ and not any(peer.failed for peer in peers):
        outcome = "same text where there is any"
    return f"{outcome}: {'; '.join(parts)}"


def _failures(comparisons: Iterable[Comparison]) -> dict[int, str]:
    return {
        answer.index: answer.outcome.message
        for comparison in comparisons
        for answer in comparison.run.answers
        if isinstance(answer.outcome, Failure)
    }


def _margin(found: Divergence) -> str:
    if found.margin is None:
        return ""
    return f", margin {found.margin:.1e}{' (a tie)' if found.tie else ''}"


def _token(token_id: int | None) -> str:
    return "no more tokens" if token_id is None else str(token_id)


def _run_json(comparison: Comparison) -> dict[str, object]:
    run = comparison.run
    return {
        "policy": run.variant.policy,
        "window": run.variant.window,
        "concurrency": run.variant.concurrency,
        "temperature": comparison.temperature,
        "tokens": run.tokens,
        "seconds": run.seconds,
        "acceptance_length": run.tokens / run.steps if run.steps else None,
        "failed_rows": run.failures,
        "ties": comparison.ties,
        "divergences": [{**asdict(found), "tie": found.tie} for found in comparison.divergences],
    }


def _peer_json(peer: PeerReport) -> dict[str, object]:
    return {
        "rows": peer.rows,
        "tokens": peer.tokens,
        "ties": peer.ties,
        "rows_with_other_prompt_tokens": peer.other_prompts,
        "divergences": [
            {"row": index, **asdict(departure), "tie": departure.tie}
            for index, departure in peer.departures
        ],
    }
