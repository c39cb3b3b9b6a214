"""The question for `paceline plan`: the table [plan], and hosts to rent in [plan.rent]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from cluster.config.fields import LISTED, Closed, Policy, Text, checked_text, profile_of, refusal
from cluster.decoding.policy import POLICIES
from paceline.text import did_you_mean
from workers.emulated.derived import CARDS, SHAPES, Card, Shape

MOST_GPUS = 1024
"""Upper bound on the GPUs of a layout to rent."""
SEEDS_TO_RENT = 3
"""Seeds of a question about hosts to rent, if `seeds` is not given."""

_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Part = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_SOME = Field(min_length=1, max_length=64, strict=False)


def _ratio(value: object) -> object:
    found = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", value) if isinstance(value, str) else None
    if found is None:
        raise refusal(
            f'expected TARGETS:DRAFTERS such as "1:1" or "4:1", each 1 to 99, got {value!r}'
        )
    return value


@dataclass(frozen=True, slots=True)
class Hosts:
    """`count` equal hosts with `gpus` of one card, of which `drafters` run drafters."""

    count: int
    gpus: int
    card: str
    drafters: int = 0


_HOSTS = re.compile(
    r"(?:(?P<count>[1-9]\d{0,3})\s*(?:hosts?\s*)?x\s*)?(?P<gpus>[1-9]\d{0,3})\s+"
    r"(?P<card>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)(?P<drafters>\s*\(?\s*(?P<some>[1-9]\d{0,3}\s+)?"
    r"for\s+drafters\s*\)?)?"
)


def hosts_of(text: str) -> tuple[Hosts, ...]:
    """The hosts of a layout such as "2 x 4 h100-sxm + 1 l40s for drafters".

    Raises ValueError.
    """
    found = []
    for part in text.split("+"):
        match = _HOSTS.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                'expected hosts such as "2 x 4 h100-sxm + 1 l40s for drafters" or "8 h100-sxm (4 '
                f'for drafters)", got {text!r}'
            )
        gpus = int(match["gpus"])
        drafters = int(match["some"] or gpus) if match["drafters"] else 0
        if drafters > gpus:
            raise ValueError(
                f"{part.strip()!r}: expected at most {gpus} GPUs for drafters, got {drafters}"
            )
        found.append(Hosts(int(match["count"] or 1), gpus, match["card"], drafters))
    gpus = sum(one.count * one.gpus for one in found)
    if gpus > MOST_GPUS:
        raise ValueError(f"expected at most {MOST_GPUS} GPUs in a layout, got {gpus}")
    if all(one.drafters == one.gpus for one in found):
        raise ValueError(f"{text!r} leaves no GPU for the target; name hosts without drafters")
    return tuple(found)


class ModelConfig(Closed):
    """A model to plan for: its shape, from a config.json or given, and how fast a card runs it."""

    config: Text | None = None
    """A checkpoint's config.json. With neither this nor `shape`: the shape with this name."""
    shape: Shape | None = None
    """The numbers of a config.json, as a table."""
    checkpoint: Text | None = None
    """The model's folder or name, as it is written into the chosen layout's configuration."""
    measured: Mapping[str, Annotated[tuple[Text, ...], LISTED, _SOME]] = Field(default_factory=dict)
    """By card, files of `scripts/measure_profile.py`. They come before what is derived."""
    bandwidth_share: _Part | None = None
    """What a pass reaches of a card's published bandwidth. None: the default of the role."""
    compute_share: _Part | None = None
    """What a pass reaches of a card's dense FLOP/s. None: the default of the role."""
    launch_ms: _NotNegative | None = None
    """What a pass takes besides. None: the default of the role."""

    @model_validator(mode="after")
    def _one_shape(self) -> ModelConfig:
        if self.config is not None and self.shape is not None:
            raise refusal("config and shape are both given; leave one of the two out")
        return self


class RentConfig(Closed):
    """Hosts with cards to compare, for one target and one drafter."""

    layouts: Annotated[tuple[Annotated[str, checked_text(hosts_of)], ...], LISTED, _SOME]
    """Such as `"2 x 4 h100-sxm + 1 l40s for drafters"` (two hosts with four cards each, and one
    host) or `"8 h100-sxm (4 for drafters)"`. Each GPU for drafters runs one drafter. At most 1,024
    GPUs and 64 layouts.
    """
    target: Text = "llama-3-70b"
    """`llama-3-70b`, `llama-3-8b`, `llama-3.2-1b`, `qwen2.5-0.5b`, or a name in `models`."""
    drafter: Text = "llama-3.2-1b"
    """The same names."""
    tensor_parallel: (
        Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], LISTED, _SOME] | None
    ) = None
    """Cards of a target group; several are compared. None: as few as hold the model and the load. A
    group has cards of one host, or all target cards of several hosts.
    """
    prices: Mapping[str, _NotNegative] = Field(default_factory=dict)
    """Your prices of a GPU-hour, by card."""
    currency: Annotated[str, Field(pattern=r"^[^\s\x00-\x1f]{1,8}$")] = "USD"
    """Of the prices."""
    max_token_ms: _Positive | None = None
    """Latency target: milliseconds a token, for the 95th percentile of requests."""
    max_first_ms: _Positive | None = None
    """Latency target: milliseconds to the first token, for the 95th percentile of requests."""
    models: Mapping[str, ModelConfig] = Field(default_factory=dict)
    """Models of yours, `[plan.rent.models.NAME]`."""
    cards: Mapping[str, Card] = Field(default_factory=dict)
    """Cards of yours, `[plan.rent.cards.NAME]`: `memory_gb`, `bandwidth_gb_s`, `dense_tflops`
    (bfloat16, no sparsity), `link_gb_s` (one direction, to other cards of the host), `source`.
    """
    all_reduce_us: _NotNegative = 20.0
    """An all-reduce of few bytes on one host, in microseconds."""
    all_reduce_us_between_hosts: _NotNegative = 44.0
    """The same between hosts."""
    gb_s_between_hosts: _Positive = 50.0
    """Rate between hosts, for each card and direction (50 is 400 Gbit/s)."""

    @property
    def known_cards(self) -> dict[str, Card]:
        """All cards by name; one in the file replaces ours."""
        return {**CARDS, **self.cards}

    @model_validator(mode="after")
    def _names_are_known(self) -> RentConfig:
        cards = self.known_cards
        used: dict[str, str] = {}
        for number, text in enumerate(self.layouts):
            for one in hosts_of(text):
                used[one.card] = f"layouts[{number}]"
        for card, key in used.items():
            if card not in cards:
                raise refusal(
                    f"{key}: there is no card {card!r}; expected one of {', '.join(cards)}, or add "
                    f"it to [plan.rent.cards]{did_you_mean(card, cards)}"
                )
            if self.prices and card not in self.prices:
                raise refusal(f"prices: {card} has none; give a price for each card, or none")
        for name in self.prices:
            if name not in cards:
                raise refusal(f"prices: there is no card {name!r}{did_you_mean(name, cards)}")
        for key in ("target", "drafter"):
            name = getattr(self, key)
            if name not in SHAPES and name not in self.models:
                known = [*self.models, *SHAPES]
                raise refusal(
                    f"{key}: there is no model {name!r}; expected one of {', '.join(known)}, or "
                    f"add it to [plan.rent.models]{did_you_mean(name, known)}"
                )
        for name, model in self.models.items():
            if model.config is None and model.shape is None and name not in SHAPES:
                raise refusal(f"models.{name}: has no shape; give config or shape")
            for card in model.measured:
                if card not in cards:
                    raise refusal(
                        f"models.{name}.measured: there is no card {card!r}"
                        f"{did_you_mean(card, cards)}"
                    )
        return self


class PlanConfig(Closed):
    """Devices, links, load and acceptance. If several values are given, all are compared."""

    target: Annotated[tuple[Annotated[str, profile_of("target")], ...], LISTED, _SOME] = (
        "70b-4xh100",
    )
    """Latency profiles (docs/emulation.md#latency-profiles)."""
    drafter: Annotated[tuple[Annotated[str, profile_of("drafter")], ...], LISTED, _SOME] = (
        "1b-h100",
    )
    """Latency profiles of drafters."""
    hosts: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Hosts that could be rented, 1 to 100,000."""
    gpus_per_host: Annotated[int, Field(ge=1, le=1024)] = 8
    """GPUs of each host."""
    ratios: Annotated[tuple[Annotated[str, BeforeValidator(_ratio)], ...], LISTED, _SOME] = (
        "1:1",
        "2:1",
        "1:4",
    )
    """Target groups to the drafters that they share. Under `replicas` one driver has all groups of
    a ratio, at least 2.
    """
    rent: RentConfig | None = None
    """Hosts with cards, in place of the five keys above."""
    policies: Annotated[tuple[Policy, ...], LISTED, _SOME] = Field(
        default_factory=lambda: tuple(POLICIES)
    )
    """Policies to compare; always compared with `off`. One that a layout cannot have is left out
    and named.
    """
    rtt_ms: Annotated[float, Field(ge=0, le=60_000, allow_inf_nan=False)] = 0.1
    """Round trip between a driver and a drafter, in milliseconds."""
    mbit_per_second: _NotNegative = 0.0
    """Bandwidth between them. 0: no bound."""
    acceptance: _Share = 0.8
    """The chance that a drafted token is right if those before it are. `paceline bench` and
    `status` measure it for your models.
    """
    hit_rate: _Share = 0.5
    """The chance that the second guess is right if the first is wrong."""
    concurrency: Annotated[tuple[Annotated[int, Field(ge=1)], ...], LISTED, _SOME] | None = None
    """The load: callers that send a request when the last is answered. Of several numbers, each is
    simulated. None: 8 for each target group.
    """
    requests_per_second: _Positive | None = None
    """The load in place of callers: random arrivals at this rate."""
    prompt_tokens: Annotated[int, Field(ge=3, le=16_384)] = 512
    """Tokens of each prompt."""
    output_tokens: Annotated[int, Field(ge=2, le=16_384)] = 128
    """Tokens of each answer."""
    kv_tokens: Annotated[int, Field(ge=1024)] | None = None
    """Tokens whose KV a target group holds. None: 131,072, or what fits on cards to rent."""
    requests: Annotated[int, Field(ge=1)] = 100
    """Requests that are simulated for a layout and a load; at least four for each caller. Upper
    bound: 50 million tokens of prompts and answers, where a request counts as 256 at least.
    """
    simulated_groups: Annotated[int, Field(ge=0)] = 4
    """Upper bound on the target groups that are simulated, with their part of the load; fewer if
    `requests` is less than four for each caller. 0: all.
    """
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the random numbers."""
    seeds: Annotated[int, Field(ge=1, le=100)] | None = None
    """Simulations of each layout, from `seed` on; figures are their mean, with the lowest and the
    highest. None: 1, or 3 to rent.
    """

    @property
    def num_seeds(self) -> int:
        """How often a layout whose figures depend on luck is simulated."""
        return self.seeds or (SEEDS_TO_RENT if self.rent else 1)

    @model_validator(mode="after")
    def _one_load(self) -> PlanConfig:
        if self.concurrency is not None and self.requests_per_second is not None:
            raise refusal(
                "concurrency and requests_per_second are both given; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _one_kind_of_hosts(self) -> PlanConfig:
        if self.rent is not None:
            for key in ("target", "drafter", "hosts", "gpus_per_host", "ratios"):
                if key in self.model_fields_set:
                    raise refusal(f"{key}: [plan.rent] says what there is; remove the key")
        return self
