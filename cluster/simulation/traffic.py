"""The requests of a load, and when they arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator

from cluster.decoding.events import Request
from cluster.simulation.layout import Layout, Load
from paceline.sampling import SamplingParams, SequenceSpec
from workers.emulated.replay_text import NUM_RESERVED, PrefixReader, ReplayText

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 32768


def requests_of(load: Load, layout: Layout) -> Iterator[Request]:
    """The requests in order. No two prompts share a prefix."""
    sampling = SamplingParams(temperature=load.temperature)
    for number in range(load.first_request, load.first_request + load.requests):
        yield Request(
            sequence_id=number,
            prompt_token_ids=_prompt(number, load.prompt_tokens),
            spec=SequenceSpec(sampling, seed=number, prompt_length=load.prompt_tokens),
            max_tokens=load.output_tokens,
            policy=layout.policy,
            window=layout.window,
            branches=layout.branches,
        )


def arrival_times(load: Load) -> Iterator[float]:
    """Seconds at which requests arrive that wait for nobody: a Poisson process."""
    assert load.per_second is not None
    luck = random.Random(f"{load.guess.seed} {load.first_request}")
    time = 0.0
    for _ in range(load.requests):
        yield time
        time += luck.expovariate(load.per_second)


def is_true_text(text: ReplayText, request: Request, token_ids: list[int]) -> bool:
    """Whether an answer is the text of plain decoding."""
    reader = PrefixReader().read(request.prompt_token_ids, 0)
    for position, token_id in enumerate(token_ids, start=len(request.prompt_token_ids)):
        if text.next_token(reader.digest(), request.spec) != token_id:
            return False
        reader.read_one(token_id, position)
    return True


def _prompt(number: int, length: int) -> tuple[int, ...]:
    """The request's number in base `VOCAB_SIZE - NUM_RESERVED`, then one token repeated."""
    base = VOCAB_SIZE - NUM_RESERVED
    first = (number % base, number // base % base, number // base**2)
    return tuple(NUM_RESERVED + digit for digit in (*first, *[0] * length)[:length])
