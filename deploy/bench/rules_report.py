"""What `bench rules` measured: a table a part, the ratios that matter, a document for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from deploy.bench.document import document
from deploy.bench.rules_acceptance import WINDOW
from deploy.bench.rules_goals import goals
from deploy.bench.rules_rows import RuleRow


def rules_json(rows: Sequence[RuleRow], machine: Mapping[str, object]) -> dict[str, object]:
    """The document of `bench rules --json`."""
    return document("rules", rows, goals(rows), machine)


def print_rules(console: Console, rows: Sequence[RuleRow]) -> None:
    """A table for each part that was measured, then the ratios; at most 80 columns."""
    _print_times(console, [row for row in rows if row.part == "time"])
    _print_acceptance(console, [row for row in rows if row.part == "acceptance"])
    for part, title in (
        ("stopping", "Stopping rules, greedy chains"),
        ("train-free", "Drafters without a model, greedy, policy lockstep"),
    ):
        _print_speeds(console, title, [row for row in rows if row.part == part])
    for goal in goals(rows):
        error = "" if goal.error is None else f" +- {goal.error:.2f}"
        console.print(f"{goal.name} = {goal.ratio:.2f}{error} (aim {goal.aim:g})", highlight=False)


def _table(console: Console, title: str, headings: Sequence[str], left: int) -> Table:
    console.print(title, highlight=False)
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", no_wrap=True)
    return table


def _print_times(console: Console, rows: Sequence[RuleRow]) -> None:
    """A column a vocabulary and batch; a line a rule, shape and window."""
    columns = list(dict.fromkeys((row.details["vocab_size"], row.details["batch"]) for row in rows))
    lines: dict[tuple[object, ...], dict[tuple[object, object], str]] = {}
    for row in rows:
        at = (row.details["vocab_size"], row.details["batch"])
        line = lines.setdefault((row.rule, row.candidates, row.details["window"]), {})
        line[at] = f"{row.ms:.2f}"
    if not lines:
        return
    headings = [f"V={vocab_size}, {batch}" for vocab_size, batch in columns]
    table = _table(
        console,
        "Verification in ms, by vocabulary and batch",
        ("rule", "candidates", "window", *headings),
        2,
    )
    for (rule, candidates, window), cells in sorted(lines.items(), key=lambda one: _order(one[0])):
        shown = (cells.get(column, "") for column in columns)
        table.add_row(str(rule), str(candidates), str(window), *shown)
    console.print(table)
    console.print()


def _order(line: tuple[object, ...]) -> tuple[int, str, str]:
    rule, candidates, window = line
    assert isinstance(window, int)
    return window, str(candidates != "chain"), str(rule)


def _print_acceptance(console: Console, rows: Sequence[RuleRow]) -> None:
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    lines: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        line = lines.setdefault((row.rule, row.candidates), {})
        error = row.details["standard_error"]
        line[row.temperature] = f"{row.acceptance_length:.2f}" + (
            "" if error is None else f" +- {error:.2f}"
        )
    if not lines:
        return
    table = _table(
        console,
        f"Tokens a step, policy lockstep, {WINDOW} candidates a step",
        ("rule", "candidates", *(f"T={temperature:g}" for temperature in temperatures)),
        2,
    )
    for (rule, candidates), cells in lines.items():
        table.add_row(rule, candidates, *(cells[one] for one in temperatures))
    console.print(table)
    console.print()


def _print_speeds(console: Console, title: str, rows: Sequence[RuleRow]) -> None:
    if not rows:
        return
    table = _table(console, title, ("", "tok/s", "/off", "spread", "len", "same"), 1)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.details['tokens_per_second']:.1f}",
            f"{row.speedup:.2f}",
            f"{row.details['spread']:.0%}",
            f"{row.acceptance_length:.2f}",
            "yes" if row.details["same_text"] else "no",
        )
    console.print(table)
    console.print()
