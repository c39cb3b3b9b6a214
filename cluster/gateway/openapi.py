"""`GET /openapi.json`: every path with the fields of its body, in OpenAPI 3.1.

Fields of decoding come from the tables by which bodies are read (requests.py). A test compares the
others with what the readers of bodies read. Neither this nor the page at `/docs`, which shows it,
needs a key: they are the same wherever this version runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from cluster.gateway.requests import (
    FIELDS,
    MAX_CHOICES,
    SPECULATION,
    TEXT,
    TEXT_PARTS,
    TEXTS,
    TOKEN_IDS,
)
from paceline.limits import MAX_LOGPROBS

Json = dict[str, Any]
Fields = Mapping[str, Any]
"""JSON schemas by name."""

_BOOLEAN: Json = {"type": "boolean"}
_OBJECT: Json = {"type": "object"}
_COUNT: Json = {"type": "integer", "minimum": 1}
_LOGPROBS: Json = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}


def _object(fields: Fields, *required: str) -> Json:
    told: Json = {"type": "object", "properties": dict(fields)}
    return {**told, "required": list(required)} if required else told


def _list(items: Fields) -> Json:
    return {"type": "array", "items": items}


def _either(*schemas: Fields) -> Json:
    return {"anyOf": list(schemas)}


def _one_of(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


_FUNCTION = _object({"name": TEXT, "description": TEXT, "parameters": _OBJECT}, "name")
_TOOL = _object({"type": _one_of("function"), "function": _FUNCTION}, "type", "function")
_CHOSEN = _object({"type": _one_of("function"), "function": _object({"name": TEXT}, "name")})
_CALL = _object(
    {
        "id": TEXT,
        "type": _one_of("function"),
        "function": _object({"name": TEXT, "arguments": TEXT}, "name", "arguments"),
    },
    "function",
)
_MESSAGE = _object(
    {
        "role": _one_of("system", "developer", "user", "assistant", "tool"),
        "content": _either(TEXT_PARTS, {"type": "null"}),
        "name": TEXT,
        "tool_calls": _list(_CALL),
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
        "reasoning": TEXT,
        "refusal": _either(TEXT, {"type": "null"}),
    },
    "role",
)
_FORMAT = _object(
    {
        "type": _one_of("text", "json_object", "json_schema"),
        "json_schema": _object({"name": TEXT, "schema": _OBJECT}, "schema"),
    },
    "type",
)
_SCHEMA = _either(_OBJECT, TEXT)
_OUTPUTS = {"json": _SCHEMA, "regex": TEXT, "grammar": TEXT, "choice": TEXTS}

_DECODING: Fields = {
    **{name: field.schema for name, field in FIELDS.items()},
    "speculation": _either(
        {"const": "off"},
        _object({name: field.schema for name, field in SPECULATION.items()})
        | {"additionalProperties": False},
    ),
}
"""What all paths that decode take."""
_COMMON: Fields = {
    "model": TEXT,
    **_DECODING,
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
    "stream": _BOOLEAN,
    "stream_options": _object({"include_usage": _BOOLEAN}),
    "prompt_logprobs": _LOGPROBS,
    "response_format": _FORMAT,
    "structured_outputs": _object({**_OUTPUTS, "json_object": _BOOLEAN}),
    **{f"guided_{name}": schema for name, schema in _OUTPUTS.items()},
    "return_token_ids": _BOOLEAN,
    "return_token_origins": _BOOLEAN,
}
_OF_MESSAGES: Fields = {
    "messages": _list(_MESSAGE),
    "tools": _list(_TOOL),
    "tool_choice": _either(_one_of("auto", "none", "required"), _CHOSEN),
    "parallel_tool_calls": _BOOLEAN,
    "chat_template_kwargs": _OBJECT,
    "add_generation_prompt": _BOOLEAN,
    "continue_final_message": _BOOLEAN,
}
_ITEM = _object({"type": TEXT, "role": TEXT, "content": TEXT_PARTS})
_TURN = _object({"role": _one_of("user", "assistant", "system"), "content": TEXT_PARTS}, "role")
_OF_ANTHROPIC: Fields = {
    "model": TEXT,
    "messages": _list(_TURN),
    "system": TEXT_PARTS,
    "tools": _list(_object({"name": TEXT, "input_schema": _OBJECT}, "name", "input_schema")),
    "tool_choice": _object(
        {
            "type": _one_of("auto", "any", "tool", "none"),
            "name": TEXT,
            "disable_parallel_tool_use": _BOOLEAN,
        },
        "type",
    ),
    "thinking": _object({"type": TEXT}, "type"),
    "output_config": _object({"format": _object({"type": TEXT, "schema": _OBJECT}, "type")}),
    "chat_template_kwargs": _OBJECT,
}
_MODEL = _object({"id": TEXT, "object": TEXT, "owned_by": TEXT, "max_model_len": _COUNT})


def _without(fields: Fields, *names: str) -> Fields:
    return {name: schema for name, schema in fields.items() if name not in names}


BODIES: Mapping[str, tuple[str, Json, Json]] = {
    "/v1/chat/completions": (
        "A chat in the checkpoint's template (OpenAI)",
        _object(
            {**_COMMON, **_OF_MESSAGES, "logprobs": _BOOLEAN, "top_logprobs": _LOGPROBS},
            "messages",
        ),
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 32},
    ),
    "/v1/completions": (
        "A text or tokens that go on (OpenAI)",
        _object(
            {
                **_COMMON,
                "max_tokens": {"type": "integer", "minimum": 0},
                "prompt": _either(TEXT, TOKEN_IDS, _list(_either(TEXT, TOKEN_IDS))),
                "echo": _BOOLEAN,
                "logprobs": _either(_LOGPROBS, {"const": False}),
            },
            "prompt",
        ),
        {"prompt": "Once upon a time", "max_tokens": 16},
    ),
    "/v1/responses": (
        "A chat in OpenAI's newer form",
        _object(
            {
                "model": TEXT,
                **_without(_DECODING, "max_tokens", "max_completion_tokens"),
                "input": _either(TEXT, _list(_ITEM)),
                "instructions": TEXT,
                "max_output_tokens": _COUNT,
                "stream": _BOOLEAN,
                "metadata": _OBJECT,
                "tools": _list(_object({"type": _one_of("function")}, "type")),
                "tool_choice": _either(_one_of("auto", "none", "required"), _OBJECT),
                "parallel_tool_calls": _BOOLEAN,
                "text": _object({"format": _object({"type": TEXT, "schema": _OBJECT}, "type")}),
                "reasoning": _object({"effort": TEXT}),
                "include": TEXTS,
                "top_logprobs": _LOGPROBS,
                "chat_template_kwargs": _OBJECT,
            },
            "input",
        ),
        {"input": "Why is the sky blue?", "max_output_tokens": 32},
    ),
    "/v1/messages": (
        "A chat in Anthropic's form",
        _object(
            {
                **_without(_DECODING, "stop", "max_completion_tokens"),
                **_OF_ANTHROPIC,
                "stop_sequences": FIELDS["stop"].schema,
                "stream": _BOOLEAN,
            },
            "messages",
            "max_tokens",
        ),
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 32},
    ),
    "/v1/messages/count_tokens": (
        "The number of tokens of a chat in Anthropic's form",
        _object(_OF_ANTHROPIC, "messages"),
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    ),
    "/tokenize": (
        "The tokens of a text or chat (vLLM)",
        _object(
            {
                "model": TEXT,
                "prompt": TEXT,
                **_OF_MESSAGES,
                "add_special_tokens": _BOOLEAN,
                "return_token_strs": _BOOLEAN,
            }
        ),
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    ),
    "/detokenize": (
        "The text of tokens (vLLM)",
        _object({"model": TEXT, "tokens": TOKEN_IDS}, "tokens"),
        {"tokens": [1, 2, 3]},
    ),
}
"""By path: what it is for, the schema of its body, and a body that a server takes."""

_QUESTIONS: Mapping[str, tuple[str, Fields]] = {
    "/v1/models": ("What is served", _object({"object": TEXT, "data": _list(_MODEL)})),
    "/v1/models/{name}": ("One model", _MODEL),
    "/health": ("Answers while the process lives", _OBJECT),
    "/ready": ("Answers if a driver serves", _object({"models": TEXTS, "troubles": TEXTS})),
    "/version": ("The version of Paceline", _object({"version": TEXT})),
    "/metrics": ("Prometheus metrics, for operators' keys", TEXT),
}
"""By path: what it answers, and the schema of that."""

_ERROR = _object(
    {
        "error": _object(
            {
                "message": TEXT,
                "type": TEXT,
                "param": _either(TEXT, {"type": "null"}),
                "code": TEXT,
            }
        )
    }
)


@cache
def description() -> Json:
    paths: Json = {}
    for path, (summary, body, example) in BODIES.items():
        content = {"application/json": {"schema": body, "example": example}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": _answers(_OBJECT, streams="stream" in body["properties"]),
            }
        }
    for path, (summary, told) in _QUESTIONS.items():
        paths[path] = {"get": {"summary": summary, "responses": _answers(told)}}
        if "{name}" in path:
            name = {"name": "name", "in": "path", "required": True, "schema": TEXT}
            paths[path]["get"]["parameters"] = [name]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline",
            "version": version("paceline"),
            "description": "Fields that are not named here are ignored, and null is no value. A key"
            " is needed only if the server has keys.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _answers(told: Fields, *, streams: bool = False) -> Json:
    kind = "text/plain" if told is TEXT else "application/json"
    content: Json = {kind: {"schema": told}}
    if streams:
        content["text/event-stream"] = {"schema": TEXT}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "The answer", "content": content},
        "default": {"description": "An error", "content": error},
    }
