"""`paceline bench rules`: what rules, stopping rules and drafters without a model bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.config import Config, DrafterConfig
from deploy.bench.decode import CORES, encode_prompts
from deploy.bench.deployments import running_side_by_side
from deploy.bench.rules_acceptance import measure_acceptance
from deploy.bench.rules_rows import PART_NAMES, RuleRow
from deploy.bench.rules_stopping import measure_stopping
from deploy.bench.rules_time import BATCHES, VOCAB_SIZES, WINDOWS, RuleTime, time_rules
from deploy.bench.rules_train_free import measure_train_free
from paceline.generation import GenerateInput

NEEDED: Mapping[str, frozenset[str]] = {
    "time": frozenset(),
    "acceptance": frozenset({"drafted"}),
    "stopping": frozenset({"drafted", "plain"}),
    "train-free": frozenset({"plain"}),
}
"""The deployments that each part needs."""
QUICK_WINDOWS = (1, 8)
WAIT_MS = 60_000.0
"""So long lockstep waits for its drafter: how busy a host is must not decide what is accepted."""


@dataclass(frozen=True, slots=True)
class RulesSettings:
    """How much is measured. `parts`: some of PART_NAMES. `quick`: short windows in part "time"."""

    parts: Sequence[str]
    max_tokens: int
    repeats: int
    quick: bool = False


def rules_deployments(config: Config, parts: Sequence[str]) -> dict[str, Config]:
    """What the parts need: `drafted` has a model drafter and a core each, `plain` the others."""
    server = config.server.model_copy(update={"http_port": 0, "grpc_port": 0})
    speculation = config.speculation.model_copy(update={"wait_ms": WAIT_MS})
    drafter = next(
        (one for one in config.drafters if one.kind == "model"), DrafterConfig(model="demo-draft")
    )

    def deployment(threads: int, *drafters: DrafterConfig) -> Config:
        target = config.target.model_copy(update={"threads": threads})
        return config.model_copy(
            update={
                "target": target,
                "drafters": drafters,
                "server": server,
                "speculation": speculation,
            }
        )

    both = {
        "drafted": deployment(1, drafter.model_copy(update={"count": 1, "threads": 1})),
        "plain": deployment(
            CORES,
            DrafterConfig(kind="ngram", threads=1),
            DrafterConfig(kind="recycling", threads=1),
        ),
    }
    needed = frozenset[str]().union(*(NEEDED[part] for part in parts))
    return {name: one for name, one in both.items() if name in needed}


def run_rules(
    config: Config,
    inputs: Sequence[GenerateInput],
    settings: RulesSettings,
    *,
    home: Path,
    tell: Callable[[str], None],
) -> list[RuleRow]:
    """The rows of all parts, in the order of PART_NAMES. Models that are absent are fetched."""
    rows: list[RuleRow] = []
    parts = [part for part in PART_NAMES if part in settings.parts]
    if "time" in parts:
        windows = QUICK_WINDOWS if settings.quick else WINDOWS
        rows += measure_time(settings.repeats, tell, windows=windows)
    configs = rules_deployments(config, parts)
    if not configs:
        return rows
    with running_side_by_side(configs, home=home, tell=tell) as clients:
        prompts = encode_prompts(next(iter(clients.values())), inputs)
        amount = {"max_tokens": settings.max_tokens, "repeats": settings.repeats}
        if "acceptance" in parts:
            rows += measure_acceptance(
                clients["drafted"], prompts, max_tokens=settings.max_tokens, tell=tell
            )
        if "stopping" in parts:
            rows += measure_stopping(
                clients["drafted"], clients["plain"], prompts, **amount, tell=tell
            )
        if "train-free" in parts:
            rows += measure_train_free(clients["plain"], prompts, **amount, tell=tell)
    return rows


def measure_time(
    repeats: int,
    tell: Callable[[str], None],
    *,
    vocab_sizes: Sequence[int] = VOCAB_SIZES,
    windows: Sequence[int] = WINDOWS,
    batches: Sequence[int] = BATCHES,
) -> list[RuleRow]:
    """Part "time", on this process's cores before anything else is started."""

    def told(row: RuleTime) -> None:
        tell(f"time: {row.rule}, {row.candidates}, {row.vocab_size} tokens, window {row.window}")

    return [
        RuleRow(
            part="time",
            name=f"{row.rule}, {row.candidates}, V={row.vocab_size}, window {row.window}, "
            f"batch {row.batch}",
            rule=row.rule,
            candidates=row.candidates,
            temperature=1.0,
            ms=row.ms,
            details={
                "vocab_size": row.vocab_size,
                "window": row.window,
                "batch": row.batch,
                "best_ms": row.best_ms,
                "worst_ms": row.worst_ms,
                "accepted": row.accepted,
            },
        )
        for row in time_rules(
            vocab_sizes=vocab_sizes,
            windows=windows,
            batches=batches,
            repeats=repeats,
            temperature=1.0,
            on_row=told,
        )
    ]
