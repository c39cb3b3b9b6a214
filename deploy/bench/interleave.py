"""Measuring contenders in turns, so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deploy.bench.contenders import Contender
from deploy.measure import Sample, acceptance_length, median_busy

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender's samples: `samples[prompt][repeat]`."""

    contender: Contender
    samples: Sequence[Sequence[Sample]]

    @property
    def tokens(self) -> int:
        """Output tokens of all prompts, once each."""
        return sum(len(repeats[0].token_ids) for repeats in self.samples)

    @property
    def seconds(self) -> float:
        """Time for all prompts, each its median over the repeats."""
        return sum(
            statistics.median(sample.seconds for sample in repeats) for repeats in self.samples
        )

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over time, prefill included."""
        return self.tokens / self.seconds

    @property
    def spread(self) -> float:
        """(slowest - fastest round over all prompts) / the median round."""
        rounds: list[float] = [
            sum(sample.seconds for sample in one) for one in zip(*self.samples, strict=True)
        ]
        return (max(rounds) - min(rounds)) / statistics.median(rounds)

    @property
    def acceptance_length(self) -> float | None:
        """Committed tokens over steps; None for peers."""
        return acceptance_length(sample for repeats in self.samples for sample in repeats)

    @property
    def busy(self) -> Mapping[str, float]:
        """The median busy share of each worker."""
        return median_busy([sample for repeats in self.samples for sample in repeats])

    def same_text(self, other: Measured) -> bool:
        """Whether every repeat of every prompt gave the tokens that `other` gave first."""
        return all(
            sample.token_ids == theirs[0].token_ids
            for ours, theirs in zip(self.samples, other.samples, strict=True)
            for sample in ours
        )


def measure_in_turns(
    contenders: Sequence[Contender],
    prompts: Prompts,
    *,
    max_tokens: int,
    repeats: int,
    on_sample: Callable[[str], None] = lambda name: None,
) -> list[Measured]:
    """Every contender decodes every prompt `repeats` times.

    All contenders take a prompt before the next one comes, each time another first. A first
    round over one prompt warms everything up and is not counted.
    """
    for contender in contenders:
        contender.decode(prompts[0], min(max_tokens, 8))
    samples: dict[str, list[list[Sample]]] = {
        contender.name: [[] for _ in prompts] for contender in contenders
    }
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            first = (repeat + number) % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                sample = contender.decode(prompt, max_tokens)
                samples[contender.name][number].append(sample)
                on_sample(contender.name)
    return [Measured(contender, samples[contender.name]) for contender in contenders]
