"""Compare the simulator with emulated runs: `python scripts/calibrate_simulator.py FILE [all]`.

An emulated 70B pair runs over real gRPC and the real driver. The simulator runs the same requests,
guesses, profiles and policies. The cells are batches of 1, 4 and 16, each at round trips of 0.1 and
10 ms, which takes about 90 seconds; with `all`, those of `paceline bench lookahead` with that
drafter, which takes ten minutes. FILE becomes JSON with a row per cell: `name`, `policy`, `rtt_ms`,
`batch`, `tokens_per_second`, `simulated` (tokens per second too), `ratio`, `gap_ms`. The figures
are meaningful only if the machine is otherwise idle.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from cluster.decoding.events import Request
from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import HostCosts, Layout, Load
from cluster.simulation.trial import in_swing_of
from deploy.bench.harness import batches_of
from deploy.bench.lookahead import (
    DRAFTER_PROFILE,
    TARGET_PROFILE,
    LookaheadResult,
    in_order,
    measure_cells,
)
from deploy.bench.lookahead_cells import (
    ACCEPTANCES,
    CHAIN_WINDOW,
    HIT_RATES,
    LOOPBACK_RTT_MS,
    Cell,
    LoadRequest,
    cells,
    pair_for,
    requests_of,
    warm_up_of,
)
from workers.emulated.latency_profiles import DeviceProfile, LinkProfile, load_profile

BATCHES = (1, 4, 16)
RTTS_MS = (0.1, 10.0)
POLICIES = ("chain", "pearl", "fanout")
MAX_TOKENS = 160
"""Tokens of a request: enough that one step more or less at the end hardly changes the rate."""
FITTED_PROCESSES = 1.5
"""Processes per core when the simulator's costs were fitted: driver, target and drafter on 2 cores.
"""
CROWDING = 0.25
"""Share that each process beyond FITTED_PROCESSES per core adds to all costs, because it needs a
core too. This value is fitted."""


def main(output: Path, *, every: bool) -> None:
    """Measure and simulate all cells, and write `output`."""
    target, drafter = (load_profile(name) for name in (TARGET_PROFILE, DRAFTER_PROFILE))
    wanted = list(_cells())
    if every:
        wanted = [one for one in cells(target, drafter, quick=False) if not one.parallel]
    result = LookaheadResult(in_order(wanted))
    with pair_for(TARGET_PROFILE, DRAFTER_PROFILE, wanted) as pair:
        measuring = measure_cells(
            {False: pair}, result, max_tokens=MAX_TOKENS, batched_tokens=MAX_TOKENS, tell=_tell
        )
        asyncio.run(measuring)
    rows = []
    for one in result.counted:
        cell, run = one.cell, one.median
        load = requests_of(cell.batch, MAX_TOKENS)
        foretold = simulated_speed(cell, load, target=target, drafter=drafter)
        rows.append(
            {
                "name": cell.name,
                "policy": cell.policy,
                "rtt_ms": cell.rtt_ms,
                "batch": cell.batch,
                "tokens_per_second": run.tokens_per_second,
                "simulated": foretold,
                "ratio": foretold / run.tokens_per_second,
                "gap_ms": run.gap_ms,
            }
        )
        _tell(f"{cell.name}: {foretold / run.tokens_per_second:.3f}, gap {run.gap_ms} ms")
    busy = os.getloadavg()[0]
    output.write_text(json.dumps({"emulated": True, "load": busy, "rows": rows}, indent=1))


def _cells() -> Iterator[Cell]:
    for batch in BATCHES:
        for policy in POLICIES:
            for rtt_ms in RTTS_MS:
                yield Cell(policy, rtt_ms, ACCEPTANCES[1], HIT_RATES[0], batch, CHAIN_WINDOW)


def simulated_speed(
    cell: Cell,
    load: Sequence[LoadRequest],
    *,
    target: DeviceProfile,
    drafter: DeviceProfile,
) -> float:
    """Tokens/s of a cell in the simulator, counted as `measure_cell` does.

    It has the same requests, luck, profiles and policy. So the comparison with the measured speed
    shows how well the simulator's costs of driver, drafters and messages fit
    (cluster/simulation/layout.py).
    """
    off = not cell.drafts
    layout = Layout(
        target=target,
        policy=cell.policy,
        window=max(1, cell.window),
        drafter=None if off else drafter,
        drafters=0 if off else cell.num_drafters,
        replicas=cell.num_targets,
        branches=cell.branches,
        link=LinkProfile(rtt_ms=cell.rtt_ms if cell.rtt_ms > LOOPBACK_RTT_MS else 0.0),
        max_num_seqs=max(64, cell.batch),
        prefix_cache=False,
        costs=_costs_here(cell),
    )
    rounds = [warm_up_of(load, cell.batch), *batches_of(load, cell.batch)]
    starts = list(accumulate(map(len, rounds), initial=0))
    asked = Load(
        requests=starts[-1],
        prompt_tokens=len(load[0].prompt),
        output_tokens=load[0].max_tokens,
        guess=cell.guess,
        concurrency=cell.batch,
    )
    requests = [
        [_simulated_request(number, cell, one) for number, one in enumerate(together, start=start)]
        for start, together in zip(starts, rounds, strict=False)
    ]
    fleet = Fleet(layout, asked, rounds=requests)
    fleet.run()
    answers = {one.request.sequence_id: one for one in fleet.answered}
    tokens, seconds = 0, 0.0
    for start, end in pairwise(starts[1:]):
        counted, lasted = in_swing_of([answers[number].arrivals for number in range(start, end)])
        tokens += counted
        seconds += lasted
    return tokens / seconds


def _costs_here(cell: Cell) -> HostCosts:
    """The simulator's costs on this host, whose cores driver, targets and drafters share."""
    processes = 1 + cell.num_targets + (cell.num_drafters if cell.drafts else 0)
    beyond = processes - FITTED_PROCESSES * len(os.sched_getaffinity(0))
    return HostCosts().times(1 + CROWDING * max(0.0, beyond))


def _simulated_request(number: int, cell: Cell, one: LoadRequest) -> Request:
    return Request(
        sequence_id=number,
        prompt_token_ids=one.prompt,
        spec=one.spec(),
        max_tokens=one.max_tokens,
        policy=cell.policy,
        window=max(1, cell.window),
        branches=cell.branches,
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), every="all" in sys.argv[2:])
