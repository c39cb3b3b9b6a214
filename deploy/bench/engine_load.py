"""The requests that engines are measured with: seeded lengths, random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PROMPT_TOKENS = (20, 600)
OUTPUT_TOKENS = (16, 256)
_LOWEST_ID = 3
"""Ids below are often special ones."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how many tokens to continue it with; an end token does not end it.

    Every engine ignores the end of sequence alike, else the lengths would be the model's.
    """

    prompt_token_ids: tuple[int, ...]
    output_tokens: int


def random_tokens(count: int, *, vocab_size: int, seed: int) -> list[int]:
    """`count` token ids. The same arguments give the same ids."""
    generator = random.Random(seed)
    return [generator.randrange(_LOWEST_ID, vocab_size) for _ in range(count)]


def seeded_requests(
    count: int,
    *,
    vocab_size: int,
    seed: int,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
    output_tokens: tuple[int, int] = OUTPUT_TOKENS,
) -> list[Request]:
    """Requests of uniform lengths, bounds included. The same arguments give the same requests."""
    generator = random.Random(seed)
    requests = []
    for number in range(count):
        length = generator.randint(*prompt_tokens)
        tokens = random_tokens(length, vocab_size=vocab_size, seed=seed * 100_000 + number)
        requests.append(Request(tuple(tokens), generator.randint(*output_tokens)))
    return requests


def batches_of(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """The requests in their order, `size` at a time."""
    return [requests[start : start + size] for start in range(0, len(requests), size)]
