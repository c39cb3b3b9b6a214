"""Part "driver" of `bench engine`: what the driver itself does for a step, by the batch's size.

It is the processor time of the driver's event loop from one answer of the target to the next:
scheduling, messages to and from workers, text and its way to the callers. A small model makes the
other side quick, which is where it matters; then most of it is messages. Rows by the length of the
prompts are measured without workers and gRPC (driver_load.py).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator

from cluster.config_model import Config
from deploy.bench.deployments import running_side_by_side
from deploy.bench.driver_load import DriverLoad, driver_milliseconds
from deploy.bench.engine_load import random_tokens
from deploy.bench.engine_rows import EngineRow, EngineTask
from paceline.client import AsyncClient
from paceline.generation import Stats
from paceline.options import GenerateOptions
from workers.engine.checkpoint import describe_checkpoint

PART = "driver"
POLICIES = ("off", "chain")
BATCHES = (1, 16, 64)
PROMPT_TOKENS = 16
TOKENS, QUICK_TOKENS = 200, 60
AIM_MS, AIM_MS_A_SEQUENCE = 1.0, 0.05

LOADS = tuple(
    DriverLoad(policy, sequences, prompt_tokens)
    for sequences in (64, 1000)
    for policy in POLICIES
    for prompt_tokens in (1_000, 8_000, 32_000)
)
QUICK_LOADS = tuple(one for one in LOADS if one.sequences == 64)
ALL_BATCHES = sorted({*BATCHES, *(load.sequences for load in LOADS)})
LOAD_STEPS, QUICK_LOAD_STEPS = 60, 15


def measure_driver(task: EngineTask) -> Iterator[EngineRow]:
    """A row for each policy and batch; a deployment of its own each, since meters are medians.

    First those by the length of the prompts.
    """
    loads = QUICK_LOADS if task.quick else LOADS
    chosen = task.batches_of(ALL_BATCHES)
    for load in (one for one in loads if one.sequences in chosen):
        yield measure_load(task, load)
    batches = task.batches_of(BATCHES[::2] if task.quick else BATCHES)
    for policy in POLICIES:
        for batch in batches:
            yield measure_one(task, policy, batch)


def measure_load(task: EngineTask, load: DriverLoad) -> EngineRow:
    """The driver's work for prompts of one length."""
    task.tell(
        f"driver: {load.policy}, {load.sequences} sequences, prompts of {load.prompt_tokens} tokens"
    )
    files = task.target_files()
    vocab_size = describe_checkpoint(files.folder).vocab_size
    steps = QUICK_LOAD_STEPS if task.quick else LOAD_STEPS
    taken = driver_milliseconds(load, files.folder, vocab_size, steps)
    return EngineRow(
        part=PART,
        name=f"{load.policy}, prompts of {load.prompt_tokens}",
        engine="paceline",
        batch=load.sequences,
        window=0,
        degree=1,
        dtype=files.weights,
        threads=1,
        details={
            "driver_ms_p50": statistics.median(taken),
            "driver_ms_least": min(taken),
            "prompt_tokens": load.prompt_tokens,
            "steps": len(taken),
            "emulated": True,
        },
    )


def measure_one(task: EngineTask, policy: str, batch: int) -> EngineRow:
    """So many sequences at once, on a deployment that has done nothing else."""
    name = f"{policy}, {batch}"
    task.tell(f"driver: {name}")
    only = {name: deployment(task.config, max_num_seqs=batch)}
    with running_side_by_side(only, home=task.home, tell=task.tell) as clients:
        client = clients[name]
        tokens = QUICK_TOKENS if task.quick else TOKENS
        vocab_size = client.describe().vocab_size
        asyncio.run(_ask(client.address, batch, vocab_size, policy, tokens))
        files = task.target_files()
        return _row(policy, batch, files.weights, client.stats())


def deployment(config: Config, *, max_num_seqs: int) -> Config:
    """The configured models, with a batch that holds all sequences at once."""
    server = config.server.model_copy(update={"http_port": 0, "grpc_port": 0})
    target = config.target.model_copy(
        update={"threads": 1, "tensor_parallel": 1, "max_num_seqs": max_num_seqs}
    )
    return config.model_copy(update={"target": target, "server": server})


def _row(policy: str, batch: int, dtype: str, stats: Stats) -> EngineRow:
    return EngineRow(
        part=PART,
        name=policy,
        engine="paceline",
        batch=batch,
        window=0,
        degree=1,
        dtype=dtype,
        threads=1,
        details={
            "driver_ms_p50": stats.driver_ms_p50,
            "aim_ms": AIM_MS + AIM_MS_A_SEQUENCE * batch,
            "gap_ms_p50": stats.gap_ms_p50,
            "steps": stats.steps,
            "drafted": stats.drafted,
        },
    )


async def _ask(address: str, batch: int, vocab_size: int, policy: str, tokens: int) -> None:
    options = GenerateOptions(max_tokens=tokens, seed=1, ignore_eos=True, policy=policy)
    async with AsyncClient(address) as client:
        await asyncio.gather(
            *(
                client.generate(
                    random_tokens(PROMPT_TOKENS, vocab_size=vocab_size, seed=number), options
                )
                for number in range(batch)
            )
        )
