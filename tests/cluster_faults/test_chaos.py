"""A minute of random faults under 20 streams: no wrong text, no leak, nothing stuck."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.bench.faults import options_of, prompt_of
from tests.cluster_faults.chaos import STREAMS, events_of, run_chaos, true_text


def test_a_seed_names_its_faults() -> None:
    assert events_of(1, has_cable=True) == events_of(1, has_cable=True)
    assert events_of(1, has_cable=True) != events_of(2, has_cable=True)
    assert {event.kind for event in events_of(1, has_cable=True)} == {"kill", "stop", "cut"}
    assert {event.kind for event in events_of(1, has_cable=False)} == {"kill", "stop"}


def test_one_other_token_is_another_text() -> None:
    prompt, options = prompt_of(1), options_of(1, 50)
    text = true_text(prompt, options)
    assert true_text(prompt, options) == text
    assert true_text([*prompt[:-1], prompt[-1] + 1], options) != text
    assert true_text(prompt, options_of(2, 50)) != text


@pytest.mark.ray
def test_a_minute_of_faults(tmp_path: Path, chaos_seed: int) -> None:
    chaos = run_chaos(tmp_path, seed=chaos_seed, seconds=60.0)
    assert chaos.num_faults >= 5
    assert chaos.num_answers > 2 * STREAMS
