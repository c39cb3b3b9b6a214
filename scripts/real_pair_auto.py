"""Compare policy `auto` with fixed policies on the demo pair: `python scripts/real_pair_auto.py`.

Six prompts of 64 tokens at temperature 0, one at a time and six at once, through the client on a
local cluster, target and drafter with a thread each. In each round every policy decodes all of
them, in turns, each as a tenant of its own: no policy finds prompts that another one has read.
`auto` gets a server of its own in each round and part, which has decoded nothing but the first
token of each prompt. The last line of a part is the median over the rounds of `auto` over the best
fixed policy; the aim is 0.9.

The demo model must have been fetched (`paceline models fetch demo`). Nothing else may run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from cluster.config.model import Config, DrafterConfig, TargetConfig
from deploy.bench.processes import on_free_ports, running_side_by_side
from deploy.rows.inputs import InputRow, read_rows
from paceline.client import Client
from paceline.options import GenerateOptions
from workers.models.catalog import default_home

FIXED = ("off", "chain", "lockstep")
PROMPTS, TOKENS, AIM = 6, 64, 0.9
PARTS = {"one at a time": 1, "six at once": PROMPTS}


def tokens_per_second(
    client: Client,
    policy: str,
    prompts: Sequence[Sequence[int]],
    *,
    tenant: str,
    at_once: int,
    window: int,
) -> tuple[float, list[tuple[int, ...]], dict[str, int]]:
    """Tokens per second, the texts, and the verdicts by the policy that `auto` chose."""
    options = GenerateOptions(
        temperature=0.0,
        seed=0,
        max_tokens=TOKENS,
        policy=policy,
        window=32 if policy == "auto" else window,
        ignore_eos=True,
        tenant=tenant,
    )
    with ThreadPoolExecutor(at_once) as callers:
        begin = time.monotonic()
        answers = list(callers.map(lambda one: client.generate(list(one), options), prompts))
        seconds = time.monotonic() - begin
    texts = [tuple(one.token_ids) for one in answers]
    choices: dict[str, int] = {}
    for one in answers:
        for name, count in one.stats.speculation.choices.items():
            choices[name] = choices.get(name, 0) + count
    return sum(map(len, texts)) / seconds, texts, choices


def main(
    rounds: Annotated[int, typer.Option(help="in each of which every policy runs")] = 5,
    prompts_file: Annotated[
        Path, typer.Option("--prompts", help="JSON lines, as for `paceline generate`")
    ] = Path("deploy/prompts/default.jsonl"),
    window: Annotated[int, typer.Option(help="of the fixed policies that draft")] = 4,
) -> None:
    """Print a line a round and part, and the medians."""
    rows = [one for one in read_rows(prompts_file, limit=PROMPTS) if isinstance(one, InputRow)]
    config = on_free_ports(
        Config(),
        target=TargetConfig(model="demo", threads=1),
        drafters=(DrafterConfig(model="demo-draft", threads=1),),
    )
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    for number in range(rounds):
        configs = dict.fromkeys(("fixed", *PARTS), config)
        with running_side_by_side(
            configs, home=default_home(os.environ), tell=lambda line: None
        ) as clients:
            for part, at_once in PARTS.items():
                share = _round(clients, part, rows, number, at_once=at_once, window=window)
                shares[part].append(share)
    for part, found in shares.items():
        print(f"{part}: auto has {median(found):.3f} of the best fixed policy (aim {AIM})")


def _round(
    clients: Mapping[str, Client],
    part: str,
    rows: Sequence[InputRow],
    number: int,
    *,
    at_once: int,
    window: int,
) -> float:
    """Measure all policies in turns, in another order each round. Returns auto over the best."""
    first = GenerateOptions(max_tokens=1, temperature=0.0, policy="off")
    prompts: dict[str, list[tuple[int, ...]]] = {
        name: [clients[name].generate(one.input, first).prompt_token_ids for one in rows]
        for name in ("fixed", part)
    }
    order = [*FIXED, "auto"]
    turn = number % len(order)
    speeds: dict[str, float] = {}
    texts: dict[str, list[tuple[int, ...]]] = {}
    chosen: dict[str, int] = {}
    for policy in order[turn:] + order[:turn]:
        server = part if policy == "auto" else "fixed"
        speeds[policy], texts[policy], chosen_now = tokens_per_second(
            clients[server],
            policy,
            prompts[server],
            tenant=f"{part}, {policy}",
            at_once=at_once,
            window=window,
        )
        chosen = chosen_now or chosen
    assert all(one == texts["off"] for one in texts.values()), "a policy changed a text"
    share = speeds["auto"] / max(speeds[policy] for policy in FIXED)
    shown = ", ".join(f"{policy} {speeds[policy]:.1f}" for policy in order)
    print(f"{part}: {shown} tokens/s; auto {share:.3f} of the best; {chosen}", flush=True)
    believed = clients[part].stats().speculation.estimates
    print("  ", ", ".join(f"{name} {value:.3g}" for name, value in believed.items()), flush=True)
    return share


if __name__ == "__main__":
    typer.run(main)
