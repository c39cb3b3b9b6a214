"""Compare the simulator with emulated runs: `python scripts/calibrate_simulator.py FILE`.

An emulated 70B pair runs over real gRPC and the real driver. The simulator runs the same requests,
guesses, profiles and policies. The cells are batches of 1, 4 and 16, each at round trips of 0.1 and
10 ms. FILE becomes JSON with a row per cell: `policy`, `rtt_ms`, `batch`, `tokens_per_second`,
`simulated` (tokens per second too), `ratio`, `gap_ms`. This takes about 90 seconds. The figures are
meaningful only if the machine is otherwise idle.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from deploy.bench.lookahead import (
    DRAFTER_PROFILE,
    TARGET_PROFILE,
    LookaheadBench,
    LookaheadSettings,
    Rates,
)
from deploy.bench.lookahead_cells import (
    ACCEPTANCES,
    CHAIN_WINDOW,
    HIT_RATES,
    Cell,
    pinned_guess,
    set_load,
)
from deploy.bench.lookahead_pairs import EmulatedPair, PairLayout
from workers.emulated.profiles import load_profile
from workers.emulated.replay_text import Guess
from workers.models.stand_in import make_stand_in

BATCHES = (1, 4, 16)
RTTS_MS = (0.1, 10.0)
POLICIES = ("chain", "pearl", "fanout")
MAX_TOKENS = 160
"""Tokens of a request: enough that one step more or less at the end hardly changes the rate."""
ACCEPTANCE, HIT_RATE = ACCEPTANCES[1], HIT_RATES[0]


def main(output: Path) -> None:
    """Measure and simulate all cells, and write `output`."""
    guess = pinned_guess(ACCEPTANCE, HIT_RATE, set_load(1, MAX_TOKENS))
    target, drafter = (load_profile(name) for name in (TARGET_PROFILE, DRAFTER_PROFILE))
    layout = PairLayout(TARGET_PROFILE, DRAFTER_PROFILE, 1, RTTS_MS, (guess,))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        stand_in = make_stand_in(Path(scratch) / "stand-in")
        pair = stack.enter_context(EmulatedPair(layout, stand_in, Path(scratch)))
        settings = LookaheadSettings(MAX_TOKENS, 1, quick=False, batched_tokens=MAX_TOKENS)
        rates: dict[Rates, Guess] = {(ACCEPTANCE, HIT_RATE): guess}
        bench = LookaheadBench({"set": pair}, rates, settings)
        measured = asyncio.run(bench.run(list(_cells()), tell=_tell, save=lambda _: None))
    done = [one for one in measured.cells if one.runs]
    simulated = bench.simulate([one.cell for one in done], target, drafter)
    rows = []
    for one in done:
        run, foretold = one.runs[0], simulated[one.cell]
        rows.append(
            {
                "policy": one.cell.policy,
                "rtt_ms": one.cell.rtt_ms,
                "batch": one.cell.batch,
                "tokens_per_second": run.tokens_per_second,
                "simulated": foretold,
                "ratio": foretold / run.tokens_per_second,
                "gap_ms": run.gap_ms,
            }
        )
        _tell(f"{one.cell.name}: {foretold / run.tokens_per_second:.3f}, gap {run.gap_ms:.2f} ms")
    load = os.getloadavg()[0]
    output.write_text(json.dumps({"emulated": True, "load": load, "rows": rows}, indent=1))


def _cells() -> Iterator[Cell]:
    for batch in BATCHES:
        for policy in POLICIES:
            for rtt_ms in RTTS_MS:
                yield Cell(policy, "set", rtt_ms, ACCEPTANCE, HIT_RATE, batch, CHAIN_WINDOW)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
