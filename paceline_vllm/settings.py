"""What the environment says: which drafters, how to speculate, where metrics are served.

PACELINE_DRAFTERS names addresses. PACELINE_CONFIG names a file as for `paceline up`, of which
[pool], [speculation] and workers.tls count; PACELINE_SECTION__KEY overrides its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.config.load import load_config
from cluster.config.model import Config, PoolConfig
from cluster.decoding.policy import policy_named
from cluster.driver.fitting import Speculation
from paceline.errors import ConfigError
from paceline.limits import MAX_WINDOW

Padding = Literal["auto", "on", "off"]

MOST_WAIT_MS = 0.3
"""How long a step of vLLM waits for this package's own lock, in milliseconds. A policy that waits
for drafters waits `speculation.wait_ms` besides."""


POLICY = "fanout"
"""The policy by default. A step verifies what has arrived, so `chain` is behind a draft model in
turns (docs/vllm.md)."""
WAIT_MS = 200.0
"""How long a policy that waits does so by default, in milliseconds. All requests of vLLM's batch
wait with it, so it is less than in a deployment of our own."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is read at vLLM's start.

    `addresses`: of the drafters, "host:port" each. `speculation`: its window is the most candidates
    that a step verifies. `wait_ms`: the most that a policy waits which waits for drafters.
    `metrics_port`: None: no metrics of our own are served. `padding`: whether proposals are filled
    up to vLLM's window; "auto": on a GPU.
    """

    addresses: tuple[str, ...]
    speculation: Speculation
    pool: PoolConfig
    wait_ms: float
    tls: str | None = None
    metrics_port: int | None = None
    padding: Padding = "auto"


def read_settings(environ: Mapping[str, str], num_speculative_tokens: int) -> Settings:
    """Raises ConfigError."""
    if not 1 <= num_speculative_tokens <= MAX_WINDOW:
        raise ConfigError(
            f"num_speculative_tokens is {num_speculative_tokens}, expected 1 to {MAX_WINDOW}: it "
            "is the most candidates that a step verifies; 8 is a good start"
        )
    file = environ.get("PACELINE_CONFIG")
    config = load_config(Path(file) if file else None, environ)
    named = [one.strip() for one in environ.get("PACELINE_DRAFTERS", "").split(",")]
    pool = _pool_of(config, tuple(filter(None, named)))
    if pool.name is not None:
        raise ConfigError(
            "pool.name: drafters of a Ray deployment cannot be looked up from vLLM; give their "
            "addresses (pool.addresses, or PACELINE_DRAFTERS)"
        )
    if not pool.addresses:
        raise ConfigError(
            "no drafters are named: set PACELINE_DRAFTERS=host:port[,host:port], or "
            "PACELINE_CONFIG to a file with [pool] addresses; `paceline drafter MODEL --port 9002` "
            "starts one"
        )
    speculation = _speculation_of(config, num_speculative_tokens)
    return Settings(
        addresses=pool.addresses,
        speculation=speculation,
        pool=pool,
        wait_ms=_wait_of(config, speculation),
        tls=config.workers.tls,
        metrics_port=_port(environ),
        padding=_padding(environ),
    )


def _pool_of(config: Config, named: tuple[str, ...]) -> PoolConfig:
    if not named:
        return config.pool
    try:
        return PoolConfig.model_validate({**config.pool.model_dump(), "addresses": named})
    except ValueError as error:
        reason = str(error).splitlines()[2].strip().removesuffix(" [type=paceline]")
        raise ConfigError(f"PACELINE_DRAFTERS: {reason.partition(' [type=')[0]}") from None


def _speculation_of(config: Config, num_speculative_tokens: int) -> Speculation:
    given, speculation = config.speculation, config.speculation.defaults()
    is_chosen = "policy" in given.model_fields_set
    policy = policy_named(speculation.policy if is_chosen else POLICY)
    if speculation.branches > 1 or speculation.merge:
        key = "merge" if speculation.merge else "branches"
        raise ConfigError(
            f"speculation.{key}: vLLM verifies chains, not trees; remove the key (policy = "
            '"fanout" drafts for several outcomes and sends the chain that came true)'
        )
    if policy.needs.groups > 1:
        raise ConfigError(
            f"speculation.policy: {policy.name!r} needs several target groups, and vLLM is one; "
            'choose "chain", "fanout", "spread", "lockstep" or "auto"'
        )
    if "window" not in given.model_fields_set:
        window = num_speculative_tokens
    elif given.window > num_speculative_tokens:
        raise ConfigError(
            f"speculation.window is {given.window}, and vLLM verifies {num_speculative_tokens} "
            "candidates at most (num_speculative_tokens): lower the window, or raise the number"
        )
    else:
        window = given.window
    return Speculation(
        policy=policy.name,
        window=window,
        stopping=speculation.stopping,
        drafter=speculation.drafter,
    )


def _wait_of(config: Config, speculation: Speculation) -> float:
    if not policy_named(speculation.policy).waits:
        return 0.0
    given = config.speculation
    return given.wait_ms if "wait_ms" in given.model_fields_set else WAIT_MS


def _port(environ: Mapping[str, str]) -> int | None:
    given = environ.get("PACELINE_METRICS_PORT", "")
    if not given:
        return None
    if not given.isascii() or not given.isdigit() or not 0 < int(given) < 65536:
        raise ConfigError(f"PACELINE_METRICS_PORT: expected a port from 1 to 65535, got {given!r}")
    return int(given)


def _padding(environ: Mapping[str, str]) -> Padding:
    given = environ.get("PACELINE_PADDING", "auto")
    for known in ("auto", "on", "off"):
        if given == known:
            return known
    raise ConfigError(f"PACELINE_PADDING: expected auto, on or off, got {given!r}")
