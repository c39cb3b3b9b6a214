"""Latency profiles: how long a forward pass takes on an emulated device.

A profile is a TOML file in the folder `profiles`. Times are interpolated linearly between the
points of its table, and its `source` says where they come from.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.errors import ConfigError
from paceline.text import did_you_mean, one_line

EMULATED = "emulated "
"""Prefix of the model name that an emulated worker reports."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PassTimes(_Closed):
    """Milliseconds of a pass: `table[i][j]` with `batch[i]` sequences and `tokens[j]` tokens fed.

    Times are linear between points. Beyond the last point the last interval is extrapolated; before
    the first point, the first value holds.
    """

    batch: tuple[Count, ...]
    tokens: tuple[Count, ...]
    table: tuple[tuple[Positive, ...], ...]

    @model_validator(mode="after")
    def _fits(self) -> PassTimes:
        for name, points in (("batch", self.batch), ("tokens", self.tokens)):
            if len(points) < 2 or sorted(set(points)) != list(points):
                raise ValueError(f"{name}: expected two or more ascending numbers, got {points}")
        if [len(row) for row in self.table] != [len(self.tokens)] * len(self.batch):
            raise ValueError(
                f"table: expected {len(self.batch)} rows of {len(self.tokens)}, "
                f"got rows of {[len(row) for row in self.table]}"
            )
        return self

    def ms(self, batch: int, tokens: int) -> float:
        """Milliseconds of one pass over `batch` sequences and `tokens` tokens."""
        row, above = _place(self.batch, batch)
        column, right = _place(self.tokens, tokens)
        first, second = self.table[row], self.table[row + 1]
        low = first[column] + right * (first[column + 1] - first[column])
        high = second[column] + right * (second[column + 1] - second[column])
        return low + above * (high - low)


class DeviceProfile(_Closed):
    """A device group and the model on it. Figures made with a profile are labeled as emulated.

    `gpus` and `hosts`: the numbers of GPUs and hosts that it occupies. `tokens_a_pass`: those that
    a drafter drafts after each node that a pass continues; each is a token fed. `kept`: with each
    further token of a pass, the chance that a guess is right falls by this factor.
    """

    name: str
    role: Literal["target", "drafter"]
    about: str
    gpus: Count
    hosts: Count
    source: Annotated[str, Field(min_length=1)]
    pass_ms: PassTimes
    tokens_a_pass: Annotated[int, Field(ge=1, le=32)] = 1
    kept: Annotated[float, Field(gt=0, le=1)] = 1.0

    def scaled(self, factor: float) -> DeviceProfile:
        """The same device with all passes `factor` times as long."""
        table = tuple(tuple(ms * factor for ms in row) for row in self.pass_ms.table)
        times = self.pass_ms.model_copy(update={"table": table})
        return self.model_copy(update={"pass_ms": times})


class LinkProfile(_Closed):
    """A network path: its round-trip time, and its rate in each direction (0: unlimited)."""

    rtt_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    mbit_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    def one_way_seconds(self, num_bytes: int) -> float:
        """Seconds from the first byte sent to the last one received."""
        sending = num_bytes * 8e-6 / self.mbit_per_second if self.mbit_per_second else 0.0
        return self.rtt_ms / 2000 + sending


def profile_names() -> list[str]:
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in (files("workers.emulated") / "profiles").iterdir()
        if entry.name.endswith(".toml")
    )


def load_profile(name: str, *, role: Literal["target", "drafter"] | None = None) -> DeviceProfile:
    """The profile with this name. Raises ConfigError, listing the profiles of the role."""
    names = profile_names()
    if name not in names:
        fitting = [one for one in names if role is None or load_profile(one).role == role]
        raise ConfigError(
            f"there is no latency profile {name!r}; expected one of {', '.join(fitting)}"
            f"{did_you_mean(name, fitting)}"
        )
    text = (files("workers.emulated") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    profile = _parsed(text, name)
    if role is not None and profile.role != role:
        raise ConfigError(
            f"the latency profile {name!r} is for a {profile.role}, expected one for a {role}: "
            "choose another"
        )
    return profile


def read_profile(path: Path, *, name: str) -> DeviceProfile:
    """The profile in a file, such as scripts/measure_profile.py writes. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; name a latency profile") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return _parsed(text, name, str(path))


def _parsed(text: str, name: str, path: str | None = None) -> DeviceProfile:
    try:
        return DeviceProfile.model_validate({"name": name, **tomllib.loads(text)})
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(
            f"the latency profile {path or name!r} is not usable: {one_line(error)}"
        ) from error


def _place(points: Sequence[int], value: int) -> tuple[int, float]:
    """The interval of `points` for `value`, and the position in it: 0 at its start, 1 at its end.

    A value below the first point counts as the first point; one beyond the last gives more than 1.
    """
    index = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    share = (value - points[index]) / (points[index + 1] - points[index])
    return index, max(share, 0.0)
