"""Turns a caller's request into one that can be decoded: checks, defaults, token ids."""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from cluster.driver.fitting import Speculation, check_deployment, speculation_of
from cluster.driver.stop_strings import StopStrings
from cluster.driver.text import TextCodec
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.generation import GenerateInput, Message
from paceline.options import GenerateOptions
from paceline.prefix_hash import EMPTY_PREFIX_HASH, hash_on
from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.load.checkpoint import CheckpointInfo

_log = logging.getLogger(__name__)

HASHED_AT_ONCE = 2048
"""Tokens of a prompt, some 1 ms, that are hashed before the event loop may go on."""

_SAMPLING_FIELDS = tuple(SamplingParams.__dataclass_fields__.keys() - {"logit_bias"})


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with all defaults filled in."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    spec: SequenceSpec
    max_tokens: int
    stop: StopStrings
    speculation: Speculation
    tenant: str
    prompt_hash: int | None = None
    """paceline.prefix_hash of the prompt, computed off the event loop; None: not known."""


class RequestResolver:
    """Checks requests against the checkpoint and fills in its defaults.

    The bounds of each option are checked where a request is read (paceline/wire.py).
    """

    def __init__(self, codec: TextCodec, checkpoint: CheckpointInfo, defaults: Speculation) -> None:
        self._codec = codec
        self._checkpoint = checkpoint
        self._defaults = defaults

    def resolve(
        self,
        generate_input: GenerateInput,
        options: GenerateOptions,
        *,
        room: int,
        drafters: Mapping[str, Collection[str]] | None = None,
        num_drafters: int | None = None,
        num_groups: int = 1,
    ) -> ResolvedRequest:
        """Check a request and return what to decode. Raises InvalidRequestError with the field.

        `room`: the most tokens of a sequence. `drafters`: the deployed kinds, and the rules that
        each can draft for; None: not known. `num_drafters`: how many are deployed. `num_groups`:
        target groups. This tokenizes, so call it off the event loop.
        """
        speculation = speculation_of(options, self._defaults, drafters or ())
        check_deployment(speculation, drafters, num_drafters=num_drafters, num_groups=num_groups)
        sampling = self._sampling(options)
        stop_token_ids = self._token_ids("stop_token_ids", options.stop_token_ids)
        self._check_length(generate_input, room)
        request_id = options.request_id or uuid.uuid4().hex
        try:
            prompt_token_ids = self._encode(generate_input)
        except InvalidRequestError as error:
            if error.__cause__ is not None:
                _log.warning("request %s: %s", request_id, error, exc_info=error.__cause__)
            raise
        ends = () if options.ignore_eos else self._checkpoint.end_token_ids
        end_token_ids = tuple(dict.fromkeys((*ends, *stop_token_ids)))
        if sampling.min_tokens and len(end_token_ids) >= self._checkpoint.vocab_size:
            raise InvalidRequestError(
                "stop_token_ids",
                f"they leave no token to choose before min_tokens "
                f"({sampling.min_tokens}): expected fewer than the {self._checkpoint.vocab_size} "
                "of the vocabulary, or min_tokens 0",
            )
        return ResolvedRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            spec=SequenceSpec(
                sampling=sampling,
                seed=secrets.randbits(63) if options.seed is None else options.seed,
                prompt_length=len(prompt_token_ids),
                end_token_ids=end_token_ids,
                rule=speculation.rule,
            ),
            max_tokens=_max_tokens(options, len(prompt_token_ids), room),
            stop=StopStrings(options.stop),
            speculation=speculation,
            tenant=options.tenant or "",
            prompt_hash=_hash(prompt_token_ids),
        )

    def _sampling(self, options: GenerateOptions) -> SamplingParams:
        set_fields = {
            name: value
            for name in _SAMPLING_FIELDS
            if (value := getattr(options, name)) is not None
        }
        if options.logit_bias:
            set_fields["logit_bias"] = dict(options.logit_bias)
        sampling = replace(self._checkpoint.default_sampling, **set_fields)
        sampling.validate(self._checkpoint.vocab_size)
        return sampling

    def _check_length(self, generate_input: GenerateInput, room: int) -> None:
        """Refuse text that cannot fit, before tokenizing it."""
        if isinstance(generate_input, str):
            characters = len(generate_input)
        else:
            characters = sum(len(m.content) for m in generate_input if isinstance(m, Message))
        if characters > room * self._codec.longest_token:
            raise PromptTooLongError(
                "prompt",
                f"it has {characters} characters, which cannot fit into {room} tokens; shorten it",
            )

    def _encode(self, generate_input: GenerateInput) -> tuple[int, ...]:
        if isinstance(generate_input, str):
            return self._codec.encode_prompt(generate_input)
        if generate_input and all(isinstance(item, Message) for item in generate_input):
            return self._codec.encode_messages(cast("Sequence[Message]", generate_input))
        if not generate_input:
            raise InvalidRequestError("prompt_token_ids", "expected at least one token, got none")
        return self._token_ids("prompt_token_ids", cast("Sequence[int]", generate_input))

    def _token_ids(self, field: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        vocab_size = self._checkpoint.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    field, f"token id {token_id} is not in the vocabulary of {vocab_size}"
                )
        return tuple(token_ids)


def _max_tokens(options: GenerateOptions, prompt_length: int, room: int) -> int:
    """The number of tokens asked for, or as many as fit."""
    if prompt_length >= room:
        raise PromptTooLongError(
            "prompt",
            f"it has {prompt_length} tokens, but prompt and output together may have {room} here; "
            f"shorten it to at most {room - 1}",
        )
    if options.max_tokens is None:
        return room - prompt_length
    if options.min_tokens is not None and options.min_tokens > options.max_tokens:
        raise InvalidRequestError(
            "min_tokens",
            f"expected at most max_tokens ({options.max_tokens}), got {options.min_tokens}",
        )
    return min(options.max_tokens, room - prompt_length)


def _hash(token_ids: Sequence[int]) -> int:
    """The hash of a prompt. The thread releases Python's lock after each piece."""
    prefix_hash = EMPTY_PREFIX_HASH
    for first in range(0, len(token_ids), HASHED_AT_ONCE):
        prefix_hash = hash_on(prefix_hash, token_ids[first : first + HASHED_AT_ONCE])
        time.sleep(0)
    return prefix_hash
