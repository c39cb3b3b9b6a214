"""Stop strings: found as their plain definition says, at a bounded cost per token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.driver.stop_strings import StopStrings
from cluster.driver.text import TextCodec, TextStream
from paceline.limits import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from tests.tiny import make_tiny_tokenizer

WORDS = ["".join(letters) for n in range(1, 5) for letters in product("ab", repeat=n)]
STOPS = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=7), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A codec whose tokens are all words of one to four letters a and b."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(WORDS)
    tokenizer.save_pretrained(folder)
    return TextCodec(folder)


def by_definition(stops: Sequence[str], pieces: Sequence[str]) -> list[tuple[str, bool]]:
    """By definition, the text that goes out after each piece, up to a stop.

    Text is held back while it may begin a stop string. Once it contains stop strings, it ends
    before the one that begins first.
    """
    given_out: list[tuple[str, bool]] = []
    held = ""
    for piece in pieces:
        text = held + piece
        begins = [text.find(stop) for stop in stops if stop in text]
        if begins:
            return [*given_out, (text[: min(begins)], True)]
        kept = max(
            length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])
        )
        held = text[len(text) - kept :]
        given_out.append((text[: len(text) - kept], False))
    return given_out


@given(stops=STOPS, words=st.lists(st.sampled_from([*WORDS, "."]), max_size=30))
def test_it_finds_what_the_definition_finds(
    codec: TextCodec, stops: list[str], words: list[str]
) -> None:
    """Equal to the character, token by token, including what is held back."""
    stream = TextStream(codec, stop=StopStrings(stops))
    found = []
    for word in words:
        token_ids = codec.encode_prompt(word)
        assert len(token_ids) == 1
        stopped = stream.first_stop(token_ids) is not None
        ([piece], _) = stream.take(token_ids, last=False)
        found.append((piece, stopped))
        if stopped:
            break
    assert found == by_definition(stops, words)


ALL_A = "a" * (MAX_STOP_LENGTH - 1)
WORST: dict[str, tuple[list[str], str]] = {
    "all but the last character, ever again": ([ALL_A + chr(66 + n) for n in range(16)], "a"),
    "then a fall through all beginnings": (
        [ALL_A + chr(66 + n) for n in range(16)],
        "a" * (MAX_STOP_LENGTH - 1) + "x",
    ),
    "beginnings within beginnings": (
        [("ab" * MAX_STOP_LENGTH)[n : n + MAX_STOP_LENGTH - 1] + "c" for n in range(16)],
        "ab" * 100,
    ),
    "other beginnings of each": (
        ["a" * n + "b" + "a" * (MAX_STOP_LENGTH - 2 - n) + "c" for n in range(16)],
        "a" * 7 + "b",
    ),
}


@pytest.mark.parametrize(("stops", "text"), WORST.values(), ids=WORST)
def test_the_worst_text_takes_less_than_a_millisecond_a_token(
    codec: TextCodec, stops: list[str], text: str
) -> None:
    """Processor time of this thread, the least of three runs, so that other load matters little."""
    assert len(stops) == MAX_STOP_STRINGS
    token_ids = codec.encode_prompt(text)
    token_ids *= 4_000 // len(token_ids) + 1
    least = [float("inf")] * len(token_ids)
    for _ in range(3):
        stream = TextStream(codec, stop=StopStrings(stops))
        for index, token_id in enumerate(token_ids):
            begin = time.thread_time_ns()
            assert stream.first_stop([token_id]) is None
            least[index] = min(least[index], (time.thread_time_ns() - begin) / 1e6)
    assert max(least) < 1.0
    assert sum(least) / len(least) < 0.1


@pytest.mark.parametrize("stops", [stops for stops, _ in WORST.values()], ids=WORST)
def test_to_build_the_largest_automaton_takes_milliseconds(stops: list[str]) -> None:
    begin = time.thread_time()
    StopStrings(stops)
    assert time.thread_time() - begin < 0.5  # 5 ms are usual


def test_sequences_share_an_automaton_and_no_text(codec: TextCodec) -> None:
    stops = StopStrings(["ab"])
    first, second = TextStream(codec, stop=stops), TextStream(codec, stop=stops)
    a, b = codec.encode_prompt("a")[0], codec.encode_prompt("b")[0]
    assert first.first_stop([a]) is None
    assert second.first_stop([b]) is None
    assert first.first_stop([b]) == 1
