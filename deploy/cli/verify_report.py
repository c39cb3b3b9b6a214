"""The results of `verify`: a table for people, a document for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from deploy.rows.batch import Failure
from deploy.rows.comparison import Comparison, Divergence
from deploy.rows.verifier import FileReport, PeerReport
from deploy.terminal.lines import plain, whole_table
from paceline.text import counted


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
    table = Table(title=report.path, title_justify="left", box=None, pad_edge=False)
    table.add_column("run")
    for name in ("temperature", "rows", "tokens", "tokens/s", "acceptance", "differ"):
        table.add_column(name, justify="right")
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
        "divergences": [
            {
                "row": found.row,
                "position": found.position,
                "expected": found.expected,
                "got": found.got,
                "margin": found.margin,
                "tie": found.tie,
            }
            for found in comparison.divergences
        ],
    }


def _peer_json(peer: PeerReport) -> dict[str, object]:
    return {
        "rows": peer.rows,
        "tokens": peer.tokens,
        "ties": peer.ties,
        "rows_with_other_prompt_tokens": peer.other_prompts,
        "divergences": [
            {
                "row": index,
                "position": departure.position,
                "ours": departure.ours,
                "theirs": departure.theirs,
                "margin": departure.margin,
                "tie": departure.tie,
            }
            for index, departure in peer.departures
        ],
    }
