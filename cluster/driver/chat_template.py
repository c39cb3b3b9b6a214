"""A checkpoint's chat template: renders chats to text, and tells which formats it shows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from paceline.chat import Chat, Message, ToolCall, json_text, message_of, object_of, tools_of
from paceline.errors import InvalidRequestError

ROLES = ("system", "user", "assistant", "tool")

THINK = "<think>"
END_OF_THINK = "</think>"

_OWN_NAMES = frozenset(
    inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
) | {"messages", "raise_exception", "strftime_now"}
"""What a caller's variables may not be named: a template of its own, for example."""


class ChatTemplate:
    """The template of a tokenizer. `tool_format` and `reasoning_format`: as in inference.proto."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        # Some checkpoints have several templates by name, one of them for tools.
        given = cast("str | dict[str, str] | None", tokenizer.chat_template)
        self._source = "\n".join(given.values()) if isinstance(given, dict) else given
        self.tool_format = _tool_format(self._source or "")
        self.reasoning_format = "think" if END_OF_THINK in (self._source or "") else ""

    def render(self, chat: Chat) -> tuple[str, bool]:
        """The text of a chat, and whether it ends inside `<think>`. Raises InvalidRequestError."""
        if self._source is None:
            raise InvalidRequestError(
                "messages", "this model has no chat template: send a prompt instead"
            )
        if not chat.messages:
            raise InvalidRequestError("messages", "expected at least one message, got none")
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message", "excludes add_generation_prompt; set that to false"
            )
        tools = tools_of(json_text("tools", chat.tools))
        if tools and "tools" not in self._source:
            raise InvalidRequestError("tools", "this model's chat template shows no tools")
        messages = [
            _variables(message_of(one) if isinstance(one, Mapping) else one)
            for one in chat.messages
        ]
        opens, kwargs = chat.add_generation_prompt, _kwargs(chat, self._names_taken())
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=cast("list[Any]", tools) or None,
                tokenize=False,
                add_generation_prompt=not chat.continue_final_message if opens is None else opens,
                continue_final_message=chat.continue_final_message,
                **kwargs,
            )
        except Exception as error:  # A template may raise anything.
            # `raise_exception` is meant for callers. Other errors show how the template is written.
            told = str(error) if type(error) is TemplateError else "it cannot render them"
            raise InvalidRequestError(
                "messages", f"the model's chat template refuses them: {told}"
            ) from error
        assert isinstance(text, str)
        return text, self._ends_in_reasoning(text, chat, messages)

    def _ends_in_reasoning(
        self, text: str, chat: Chat, messages: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Only what the template wrote counts, and an answer that is continued."""
        if not self.reasoning_format:
            return False
        if chat.continue_final_message:
            role, last = str(messages[-1]["role"]), str(messages[-1]["content"])
            return role == "assistant" and last.rfind(THINK) > last.rfind(END_OF_THINK)
        return chat.add_generation_prompt is not False and text.rstrip().endswith(THINK)

    def _names_taken(self) -> Set[str]:
        """Names of variables that templates have already."""
        return _OWN_NAMES | self._tokenizer.special_tokens_map.keys()


def _kwargs(chat: Chat, names_taken: Set[str]) -> dict[str, Any]:
    kwargs = object_of("template_kwargs", json_text("template_kwargs", chat.template_kwargs))
    taken = names_taken & kwargs.keys()
    if taken:
        raise InvalidRequestError(
            "template_kwargs", f"cannot set {', '.join(sorted(taken))}; leave it out"
        )
    return kwargs


def _variables(message: Message) -> dict[str, Any]:
    """A message as templates know it: what it lacks is missing, and arguments are objects."""
    if message.role not in ROLES:
        raise InvalidRequestError(
            "messages", f"expected a role of {', '.join(ROLES)}, got {message.role!r:.200}"
        )
    variables: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if value := getattr(message, name):
            variables[name] = value
    if message.tool_calls:
        variables["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments_of(call),
                },
            }
            for call in message.tool_calls
        ]
    return variables


def _arguments_of(call: ToolCall) -> dict[str, Any]:
    """The arguments as an object. A model may have written others, and a cut answer half of one."""
    try:
        return object_of("messages", call.arguments)
    except InvalidRequestError as error:
        why = f"the arguments of a call of {call.name!r:.100}: {error.args[1]}"
        raise InvalidRequestError("messages", why) from None


def _tool_format(source: str) -> str:
    """The format of tool calls that a template shows; "" if it is not known here."""
    if "<function=" in source or "tools" not in source:  # The former is XML within <tool_call>.
        return ""
    if "<tool_call>" in source:
        return "hermes"
    return "llama" if "ipython" in source and '"parameters"' in source else ""
