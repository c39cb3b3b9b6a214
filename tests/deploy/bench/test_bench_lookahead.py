"""`bench lookahead`: its cells, its seeds, and a whole run over emulated workers."""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from rich.console import Console

from cluster.decoding.policy import POLICIES
from cluster.simulation import closed_forms
from deploy.bench.harness import Document
from deploy.bench.lookahead import (
    CellResult,
    LookaheadResult,
    in_order,
    lookahead_document,
    measure_cells,
    run_lookahead,
    show_lookahead,
)
from deploy.bench.lookahead_cells import (
    PARALLEL,
    SEEDS,
    CellRun,
    EmulatedPair,
    cells,
    part_names,
    plain_cell,
    requests_of,
)
from scripts.calibrate_simulator import simulated_speed
from tests.deploy.bench.benches import asked_of
from workers.emulated.latency_profiles import load_profile
from workers.emulated.replay_text import (
    Guess,
    PrefixReader,
    ReplayText,
)
from workers.models.stand_in import VOCAB_SIZE

TARGET, DRAFTER = load_profile("70b-4xh100"), load_profile("1b-h100")
FIELDS = {
    "policy",
    "rtt_ms",
    "acceptance",
    "hit_rate",
    "batch",
    "speedup",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "faster_but_worse_per_gpu",
    "acceptance_length",
    "target_idle",
    "target_gap_ms",
    "efficiency",
    "same_text",
}


def test_every_policy_meets_every_link_and_acceptance() -> None:
    found = cells(TARGET, DRAFTER, quick=False)
    assert len({cell.name for cell in found}) == len(found)
    one = Counter(
        cell.policy
        for cell in found
        if cell.batch == 1 and cell.hit_rate in (None, 0.85)
        if not cell.parallel
        if cell.branches == 1
    )
    drafting = set(POLICIES) - {"off"}
    assert one == dict.fromkeys(drafting, 6)
    assert {cell.policy for cell in cells(TARGET, DRAFTER, quick=True)} <= drafting


def test_a_part_is_one_policy_or_the_parallel_drafter() -> None:
    assert {"chain", "lockstep", PARALLEL} <= set(part_names())
    assert "off" not in part_names()
    chain = cells(TARGET, DRAFTER, quick=False, parts=("chain",))
    assert {cell.policy for cell in chain} == {"chain"}
    parallel = cells(TARGET, DRAFTER, quick=False, parts=(PARALLEL,))
    assert all(cell.parallel for cell in parallel)
    assert set(parallel) <= set(cells(TARGET, DRAFTER, quick=False))


@pytest.mark.parametrize("acceptance", [0.75, 0.85])
def test_pinned_luck_is_that_of_the_long_run(acceptance: float) -> None:
    load = requests_of(1, 150)
    guess = Guess(acceptance, 0.85, SEEDS[acceptance])
    text = ReplayText(VOCAB_SIZE)
    right = tested = 0
    second = missed = 0
    for request in load:
        reader = PrefixReader().read(request.prompt, 0)
        spec = request.spec()
        for index in range(request.max_tokens):
            digest = reader.digest()
            truth = text.next_token(digest, spec)
            guesses = text.guesses(digest, spec, guess, 2)
            tested += 1
            if guesses[0] == truth:
                right += 1
            else:
                missed += 1
                second += guesses[1] == truth
            reader.read((truth,), len(request.prompt) + index)
    assert right / tested == pytest.approx(acceptance, rel=0.02)
    assert second / missed == pytest.approx(0.85, abs=0.05)


def test_a_cell_is_simulated_with_the_same_requests_and_luck() -> None:
    """Lockstep has a closed form, which leaves out driver and messages: 1 to 5 % of a round.

    The chosen seed is within 2 % of the long run's mean.
    """
    lockstep = next(
        cell
        for cell in cells(TARGET, DRAFTER, quick=False)
        if cell.policy == "lockstep" and cell.acceptance == 0.75 and cell.rtt_ms == 10
    )
    load = requests_of(1, 200)
    plain, drafted = (
        simulated_speed(cell, load, target=TARGET, drafter=DRAFTER)
        for cell in (plain_cell(1), lockstep)
    )
    formula = closed_forms.lockstep(
        0.75,
        lockstep.window,
        step_ms=TARGET.pass_ms.ms(1, 1),
        draft_ms=DRAFTER.pass_ms.ms(1, 1),
        rtt_ms=10,
    )
    assert 0.93 * formula < drafted / plain < 1.01 * formula


def _no_pair(folder: Path) -> EmulatedPair:
    """A pair without anything."""
    return EmulatedPair(folder, ("",), defaultdict(dict))


async def test_a_cell_that_fails_is_told_and_does_not_end_the_others(tmp_path: Path) -> None:
    wanted = cells(TARGET, DRAFTER, quick=False, parts=("chain",))[:2]
    result = LookaheadResult(in_order(wanted))
    told: list[str] = []
    saved: list[int] = []
    await measure_cells(
        {False: _no_pair(tmp_path)},
        result,
        max_tokens=24,
        repeats=2,
        tell=told.append,
        save=lambda: saved.append(len(result.cells)),
    )
    document = lookahead_document(result)
    assert document["rows"] == []
    failed = document["failed"]
    assert list(failed) == ["off", *(cell.name for cell in wanted)]
    assert all(len(errors) == 2 for errors in failed.values())
    assert len([line for line in told if "failed: " in line]) == 6 == len(saved)


async def test_repeats_end_when_the_time_is_over(tmp_path: Path) -> None:
    wanted = cells(TARGET, DRAFTER, quick=True, parts=("chain",))
    result, pairs = LookaheadResult(in_order(wanted)), {False: _no_pair(tmp_path)}
    await measure_cells(
        pairs, result, max_tokens=24, repeats=5, most_seconds=0.0, tell=lambda line: None
    )
    assert [len(one.errors) for one in result.cells] == [1, 1]
    assert result.rounds == 1


def test_a_narrow_terminal_gets_the_columns_that_fit() -> None:
    (cell,) = cells(TARGET, DRAFTER, quick=True, parts=("fanout",))
    measured = LookaheadResult(
        [CellResult(plain_cell(1), {0: _run(50.0)}), CellResult(cell, {0: _run(200.0)})]
    )
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, color_system=None)
    show_lookahead(console, lookahead_document(measured))
    lines = re.sub("\x1b\\[[0-9;]*m", "", shown.getvalue()).splitlines()
    [headings] = [line.split() for line in lines if "tok/s" in line and "accept" in line]
    assert {"/off", "len", "idle", "same"} <= {*headings}
    assert [line for line in lines if line.startswith("left out: spread")]
    assert max(map(len, lines)) <= 80


def _run(tokens_per_second: float) -> CellRun:
    return CellRun(((1, 2),), tokens_per_second, 1.0, 0.1, None, 18.3, None, 0.5, 0)


def test_what_a_cell_gains_is_told_within_a_round_and_of_whole_rounds() -> None:
    """The second round is slower as a whole. A cell that it contains has the same speed-up."""
    first, second = cells(TARGET, DRAFTER, quick=False, parts=("chain",))[:2]
    measured = LookaheadResult(
        [
            CellResult(plain_cell(1), {0: _run(50.0), 1: _run(40.0)}),
            CellResult(first, {0: _run(100.0), 1: _run(84.0)}),
            CellResult(second, {0: _run(150.0)}),
        ]
    )

    def speedups() -> tuple[object, list[object]]:
        document = lookahead_document(measured)
        rows = document["rows"]
        return document["rounds"], [(row["speedup"], row["repeats"]) for row in rows]

    assert speedups() == (1, [(1.0, 1), (2.0, 1), (3.0, 1)])
    measured.cells[2].runs[1] = _run(124.0)
    measured.rounds = 2
    rounds, ratios = speedups()
    assert rounds == 2
    assert ratios == [(1.0, 2), (pytest.approx(2.05), 2), (pytest.approx(3.05), 2)]


@pytest.mark.release
def test_a_whole_run_gives_the_text_of_plain_decoding(tmp_path: Path) -> None:
    told: list[str] = []
    saved: list[Document] = []
    asked = asked_of(tmp_path, max_tokens=24, quick=True, tell=told.append, save=saved.append)
    document = run_lookahead(asked)
    assert document["emulated"] is document["complete"] is True
    assert "failed" not in document
    # After each cell, the rows were saved and the next cell was announced.
    lengths = [len(one["rows"]) for one in saved]
    assert lengths == list(range(1, len(saved) + 1))
    assert not any(one["complete"] for one in saved)
    assert any(f"{len(saved)} of {len(saved)} in round 1, after " in line for line in told)
    rows = document["rows"]
    assert {"off", "lockstep", "chain"} <= {row["policy"] for row in rows}
    for row in rows:
        assert row.keys() >= FIELDS
        assert row["same_text"] is True
        assert row["tokens_per_second"] > row["tokens_per_second_per_gpu"] > 0
