"""What `paceline bench` runs, suite by suite: measure, print, and the document for programs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.outputs import write_json
from deploy.reach import teller
from paceline.generation import GenerateInput

if TYPE_CHECKING:
    from cluster.config import Config


@dataclass(frozen=True, slots=True)
class Amount:
    """How much a suite measures: rows of the input, tokens a row, rounds."""

    limit: int
    max_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Task:
    """What a suite is given."""

    config: Config
    inputs: Sequence[GenerateInput]
    amount: Amount
    home: Path


def decode(task: Task, *, calibrate: bool, gap_steps: int) -> Mapping[str, object]:
    """Run the suite and print it; the document for programs."""
    from deploy.bench.decode import DecodeSettings, deployments, run_decode
    from deploy.bench.machine import describe_machine
    from deploy.bench.report import decode_json, print_decode

    settings = DecodeSettings(task.amount.max_tokens, task.amount.repeats, calibrate, gap_steps)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder, teller(Console(stderr=True)) as tell:
        result = run_decode(
            deployments(task.config),
            task.inputs,
            settings,
            home=task.home,
            log_folder=Path(folder),
            tell=tell,
        )
    print_decode(Console(), result)
    return decode_json(result, machine)


def rules(task: Task, parts: Sequence[str] | None, *, quick: bool) -> Mapping[str, object]:
    """Run the suite and print it; the document for programs."""
    from deploy.bench.machine import describe_machine
    from deploy.bench.rules import RulesSettings, run_rules
    from deploy.bench.rules_report import print_rules, rules_json
    from deploy.bench.rules_rows import PART_NAMES

    amount = task.amount
    settings = RulesSettings(parts or PART_NAMES, amount.max_tokens, amount.repeats, quick)
    machine = describe_machine()
    with teller(Console(stderr=True)) as tell:
        rows = run_rules(task.config, task.inputs, settings, home=task.home, tell=tell)
    print_rules(Console(), rows)
    return rules_json(rows, machine)


def engine(
    config: Config,
    parts: Sequence[str] | None,
    batches: Sequence[int] | None,
    *,
    quick: bool,
    home: Path,
    json_path: Path | None,
) -> Mapping[str, object]:
    """Run the suite and print it; the document for programs, written after each row too."""
    from deploy.bench.engine import USUAL_PARTS, EngineResult, run_engine
    from deploy.bench.engine_report import engine_json, print_engine
    from deploy.bench.engine_rows import EngineTask
    from deploy.bench.machine import describe_machine

    machine = describe_machine()

    def save(result: EngineResult) -> None:
        if json_path is not None:
            write_json(json_path, engine_json(result.rows, machine, result.failed))

    with tempfile.TemporaryDirectory() as folder, teller(Console(stderr=True)) as tell:
        task = EngineTask(config, home, Path(folder), quick, tell, batches)
        result = run_engine(task, parts or USUAL_PARTS, save)
    print_engine(Console(), result.rows)
    for part, why in result.failed.items():
        Console(stderr=True).print(f"part {part} failed: {why}", highlight=False, markup=False)
    return engine_json(result.rows, machine, result.failed)


def gpu(*, quick: bool, kernels: bool) -> Mapping[str, object]:
    """Run the suite on a GPU and print it; the document for programs. `kernels`: ours run."""
    from deploy.bench.engine_gpu import llama_8b, measure_gpu
    from deploy.bench.engine_report import engine_json, print_engine
    from deploy.bench.engine_rows import with_speedups
    from deploy.bench.machine import describe_machine
    from workers.kernels import use_kernels

    use_kernels(kernels)
    machine = describe_machine()
    with teller(Console(stderr=True)) as tell:
        rows = with_speedups(measure_gpu(llama_8b(quick=quick), tell))
    print_engine(Console(), rows)
    return engine_json(rows, machine, {})


def lookahead(
    parts: Sequence[str] | None,
    max_tokens: int | None,
    repeats: int | None,
    *,
    quick: bool,
    home: Path,
    json_path: Path | None,
) -> Mapping[str, object]:
    """Run the suite and print it; the document for programs, written after each cell too."""
    from deploy.bench import lookahead
    from deploy.bench.lookahead_report import lookahead_json, print_lookahead
    from deploy.bench.lookahead_results import LookaheadResult
    from deploy.bench.machine import describe_machine

    usual = lookahead.QUICK if quick else lookahead.FULL
    settings = replace(
        usual,
        max_tokens=usual.max_tokens if max_tokens is None else max_tokens,
        repeats=usual.repeats if repeats is None else repeats,
        parts=tuple(parts or ()),
    )
    machine = describe_machine()

    def save(result: LookaheadResult) -> None:
        if json_path is not None:
            write_json(json_path, lookahead_json(result, machine))

    with teller(Console(stderr=True)) as tell:
        result = lookahead.run_lookahead(settings, home=home, tell=tell, save=save)
    print_lookahead(Console(), result)
    return lookahead_json(result, machine)
