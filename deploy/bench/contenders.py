"""The rows of a benchmark: each decodes a prompt greedily and says how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deploy.bench.transformers_process import Assistance, TransformersProcess
from deploy.measure import Sample, measure
from paceline.client import Client
from paceline.options import GenerateOptions


class Contender(Protocol):
    """One row."""

    @property
    def name(self) -> str:
        """The row's name."""

    @property
    def setting(self) -> str:
        """How it runs, for people."""

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """Continue a prompt greedily, up to the end token or `max_tokens`."""


@dataclass(frozen=True, slots=True)
class OwnContender:
    """A policy of a deployment of ours."""

    name: str
    client: Client
    policy: str
    window: int | None
    devices: str

    @property
    def setting(self) -> str:
        """Policy, window and devices."""
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.policy}{window}; {self.devices}"

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
        """Through the client library, as any caller would."""
        return measure(self.client, list(prompt_token_ids), self.options(max_tokens))


@dataclass(frozen=True, slots=True)
class PeerContender:
    """transformers' generate, with or without an assistant."""

    name: str
    process: TransformersProcess
    assistance: Assistance | None
    threads: int

    @property
    def setting(self) -> str:
        """The assistant's settings and the threads."""
        assistance = "" if self.assistance is None else f"{self.assistance}; "
        return f"{assistance}{self.threads} threads"

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """In its own process, timed there."""
        answer = self.process.generate(
            prompt_token_ids, max_tokens=max_tokens, assistance=self.assistance
        )
        return Sample(answer.token_ids, answer.seconds)
