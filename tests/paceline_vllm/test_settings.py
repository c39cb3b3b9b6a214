"""What vLLM's start refuses, by name, and what it takes from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline_vllm.settings import WAIT_MS, Settings, read_settings


def _read(tokens: int = 8, **environ: str) -> Settings:
    return read_settings({"PACELINE_DRAFTERS": "one:9002", **environ}, tokens)


def test_addresses_alone_are_enough() -> None:
    settings = _read(PACELINE_DRAFTERS="one:9002, two:9003")
    assert settings.addresses == ("one:9002", "two:9003")
    assert (settings.speculation.policy, settings.speculation.window) == ("fanout", 8)
    assert settings.wait_ms == 0
    assert settings.metrics_port is None
    assert settings.padding == "auto"


def test_a_file_is_read_as_that_of_a_deployment(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text(
        '[pool]\naddresses = ["one:9002"]\nparty = "search"\n'
        '[speculation]\npolicy = "fanout"\nwindow = 4\n[workers]\ntls = "certificates"\n'
    )
    settings = read_settings({"PACELINE_CONFIG": str(file)}, 8)
    assert settings.addresses == ("one:9002",)
    assert settings.pool.party == "search"
    assert (settings.speculation.policy, settings.speculation.window) == ("fanout", 4)
    assert settings.tls is not None
    # Variables override it.
    settings = read_settings(
        {"PACELINE_CONFIG": str(file), "PACELINE_SPECULATION__POLICY": "chain"}, 8
    )
    assert settings.speculation.policy == "chain"


def test_a_policy_that_waits_does_so_for_less_than_in_a_deployment() -> None:
    assert _read(PACELINE_SPECULATION__POLICY="lockstep").wait_ms == WAIT_MS
    given = _read(
        PACELINE_SPECULATION__POLICY="lockstep", PACELINE_SPECULATION__WAIT_MS="50"
    ).wait_ms
    assert given == 50


@pytest.mark.parametrize(
    ("tokens", "environ", "says"),
    [
        (0, {}, "num_speculative_tokens is 0"),
        (200, {}, "num_speculative_tokens is 200, expected 1 to 64"),
        (8, {"PACELINE_DRAFTERS": ""}, "no drafters are named: set PACELINE_DRAFTERS"),
        (8, {"PACELINE_DRAFTERS": "one"}, "PACELINE_DRAFTERS: "),
        (8, {"PACELINE_DRAFTERS": "one:99999"}, "PACELINE_DRAFTERS: "),
        (8, {"PACELINE_CONFIG": "/absent.toml"}, "/absent.toml: there is no such file"),
        (8, {"PACELINE_SPECULATION__BRANCHES": "2"}, "speculation.branches: vLLM verifies chains"),
        (8, {"PACELINE_SPECULATION__MERGE": "true"}, "speculation.merge: "),
        (8, {"PACELINE_SPECULATION__POLICY": "replicas"}, "replicas"),
        (8, {"PACELINE_SPECULATION__POLICY": "chian"}, "chian"),
        (4, {"PACELINE_SPECULATION__WINDOW": "8"}, "speculation.window is 8"),
        (8, {"PACELINE_POOL__NAME": "drafters"}, "pool.name"),
        (8, {"PACELINE_METRICS_PORT": "http"}, "PACELINE_METRICS_PORT"),
        (8, {"PACELINE_PADDING": "maybe"}, "PACELINE_PADDING"),
    ],
)
def test_a_mistake_is_one_clear_line(tokens: int, environ: dict[str, str], says: str) -> None:
    with pytest.raises(PacelineError) as caught:
        _read(tokens, **environ)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
