"""The rows of `bench rules`, and the requests that most of them measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from deploy.bench.interleave import Measured
from deploy.measure import Sample, measure
from paceline.client import Client
from paceline.options import GenerateOptions

PART_NAMES = ("time", "acceptance", "stopping", "train-free")
OFF = "off"


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One row; None where a figure does not apply.

    `candidates` is "chain" or "N wide". `ms` is of a batch's verification in part "time", of an
    output token elsewhere. `speedup` is against plain decoding in the same run. `details` are
    further figures by name.
    """

    part: str
    name: str
    rule: str
    candidates: str
    temperature: float
    ms: float | None = None
    acceptance_length: float | None = None
    speedup: float | None = None
    details: Mapping[str, object] = field(default_factory=dict)


def candidates_shown(branches: int | None) -> str:
    """How a drafter branches, in words."""
    return "chain" if branches in (None, 1) else f"{branches} wide"


@dataclass(frozen=True, slots=True)
class RequestContender:
    """A way to ask a deployment of ours.

    No tenant sees a prompt twice: a drafter that learns would know the answer by heart.
    """

    name: str
    client: Client
    options: GenerateOptions
    seen: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def setting(self) -> str:
        """What the request says of speculation."""
        options = self.options
        parts = (options.policy, options.drafter, options.rule, options.stopping)
        shape = f"window {options.window}, {candidates_shown(options.branches)}"
        return ", ".join([*(part for part in parts if part is not None), shape])

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """Through the client library, as any caller would."""
        prompt = tuple(prompt_token_ids)
        tenant = f"{self.name} {self.seen[prompt]}"
        self.seen[prompt] += 1
        options = replace(self.options, max_tokens=max_tokens, tenant=tenant)
        return measure(self.client, list(prompt), options)


def row_of(part: str, measured: Measured, off: Measured) -> RuleRow:
    """What was measured of a contender, against plain decoding."""
    contender = measured.contender
    assert isinstance(contender, RequestContender)
    options = contender.options
    plain = options.policy == OFF
    return RuleRow(
        part=part,
        name=contender.name,
        rule=options.rule or "coupled",
        candidates="none" if plain else candidates_shown(options.branches),
        temperature=options.temperature or 0.0,
        ms=1000 / measured.tokens_per_second,
        acceptance_length=measured.acceptance_length,
        speedup=measured.tokens_per_second / off.tokens_per_second,
        details={
            "policy": options.policy,
            "drafter": options.drafter,
            "window": options.window,
            "stopping": options.stopping,
            "tokens": measured.tokens,
            "tokens_per_second": measured.tokens_per_second,
            "spread": measured.spread,
            "same_text": measured.same_text(off),
        },
    )
