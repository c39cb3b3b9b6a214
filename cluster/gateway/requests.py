"""A request of OpenAI's interface as plain frozen values, read from its JSON object.

Fields that are not known here are ignored, as vLLM does, except inside `speculation`. Fields that
would change the answer and are not possible yet are refused by name.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from pydantic_core import from_json

from cluster.gateway.structure import Tools, read_tools, structure_of
from paceline.chat import Chat, Message, json_text, message_of, texts_of
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.generation import GenerateInput
from paceline.limits import (
    MAX_BIASED_TOKENS,
    MAX_MESSAGES,
    MAX_NAME_LENGTH,
    MAX_PROMPT_BYTES,
    MAX_SEQUENCE_TOKENS,
    MAX_TEMPLATE_KWARGS_BYTES,
)
from paceline.options import BOUNDS, GenerateOptions, check_count
from paceline.text import did_you_mean
from paceline.wire.requests import request_to_wire

MAX_CHOICES = 128
"""Most choices of a request: its prompts times `n`."""

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that has none, as OpenAI's. A chat has as many as fit."""

_OVER_64_BITS = 2**64

Kind = Literal["chat", "completion"]
Body = Mapping[str, Any]
"""A JSON object."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be continued: a request to a driver, with `n` samples.

    `echo` is the text that each answer repeats first; None: that of the prompt's tokens, which come
    with their log probabilities.
    """

    input: GenerateInput
    options: GenerateOptions
    echo: str | None = ""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What a caller asks. `model` is None if the body names none.

    Each prompt has `n` choices, which are neighbors. `tells_prompt_logprobs`: the answer
    has vLLM's `prompt_logprobs`. `is_prompt_only`: the answer is the prompt (`max_tokens` 0 with
    `echo`); the one token that is decoded is not told. `tells_origins`: each event tells of its
    tokens where they come from. `tells_token_ids`: the answer has the ids of its tokens, and of
    the prompt's.
    """

    kind: Kind
    model: str | None
    prompts: tuple[Prompt, ...]
    n: int
    stream: bool
    include_usage: bool
    field_names: Mapping[str, str]
    """The field of the body that set an option, where the names differ."""
    tools: Tools | None = None
    """Of a chat: the functions that the answer may call."""
    tells_prompt_logprobs: bool = False
    is_prompt_only: bool = False
    tells_origins: bool = False
    tells_token_ids: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    def with_names(self, names: Mapping[str, str]) -> CompletionRequest:
        """The same request of a body in which fields have other names. `names`: from ours."""
        told = {option: names.get(name, name) for option, name in self.field_names.items()}
        return replace(self, field_names={**names, **told})


class ReadBody(dict[str, Any]):
    """A body that knows which of its fields were read."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.names_read: set[str] = set()
        self.left_out: list[str] = []
        """Parts of fields that have no effect."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, which counts as read."""
        self.names_read.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return super().__getitem__(name)

    def ignored(self) -> list[str]:
        """The fields with a value that were not read, and parts that were left out."""
        return [
            name
            for name, value in self.items()
            if value is not None and name not in self.names_read
        ] + self.left_out


def body_in(name: str, raw: bytes | bytearray) -> Body:
    """The JSON object in some bytes. Raises InvalidRequestError, which names the field `name`."""
    collects = gc.isenabled()
    # Else millions of lists in a body are looked through again and again while they come, which
    # takes six times as long as reading them, and nothing else goes on meanwhile.
    gc.disable()
    try:
        read = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(name, f"expected JSON in UTF-8: {error}") from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(read, dict):
        raise InvalidRequestError(name, "expected a JSON object")
    return read


# Kinds of values


def _got(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def _wrong(name: str, expected: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(name, f"expected {expected}, got {_got(value)}")


def _number(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
        raise InvalidRequestError(name, "expected a number, got one that is too large")
    raise _wrong(name, "a number", value)


def _integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, "an integer", value)
    if (
        not -_OVER_64_BITS < value < _OVER_64_BITS
    ):  # Python refuses to print an integer of 5,000 digits.
        raise InvalidRequestError(name, "expected an integer of at most 64 bits")
    return value


def read_boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def read_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    return value


def _table(name: str, value: object) -> Body:
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    return value


def token_ids_in(name: str, value: object) -> list[int]:
    """A list of millions is checked without a call for each of its entries."""
    if not isinstance(value, list):
        raise _wrong(name, "a list of token ids", value)
    if not set(map(type, value)) <= {int} or (value and not 0 <= min(value) <= max(value) < 2**32):
        raise InvalidRequestError(name, "expected token ids, each an integer of at least 0")
    return value


def _texts(name: str, value: object) -> list[str]:
    given = value if isinstance(value, list) else [value]
    return [read_text(name, one) for one in given]


def _top_k(name: str, value: object) -> int:
    """vLLM writes -1 for "all tokens"; here that is 0."""
    number = _integer(name, value)
    return 0 if number == -1 else number


def _seed(name: str, value: object) -> int | None:
    """OpenAI's seeds have a sign. vLLM writes -1 for "none"."""
    number = _integer(name, value)
    if number == -1:
        return None
    return number + _OVER_64_BITS if -(2**63) <= number < 0 else number


def _truncation(name: str, value: object) -> int:
    """vLLM writes -1 for "as many as fit"; here that is 0."""
    number = _integer(name, value)
    if number == 0:
        raise InvalidRequestError(name, "expected a number of tokens of at least 1, or -1, got 0")
    return 0 if number == -1 else number


def _not(name: str, value: object) -> bool:
    return not read_boolean(name, value)


def _bias(name: str, value: object) -> dict[int, float]:
    table = _table(name, value)
    check_count(name, len(table), MAX_BIASED_TOKENS, "entries")
    biases = {}
    for key, bias in table.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError(name, "expected token ids, written as strings, as its keys")
        biases[int(key)] = _number(name, bias)
    return biases


def _prediction(name: str, value: object) -> str:
    """OpenAI's predicted output: its `content` is a text, or a list of parts."""
    table = _table(name, value)
    if table.get("type", "content") != "content":
        raise InvalidRequestError(f"{name}.type", 'expected "content"')
    content = table.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{name}.content", "a string or a list of text parts", content)
    parts = [_table(f"{name}.content", one) for one in content]
    return "".join([read_text(f"{name}.content", one.get("text")) for one in parts])


_Read = Callable[[str, object], Any]
TEXT: Body = {"type": "string"}
TEXTS: Body = {"type": "array", "items": TEXT}
TOKEN_IDS: Body = {"type": "array", "items": {"type": "integer", "minimum": 0}}
TEXT_PARTS: Body = {
    "anyOf": [TEXT, {"type": "array", "items": {"type": "object", "properties": {"text": TEXT}}}]
}
_SCHEMAS: Mapping[_Read, Body] = {
    _number: {"type": "number"},
    _integer: {"type": "integer"},
    read_boolean: {"type": "boolean"},
    _not: {"type": "boolean"},
    read_text: TEXT,
    _texts: {"anyOf": [TEXT, TEXTS]},
    token_ids_in: TOKEN_IDS,
    _top_k: {"type": "integer", "minimum": -1},
    _seed: {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    _truncation: {"type": "integer", "minimum": -1},
    _bias: {"type": "object", "additionalProperties": {"type": "number"}},
    _prediction: {"type": "object", "properties": {"type": TEXT, "content": TEXT_PARTS}},
}
"""What each reader takes, as JSON schemas."""


@dataclass(frozen=True, slots=True)
class _Field:
    """How a field is read, and the option of GenerateOptions that it sets."""

    option: str
    read: _Read

    @property
    def schema(self) -> Body:
        told = dict(_SCHEMAS[self.read])
        if self.option in BOUNDS and len(told) == 1:
            told["minimum"], told["maximum"] = BOUNDS[self.option]
        return told


FIELDS: Mapping[str, _Field] = {
    "temperature": _Field("temperature", _number),
    "top_p": _Field("top_p", _number),
    "top_k": _Field("top_k", _top_k),
    "min_p": _Field("min_p", _number),
    "repetition_penalty": _Field("repetition_penalty", _number),
    "presence_penalty": _Field("presence_penalty", _number),
    "frequency_penalty": _Field("frequency_penalty", _number),
    "logit_bias": _Field("logit_bias", _bias),
    "seed": _Field("seed", _seed),
    "max_tokens": _Field("max_tokens", _integer),
    "max_completion_tokens": _Field("max_tokens", _integer),  # wins over the older name
    "min_tokens": _Field("min_tokens", _integer),
    "stop": _Field("stop", _texts),
    "stop_token_ids": _Field("stop_token_ids", token_ids_in),
    "ignore_eos": _Field("ignore_eos", read_boolean),
    "prediction": _Field("prediction", _prediction),
    "truncate_prompt_tokens": _Field("truncate_prompt", _truncation),
    "include_stop_str_in_output": _Field("include_stop", read_boolean),
    "skip_special_tokens": _Field("special_tokens", _not),
    "bad_words": _Field("bad_words", _texts),
}
SPECULATION: Mapping[str, _Field] = {
    "policy": _Field("policy", read_text),
    "verification": _Field("rule", read_text),
    "window": _Field("window", _integer),
    "branches": _Field("branches", _integer),
    "stopping": _Field("stopping", read_text),
    "drafter": _Field("drafter", read_text),
    "merge": _Field("merge", read_boolean),
    "steady": _Field("steady", read_boolean),
}
_HTTP_NAMES = {
    "prompt_token_ids": "prompt",
    "samples": "n",
    "truncate_prompt": "truncate_prompt_tokens",
} | {field.option: f"speculation.{name}" for name, field in SPECULATION.items()}

_REFUSED_IN_BOTH: Mapping[str, tuple[object, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "structural_tag": (None,),
    "chat_template": (None,),
    "allowed_token_ids": (None,),
    "prompt_embeds": (None,),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
}
REFUSED: Mapping[Kind, Mapping[str, tuple[object, ...]]] = {
    "chat": {**_REFUSED_IN_BOTH, "add_special_tokens": (None, False), "echo": (None, False)},
    "completion": {
        **_REFUSED_IN_BOTH,
        "add_special_tokens": (None, True),
        "tools": (None, []),
        "chat_template_kwargs": (None, {}),
        "continue_final_message": (None, False),
        "add_generation_prompt": (None, True),
    },
}
"""Fields that would change the answer and are not possible yet, each with the values that have no
effect."""


def http_name(option: str) -> str:
    """The field of the body that sets an option."""
    return _HTTP_NAMES.get(option, option)


# Requests


def chat_request(body: Body) -> CompletionRequest:
    """The request in a body of /v1/chat/completions.

    Raises InvalidRequestError, which names the field.
    """
    tools = read_tools(body)
    return _request("chat", body, [read_chat(body, tools)], tools)


def read_chat(body: Body, tools: Tools | None) -> Chat:
    """The chat in a body, of whatever path. Raises InvalidRequestError, which names the field."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        came = "an empty list" if given == [] else _got(given)
        raise InvalidRequestError("messages", f"expected a list of messages, got {came}")
    check_count("messages", len(given), MAX_MESSAGES, "messages")
    name = "chat_template_kwargs"
    kwargs = json_text(name, field_in(body, name, _table, {}))
    check_count(name, len(kwargs.encode()), MAX_TEMPLATE_KWARGS_BYTES, "bytes of JSON text")
    continues = field_in(body, "continue_final_message", read_boolean, False)
    opens = field_in(body, "add_generation_prompt", read_boolean, None)
    if continues and opens:
        why = "excludes add_generation_prompt; set that to false"
        raise InvalidRequestError("continue_final_message", why)
    return Chat(
        messages=tuple(map(_message, given)),
        tools="" if tools is None else tools.text,
        template_kwargs=kwargs,
        add_generation_prompt=opens,
        continue_final_message=continues,
    )


def completion_request(body: Body) -> CompletionRequest:
    """The request in a body of /v1/completions. Raises InvalidRequestError, naming the field."""
    return _request("completion", body, list(_prompts(body.get("prompt"))))


def _request(
    kind: Kind, body: Body, inputs: list[GenerateInput], tools: Tools | None = None
) -> CompletionRequest:
    for name, harmless in REFUSED[kind].items():
        value = body.get(name)
        if not any(type(value) is type(one) and value == one for one in harmless):
            raise InvalidRequestError(name, "is not supported yet; leave it out")
    n = field_in(body, "n", _integer, 1)
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequestError("n", f"expected an integer from 1 to {MAX_CHOICES}, got {n}")
    if n * len(inputs) > MAX_CHOICES:
        asked = f"{len(inputs)} prompts with n = {n}"
        raise InvalidRequestError("prompt", f"expected at most {MAX_CHOICES} choices, got {asked}")
    _check_size("messages" if kind == "chat" else "prompt", inputs, n)
    options = replace(_options(kind, body), samples=n if n > 1 else None)
    echoes = kind == "completion" and field_in(body, "echo", read_boolean, False)
    is_prompt_only = echoes and options.max_tokens == 0
    if is_prompt_only:
        options = replace(options, max_tokens=1)
    options = _with_logprobs(options, kind, body, echoes=echoes)
    field_names = _field_names(kind, body)
    if (structure := structure_of(body)) is not None:
        options = replace(options, structure=structure[0])
        field_names = {**field_names, "structure": structure[1]}
    if tools is not None and tools.forced:
        if structure is not None:
            why = f"excludes {structure[1]}, since the answer must be a call"
            raise InvalidRequestError("tool_choice", why)
        field_names = {**field_names, "structure": "tools"}
    try:
        request_to_wire("", options)  # It checks the options.
    except InvalidRequestError as error:
        raise error.renamed(field_names) from None
    is_stream = field_in(body, "stream", read_boolean, False)
    tells_prompt_logprobs = body.get("prompt_logprobs") is not None
    if is_stream and tells_prompt_logprobs:
        raise InvalidRequestError("prompt_logprobs", "is not possible in a stream; leave it out")
    tells_origins = field_in(body, "return_token_origins", read_boolean, False)
    if tells_origins and not is_stream:
        raise InvalidRequestError("return_token_origins", "is possible only with stream")
    if tells_origins:
        options = replace(options, tell_refused=True)
    if echoes and options.truncate_prompt is not None:
        raise InvalidRequestError("echo", "excludes truncate_prompt_tokens")
    stream_options = field_in(body, "stream_options", _table, {})
    return CompletionRequest(
        kind=kind,
        model=field_in(body, "model", read_text, None),
        prompts=tuple(
            Prompt(one, options, _echo(one, options) if echoes else "") for one in inputs
        ),
        n=n,
        stream=is_stream,
        include_usage=field_in(
            stream_options, "include_usage", read_boolean, False, within="stream_options."
        ),
        field_names=field_names,
        tools=tools,
        tells_prompt_logprobs=tells_prompt_logprobs,
        is_prompt_only=is_prompt_only,
        tells_origins=tells_origins,
        tells_token_ids=field_in(body, "return_token_ids", read_boolean, False),
    )


def _field_names(kind: Kind, body: Body) -> Mapping[str, str]:
    names = {}
    if kind == "chat":
        names = {"prompt": "messages", "prompt_token_ids": "messages"}
        names["template_kwargs"] = "chat_template_kwargs"
        names["logprobs"] = "top_logprobs"
    if body.get("max_completion_tokens") is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def _check_size(name: str, inputs: Sequence[GenerateInput], n: int) -> None:
    """All choices together have at most the text, or the tokens, of one request.

    A driver's target holds a prompt for each choice.
    """
    num_bytes = num_tokens = 0
    for given in inputs:
        if isinstance(given, str):
            num_bytes += len(given.encode())
        elif isinstance(given, Chat):
            num_bytes += len(given.tools) + len(given.template_kwargs)
            for one in cast("Sequence[Message]", given.messages):
                num_bytes += sum(len(text.encode()) for text in texts_of(one))
        else:
            num_tokens += len(given)
    together = "" if len(inputs) * n == 1 else " in all prompts together, times n"
    unit = f"bytes of text{together}"
    check_count(name, num_bytes * n, MAX_PROMPT_BYTES, unit, PromptTooLongError)
    unit = f"tokens{together}"
    check_count(name, num_tokens * n, MAX_SEQUENCE_TOKENS, unit, PromptTooLongError)


def field_in(body: Body, name: str, read: _Read, default: Any, *, within: str = "") -> Any:
    """The value of a field, or the default if it is missing or null."""
    value = body.get(name)
    return default if value is None else read(within + name, value)


def _options(kind: Kind, body: Body) -> GenerateOptions:
    options: dict[str, Any] = {}
    if kind == "completion":
        options["max_tokens"] = DEFAULT_COMPLETION_TOKENS
    for name, field in FIELDS.items():
        if (value := field_in(body, name, field.read, None)) is not None:
            options[field.option] = value
    speculation = body.get("speculation")
    if speculation is None:
        speculation = {}
    elif speculation == "off":
        speculation = {"policy": "off"}
    elif isinstance(speculation, str):
        like = json_text("speculation", {"policy": speculation[:MAX_NAME_LENGTH]})
        why = f'expected "off" or an object such as {like}, got a string'
        raise InvalidRequestError("speculation", why)
    for name, value in _table("speculation", speculation).items():
        if name not in SPECULATION:
            # To search near names takes long if the given one is.
            hint = did_you_mean(name, SPECULATION) if len(name) <= MAX_NAME_LENGTH else ""
            raise InvalidRequestError("speculation", f"has no field {name!r:.100}{hint}")
        field = SPECULATION[name]
        if value is not None:
            options[field.option] = field.read(f"speculation.{name}", value)
    return GenerateOptions(**options)


def _with_logprobs(
    options: GenerateOptions, kind: Kind, body: Body, *, echoes: bool
) -> GenerateOptions:
    """The options with those for log probabilities.

    A chat says whether and how many, a completion how many. As with vLLM, a completion that echoes
    its prompt has the prompt's as well.
    """
    logprobs = None
    if kind == "completion":
        if body.get("logprobs") is not False:
            logprobs = field_in(body, "logprobs", _integer, None)
    else:
        top = field_in(body, "top_logprobs", _integer, 0)
        if field_in(body, "logprobs", read_boolean, False):
            logprobs = top
        elif top:
            raise InvalidRequestError("top_logprobs", "expected logprobs to be true as well")
    of_prompt = field_in(body, "prompt_logprobs", _integer, logprobs if echoes else None)
    return replace(options, logprobs=logprobs, prompt_logprobs=of_prompt)


def _echo(given: GenerateInput, options: GenerateOptions) -> str | None:
    if isinstance(given, str):
        return given
    if options.prompt_logprobs is None:
        raise InvalidRequestError(
            "echo", "is supported for prompts that are text, and for token ids with logprobs"
        )
    return None


def _message(item: object) -> Message:
    if not isinstance(item, dict):
        raise _wrong("messages", "messages that are objects", item)
    if item.get("role") == "developer":  # OpenAI's newer name. Templates know the older one.
        item = {**item, "role": "system"}
    return message_of(item)


def _prompts(prompt: object) -> Iterator[GenerateInput]:
    expected = "a string, a list of token ids, or a list of either"
    if isinstance(prompt, str):
        yield prompt
    elif not isinstance(prompt, list) or not prompt:
        came = "an empty list" if prompt == [] else _got(prompt)
        raise InvalidRequestError("prompt", f"expected {expected}, got {came}")
    elif isinstance(prompt[0], int):
        yield token_ids_in("prompt", prompt)
    else:
        check_count("prompt", len(prompt), MAX_CHOICES, "prompts")
        for one in prompt:
            if not isinstance(one, str | list) or not one:
                came = "an empty one" if one in ("", []) else _got(one)
                raise InvalidRequestError("prompt", f"expected {expected}, got {came} in it")
            yield one if isinstance(one, str) else token_ids_in("prompt", one)
