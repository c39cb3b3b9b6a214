"""A cell of `bench lookahead` in the simulator: the same requests, luck, profiles and policy.

What it says beside what was measured is how well the simulator's costs of driver, drafters and
messages (cluster/simulation/costs.py) fit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise

from cluster.decoding.events import Request
from cluster.decoding.policies import PolicyName
from cluster.simulation.costs import HostCosts
from cluster.simulation.figures import in_swing_of
from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import Layout
from cluster.simulation.layout import Load as SimulatedLoad
from deploy.bench.lookahead_cells import Cell
from deploy.bench.lookahead_load import LoadRequest, rounds_of, warm_up_of
from workers.emulated.profiles import DeviceProfile, LinkProfile
from workers.emulated.replay_text import Guess, ReplayText

LOOPBACK_MS = 0.1
"""A link that is that short is none: what loopback takes is among the simulator's costs."""
FITTED_PROCESSES = 1.5
"""For each core: so many there were where the costs were fitted, a driver, a target and a drafter
on two cores."""
CROWDING = 0.25
"""What each process beyond that adds to all costs, for it wants a core as well. Also fitted."""


def simulated_speed(
    cell: Cell,
    load: Sequence[LoadRequest],
    guess: Guess,
    text: ReplayText,
    *,
    target: DeviceProfile,
    drafter: DeviceProfile,
) -> float:
    """Tokens a second, counted as lookahead_measure.py does."""
    off = cell.policy is PolicyName.OFF
    layout = Layout(
        target=target,
        policy=cell.policy,
        window=max(1, cell.window),
        drafter=None if off else drafter,
        drafters=0 if off else cell.num_drafters,
        replicas=cell.num_targets,
        branches=cell.branches,
        link=LinkProfile(rtt_ms=cell.rtt_ms if cell.rtt_ms > LOOPBACK_MS else 0.0),
        max_num_seqs=max(64, cell.batch),
        prefix_cache=False,
        costs=_costs_here(cell),
    )
    rounds = [warm_up_of(load, cell.batch), *rounds_of(load, cell.batch)]
    starts = list(accumulate(map(len, rounds), initial=0))
    asked = SimulatedLoad(
        requests=starts[-1],
        prompt_tokens=len(load[0].prompt),
        output_tokens=load[0].max_tokens,
        guess=guess,
        concurrency=cell.batch,
    )
    requests = [
        [_request(number, cell, one) for number, one in enumerate(together, start=start)]
        for start, together in zip(starts, rounds, strict=False)
    ]
    fleet = Fleet(layout, asked, rounds=requests, text=text)
    fleet.run()
    answers = {one.request.sequence_id: one for one in fleet.answered}
    tokens, seconds = 0, 0.0
    for start, end in pairwise(starts[1:]):
        counted, lasted = in_swing_of([answers[number] for number in range(start, end)])
        tokens += counted
        seconds += lasted
    return tokens / seconds


def _costs_here(cell: Cell) -> HostCosts:
    """Driver, targets and drafters of a cell share this host's cores."""
    processes = 1 + cell.num_targets + (0 if cell.policy is PolicyName.OFF else cell.num_drafters)
    beyond = processes - FITTED_PROCESSES * len(os.sched_getaffinity(0))
    return HostCosts().times(1 + CROWDING * max(0.0, beyond))


def _request(number: int, cell: Cell, one: LoadRequest) -> Request:
    return Request(
        sequence_id=number,
        prompt_token_ids=one.prompt,
        spec=one.spec(),
        max_tokens=one.max_tokens,
        policy=cell.policy,
        window=max(1, cell.window),
        branches=cell.branches,
    )
