"""Requests to a pretended model, and the text that each must have."""

from __future__ import annotations

import functools

from cluster.decoding.events import Request
from paceline.generation import TokenLogprobs
from paceline.prefix_hash import extend_hash
from paceline.sampling import SamplingParams, SequenceSpec

VOCAB_SIZE = 50
END_TOKEN = 0


def true_token(prefix: list[int], seed: int) -> int:
    """The token that the pretended target chooses; depends on the whole prefix. Rarely an end
    token.
    """
    value = extend_hash(hash(tuple(prefix)), seed)  # a hash of integers is the same in every run
    return END_TOKEN if value % 97 == 0 else 1 + value % (VOCAB_SIZE - 1)


def true_logprobs(position: int, token_id: int) -> TokenLogprobs:
    """What the pretended target tells of a token at a position."""
    return TokenLogprobs(-position - token_id / 100)


@functools.cache
def plain_text(prompt: tuple[int, ...], seed: int, max_tokens: int) -> list[int]:
    """The text of plain decoding."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(true_token(tokens, seed))
        if tokens[-1] == END_TOKEN:
            break
    return tokens[len(prompt) :]


def request(
    sequence_id: int,
    prompt: tuple[int, ...],
    *,
    max_tokens: int = 20,
    policy: str = "chain",
    window: int = 4,
    branches: int = 1,
    tenant: str = "",
    merge: bool = False,
    rule: str = "coupled",
    prompt_logprobs: int | None = None,
) -> Request:
    """A request whose seed is its id. It asks for the log probabilities of its output."""
    spec = SequenceSpec(
        SamplingParams(),
        seed=sequence_id,
        prompt_length=len(prompt),
        end_token_ids=(END_TOKEN,),
        rule=rule,
        logprobs=0,
        prompt_logprobs=prompt_logprobs,
    )
    return Request(
        sequence_id,
        prompt,
        spec,
        max_tokens,
        policy,
        window,
        branches=branches,
        tenant=tenant,
        merge=merge,
    )
