"""Requests whose whole text can be enumerated, and the law that it must have.

A bias leaves a random checkpoint with three tokens. Many requests are served with the seeds 0, 1,
..., and Pearson's test (chi_square.bound) decides whether their texts follow the target's law.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.decoding import step_answers
from cluster.decoding.events import SequenceVerdict
from cluster.decoding.sequence import Sequence as Decoded
from paceline import Completion, GenerateOptions
from paceline.sampling import SequenceSpec
from tests.cluster.system import Checkpoints, System
from tests.tiny import make_tiny_checkpoint
from tests.workers.verification import chi_square
from workers.drafting import draw
from workers.engine.cpu.engine import CpuEngine
from workers.engine.slices import Slice
from workers.verification.candidates import SparseProbs

TOKENS = (10, 11, 12)
PROMPT = (10, 11, 12, 10, 10, 12, 11, 10)
TEMPERATURE = 3.0
NUM_SEEN = 3
NUM_REQUESTS = 624
AT_ONCE = 48


@dataclass(frozen=True)
class Case:
    """A rule, a drafter that fits it, its branches, and the policy."""

    rule: str
    drafter: str
    branches: int
    policy: str = "lockstep"

    def __str__(self) -> str:
        return f"{self.rule}-{self.drafter}-{self.branches}-{self.policy}"

    def options(self, seed: int) -> GenerateOptions:
        return GenerateOptions(
            temperature=TEMPERATURE,
            logit_bias=dict.fromkeys(TOKENS, 200.0),
            seed=seed,
            max_tokens=NUM_SEEN + (2 if self.policy.endswith("chain") else 0),
            policy=self.policy,
            rule=self.rule,
            branches=self.branches,
            window=6,
            drafter=self.drafter,
        )


@dataclass
class Served:
    """How often each triple of tokens came, and counts of what happened to candidates."""

    counts: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((len(TOKENS),) * NUM_SEEN, dtype=np.int64)
    )
    drafted: int = 0
    accepted: int = 0

    def add(self, completion: Completion) -> None:
        seen = completion.token_ids[:NUM_SEEN]
        self.counts[tuple(TOKENS.index(token) for token in seen)] += 1
        self.drafted += completion.stats.drafted
        self.accepted += completion.stats.accepted


def disagreeing_models(folder: Path) -> Checkpoints:
    """Two models that disagree, so that many candidates are refused."""
    return Checkpoints(
        make_tiny_checkpoint(folder / "target"), make_tiny_checkpoint(folder / "drafter", seed=1)
    )


async def ask(system: System, case: Case, first_seed: int) -> list[Completion]:
    """Answer AT_ONCE requests, with seeds from `first_seed` on."""
    seeds = range(first_seed, first_seed + AT_ONCE)
    requests = (system.client.generate(PROMPT, case.options(seed)) for seed in seeds)
    return list(await asyncio.gather(*requests))


async def serve(
    system: System, case: Case, batch: Callable[[Case, int], Awaitable[list[Completion]]]
) -> Served:
    """Answer NUM_REQUESTS requests in batches. `batch` answers AT_ONCE of them, as `ask` does."""
    served = Served()
    for first_seed in range(0, NUM_REQUESTS, AT_ONCE):
        for completion in await batch(case, first_seed):
            served.add(completion)
    await system.settle()
    return served


def law_of(target: Path) -> NDArray[np.float64]:
    """The probability of each triple, by the target's logits and a softmax written out here."""
    engine = CpuEngine(target, threads=1, kv_memory_bytes=1024 * 1024)

    def next_token(tokens: Sequence[int]) -> NDArray[np.float64]:
        (logits_V,) = engine.step([Slice((0,), 0, [*PROMPT, *tokens], 1)])
        weights = np.exp(logits_V[list(TOKENS)].double().numpy() / TEMPERATURE)
        return np.asarray(weights / weights.sum())

    probs = np.ones(())
    for number in range(NUM_SEEN):
        rows = [next_token(tokens) for tokens in product(TOKENS, repeat=number)]
        probs = probs[..., None] * np.array(rows).reshape((len(TOKENS),) * (number + 1))
    return probs


def follows(served: Served, law: NDArray[np.float64]) -> bool:
    """Whether the counts are likely under the law. Wrongly False once in a million."""
    return chi_square.follows(served.counts.ravel(), law.ravel())


def likeliest(kept: SparseProbs, num: int) -> tuple[int, ...]:
    order = np.argsort(-kept.probs_M, kind="stable")
    return tuple(kept.token_ids_M[order[:num]].tolist())


def draws_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the drafter sends its distribution, but candidates that it did not draw from it."""

    def chain_token(kept: SparseProbs, spec: SequenceSpec, position: int) -> int:
        return likeliest(kept, 1)[0]

    def independent(
        kept: SparseProbs, spec: SequenceSpec, position: int, numbers: Sequence[int]
    ) -> tuple[int, ...]:
        return likeliest(kept, 1) * len(numbers)

    def without_replacement(
        kept: SparseProbs, spec: SequenceSpec, position: int, num_children: int
    ) -> tuple[int, ...]:
        return likeliest(kept, num_children)

    monkeypatch.setattr(draw, "draw_chain_token", chain_token)
    monkeypatch.setattr(draw, "draw_independent", independent)
    monkeypatch.setattr(draw, "draw_without_replacement", without_replacement)


def trusts_what_was_drafted(patch: pytest.MonkeyPatch) -> None:
    """Broken: after a sequence is computed again, its next token is the draft's, if any."""
    commit: Any = step_answers._commit

    def trusting(*args: Any) -> None:
        (sequence,) = (one for one in args if isinstance(one, Decoded))
        ahead = sequence.tree.root.children
        trusted = ahead[0].token_id if ahead and not sequence.tree.num_pinned else None
        commit(
            *(
                replace(one, token_id=trusted)
                if isinstance(one, SequenceVerdict) and trusted is not None
                else one
                for one in args
            )
        )

    patch.setattr(step_answers, "_commit", trusting)
