"""Text of committed tokens: nothing lost or repeated, and cut at stop strings in any split."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from cluster.driver.stop_strings import StopStrings
from cluster.driver.text import ByteDecoder, IncrementalDecoder, TextCodec, TextStream, tokenizer_of
from paceline.chat import Chat, Message
from paceline.errors import CheckpointError, InvalidRequestError
from tests.tiny import Architecture, make_tiny_checkpoint, make_tiny_tokenizer

TEXTS = st.text(st.sampled_from("ab cé漢🙂\n."), max_size=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> TextCodec:
    return TextCodec(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A codec like Llama 2's: words begin with U+2581, unknown characters become byte tokens."""
    words = ["▁", "▁a", "▁b", "a", "b", "c", ".", "▁ab", "é"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(words)} | {"<unk>": 300}
    raw = Tokenizer(
        models.BPE(
            vocabulary, [("▁", "a"), ("▁", "b"), ("▁a", "b")], unk_token="<unk>", byte_fallback=True
        )
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    raw.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec(folder)


@given(token_ids=st.lists(st.integers(0, 383), max_size=120))
def test_any_byte_level_tokens(byte_level: TextCodec, token_ids: list[int]) -> None:
    for decoder in (IncrementalDecoder(byte_level), ByteDecoder(byte_level)):
        text = "".join([*map(decoder.push, token_ids), decoder.flush()])
        assert text == byte_level.decode(token_ids)


@given(byte=st.integers(3, 258), count=st.integers(1, 200))
def test_runs_of_one_byte(byte_level: TextCodec, byte: int, count: int) -> None:
    for decoder in (IncrementalDecoder(byte_level), ByteDecoder(byte_level)):
        text = "".join([*map(decoder.push, [byte] * count), decoder.flush()])
        assert text == byte_level.decode([byte] * count)


def test_the_quicker_decoder_is_taken_where_it_is_right(
    byte_level: TextCodec, sentencepiece: TextCodec
) -> None:
    assert isinstance(byte_level.decoder(), ByteDecoder)
    assert isinstance(sentencepiece.decoder(), IncrementalDecoder)


def test_added_tokens_are_written_as_they_are(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<tool call> é"])
    tokenizer.save_pretrained(tmp_path)
    codec = TextCodec(tmp_path)
    token_ids = codec.encode_prompt("a<tool call> éb")
    decoder = codec.decoder()
    assert isinstance(decoder, ByteDecoder)
    text = "".join([*map(decoder.push, token_ids), decoder.flush()])
    assert text == codec.decode(token_ids) == "a<tool call> éb"


@given(text=st.text(max_size=150))
def test_any_text_through_byte_level(byte_level: TextCodec, text: str) -> None:
    token_ids = byte_level.encode_prompt("x" + text)
    stream = TextStream(byte_level)
    pieces, rest = stream.take(token_ids, last=True)
    assert "".join(pieces) + rest == byte_level.decode(token_ids)


@given(words=st.lists(TEXTS, max_size=12))
def test_any_text_through_sentencepiece(sentencepiece: TextCodec, words: list[str]) -> None:
    token_ids = sentencepiece.encode_prompt("".join(["a", *words]))
    decoder = IncrementalDecoder(sentencepiece)
    text = "".join([*map(decoder.push, token_ids), decoder.flush()])
    assert text == sentencepiece.decode(token_ids)


def test_byte_tokens_first(sentencepiece: TextCodec) -> None:
    token_ids = [*"漢".encode(), *"🙂".encode(), 257]
    decoder = IncrementalDecoder(sentencepiece)
    assert [decoder.push(token_id) for token_id in token_ids if token_id] == [
        *("", "", "漢"),
        *("", "", "", "🙂"),
        " a",
    ]


@given(text=TEXTS, stop=st.lists(TEXTS.filter(bool), min_size=1, max_size=3), data=st.data())
def test_stop_strings_however_split(
    byte_level: TextCodec, text: str, stop: list[str], data: st.DataObject
) -> None:
    """The text ends before the stop string that is complete first, for any split into steps."""
    token_ids = byte_level.encode_prompt("." + text)
    stream = TextStream(byte_level, stop=StopStrings(stop))
    pieces: list[str] = []
    begin, stopped = 0, False
    while begin < len(token_ids) and not stopped:
        end = data.draw(st.integers(begin + 1, len(token_ids)))
        count = stream.first_stop(token_ids[begin:end])
        stopped = count is not None
        taken = token_ids[begin : begin + count] if count is not None else token_ids[begin:end]
        new, rest = stream.take(taken, last=stopped or end == len(token_ids))
        pieces += [*new, rest]
        begin += len(taken)
    whole = "." + text
    ends = [
        len(byte_level.decode(token_ids[:n]).rstrip("\ufffd")) for n in range(len(token_ids) + 1)
    ]
    expected, expected_tokens = whole, len(token_ids)
    for n, length in enumerate(ends):
        found = [i for s in stop if (i := whole[:length].find(s)) >= 0]
        if found:
            expected, expected_tokens = whole[: min(found)], n
            break
    assert ("".join(pieces), begin) == (expected, expected_tokens)


def test_the_text_ends_before_an_end_token(byte_level: TextCodec) -> None:
    token_ids = byte_level.encode_prompt("left")
    letter = byte_level.encode_prompt("Q")[0]
    stream = TextStream(byte_level, stop=StopStrings(["tx"]), end_token_ids=[letter])
    assert stream.first_stop([*token_ids, letter, *token_ids]) is None
    pieces, rest = stream.take([*token_ids, letter], last=True)
    assert ("".join(pieces), rest) == ("left", "")
    assert len(pieces) == len(token_ids) + 1


def test_special_tokens_have_no_text(byte_level: TextCodec) -> None:
    pieces, rest = TextStream(byte_level).take([0, 1, 2], last=True)
    assert (pieces, rest) == (["", "", ""], "")


def test_prompts_and_chats(byte_level: TextCodec) -> None:
    assert byte_level.decode(byte_level.encode_prompt("The rain, été")) == "The rain, été"
    chat = byte_level.encode_chat(Chat([Message("user", "hello")]))[0]
    assert chat[0] == 1
    assert byte_level.decode(chat) == "user\nhello\nassistant\n"


@pytest.mark.parametrize(
    "messages", [[], [Message("robot", "hello")], [SimpleNamespace(role="", content="x")]]
)
def test_refused_chats(byte_level: TextCodec, messages: list[object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        byte_level.encode_chat(Chat(cast("list[Message]", messages)))
    assert caught.value.field == "messages"


def test_a_chat_without_a_template(sentencepiece: TextCodec) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        sentencepiece.encode_chat(Chat([Message("user", "hello")]))


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.secret.name }}", "it cannot render them"),
        ("{{ 1 // 0 }}", "it cannot render them"),
    ],
)
def test_what_a_template_says_is_told_and_no_error_within_it(
    tmp_path: Path, template: str, told: str
) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError) as caught:
        TextCodec(tmp_path).encode_chat(Chat([Message("user", "hello")]))
    assert str(caught.value) == f"messages: the model's chat template refuses them: {told}"


def test_an_empty_prompt(byte_level: TextCodec) -> None:
    with pytest.raises(InvalidRequestError, match="prompt: expected text"):
        byte_level.encode_prompt("")


@pytest.mark.parametrize("stated", ["TokenizersBackend", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_tokenizer_is_the_one_that_transformers_finds(
    tmp_path: Path, architecture: Architecture, stated: str | None
) -> None:
    make_tiny_checkpoint(tmp_path, architecture=architecture)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": stated}
    path.write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
    ours, theirs = tokenizer_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot load a tokenizer"):
        TextCodec(tmp_path)
