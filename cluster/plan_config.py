"""The section [plan] of a configuration: the question that `paceline plan` answers."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cluster.config_checks import check_profile, refusal
from cluster.decoding.policies import PolicyName
from paceline.text import did_you_mean

SIMULATED_POLICIES = tuple(policy.value for policy in PolicyName)

_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _profile(role: Literal["target", "drafter"]) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, str):
            raise refusal(f"expected the name of a latency profile, got {value!r}")
        check_profile(value, role)
        return value

    return BeforeValidator(check)


def _ratio(value: object) -> object:
    found = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", value) if isinstance(value, str) else None
    if found is None:
        raise refusal(
            f'expected TARGETS:DRAFTERS such as "1:1" or "4:1", each 1 to 99, got {value!r}'
        )
    return value


def _policy(value: object) -> object:
    if value in SIMULATED_POLICIES:
        return value
    hint = did_you_mean(value, SIMULATED_POLICIES) if isinstance(value, str) else ""
    raise refusal(f"expected one of {', '.join(SIMULATED_POLICIES)}, got {value!r}{hint}")


def _listed(value: object) -> object:
    """Turn a single value into a list."""
    return value if isinstance(value, list | tuple) else [value]


_Listed = BeforeValidator(_listed)
_SOME = Field(min_length=1, strict=False)


class PlanConfig(BaseModel):
    """Devices, links, load and acceptance. If several values are given, all are compared."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # Latency profiles (workers/emulated/profiles).
    target: Annotated[tuple[Annotated[str, _profile("target")], ...], _Listed, _SOME] = (
        "70b-4xh100",
    )
    drafter: Annotated[tuple[Annotated[str, _profile("drafter")], ...], _Listed, _SOME] = (
        "1b-h100",
    )
    hosts: Annotated[int, Field(ge=1, le=100_000)] = 1
    gpus_per_host: Annotated[int, Field(ge=1, le=1024)] = 8
    # Target groups and the drafters that they share. Plain decoding is always compared as well.
    ratios: Annotated[tuple[Annotated[str, BeforeValidator(_ratio)], ...], _Listed, _SOME] = (
        "1:1",
        "2:1",
        "1:4",
    )
    policies: Annotated[tuple[Annotated[str, BeforeValidator(_policy)], ...], _Listed, _SOME] = (
        SIMULATED_POLICIES
    )
    # The link between a driver and a drafter: round trip in milliseconds, and Mbit/s.
    rtt_ms: Annotated[float, Field(ge=0, le=60_000, allow_inf_nan=False)] = 0.1
    mbit_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    # The chance that a drafted token is right if those before it are. The chance that the second
    # guess is right if the first is wrong.
    acceptance: _Share = 0.8
    hit_rate: _Share = 0.5
    # The load: callers that ask again when they are answered, or a fixed rate of requests.
    concurrency: Annotated[int, Field(ge=1)] | None = None
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    prompt_tokens: Annotated[int, Field(ge=3, le=16_384)] = 512
    output_tokens: Annotated[int, Field(ge=2, le=16_384)] = 128
    # Tokens whose KV a target group holds.
    kv_tokens: Annotated[int, Field(ge=1024)] = 131_072
    # Requests simulated for each layout. The most target groups that are simulated, with the load
    # reduced accordingly (0: all).
    requests: Annotated[int, Field(ge=1)] = 100
    simulated_groups: Annotated[int, Field(ge=0)] = 4
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one_load(self) -> PlanConfig:
        if self.concurrency is not None and self.requests_per_second is not None:
            raise refusal(
                "concurrency and requests_per_second are both given; leave one of the two out"
            )
        return self
