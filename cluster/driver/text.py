"""Text and chats to token ids, and committed tokens back to text.

A sequence's `TextStream` turns tokens into text as they are committed. It holds back text that
later tokens may still change: bytes of an unfinished character, and the start of a stop string.
"""

from __future__ import annotations

import codecs
import inspect
import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cluster.driver.stop_strings import StopStrings
from paceline.chat import Chat, Message, ToolCall, json_text, message_of, object_of, tools_of
from paceline.errors import CheckpointError, InvalidRequestError, PromptTooLongError
from paceline.generation import TokenLogprobs
from workers.engine.load.vocabulary import TokenBytes

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so at most three of them can lack the last one.
_MAX_UNFINISHED = 3
# Limits of the decoding window, in tokens. At its limit it is cut to the tokens to keep. These must
# cover what is unfinished (three replacement characters may stand for nine bytes) and a byte run
# before it.
_WINDOW_LIMIT = 24
_WINDOW_KEPT = 16

ROLES = ("system", "user", "assistant", "tool")

THINK = "<think>"
END_OF_THINK = "</think>"

_OWN_NAMES = frozenset(
    inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
) | {"messages", "raise_exception", "strftime_now"}
"""What a caller's variables may not be named: a template of its own, for example."""

_NO_CLASS_OF_ITS_OWN = ("PreTrainedTokenizerFast", "TokenizersBackend")


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer that AutoTokenizer finds, which imports torch to find it.

    It finds this one for a llama whose tokenizer_config.json names no class of its own.
    """
    config, stated = (
        json.loads(path.read_text("utf-8")) if path.is_file() else {}
        for path in (folder / "config.json", folder / "tokenizer_config.json")
    )
    is_plain = config.get("model_type") == "llama" and "auto_map" not in stated
    if is_plain and stated.get("tokenizer_class") in _NO_CLASS_OF_ITS_OWN:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


class TextCodec:
    """A checkpoint's tokenizer and chat template. Encoding is slow: do it off the event loop."""

    def __init__(self, folder: Path) -> None:
        """Load from `folder`. Raises CheckpointError."""
        try:
            loaded = tokenizer_of(folder)
        except Exception as error:  # transformers raises many types.
            raise CheckpointError(f"cannot load a tokenizer from {folder}: {error}") from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise CheckpointError(
                f"{folder} has no fast tokenizer: expected tokenizer.json, got "
                f"{type(loaded).__name__}"
            )
        self.chat_template = ChatTemplate(loaded)
        self._raw: Tokenizer = loaded.backend_tokenizer
        self.tokens = TokenBytes(self._raw)
        self.longest_token = max(map(len, self._raw.get_vocab()), default=1)
        """The most characters that a token stands for."""

    def encode_prompt(self, prompt: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of text, by default with the special tokens that the tokenizer adds.

        Raises InvalidRequestError for text without tokens.
        """
        if not prompt:
            raise InvalidRequestError("prompt", "expected text, got an empty string")
        token_ids = self._encode(prompt, special_tokens=special_tokens)
        if not token_ids:
            raise InvalidRequestError("prompt", "expected text, but it has no tokens")
        return token_ids

    def encode_chat(
        self, chat: Chat, *, special_tokens: bool = False, most_characters: int | None = None
    ) -> tuple[tuple[int, ...], bool]:
        """Token ids of a chat in the checkpoint's template, and whether it ends inside `<think>`.

        `special_tokens`: the tokenizer adds its own, beside those that the template writes. Raises
        InvalidRequestError, and PromptTooLongError if the template makes more than
        `most_characters` of it.
        """
        text, in_reasoning = self.chat_template.render(chat)
        if most_characters is not None and len(text) > most_characters:
            raise PromptTooLongError(
                "messages",
                f"with the chat template they have {len(text)} characters, and may have "
                f"{most_characters}; shorten them",
            )
        return self._encode(text, special_tokens=special_tokens), in_reasoning

    def _encode(self, text: str, *, special_tokens: bool) -> tuple[int, ...]:
        """Encode text as a batch of one.

        `encode` would hold Python's lock throughout, 1.3 s for a million letters, so that no other
        thread could run, the event loop's included.
        """
        (encoded,) = self._raw.encode_batch([text], add_special_tokens=special_tokens)
        return tuple(encoded.ids)

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, with the names of special tokens. As `_encode`, it is a batch of one."""
        (text,) = self._raw.decode_batch([list(token_ids)], skip_special_tokens=False)
        return text

    def strings_of(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """How the vocabulary writes each token; "" for an id without a token."""
        return tuple(self._raw.id_to_token(token_id) or "" for token_id in token_ids)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of a whole output. `special`: with the names of special tokens."""
        return self._raw.decode(list(token_ids), skip_special_tokens=not special)

    def decoder(self, *, special: bool = False) -> IncrementalDecoder | ByteDecoder:
        """A new decoder for the tokens of an output, the faster one if the tokenizer allows it.

        `special`: special tokens have a text, their names.
        """
        make = ByteDecoder if self.tokens.are_concatenated else IncrementalDecoder
        return make(self, special=special)


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


class ByteDecoder:
    """Like IncrementalDecoder but faster, where text is the UTF-8 of the tokens' bytes in a row."""

    def __init__(self, codec: TextCodec, *, special: bool = False) -> None:
        self._codec = codec
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if not self._special and self._codec.tokens.is_special(token_id):
            return ""
        return self._utf8.decode(self._codec.tokens.concatenated(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class IncrementalDecoder:
    """Decodes one token at a time. Its results, `flush` included, concatenate to the whole text.

    It decodes a short window of the last tokens and returns what is new. Incomplete characters show
    as replacement characters at the end, which are held back. A run of byte tokens is decoded
    character by character, because a tokenizer gives no text for a run with one wrong byte.
    (tokenizers' DecodeStream gives none either, and cannot return what it held back at the end.)
    """

    def __init__(self, codec: TextCodec, *, special: bool = False) -> None:
        self._codec = codec
        self._special = special
        self._window: list[int] = []
        self._emitted = 0  # Characters of the window's text.

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        if not self._special and self._codec.tokens.is_special(token_id):
            return ""
        self._window.append(token_id)
        text = self._decoded()
        trailing = len(text) - len(text.rstrip(_REPLACEMENT))
        certain = len(text) - min(trailing, _MAX_UNFINISHED)
        new = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if trailing == 0 and self._codec.tokens.is_byte(token_id):
            self._forget_bytes()
        elif len(self._window) >= _WINDOW_LIMIT:
            # The start of a shorter window may decode differently, but its end does not.
            unfinished = len(text) - self._emitted
            self._window = self._window[-_WINDOW_KEPT:]
            self._emitted = len(self._decoded()) - unfinished
        return new

    def _forget_bytes(self) -> None:
        while self._window and self._codec.tokens.is_byte(self._window[-1]):
            self._window.pop()
        if not self._window and self._codec.tokens.anchor is not None:
            self._window.append(self._codec.tokens.anchor)
        self._emitted = len(self._decoded())

    def flush(self) -> str:
        """The text that was held back. The decoder ends with this."""
        text = self._decoded()[self._emitted :]
        self._window = []
        self._emitted = 0
        return text

    def _decoded(self) -> str:
        return self._codec.decode(self._window, special=self._special)


class TextStream:
    """The text of one sequence's output. It ends before a stop string and before an end token.

    With `includes_stop` it ends after them. With `special`, special tokens have their names as
    text. `stopped_by`: the stop string that ended it; "" while none has.

    It is also the scheduler's `StopScanner`. Each committed token passes through it once: by
    `first_stop` if there are stop strings, else by `take`.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        stop: StopStrings | None = None,
        end_token_ids: Collection[int] = (),
        includes_stop: bool = False,
        special: bool = False,
    ) -> None:
        self.stopped_by = ""
        self._codec = codec
        self._decoder = codec.decoder(special=special)
        self._includes_stop = includes_stop
        self._stop = stop or None
        self._stop_node = 0
        self._end_token_ids = frozenset(end_token_ids)
        self._held = ""  # May become a stop string.
        self._ended = False
        self._ready: deque[str] = deque()  # Pieces of tokens that were scanned and not taken.

    def skip(self, token_ids: Sequence[int]) -> int | None:
        """Append tokens whose text the caller has. Returns how many end the output; None: none."""
        for count, token_id in enumerate(token_ids, start=1):
            self._push(token_id)
            if self._ended:
                return count
        return None

    def first_stop(self, token_ids: Sequence[int]) -> int | None:
        """Append tokens. Returns how many there are up to the one that completes a stop string."""
        for count, token_id in enumerate(token_ids, start=1):
            was_ended = self._ended
            piece, stopped = self._push(token_id)
            self._ready.append(piece)
            if stopped and not was_ended:
                return count
        return None

    def take(self, token_ids: Sequence[int], *, last: bool) -> tuple[list[str], str]:
        """The pieces of the next tokens, and the text left over. `last`: no token follows.

        The left-over text belongs to the last piece. It is empty unless `last`.
        """
        if self._stop is None:
            pieces = [self._push(token_id)[0] for token_id in token_ids]
        else:
            pieces = [self._ready.popleft() for _ in token_ids]
        return pieces, self._end() if last else ""

    def named(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> tuple[TokenLogprobs, ...]:
        """The log probabilities of these tokens with the bytes of all tokens in them."""
        bytes_of = self._codec.tokens.of
        return tuple(
            replace(one, token=bytes_of(token_id), top_tokens=tuple(map(bytes_of, one.top_ids)))
            for token_id, one in zip(token_ids, logprobs, strict=True)
        )

    def texts_of(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._codec.tokens.of(one).decode(errors="replace") for one in token_ids)

    def _push(self, token_id: int) -> tuple[str, bool]:
        """The text that one more token makes certain, and whether it completes a stop string."""
        if self._ended:
            return "", False
        if token_id in self._end_token_ids:
            last = self._release(self._decoder.push(token_id))[0] if self._includes_stop else ""
            return last + self._end(), False
        return self._release(self._decoder.push(token_id))

    def _end(self) -> str:
        if self._ended:
            return ""
        released, stopped = self._release(self._decoder.flush())
        if not stopped:
            released += self._held
        self._held = ""
        self._ended = True
        return released

    def _release(self, new: str) -> tuple[str, bool]:
        """The part of held and new text that can go out, and whether a stop string was found."""
        if self._stop is None:
            return new, False
        self._stop_node, found = self._stop.scan(self._stop_node, new)
        text = self._held + new
        if found is not None:
            begin, end = len(self._held) + found[0], len(self._held) + found[1]
            self.stopped_by = text[begin:end]
            self._held = ""
            self._ended = True
            return text[: end if self._includes_stop else begin], True
        certain = len(text) - self._stop.depth(self._stop_node)
        self._held = text[certain:]
        return text[:certain], False
