"""Latency profiles: those that come with Paceline, and the errors of broken ones."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.errors import ConfigError
from workers.emulated.latency_profiles import LinkProfile, PassTimes, load_profile, profile_names

TIMES = PassTimes(batch=(1, 3), tokens=(1, 5), table=((1.0, 5.0), (3.0, 7.0)))


@pytest.mark.parametrize(
    ("batch", "tokens", "ms"),
    [(1, 1, 1.0), (1, 3, 3.0), (2, 1, 2.0), (2, 3, 4.0), (3, 5, 7.0), (1, 9, 9.0), (5, 1, 5.0)],
)
def test_between_the_points_and_beyond(batch: int, tokens: int, ms: float) -> None:
    assert TIMES.ms(batch, tokens) == pytest.approx(ms)


def test_the_profiles_that_come_with_paceline() -> None:
    profiles = {name: load_profile(name) for name in profile_names()}
    wanted = {"70b-4xh100", "70b-8xh100-2hosts", "8b-h100", "1b-h100", "0.5b-h100", "pard-1b-h100"}
    assert wanted <= profiles.keys()
    assert all("not a measurement" in one.source for one in profiles.values())
    for profile in profiles.values():
        table = profile.pass_ms.table
        assert all(list(row) == sorted(row) for row in table), "more tokens, less time"
        assert all(list(col) == sorted(col) for col in zip(*table, strict=True))
    assert profiles["70b-4xh100"].pass_ms.ms(1, 9) == pytest.approx(18.3, abs=0.05)
    assert profiles["1b-h100"].pass_ms.ms(1, 1) == pytest.approx(2.5, abs=0.02)
    assert (profiles["70b-8xh100-2hosts"].gpus, profiles["70b-8xh100-2hosts"].hosts) == (8, 2)


def test_refusals_say_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"70b-4xh100.*did you mean|expected one of .*70b-4xh100"):
        load_profile("70b-4xh10")
    with pytest.raises(ConfigError, match="for a drafter, expected one for a target"):
        load_profile("1b-h100", role="target")
    with pytest.raises(ValidationError, match="expected 2 rows of 2"):
        PassTimes(batch=(1, 2), tokens=(1, 2), table=((1.0, 2.0),))
    with pytest.raises(ValidationError, match="ascending"):
        PassTimes(batch=(2, 1), tokens=(1, 2), table=((1.0, 2.0), (1.0, 2.0)))


def test_a_link_takes_half_the_round_trip_and_the_time_to_send() -> None:
    assert LinkProfile(rtt_ms=10).one_way_seconds(1000) == pytest.approx(0.005)
    assert LinkProfile(rtt_ms=2, mbit_per_second=8).one_way_seconds(1000) == pytest.approx(0.002)
