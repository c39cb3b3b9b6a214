"""The rows of `bench decode`: how each of them decodes a prompt, and the settings that it tries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from deploy.bench.harness import CORES, Contender, Prompts
from deploy.bench.openvino_peer import OpenVinoProcess
from deploy.bench.transformers_peer import Answer, Assistance, TransformersProcess
from deploy.rows.measure import Sample, measure
from paceline.client import Client
from paceline.options import GenerateOptions

DRAFTED, NGRAM, RECYCLING = "drafted", "ngram", "recycling"
"""Our deployments: with the model drafter of the configuration, and with one at hand."""

POLICIES: Mapping[str, Sequence[str]] = {
    DRAFTED: ("lockstep", "chain", "fanout", "auto"),
    NGRAM: ("off", "lockstep", "chain", "auto"),
    RECYCLING: ("lockstep", "chain", "auto"),
}
"""Policies measured in each deployment. `off` is measured where the target has all cores."""

WINDOWS: Mapping[tuple[str, str], Sequence[int]] = {
    (DRAFTED, "lockstep"): (1, 2, 3, 4, 6),
    (DRAFTED, "chain"): (2, 3, 4, 6, 8),
    (DRAFTED, "fanout"): (2, 4, 8),
    (NGRAM, "lockstep"): (2, 4, 8),
    (NGRAM, "chain"): (2, 4, 8),
    (RECYCLING, "lockstep"): (1, 2, 4),
    (RECYCLING, "chain"): (1, 2, 4),
}
"""Windows that a row tries before the run. `auto` chooses its own."""

ASSISTANCES = tuple(
    Assistance(tokens, schedule, threshold)
    for tokens, schedule, threshold in (
        (2, "constant", 0.0),
        (3, "constant", 0.0),
        (4, "constant", 0.0),
        (6, "constant", 0.0),
        (5, "heuristic", 0.0),
        (6, "constant", 0.4),
        (10, "constant", 0.4),
        (20, "constant", 0.4),
        (10, "constant", 0.6),
    )
)
"""Settings of transformers' assistant that are tried. The last but one is its default."""

OPENVINO_DRAFT, OPENVINO_LOOKUP = "openvino-draft", "openvino-lookup"
OPENVINO_CANDIDATES: Mapping[str, Sequence[int]] = {
    OPENVINO_DRAFT: (2, 3, 4, 5),
    OPENVINO_LOOKUP: (3, 5, 8),
}
"""Numbers of candidates that OpenVINO GenAI's rows try. The second is taken without trying."""

PROBE_TOKENS = 8
"""Tokens of the first probes; each round doubles them."""

C = TypeVar("C", bound=Contender)


@dataclass(frozen=True, slots=True)
class OwnContender:
    """A policy of a deployment of ours. `deployment`: DRAFTED, NGRAM or RECYCLING.

    `times_sent` counts each prompt. A prompt that is sent again belongs to another tenant, so that
    neither a cached prefix nor a drafter's rows help it. No peer remembers a prompt either.
    """

    deployment: str
    client: Client
    policy: str
    window: int | None = None
    times_sent: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The policy, and the drafter unless it is the model."""
        drafter = "" if self.deployment == DRAFTED or self.policy == "off" else self.deployment
        return f"{self.policy}-{drafter}" if drafter else self.policy

    @property
    def setting(self) -> str:
        """Policy, drafter and window, as a user would set them."""
        if self.policy == "off":
            return "plain decoding"
        kind = "model" if self.deployment == DRAFTED else self.deployment
        window = "" if self.window is None else f", window {self.window}"
        return f"policy {self.policy}, a drafter of kind {kind}{window}"

    def options(self, max_tokens: int, temperature: float = 0.0) -> GenerateOptions:
        """The request that this row sends."""
        return GenerateOptions(
            temperature=temperature,
            seed=0,
            max_tokens=max_tokens,
            policy=self.policy,
            window=self.window,
        )

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """Send the request through the client library, as any caller would."""
        self.times_sent[tuple(prompt_token_ids)] += 1
        times = self.times_sent[tuple(prompt_token_ids)]
        options = replace(self.options(max_tokens), tenant=f"{self.name} {times}")
        return measure(self.client, list(prompt_token_ids), options)


@dataclass(frozen=True, slots=True)
class PeerContender:
    """A way in which another's process decodes, with its setting in words.

    `generate` gets prompts and `max_tokens`; the process measures the time.
    """

    name: str
    setting: str
    generate: Callable[..., Answer]

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """Decode in the peer's process."""
        answer = self.generate([prompt_token_ids], max_tokens=max_tokens)
        return Sample(answer.token_ids[0], answer.seconds)


def transformers_row(
    name: str, process: TransformersProcess, assistance: Assistance | None
) -> PeerContender:
    """transformers' generate, with or without an assistant."""
    helped = "" if assistance is None else f"{assistance}; "
    generate = partial(process.generate, threads=CORES, assistance=assistance)
    return PeerContender(name, f"{helped}{CORES} threads", generate)


def openvino_row(name: str, process: OpenVinoProcess, candidates: int | None) -> PeerContender:
    """A pipeline of OpenVINO GenAI. `candidates`: of a step; None: plain decoding."""
    helped = "" if candidates is None else f"{candidates} candidates; "
    generate = partial(process.generate, num_assistant_tokens=candidates)
    return PeerContender(name, f"{helped}{process.dtype}, {process.threads} threads", generate)


def own_contenders(clients: Mapping[str, Client]) -> list[OwnContender]:
    """Our rows, with the windows of the server. The first is `off`."""
    rows = [
        OwnContender(deployment, clients[deployment], policy)
        for deployment, policies in POLICIES.items()
        for policy in policies
    ]
    return sorted(rows, key=lambda row: row.policy != "off")


def with_windows(row: OwnContender) -> list[OwnContender]:
    """The row with each of the windows to try; with its own if there are none."""
    windows = WINDOWS.get((row.deployment, row.policy), ())
    return [replace(row, window=window) for window in windows] or [row]


def find_fastest(
    contenders: Iterable[C],
    prompts: Prompts,
    *,
    max_tokens: int,
    seconds: float,
    clock: Callable[[], float],
    on_probe: Callable[[str], None] = lambda name: None,
) -> C:
    """The fastest contender, by short probes in a bounded time (successive halving).

    In each round, every contender decodes a few tokens of one prompt. The faster half goes on to
    the next round, with another prompt and twice the number of tokens, until one contender is left
    or the time is up (Karnin et al. 2013, "Almost optimal exploration in multi-armed bandits").

    The first round only warms up: it drops no contender. No probe begins after `seconds` of
    `clock`, so only the last probe can exceed them. A round that is cut short does not count: the
    fastest of the last complete round is taken. If no round after the warm-up is complete, the
    fastest of those probed after the warm-up is taken; if none was, the first contender.
    """
    until = clock() + seconds
    left = list(contenders)
    tokens = PROBE_TOKENS
    number = 0
    while len(left) > 1:
        costs: list[tuple[float, int]] = []
        for place, contender in enumerate(left):
            if clock() >= until:
                return left[min(costs)[1]] if number == 1 and costs else left[0]
            on_probe(contender.name)
            sample = contender.decode(prompts[number % len(prompts)], min(tokens, max_tokens))
            costs.append((sample.seconds / max(1, len(sample.token_ids)), place))
        if number > 0:
            left = [left[place] for _, place in sorted(costs)[: math.ceil(len(left) / 2)]]
            tokens *= 2
        number += 1
    return left[0]
