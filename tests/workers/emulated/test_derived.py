"""Profiles derived from shapes and cards, compared with those committed and with measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from workers.emulated.derived import (
    CARDS,
    EFFICIENCY,
    SHAPES,
    Efficiency,
    Reduction,
    derived_profile,
    read_shape,
    room_on,
)
from workers.emulated.latency_profiles import load_profile

_NO_LIMIT = 1e12


@pytest.mark.parametrize(
    ("name", "shape", "efficiency", "hosts", "all_reduce_us"),
    [
        ("70b-4xh100", "llama-3-70b", Efficiency(0.7, 0.6, 0.0), 1, 20.0),
        ("70b-8xh100-2hosts", "llama-3-70b", Efficiency(0.7, 0.6, 0.0), 2, 44.0),
        ("8b-h100", "llama-3-8b", EFFICIENCY["target"], 1, None),
        ("1b-h100", "llama-3.2-1b", EFFICIENCY["drafter"], 1, None),
        ("0.5b-h100", "qwen2.5-0.5b", Efficiency(0.5, 0.4, 1.0), 1, None),
    ],
)
def test_the_formula_gives_the_committed_profiles(
    name: str, shape: str, efficiency: Efficiency, hosts: int, all_reduce_us: float | None
) -> None:
    """Theirs round the number of weights and the milliseconds, and count no bytes on links."""
    committed = load_profile(name)
    derived = derived_profile(
        name,
        SHAPES[shape],
        CARDS["h100-sxm"],
        efficiency,
        role=committed.role,
        card_name="h100-sxm",
        cards=committed.gpus,
        hosts=hosts,
        reduction=None if all_reduce_us is None else Reduction(all_reduce_us, _NO_LIMIT),
    )
    assert derived.pass_ms.batch == committed.pass_ms.batch
    assert derived.pass_ms.tokens == committed.pass_ms.tokens
    for row, expected in zip(derived.pass_ms.table, committed.pass_ms.table, strict=True):
        assert row == pytest.approx(expected, rel=0.008)


@pytest.mark.parametrize(
    ("batch", "tokens", "context", "measured_ms", "error"),
    [
        (1, 1, 512, 7.75, -0.035),
        (4, 4, 512, 7.86, -0.038),
        (16, 16, 512, 8.61, -0.082),
        (1, 512, 512, 16.1, -0.048),
        (1, 2048, 2048, 52.1, 0.076),
    ],
)
def test_the_errors_in_the_documentation_are_those_of_the_formula(
    batch: int, tokens: int, context: int, measured_ms: float, error: float
) -> None:
    """docs/planning.md has the measurements and these errors."""
    derived = derived_profile(
        "8b",
        SHAPES["llama-3-8b"],
        CARDS["h100-sxm"],
        EFFICIENCY["target"],
        role="target",
        card_name="h100-sxm",
        context=context,
    )
    found = derived.pass_ms.ms(batch, tokens) / measured_ms - 1
    assert found == pytest.approx(error, abs=0.001)
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    assert f"{100 * error:+.1f} %" in page


@pytest.mark.parametrize(
    ("name", "weights", "kv_bytes"),
    [
        ("llama-3-70b", 70_553_706_496, 327_680),
        ("llama-3-8b", 8_030_261_248, 131_072),
        ("llama-3.2-1b", 1_235_814_400, 32_768),
    ],
)
def test_weights_are_counted(name: str, weights: int, kv_bytes: int) -> None:
    assert SHAPES[name].num_weights == weights
    assert SHAPES[name].kv_bytes == kv_bytes


def test_all_reduces_cost_time_and_bytes() -> None:
    shape = SHAPES["llama-3-70b"]
    assert Reduction(20.0, _NO_LIMIT).ms(shape, 4, 1) == pytest.approx(160 * 0.02)
    # 160 of 1,024 rows of 16 KiB, of which 1.5 times as much is sent, at 50 GB/s.
    sent_ms = 160 * 1024 * 16384 * 1.5 / 50e9 * 1000
    assert Reduction(0.0, 50.0).ms(shape, 4, 1024) == pytest.approx(sent_ms)


def test_a_card_lacks_what_the_model_needs_more() -> None:
    shape = SHAPES["llama-3-70b"]
    room = room_on(CARDS["h100-sxm"], shape, cards=1, least_tokens=1024)
    missing = 2 * 70_553_706_496 + 1024 * 327_680 - 0.9 * 80e9
    assert room.lacks_gib == pytest.approx(missing / 2**30)
    four = room_on(CARDS["h100-sxm"], shape, cards=4, least_tokens=1024)
    assert four.lacks_gib == 0
    assert four.kv_tokens == int((0.9 * 80e9 - 2 * 70_553_706_496 / 4) / (327_680 / 4))
    # 16 cards share 8 heads of keys and values: each head is on two cards.
    assert room_on(CARDS["l40s"], shape, cards=16, least_tokens=1).kv_of_a_token == 327_680 / 8


_CONFIG = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
    "rope_theta": 500_000.0,
}


def test_a_config_json_has_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_CONFIG))
    assert read_shape(path) == SHAPES["llama-3-8b"]
    path.write_text(json.dumps(_CONFIG | {"torch_dtype": "float32"}))
    assert read_shape(path).weight_bytes == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_local_experts": 8}, "num_local_experts is 8: only dense models"),
        ({"hidden_size": None}, "hidden_size: Field required"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_a_shape_that_cannot_be_derived_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_CONFIG | changes))
    with pytest.raises(ConfigError, match=words):
        read_shape(path)


@pytest.mark.parametrize("text", [None, "no json", "[1]"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(path)
