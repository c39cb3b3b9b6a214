"""Sampling parameters and what a worker must know of a sequence, as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import InvalidRequestError
from paceline.rules import Rule

MAX_LOGIT_BIAS = 10_000.0
"""Largest size of a bias. Far beyond any difference of logits (OpenAI allows 100), so small that
no logit leaves float32 for it, whatever penalty comes on top: -inf is for masked tokens alone."""

MAX_REPETITION_PENALTY = 100.0
"""The least is its inverse. It multiplies logits, biases included: these must stay in float32."""

_LEAST_FLOAT32, _MOST_FLOAT32 = 1.1754944e-38, 3.4028234e38
"""What float32, which the wire has, rounds neither to 0 nor to infinity."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the distribution at a position is made from logits (order: see types.proto).

    The defaults leave the model's distribution as it is; temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the choice is the plain argmax."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError naming the first field that is out of range."""

        def require(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InvalidRequestError(name, f"expected {expected}, got {getattr(self, name)}")

        require(
            0 <= self.temperature <= _MOST_FLOAT32,
            "temperature",
            "a finite number of at least 0",
        )
        require(self.top_k >= 0, "top_k", "an integer of at least 0 (0: all tokens)")
        require(_LEAST_FLOAT32 <= self.top_p <= 1, "top_p", "a number above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", "a number from 0 to 1")
        require(
            1 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            f"a number from {1 / MAX_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}",
        )
        require(-2 <= self.presence_penalty <= 2, "presence_penalty", "a number from -2 to 2")
        require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "a number from -2 to 2")
        require(self.min_tokens >= 0, "min_tokens", "an integer of at least 0")
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    "logit_bias", f"token id {token_id} is not in the vocabulary of {vocab_size}"
                )
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise InvalidRequestError(
                    "logit_bias",
                    f"expected biases from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, got {bias} "
                    f"for token {token_id}",
                )


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """All that a worker must know of a sequence besides its token ids (types.proto, SequenceSpec).

    `seed` is a 64-bit key. Tokens before `prompt_length` are prompt. `end_token_ids` end the
    sequence, and are masked until the output holds `sampling.min_tokens` tokens.
    """

    sampling: SamplingParams
    seed: int
    prompt_length: int
    sample_index: int = 0
    end_token_ids: tuple[int, ...] = ()
    rule: Rule = Rule.COUPLED
