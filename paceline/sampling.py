"""Sampling parameters, and what a worker must know of a sequence, as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import InvalidRequestError
from paceline.limits import MAX_BAD_WORD_TOKENS
from paceline.options import check_count, check_option
from paceline.structure import Structure


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the distribution at a position is made from logits; types.proto gives the order.

    The defaults leave the model's distribution unchanged. Temperature 0 is greedy.
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
        """Whether the distribution depends on the tokens before the position."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError, which names the first field that is out of range."""
        for name in self.__dataclass_fields__:
            check_option(name, getattr(self, name))
        for token_id in self.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    "logit_bias", f"token id {token_id} is not in the vocabulary of {vocab_size}"
                )


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a worker must know of a sequence besides its token ids (types.proto, SequenceSpec).

    `seed` is a 64-bit key. Tokens before `prompt_length` are prompt. `end_token_ids` end the
    sequence; they are masked until the output has `sampling.min_tokens` tokens. `rule`: the name of
    the verification rule, which the receiver of the spec looks up. `structure`: what the
    output must be; None: any text. `logprobs`, `prompt_logprobs`: how many of the likeliest tokens
    are told with each token's log probability; None: no log probabilities. `bad_words`: runs of
    tokens; where the output ends with all of a run but its last token, that one is masked.
    """

    sampling: SamplingParams
    seed: int
    prompt_length: int
    sample_index: int = 0
    end_token_ids: tuple[int, ...] = ()
    rule: str = "coupled"
    structure: Structure | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError, which names the field that is out of range.

        `sampling` and `structure` are checked by their own.
        """
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                check_option(name, count)
        check_count("bad_words", sum(map(len, self.bad_words)), MAX_BAD_WORD_TOKENS, "tokens")
        if not all(self.bad_words):
            raise InvalidRequestError("bad_words", "expected words with tokens, got one without")
        ends = ("end_token_ids", self.end_token_ids)
        for name, token_ids in (ends, *(("bad_words", word) for word in self.bad_words)):
            if token_ids and max(token_ids) >= vocab_size:
                raise InvalidRequestError(
                    name, f"token id {max(token_ids)} is not in the vocabulary of {vocab_size}"
                )
