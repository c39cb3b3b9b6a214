"""Turns a caller's request into one that can be decoded: checks, defaults, token ids."""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from cluster.decoding.instructions import FinishReason
from cluster.decoding.predicted import PredictedText, Prediction
from cluster.driver.fitting import Speculation, check_deployment, speculation_of
from cluster.driver.stop_strings import StopStrings
from cluster.driver.structure_check import StructureChecker
from cluster.driver.text import TextCodec, TextStream
from paceline.chat import Chat, Message
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.generation import GenerateInput, Tokens, chat_of
from paceline.limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_PROMPT_BYTES,
    MAX_PROMPT_LOGPROBS,
    MAX_SEQUENCE_TOKENS,
)
from paceline.options import GenerateOptions, check_count
from paceline.prefix_hash import EMPTY_PREFIX_HASH, hash_on
from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.load.checkpoint import CheckpointInfo
from workers.verification.grammars import Grammars
from workers.verification.structure import Matcher

_log = logging.getLogger(__name__)

HASHED_AT_ONCE = 2048
"""Tokens of a prefix, some 1 ms, that are hashed before the event loop may go on."""

COMPILE_SECONDS = 0.25
"""Most processor time to compile a structure. Workers compile it again, beside their steps; a step
that already needs its mask waits for that."""

_SAMPLING_FIELDS = tuple(SamplingParams.__dataclass_fields__.keys() - {"logit_bias"})


@dataclass(frozen=True, slots=True)
class ResolvedSample:
    """What a sample of a request has of its own.

    `text` has read `output_token_ids`, which the caller has already. `finish_reason`: set if they
    end the output.
    """

    prefix_hash: int
    """paceline.prefix_hash of the prompt and of `output_token_ids`, computed off the event loop."""
    text: TextStream
    output_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    matcher: Matcher | None = None
    """Of the structure that the output must have, after `output_token_ids`."""
    prediction: Prediction | None = None
    """What the caller expects, after `output_token_ids`."""


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with all defaults filled in. `spec` is that of sample 0."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    spec: SequenceSpec
    max_tokens: int
    stop: StopStrings
    speculation: Speculation
    tenant: str
    samples: tuple[ResolvedSample, ...]
    steady: bool = False
    tells_refused: bool = False
    in_reasoning: bool = False
    """The prompt ends inside `<think>`."""

    def spec_of(self, sample: int) -> SequenceSpec:
        """The spec of the sample with this number. Only the first tells of the prompt."""
        if sample == 0:
            return self.spec
        return replace(self.spec, sample_index=sample, prompt_logprobs=None)


class RequestResolver:
    """Checks requests against the checkpoint and fills in its defaults.

    The bounds of each option are checked where a request is read (paceline/wire/requests.py).
    """

    def __init__(
        self,
        codec: TextCodec,
        checkpoint: CheckpointInfo,
        defaults: Speculation,
        grammars: Grammars | None = None,
        checker: StructureChecker | None = None,
    ) -> None:
        """`grammars`: compiles structures; None: requests with one are refused.

        `checker`: has compiled a structure before `grammars` does; None: nothing has.
        """
        self._grammars = grammars
        self._checker = checker
        self._codec = codec
        self._checkpoint = checkpoint
        self.defaults = defaults

    def resolve(
        self,
        generate_input: GenerateInput,
        options: GenerateOptions,
        *,
        room: int,
        drafters: Mapping[str, Collection[str]] | None = None,
        num_drafters: int | None = None,
        num_groups: int = 1,
        most_matchers: int = 1,
    ) -> ResolvedRequest:
        """Check a request and return what to decode. Raises InvalidRequestError with the field.

        `room`: the most tokens of a sequence. `drafters`: the deployed kinds, and the rules that
        each can draft for; None: not known. `num_drafters`: how many are deployed. `num_groups`:
        target groups. `most_matchers`: how many samples get one. This tokenizes, so call it off the
        event loop.
        """
        speculation = speculation_of(options, self.defaults, drafters or ())
        check_deployment(speculation, drafters, num_drafters=num_drafters, num_groups=num_groups)
        sampling = self._sampling(options)
        stop_token_ids = self._token_ids("stop_token_ids", options.stop_token_ids)
        if options.truncate_prompt is None:
            self._check_length(generate_input, room)
        matcher = self._matcher(options, sampling)
        request_id = options.request_id or uuid.uuid4().hex
        try:
            whole = MAX_SEQUENCE_TOKENS if options.truncate_prompt is not None else room
            prompt_token_ids, in_reasoning = self._encode(generate_input, whole)
        except InvalidRequestError as error:
            if error.__cause__ is not None:
                _log.warning("request %s: %s", request_id, error, exc_info=error.__cause__)
            raise
        prompt_token_ids = _truncated(prompt_token_ids, options, room)
        _check_prompt_logprobs(options, len(prompt_token_ids))
        ends = () if options.ignore_eos else self._checkpoint.end_token_ids
        end_token_ids = tuple(dict.fromkeys((*ends, *stop_token_ids)))
        if sampling.min_tokens and len(end_token_ids) >= self._checkpoint.vocab_size:
            raise InvalidRequestError(
                "stop_token_ids",
                f"they leave no token to choose before min_tokens "
                f"({sampling.min_tokens}): expected fewer than the {self._checkpoint.vocab_size} "
                "of the vocabulary, or min_tokens 0",
            )
        max_tokens = _max_tokens(options, len(prompt_token_ids), room)
        stop = StopStrings(options.stop)
        new_text = partial(
            TextStream,
            self._codec,
            stop=stop,
            end_token_ids=end_token_ids,
            includes_stop=options.include_stop,
            special=options.special_tokens,
        )
        samples = self._samples(
            options, prompt_token_ids, max_tokens, new_text, matcher, most_matchers
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
                logprobs=options.logprobs,
                prompt_logprobs=options.prompt_logprobs,
                structure=options.structure,
                bad_words=self._bad_words(options.bad_words),
            ),
            max_tokens=max_tokens,
            stop=stop,
            speculation=speculation,
            tenant=options.tenant or "",
            in_reasoning=in_reasoning,
            samples=samples,
            steady=options.steady,
            tells_refused=options.tell_refused and not options.steady,
        )

    def _samples(
        self,
        options: GenerateOptions,
        prompt_token_ids: tuple[int, ...],
        max_tokens: int,
        new_text: Callable[[], TextStream],
        matcher: Matcher | None,
        most_matchers: int,
    ) -> tuple[ResolvedSample, ...]:
        """What each sample has of its own, after what is resumed of it."""
        field, resumed = self._resumed(options)
        count = len(resumed) * len(prompt_token_ids)
        check_count("samples", count, MAX_SEQUENCE_TOKENS, "tokens of prompt, times samples")
        texts = [new_text() for _ in resumed]
        reasons = [
            _read_resumed(field, text, token_ids, max_tokens)
            for text, token_ids in zip(texts, resumed, strict=True)
        ]
        matchers: list[Matcher | None] = [None] * len(resumed)
        if matcher is not None:
            open_ones = [
                None if reason else token_ids
                for token_ids, reason in zip(resumed, reasons, strict=True)
            ]
            matchers = self._matchers(options, matcher, field, open_ones, most_matchers)
        prompt_hash = _hash(EMPTY_PREFIX_HASH, prompt_token_ids)
        predicted = None
        if options.prediction:
            token_ids = self._codec.encode_prompt(options.prediction, special_tokens=False)
            predicted = PredictedText(token_ids)
        return tuple(
            ResolvedSample(
                _hash(prompt_hash, token_ids),
                text,
                token_ids,
                reason,
                own,
                None if predicted is None else Prediction(predicted, token_ids),
            )
            for token_ids, text, reason, own in zip(resumed, texts, reasons, matchers, strict=True)
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it is and behind a space, without blanks before it."""
        runs: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                try:
                    runs[self._codec.encode_prompt(text, special_tokens=False)] = None
                except InvalidRequestError:
                    if text is bare:
                        raise InvalidRequestError("bad_words", f"{word!r} has no tokens") from None
        check_count("bad_words", sum(map(len, runs)), MAX_BAD_WORD_TOKENS, "tokens")
        return tuple(runs)

    def _matcher(self, options: GenerateOptions, sampling: SamplingParams) -> Matcher | None:
        """The matcher of the request's structure. Compiling it may take a quarter of a second."""
        if options.structure is None:
            return None
        if self._grammars is None:
            raise InvalidRequestError("structure", "this server cannot decode with a structure")
        if options.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos", "expected false with a structure, which an end token completes"
            )
        if sampling.min_tokens:
            raise InvalidRequestError(
                "min_tokens",
                f"expected 0 with a structure, which says where a text may end, got "
                f"{sampling.min_tokens}",
            )
        if self._checker is not None:
            self._checker.check(options.structure)
        begin = time.thread_time()
        matcher = self._grammars.check(options.structure)
        took = time.thread_time() - begin
        if took > COMPILE_SECONDS:
            raise InvalidRequestError(
                "structure",
                f"it takes {took:.1f} s to compile, more than {COMPILE_SECONDS:g} s; make it "
                "simpler",
            )
        return matcher

    def _matchers(
        self,
        options: GenerateOptions,
        first: Matcher,
        field: str,
        resumed: Sequence[Sequence[int] | None],
        most: int,
    ) -> list[Matcher | None]:
        """The matchers of all samples after what is resumed of them; `first` becomes sample 0's.

        `resumed`: None for a sample that has ended. A sample can do without a matcher, which only
        gives candidates. So there are at most `most`, made within COMPILE_SECONDS. Raises
        InvalidRequestError for a text that the structure refuses.
        """
        assert self._grammars is not None
        assert options.structure is not None
        made: list[Matcher | None] = []
        begin = time.thread_time()
        for token_ids in resumed[1:]:
            if token_ids is None:
                made.append(None)
                continue
            own = None
            _follow_resumed(field, first, token_ids)
            first.retreat(len(token_ids))
            if 1 + len(made) < most and time.thread_time() - begin < COMPILE_SECONDS:
                own = self._grammars.matcher(options.structure)
                _follow_resumed(field, own, token_ids)
            made.append(own)
        _follow_resumed(field, first, resumed[0] or ())
        return [first if most else None, *made]

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
        characters = num_characters(generate_input)
        if characters > self._most_characters(room):
            raise PromptTooLongError(
                "prompt",
                f"it has {characters} characters, which cannot fit into {room} tokens; shorten it",
            )

    def _most_characters(self, room: int) -> int:
        return min(room * self._codec.longest_token, MAX_PROMPT_BYTES)

    def _encode(self, generate_input: GenerateInput, room: int) -> tuple[tuple[int, ...], bool]:
        """Token ids, and whether they end inside `<think>`."""
        if isinstance(generate_input, str):
            return self._codec.encode_prompt(generate_input), False
        chat = chat_of(generate_input)
        if chat is not None:
            return self._codec.encode_chat(chat, most_characters=self._most_characters(room))
        token_ids = cast("Sequence[int]", generate_input)
        if not token_ids:
            raise InvalidRequestError("prompt_token_ids", "expected at least one token, got none")
        return self._token_ids("prompt_token_ids", token_ids), False

    def tokenize(
        self, given: str | Chat, *, special_tokens: bool | None, strings: bool, room: int
    ) -> Tokens:
        """The tokens of a text or chat. Raises InvalidRequestError. Call it off the event loop.

        `special_tokens`: whether the tokenizer adds its own; None: to a text.
        """
        most = self._most_characters(MAX_SEQUENCE_TOKENS)
        if isinstance(given, str):
            token_ids = self._codec.encode_prompt(given, special_tokens=special_tokens is not False)
        else:
            token_ids, _ = self._codec.encode_chat(
                given, special_tokens=bool(special_tokens), most_characters=most
            )
        check_count("prompt", len(token_ids), MAX_SEQUENCE_TOKENS, "tokens", PromptTooLongError)
        told = self._codec.strings_of(token_ids) if strings else ()
        return Tokens(token_ids, told, room)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises InvalidRequestError. Call it off the event loop."""
        return self._codec.decode_with_special(self._token_ids("token_ids", token_ids))

    def _resumed(self, options: GenerateOptions) -> tuple[str, list[tuple[int, ...]]]:
        """The output of each sample that the caller has, and the option that tells it."""
        num_samples = options.samples or 1
        field, resumed = "resume_samples", [*options.resume_samples]
        if not resumed:
            field, resumed = "resume", [options.resume]
            if options.resume and num_samples > 1:
                why = f"expected resume_samples in its place, since there are {num_samples} samples"
                raise InvalidRequestError(field, why)
        elif options.resume:
            raise InvalidRequestError(field, "excludes resume; leave that out")
        check_count(field, len(resumed), num_samples, "samples")
        if any(resumed) and options.seed is None:
            raise InvalidRequestError(
                field, "expected the seed of the stream that it resumes too, got none"
            )
        token_ids = [self._token_ids(field, one) for one in resumed]
        return field, token_ids + [()] * (num_samples - len(resumed))

    def _token_ids(self, field: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        vocab_size = self._checkpoint.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    field, f"token id {token_id} is not in the vocabulary of {vocab_size}"
                )
        return tuple(token_ids)


def num_characters(generate_input: GenerateInput) -> int:
    """Characters to render and to tokenize. Prompts given as token ids have none."""
    if isinstance(generate_input, str):
        return len(generate_input)
    chat = chat_of(generate_input)
    if chat is None:
        return 0
    count = len(chat.tools) + len(chat.template_kwargs)  # Texts, as they came over the wire.
    for one in chat.messages:
        assert isinstance(one, Message)
        count += len(one.content) + len(one.reasoning_content)
        count += sum(len(call.name) + len(call.arguments) for call in one.tool_calls)
    return count


def _check_prompt_logprobs(options: GenerateOptions, prompt_length: int) -> None:
    """Refuse more log probabilities of the prompt than a driver keeps for a caller."""
    if options.prompt_logprobs is not None:
        if options.resume or any(options.resume_samples):
            raise InvalidRequestError("prompt_logprobs", "expected none with resume; leave it out")
        count = (1 + options.prompt_logprobs) * prompt_length
        unit = "log probabilities (1 + prompt_logprobs, times the prompt's tokens)"
        check_count("prompt_logprobs", count, MAX_PROMPT_LOGPROBS, unit)


def _truncated(
    prompt_token_ids: tuple[int, ...], options: GenerateOptions, room: int
) -> tuple[int, ...]:
    most = options.truncate_prompt
    if most == 0:
        most = max(1, room - (options.max_tokens or 1))
    return prompt_token_ids if most is None else prompt_token_ids[-most:]


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


def _read_resumed(
    field: str, text: TextStream, token_ids: Sequence[int], max_tokens: int
) -> FinishReason | None:
    """Have `text` read output that the caller has already. Returns why the output ends with it.

    None: it goes on. Raises InvalidRequestError if it ends before its last token. The thread
    releases Python's lock after each piece.
    """
    ended_at: int | None = None
    for first in range(0, len(token_ids), HASHED_AT_ONCE):
        ended_at = text.skip(token_ids[first : first + HASHED_AT_ONCE])
        if ended_at is not None:
            ended_at += first
            break
        time.sleep(0)
    length = min(max_tokens, len(token_ids) if ended_at is None else ended_at)
    if length < len(token_ids):
        raise InvalidRequestError(
            field, f"the output ends after {length} tokens, got {len(token_ids)}"
        )
    if ended_at is not None:
        return FinishReason.STOP
    return FinishReason.LENGTH if length == max_tokens else None


def _follow_resumed(field: str, matcher: Matcher, token_ids: Sequence[int]) -> None:
    """Have the matcher take output that the caller has already. Raises InvalidRequestError."""
    for first in range(0, len(token_ids), HASHED_AT_ONCE):
        piece = token_ids[first : first + HASHED_AT_ONCE]
        taken = matcher.advance(piece)
        if taken < len(piece):
            raise InvalidRequestError(
                field, f"the structure refuses token {piece[taken]} after {first + taken} others"
            )


def _hash(prefix_hash: int, token_ids: Sequence[int]) -> int:
    """The hash of a prefix with more tokens. The thread releases Python's lock after each piece."""
    for first in range(0, len(token_ids), HASHED_AT_ONCE):
        prefix_hash = hash_on(prefix_hash, token_ids[first : first + HASHED_AT_ONCE])
        time.sleep(0)
    return prefix_hash
