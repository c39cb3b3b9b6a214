"""Simulate the cells of a measured run anew: `python scripts/simulate_again.py F [WORD ...]`.

F is what `paceline bench lookahead --json F` wrote. Each replayed cell (those alone whose names
have all WORDs in them) is simulated with the costs that the simulator has now, and shown beside
what was measured then: so costs can be fitted without measuring again. All take about a minute.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.bench.lookahead import (
    DRAFTER_PROFILE,
    FULL,
    TARGET_PROFILE,
    LookaheadBench,
    guesses_of,
)
from deploy.bench.lookahead_cells import COMPUTED, cells, plain_cell
from deploy.bench.record_replay import demo_recording
from workers.emulated.profiles import load_profile
from workers.models import default_home

WITHIN = 0.1


def main(measured: Path, words: list[str]) -> None:
    """A line a cell, the farthest from what was measured last."""
    rows = {row["name"]: row for row in json.loads(measured.read_text())["rows"]}
    target, drafter = (load_profile(name) for name in (TARGET_PROFILE, DRAFTER_PROFILE))
    wanted = cells(target, drafter, quick=False)
    recording = demo_recording(default_home(os.environ), tell=print)
    bench = LookaheadBench({}, recording, guesses_of(wanted, FULL.max_tokens), FULL)
    found = []
    plain = dict.fromkeys(plain_cell(cell.batch, cell.load) for cell in wanted)
    for cell in (*plain, *wanted):
        row = rows.get(cell.name)
        if row is None or cell.load in COMPUTED or not all(word in cell.name for word in words):
            continue
        ratio = bench.simulate([cell], target, drafter)[cell] / _measured(row)
        found.append((abs(ratio - 1), ratio, row))
    for _, ratio, row in sorted(found, key=lambda one: one[0]):
        print(f"{ratio:.3f}  {row['name']} (rounds {row['spread']:.1%} apart)")
    within = sum(far <= WITHIN for far, _, _ in found)
    print(f"{within} of {len(found)} within {WITHIN:.0%}")


def _measured(row: Mapping[str, float]) -> float:
    """Tokens/s in the middle of the rounds. A row tells the lower of two."""
    speed = row["tokens_per_second"]
    return speed / (1 - row["spread"] / 2) if row["repeats"] == 2 else speed


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
