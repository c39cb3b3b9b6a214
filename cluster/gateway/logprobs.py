"""Log probabilities as OpenAI's and vLLM's clients read them.

A token's string is the text that becomes certain with its bytes, as vLLM has it: the strings of an
answer concatenate to text without broken characters, and a token that ends within a character may
have an empty one. OpenAI's `bytes` are the token's own.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.generation import TokenLogprobs

Json = dict[str, Any]

_LEAST = -9999.0
"""JSON has no infinity. vLLM's clients know this number."""


class TokenTexts:
    """The strings of tokens, one after another."""

    def __init__(self) -> None:
        self.offset = 0
        """Characters before the next token."""
        self._unfinished = b""

    def of(self, token: bytes) -> str:
        """The string of a token, if it came next."""
        return codecs.utf_8_decode(self._unfinished + token, "replace", False)[0]

    def push(self, token: bytes) -> str:
        """The string of the next token."""
        given = self._unfinished + token
        text, used = codecs.utf_8_decode(given, "replace", False)
        self._unfinished = given[used:]
        self.offset += len(text)
        return text


def text_of(logprobs: Iterable[TokenLogprobs]) -> str:
    return b"".join(one.token for one in logprobs).decode(errors="replace")


def of_completion(texts: TokenTexts, logprobs: Iterable[TokenLogprobs]) -> Json:
    """`logprobs` of a completion's choice. `texts`: the tokens before these.

    As vLLM's, `top_logprobs` have the token itself too.
    """
    told: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for one in logprobs:
        top = None
        if one.logprob is not None:
            top = {texts.of(one.token): _bounded(one.logprob)}
            for token, logprob in _likeliest(one):
                name = texts.of(token)  # Those of two tokens may be equal.
                top[name] = max(top.get(name, _LEAST), logprob)
        told["text_offset"].append(texts.offset)
        told["token_logprobs"].append(None if one.logprob is None else _bounded(one.logprob))
        told["tokens"].append(texts.push(one.token))
        told["top_logprobs"].append(top)
    return told


def of_chat(texts: TokenTexts, logprobs: Iterable[TokenLogprobs]) -> Json:
    """`logprobs` of a chat's choice. `texts`: the tokens before these."""
    content = []
    for one in logprobs:
        assert one.logprob is not None
        top = [_entry(texts.of(token), token, logprob) for token, logprob in _likeliest(one)]
        own = _entry(texts.push(one.token), one.token, _bounded(one.logprob))
        content.append(own | {"top_logprobs": top})
    return {"content": content}


def of_prompt(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt a table by token id."""
    texts = TokenTexts()
    told: list[Json | None] = []
    for token_id, one in zip(token_ids, logprobs, strict=True):
        table = None
        if one.logprob is not None:
            table = {
                str(top_id): _ranked(texts.of(token), logprob, rank)
                for rank, (top_id, (token, logprob)) in enumerate(
                    zip(one.top_ids, _likeliest(one), strict=True), start=1
                )
            }
            table[str(token_id)] = _ranked(texts.of(one.token), _bounded(one.logprob), one.rank)
        texts.push(one.token)
        told.append(table)
    return told


def _likeliest(one: TokenLogprobs) -> Iterable[tuple[bytes, float]]:
    return zip(one.top_tokens, map(_bounded, one.top_logprobs), strict=True)


def _entry(text: str, token: bytes, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(token)}


def _ranked(text: str, logprob: float, rank: int) -> Json:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


def _bounded(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST
