"""The share of a scheduler's steps that a captured graph of a GPU's engine serves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.decoding.instructions import RunStep
from cluster.decoding.instructions import Slice as Part
from cluster.simulation.target import SimulatedTarget
from tests.cluster.simulation.devices import layout, load, simulated
from workers.engine.cuda.graphs import shapes_to_capture
from workers.engine.cuda.linears import FIXED_ROWS
from workers.engine.cuda.step import Shape, exact_shape
from workers.engine.slices import Slice


def engine_slice(part: Part) -> Slice:
    """As the target's session makes it, with pages in order."""
    end = part.start + len(part.token_ids)
    tree_start = end - part.window if part.parents else None
    num_logits = part.window + 1 if part.verdict else 0
    table = range(end)
    return Slice(table, part.start, part.token_ids, num_logits, tree_start, part.parents)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The exact shape of every step that simulated targets run."""
    shapes: list[Shape] = []
    run = SimulatedTarget.step

    def step(target: SimulatedTarget, step: RunStep) -> None:
        if step.slices:
            shapes.append(exact_shape([engine_slice(part) for part in step.slices]))
        run(target, step)

    monkeypatch.setattr(SimulatedTarget, "step", step)
    return shapes


def covered(steps: Sequence[Shape]) -> float:
    captured = shapes_to_capture(max_num_seqs=64, max_step_tokens=2048, fixed_rows=FIXED_ROWS)
    return sum(any(one.holds(step) for one in captured) for step in steps) / len(steps)


@pytest.mark.parametrize(
    ("policy", "window", "branches", "concurrency"),
    [
        ("off", 0, 1, 4),
        ("off", 0, 1, 48),
        ("chain", 8, 1, 4),
        ("chain", 8, 1, 48),
        ("fanout", 24, 4, 4),
        ("fanout", 24, 4, 20),
        ("auto", 16, 4, 48),
    ],
)
def test_all_steps_have_a_graph(
    policy: str, window: int, branches: int, concurrency: int, recorded: list[Shape]
) -> None:
    """Prefill beside decoding, windows, and trees, as requests come and go."""
    simulated(
        layout(policy, window=window),
        load(concurrency=concurrency, requests=2 * concurrency, tokens=40),
        branches=branches,
    )
    mixed = [one for one in recorded if one.num_rows < one.num_tokens]
    assert mixed, "prefill beside decoding occurs"
    if policy == "fanout":
        assert any(one.num_trees and one.num_chains for one in recorded)
    assert covered(recorded) == 1.0, len(recorded)
