"""One cell of `bench lookahead` beside plain decoding: what drafting gives an emulated 70B pair."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.decoding.policies.fanout import FANOUT
from deploy.bench.lookahead import DRAFTER_PROFILE, TARGET_PROFILE, guesses_of
from deploy.bench.lookahead_cells import cells, plain_cell, set_load
from deploy.bench.lookahead_pairs import EmulatedPair, PairLayout, measure_cell
from paceline.v1 import trace_pb2
from workers.emulated.profiles import load_profile
from workers.models.stand_in import make_stand_in

USUAL_TOKENS = 160
"""The tokens of a request. The four requests of a measurement then take 11 s."""


@dataclass(frozen=True, slots=True)
class EmulatedGain:
    """Speeds in tokens/s of one sequence, on devices that replay latency profiles."""

    policy: str
    acceptance: float
    plain: float
    drafted: float
    target_gpus: int
    same_text: bool

    @property
    def times(self) -> float:
        """The speed over that of plain decoding."""
        return self.drafted / self.plain


async def emulated_gain(
    max_tokens: int = USUAL_TOKENS,
    *,
    tell: Callable[[str], None],
    on_round: Callable[[trace_pb2.TraceResponse], None],
) -> EmulatedGain:
    """Start the pair, measure both, end it. `on_round` gets the rounds of the second."""
    target = load_profile(TARGET_PROFILE, role="target")
    drafter = load_profile(DRAFTER_PROFILE, role="drafter")
    (cell,) = cells(target, drafter, quick=True, parts=(FANOUT.name,))
    guess = guesses_of([cell], max_tokens)[cell.acceptance, cell.hit_rate]
    load = set_load(1, max_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        tell("an emulated 70B: starting its processes")
        stand_in = make_stand_in(Path(scratch) / "stand-in")
        layout = PairLayout(
            TARGET_PROFILE, DRAFTER_PROFILE, cell.num_drafters, (cell.rtt_ms,), (guess,)
        )
        with EmulatedPair(layout, stand_in, Path(scratch)) as pair:
            tell("an emulated 70B: plain decoding")
            plain = await measure_cell(pair, plain_cell(1, "set"), load, guess)
            tell(f"an emulated 70B: {cell.policy}")
            drafted = await measure_cell(pair, cell, load, guess, on_round=on_round)
    return EmulatedGain(
        policy=cell.policy,
        acceptance=cell.acceptance or 0.0,
        plain=plain.tokens_per_second,
        drafted=drafted.tokens_per_second,
        target_gpus=target.gpus,
        same_text=plain.texts == drafted.texts,
    )
