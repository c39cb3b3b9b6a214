"""`/tokenize` and `/detokenize`, as vLLM has them: text or messages to token ids, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.gateway.drivers import DriverPool
from cluster.gateway.requests import field_in, read_boolean, read_chat, read_text, token_ids_in
from cluster.gateway.structure import read_tools
from paceline.chat import Chat
from paceline.errors import InvalidRequestError
from paceline.generation import Tokens
from paceline.limits import MAX_SEQUENCE_TOKENS
from paceline.options import check_count

ANSWER_SECONDS = 60.0
"""Longest time to tokenize the largest text behind others."""


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A text or a chat whose tokens are asked for. `only_count`: as Anthropic has it."""

    model: str | None
    given: str | Chat
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    only_count: bool = False

    async def _tokens(self, pool: DriverPool, model: str) -> Tokens:
        try:
            return await pool.ask(
                model,
                lambda client: client.tokenize(
                    self.given,
                    add_special_tokens=self.add_special_tokens,
                    return_token_strings=self.return_token_strs,
                    timeout=ANSWER_SECONDS,
                ),
            )
        except InvalidRequestError as error:
            names = {"template_kwargs": "chat_template_kwargs"}
            if isinstance(self.given, Chat):
                names["prompt"] = "messages"
            raise type(error)(names.get(error.field, error.field), error.args[1]) from None

    async def answer(self, pool: DriverPool, model: str) -> bytes:
        """The JSON object that answers it. Raises InvalidRequestError, naming the field."""
        tokens = await self._tokens(pool, model)
        if self.only_count:
            return json.dumps({"input_tokens": len(tokens.token_ids)}).encode()
        told = {
            "count": len(tokens.token_ids),
            "max_model_len": tokens.max_model_len,
            "tokens": tokens.token_ids,
            "token_strs": tokens.token_strings if self.return_token_strs else None,
        }
        return json.dumps(told, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    model: str | None
    tokens: list[int]

    async def answer(self, pool: DriverPool, model: str) -> bytes:
        """The JSON object that answers it. Raises InvalidRequestError, naming the field."""
        try:
            text = await pool.ask(
                model, lambda client: client.detokenize(self.tokens, timeout=ANSWER_SECONDS)
            )
        except InvalidRequestError as error:
            raise type(error)("tokens", error.args[1]) from None
        return json.dumps({"prompt": text}, separators=(",", ":")).encode()


def tokenize_request(body: Mapping[str, Any]) -> TokenizeRequest:
    """The request in a body of /tokenize. Raises InvalidRequestError, which names the field."""
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise InvalidRequestError("prompt", "expected a prompt or messages")
    given: str | Chat
    if body.get("messages") is not None:
        given = read_chat(body, read_tools(body))
    else:
        given = field_in(body, "prompt", read_text, "")
    return TokenizeRequest(
        model=field_in(body, "model", read_text, None),
        given=given,
        add_special_tokens=field_in(body, "add_special_tokens", read_boolean, None),
        return_token_strs=field_in(body, "return_token_strs", read_boolean, False),
    )


def detokenize_request(body: Mapping[str, Any]) -> DetokenizeRequest:
    """The request in a body of /detokenize. Raises InvalidRequestError, which names the field."""
    tokens = token_ids_in("tokens", body.get("tokens"))
    check_count("tokens", len(tokens), MAX_SEQUENCE_TOKENS, "tokens")
    return DetokenizeRequest(model=field_in(body, "model", read_text, None), tokens=tokens)
