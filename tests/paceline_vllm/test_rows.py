"""Requests of vLLM's batch are found again by their tokens."""

from __future__ import annotations

import random

import numpy as np

from paceline_vllm.rows import MOST_NEW, UNSEEN_CALLS, Rows, Table, Text

WIDTH = 6000


def _table(*texts: list[int]) -> Table:
    table = np.zeros((8, WIDTH), dtype=np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    return table


def _match(rows: Rows, *texts: list[int], sampled: list[int] | None = None) -> list[Text]:
    lengths = [len(text) for text in texts]
    found = rows.match(lengths, _table(*texts), sampled or [1] * len(texts))
    for text, given in zip(found, texts, strict=True):
        assert text is not None
        assert text.tokens[: text.length].tolist() == given
    return [text for text in found if text is not None]


def test_a_row_goes_on_with_its_text() -> None:
    rows = Rows(8)
    (first,) = _match(rows, [1, 2, 3])
    (second,) = _match(rows, [1, 2, 3, 4, 5])
    assert second is first
    first.told = 3
    assert first.new_tokens == (4, 5)


def test_rows_that_change_places_are_found() -> None:
    rows = Rows(8)
    one, other = _match(rows, [1, 2, 3], [7, 8, 9])
    assert _match(rows, [7, 8, 9, 1], [1, 2, 3, 4]) == [other, one]


def test_a_preempted_request_is_found_when_it_comes_back() -> None:
    rows = Rows(8)
    one, other = _match(rows, [1, 2, 3], [7, 8, 9])
    _match(rows, [7, 8, 9, 1])
    # Its tokens are computed again: the first chunks commit nothing.
    assert _match(rows, [7, 8, 9, 1, 2], [1, 2, 3], sampled=[1, 0]) == [other, one]
    assert _match(rows, [7, 8, 9, 1, 2, 3], [1, 2, 3, 4]) == [other, one]
    assert not rows.take_gone()


def test_a_text_that_no_row_shows_is_let_go_after_some_steps() -> None:
    rows = Rows(8)
    one, _ = _match(rows, [1, 2, 3], [7, 8, 9])
    text = [7, 8, 9]
    for _ in range(UNSEEN_CALLS):
        text.append(5)
        _match(rows, list(text))
    assert rows.take_gone() == [one]
    assert not rows.has(one)
    assert len(rows) == 1


def test_equal_requests_share_a_text_until_they_part() -> None:
    rows = Rows(8)
    one, same = _match(rows, [1, 2, 3], [1, 2, 3])
    assert one is same
    one, same = _match(rows, [1, 2, 3, 4], [1, 2, 3, 4])
    assert one is same
    one, other = _match(rows, [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    assert one is not other
    assert _match(rows, [1, 2, 3, 4, 5, 1], [1, 2, 3, 4, 6, 1]) == [one, other]


def test_one_that_gets_more_than_its_twin_parts_from_it() -> None:
    rows = Rows(8)
    one, same = _match(rows, [1, 2, 3], [1, 2, 3])
    assert one is same
    one, other = _match(rows, [1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert one is not other


def test_a_new_request_in_a_row_is_another_text() -> None:
    rows = Rows(8)
    (one,) = _match(rows, [1, 2, 3])
    (other,) = _match(rows, [4, 5, 6, 7])
    assert one is not other


def test_texts_that_differ_only_far_back_are_told_apart() -> None:
    rows = Rows(8)
    same = [5] * 900
    one, other = _match(rows, [1, *same], [2, *same])
    assert _match(rows, [2, *same, 3], [1, *same, 3]) == [other, one]
    same = [5] * 5000  # Farther back than rows are compared while they stay.
    one, other, _ = _match(rows, [1, *same], [2, *same], [3])
    assert _match(rows, [3, 4], [1, *same, 3], [2, *same, 3])[1:] == [one, other]


def test_too_much_that_is_new_begins_another_text() -> None:
    rows = Rows(8)
    (one,) = _match(rows, [1, 2, 3])
    (other,) = _match(rows, [1, 2, 3] + [4] * (MOST_NEW + 1))
    assert one is not other


def test_no_more_texts_are_kept_than_allowed() -> None:
    rows = Rows(4)
    for number in range(100):
        _match(rows, [number, 1, 2])
        assert len(rows) <= 4
    assert len(rows.take_gone()) == 96


def test_a_row_without_tokens_has_no_text() -> None:
    assert Rows(8).match([0, 2], _table([], [1, 2]), [0, 1])[0] is None


def test_random_batches() -> None:
    """Requests come, go, move, are preempted and come back; each keeps its text while it is in."""
    source = random.Random(0)
    rows = Rows(16)
    present: list[tuple[list[int], Text | None]] = []
    kept = 0
    for step in range(2000):
        if source.random() < 0.2 and len(present) < 8:
            present.append(([source.randrange(9) for _ in range(source.randrange(1, 40))], None))
        if source.random() < 0.15 and present:
            present.pop(source.randrange(len(present)))
        if source.random() < 0.2:
            source.shuffle(present)
        for text, _ in present:
            text += [source.randrange(9) for _ in range(source.randrange(1, 5))]
        found = rows.match(
            [len(text) for text, _ in present],
            _table(*[text for text, _ in present]),
            [1] * len(present),
        )
        for number, (text, before) in enumerate(present):
            now = found[number]
            assert now is not None
            assert now.tokens[: now.length].tolist() == text
            kept += now is before
            present[number] = (text, now)
        if step % 100 == 0:
            rows.take_gone()
    assert kept > 4000
