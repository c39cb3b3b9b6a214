"""Measure a target and a drafter with random weights on one GPU, over real gRPC and the driver.

    python scripts/gpu_pair.py FOLDER [--layers 32] [--draft-layers 4] [--quick]
        [--kv-cache-dtype fp8]

No model hub is needed. The target has the shape of an 8 B Llama and random weights. The drafter is
the target's first layers, with its embedding and LM head. The output of the target's later layers
is scaled down until the drafter is right as often as requested, as if it had been trained on the
target. Both are on one GPU, which alternates between their processes. So the time that is saved
when drafting and verification overlap on different devices does not appear here. Ratios compare the
policies of one run with its `off`. Exit code 1: at least one text differed from that of `off`.
FOLDER takes 20 GB, and is used again if it has the pair already.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from cluster.driver.driver import Driver, DriverOptions
from deploy.bench.processes import WorkerProcess
from paceline.errors import ConfigError
from paceline.generation import Finished, RequestStats
from paceline.options import GenerateOptions
from scripts.gpu_check.engine import gpu_for

PROMPT_TOKENS = 64
POLICIES = (
    ("off", 1),
    ("lockstep", 1),
    ("pearl", 1),
    ("chain", 1),
    ("fanout", 1),
    ("auto", 1),
    ("lockstep", 4),
    ("chain", 4),
)
"""Policies, and candidates at each position: more than 1 makes trees. `spread` and `replicas` need
several drafters or targets, which one GPU has no room for.
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the target. The drafter has the first `draft_layers` layers."""

    layers: int
    draft_layers: int
    hidden: int
    vocab: int

    def config(self, layers: int) -> LlamaConfig:
        """A configuration with the proportions of an 8 B Llama, whose hidden size is 4096."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 7 // 2,
            num_hidden_layers=layers,
            num_attention_heads=self.hidden // 128,
            num_key_value_heads=max(self.hidden // 512, 1),
            head_dim=128,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


def make_pair(folder: Path, sizes: Sizes, acceptance: float, device: str) -> float:
    """Write folder/target and folder/draft. Returns the drafter's share of right tokens."""
    torch.manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = sizes.config(sizes.layers)
    config.torch_dtype = dtype
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        target = LlamaForCausalLM(config).train(False)
        draft = LlamaForCausalLM(sizes.config(sizes.draft_layers)).train(False)
        torch.set_default_dtype(before)
    for parameter in (*target.parameters(), *draft.parameters()):
        parameter.requires_grad_(False)
    # Larger than the initial weights, with which all logits would be nearly equal.
    target.lm_head.weight.mul_(4)
    draft.load_state_dict(
        {name: value for name, value in target.state_dict().items() if name in draft.state_dict()}
    )
    token_ids = torch.randint(sizes.vocab, (1, 512), device=device)
    drafted = _chosen(draft, token_ids)
    late = [
        linear.weight
        for layer in target.model.layers[sizes.draft_layers :]
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj)
    ]
    low, high, now, right = 0.0, 1.0, 1.0, 0.0
    for _ in range(9):
        middle = (low + high) / 2
        for weight in late:
            weight.mul_(middle / now)
        now = middle
        right = float((_chosen(target, token_ids) == drafted).float().mean())
        low, high = (middle, high) if right > acceptance else (low, middle)
    for name, model in (("target", target), ("draft", draft)):
        model.generation_config = GenerationConfig()
        model.save_pretrained(folder / name)
        _tokenizer(256).save_pretrained(folder / name)
    (folder / "pair.json").write_text(json.dumps({"sizes": repr(sizes), "right": right}))
    return right


def _chosen(model: LlamaForCausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Tokens drawn at temperature 1 with the same noise for all models, as in the coupled rule."""
    generator = torch.Generator(token_ids.device).manual_seed(3)
    logits: torch.Tensor = model(token_ids).logits[0].float()
    noise = torch.rand(logits.shape, generator=generator, device=logits.device)
    return (logits - torch.log(-torch.log(noise))).argmax(dim=-1)


def _tokenizer(size: int) -> PreTrainedTokenizerFast:
    vocabulary = {f"<{number}>": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one policy at one temperature and batch."""

    policy: str
    branches: int
    temperature: float
    batch: int
    tokens_per_second: float
    acceptance_length: float
    token_ids: list[list[int]]


async def decode(
    driver: Driver,
    policy: str,
    branches: int,
    temperature: float,
    batch: int,
    *,
    tokens: int,
    window: int,
) -> Figures:
    """`batch` requests at once, each of `tokens` tokens."""
    generator = torch.Generator().manual_seed(9)
    prompts = torch.randint(250, (batch, PROMPT_TOKENS), generator=generator).tolist()

    async def one(number: int) -> tuple[list[int], RequestStats]:
        options = GenerateOptions(
            temperature=temperature,
            seed=number,
            max_tokens=tokens,
            ignore_eos=True,
            policy=policy,
            branches=branches,
            window=window,
        )
        generation = await driver.submit(prompts[number], options)
        token_ids: list[int] = []
        async for event in generation:
            if isinstance(event, Finished):
                return token_ids, event.stats
            token_ids += getattr(event, "token_ids", ())
        raise AssertionError("a stream ends with its figures")

    begin = time.perf_counter()
    answers = await asyncio.gather(*(one(number) for number in range(batch)))
    seconds = time.perf_counter() - begin
    return Figures(
        policy,
        branches,
        temperature,
        batch,
        tokens_per_second=batch * tokens / seconds,
        acceptance_length=statistics.mean(stats.acceptance_length for _, stats in answers),
        token_ids=[token_ids for token_ids, _ in answers],
    )


async def measure(
    addresses: tuple[str, str],
    folder: Path,
    save: Callable[[list[dict[str, Any]]], None],
    *,
    batches: list[int],
    tokens: int,
    window: int,
) -> bool:
    """A row for each policy, temperature and batch. Returns whether all texts equal `off`'s.

    `save` gets the rows after each one.
    """
    target, draft = addresses
    driver = Driver(
        DriverOptions(
            folder=folder / "target",
            target_addresses=(target,),
            drafter_addresses={"draft": draft},
            wait_ms=1000.0,
        )
    )
    rows: list[dict[str, Any]] = []
    all_same = True
    await driver.start()
    try:
        for policy, branches in POLICIES:
            await decode(driver, policy, branches, 1.0, min(batches), tokens=24, window=window)
        for temperature in (0.0, 1.0):
            for batch in batches:
                plain: Figures | None = None
                for policy, branches in (*POLICIES, ("off", 1)):
                    now = await decode(
                        driver, policy, branches, temperature, batch, tokens=tokens, window=window
                    )
                    plain = plain or now
                    same = now.token_ids == plain.token_ids
                    all_same &= same
                    row = {
                        "policy": policy,
                        "branches": branches,
                        "temperature": temperature,
                        "batch": batch,
                        "tokens_per_second": now.tokens_per_second,
                        "speedup": now.tokens_per_second / plain.tokens_per_second,
                        "acceptance_length": now.acceptance_length,
                        "same_text": same,
                    }
                    rows.append(row)
                    typer.echo(_line(row))
                    save(rows)
    finally:
        await driver.stop()
    return all_same


def _line(row: dict[str, Any]) -> str:
    return (
        f"T {row['temperature']:g}  batch {row['batch']:2d}  {row['policy']:9s}"
        f"{'trees' if row['branches'] > 1 else 'chains':7s}"
        f"{row['tokens_per_second']:8.1f} tok/s  {row['speedup']:5.2f} x  "
        f"acceptance length {row['acceptance_length']:.2f}  same text {row['same_text']}"
    )


def main(
    folder: Path,
    layers: int = 32,
    draft_layers: int = 4,
    hidden: int = 4096,
    vocab: int = 128_256,
    acceptance: float = 0.8,
    window: int = 5,
    tokens: int = 128,
    device: str = "cuda",
    kv_cache_dtype: str = "auto",
    quick: bool = False,
    json_file: Path | None = None,
) -> None:
    """Make the pair if FOLDER lacks it, serve both on DEVICE, and measure every policy.

    KV_CACHE_DTYPE (auto or fp8) is the target's. Texts are compared within one such run.
    """
    sizes = Sizes(layers, draft_layers, hidden, vocab)
    if device == "cuda":
        try:
            gpu_for("a pair on a GPU")
        except ConfigError as error:
            sys.exit(f"error: {error}")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "pair.json").exists():
        begin = time.perf_counter()
        right = make_pair(folder, sizes, acceptance, device)
        typer.echo(f"pair made in {time.perf_counter() - begin:.0f} s; right {right:.2f} (T = 1)")
    if device == "cuda":
        torch.cuda.empty_cache()

    def save(rows: list[dict[str, Any]]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(rows, indent=1))

    workers: list[WorkerProcess] = []
    arguments = ["--device", device, "--weights", "float32"]
    try:
        for name, module, kv in (
            ("target", "workers.target.shard", 12_000),
            ("draft", "workers.drafting.drafter", 4_000),
        ):
            own = ["--max-model-len", "2048", "--kv-cache-dtype", kv_cache_dtype]
            more = own if name == "target" else []
            memory = str(kv if device == "cuda" else 256)
            workers.append(
                WorkerProcess(
                    module,
                    [str(folder / name), *arguments, "--kv-memory-mib", memory, *more],
                    log=folder / f"{name}.log",
                )
            )
        addresses = workers[0].addresses(1)[0], workers[1].addresses(1)[0]
        batches = [1] if quick else [1, 8]
        same = asyncio.run(
            measure(addresses, folder, save, batches=batches, tokens=tokens, window=window)
        )
    finally:
        for worker in workers:
            worker.end()
    if not same:
        typer.echo("some text is NOT that of off", err=True)
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
