"""Structures compiled by llguidance, which computes masks over a tokenizer's vocabulary.

Limits bound what a grammar may cost: its compilation, each mask, and its memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InternalError, InvalidRequestError
from paceline.structure import Structure, StructureKind
from paceline.text import one_line
from workers.verification.structure import Follower, Matcher

_LIMITS: dict[str, Any] = {
    # Work of a compilation, some 20 ms; of a mask, some 7 ms for the lexer and 1 ms for the parser.
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    # Up to 2 kB each: at most some 20 MB for a sequence.
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
MASK_SECONDS = 0.005
"""Most processor time of a mask, on average over a sequence after its first FREE_MASKS."""
FREE_MASKS = 64

_MAX_ERROR = 300
_FIELD = "structure"


class Grammars:
    """Compiles structures for one tokenizer. Thread-safe, but a matcher is not.

    Making one takes 0.3 s for 49,152 tokens, in which Python's lock is held.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        end_token_ids: Sequence[int],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`folder` has tokenizer.json. `vocab_size`: the number of logits, padding included.

        `end_token_ids`: the checkpoint's, one of which follows a complete text. `clock`: the
        processor time in seconds, by which masks that take too long are found; None: they are not.
        """
        self._clock = clock
        self.end_token_ids = tuple(end_token_ids)
        self._vocab_size = vocab_size
        self._tokenizer: Any = None
        self._trouble = ""
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammars")
        if not end_token_ids:
            self._trouble = "its checkpoint has no end token"
            return
        from llguidance import LLTokenizer  # takes some 50 ms

        try:
            text = (folder / "tokenizer.json").read_text()
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=[*end_token_ids])
        except Exception as error:  # llguidance raises ValueError and others
            self._trouble = f"llguidance cannot use its tokenizer: {one_line(error)}"

    def follower(self, structure: Structure | None) -> Follower | None:
        """A follower of a structure, which is being compiled in a thread; None without one."""
        if structure is None:
            return None
        compiling = self._threads.submit(self.matcher, structure)
        return Follower(compiling.result, self.end_token_ids)

    def matcher(self, structure: Structure) -> Matcher:
        """The matcher of an empty output. Raises InvalidRequestError if it does not compile.

        Equal structures are compiled again: copies of a matcher share the lexer's states, and so
        the limit on them, which one request could use up for others.
        """
        return _Matcher(self._compile(structure), self._vocab_size, self._clock)

    def check(self, structure: Structure) -> Matcher:
        """`matcher`, after a check that the structure allows some text. Raises InvalidRequestError.

        It may take seconds, most of them without Python's lock.
        """
        matcher = self.matcher(structure)
        try:
            possible = bool(matcher.allowed_V().any())
            forced = matcher.forced()[:1]
            matcher.advance(forced)  # It fails if the grammar forces a text without end.
            matcher.retreat(len(forced))
        except InternalError as error:
            raise _refusal(structure, str(error)) from None
        if not possible:
            raise _refusal(structure, "no text fits it")
        return matcher

    def _compile(self, structure: Structure) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        if self._tokenizer is None:
            raise InvalidRequestError(
                _FIELD, f"this server cannot decode with a structure: {self._trouble}"
            )
        grammar = _GRAMMARS[structure.kind](structure)
        limits = LLParserLimits(**_LIMITS)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(structure, matcher.get_error())
        return matcher


def _refusal(structure: Structure, reason: str) -> InvalidRequestError:
    # A pretty-printed excerpt of the grammar, or of the parser's state, may follow the reason.
    lines = [line.strip() for line in reason.split("\n<")[0].splitlines() if line.strip()]
    shown = " ".join(lines)
    shown = shown if len(shown) <= _MAX_ERROR else f"{shown[:_MAX_ERROR]}..."
    return InvalidRequestError(_FIELD, f"the {structure.kind.value} is not usable: {shown}")


def _json_schema(structure: Structure) -> str:
    from llguidance import LLMatcher

    try:
        schema = json.loads(structure.text)
    except (ValueError, RecursionError) as error:
        raise _refusal(structure, f"expected JSON: {one_line(error)}") from None
    if not isinstance(schema, dict | bool):
        raise _refusal(structure, f"expected an object, got {structure.text:.40}")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _regex(structure: Structure) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(structure.text)


def _lark(structure: Structure) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(structure.text)


def _json_object(structure: Structure) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema('{"type": "object"}')


def _choice(structure: Structure) -> str:
    from llguidance import LLMatcher

    texts = dict.fromkeys(structure.choices)
    return LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    )


_GRAMMARS: dict[StructureKind, Callable[[Structure], str]] = {
    StructureKind.JSON_OBJECT: _json_object,
    StructureKind.JSON_SCHEMA: _json_schema,
    StructureKind.REGEX: _regex,
    StructureKind.GRAMMAR: _lark,
    StructureKind.CHOICE: _choice,
}


class _Matcher:
    """A Matcher of llguidance, which never raises: it notes an error and stays in it."""

    __slots__ = ("_bits", "_clock", "_inner", "_num_masks", "_seconds", "_vocab_size")

    def __init__(self, inner: Any, vocab_size: int, clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self._inner = inner
        self._vocab_size = vocab_size
        self._num_masks = -FREE_MASKS
        self._seconds = 0.0
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def advance(self, token_ids: Sequence[int]) -> int:
        taken = int(self._inner.try_consume_tokens(list(token_ids))) if token_ids else 0
        self._check()
        return taken

    def retreat(self, count: int) -> None:
        if count:
            self._inner.rollback(count)
            self._check()

    def allowed_V(self) -> NDArray[np.bool_]:
        begin = 0.0 if self._clock is None else self._clock()
        self._inner.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._clock is not None:
            self._note(self._clock() - begin)
        self._check()
        bits_V = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits_V.view(np.bool_)

    def forced(self) -> list[int]:
        token_ids: list[int] = self._inner.compute_ff_tokens()
        self._check()
        return token_ids

    def accepts(self, token_ids: Sequence[int]) -> int:
        taken = int(self._inner.validate_tokens(list(token_ids)))
        self._check()
        return taken

    def _note(self, seconds: float) -> None:
        """Raises InternalError if masks take too long: a step waits for all of them."""
        self._num_masks += 1
        if self._num_masks > 0:
            self._seconds += seconds
        if self._num_masks >= FREE_MASKS and self._seconds > self._num_masks * MASK_SECONDS:
            raise InternalError(
                f"the request's structure takes {1000 * self._seconds / self._num_masks:.0f} ms a "
                f"token, more than {1000 * MASK_SECONDS:g} ms; make it simpler"
            )

    def _check(self) -> None:
        if self._inner.is_error():
            reason = self._inner.get_error().split("\n<")[0].strip()
            raise InternalError(
                f"the request's structure can be followed no further: {reason[:_MAX_ERROR]}"
            )
