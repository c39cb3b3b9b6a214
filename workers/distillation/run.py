"""Distills a drafter from a target: samples answers, trains a student, writes it with a report.

`python -m workers.distillation.run --help`: for machines with torch, transformers, safetensors and
numpy alone. `paceline distill` calls the same functions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workers.distillation.learned import write_learned
from workers.distillation.network import Network, evenly_spaced, read_network, student_of
from workers.distillation.sampling import Prompts, sample_rows
from workers.distillation.training import (
    Progress,
    Rows,
    Trainer,
    TrainingSettings,
    acceptance,
    best_device,
    save_whole,
)

TEMPERATURES = (0.0, 0.7, 1.0)
GREEDY_SHARE = 0.5
"""Share of the rows that the target writes at temperature 0; the others share the rest."""
HELD_OUT = 64
"""Rows of the first round, all greedy, that are kept for the report."""
SAVE_SECONDS = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a drafter is made. `sample_seconds`, `train_seconds`, `parallel_seconds`: at most.

    `layers`: number of the target's layers that the student begins with. `head`: number of tokens
    that it can draft. `round_tokens`: positions that are sampled at once, in texts of
    `num_positions`, and every fourth time in texts of twice the length. `parallel_seconds`: then
    the student is trained to fill masks too, as a second drafter of `candidates` a forward.
    """

    sample_seconds: float
    train_seconds: float
    parallel_seconds: float = 0.0
    layers: int = 5
    head: int = 16384
    num_positions: int = 512
    round_tokens: int = 1 << 20
    candidates: int = 8
    rate: float = 1.5e-3
    parallel_rate: float = 8e-4
    batch_tokens: int = 32768
    loss: str = "mixed"
    seed: int = 0


def read_prompts(path: Path, device: torch.device) -> Prompts:
    """Prompts as `prompts.py` writes them: npz with token_ids, lengths, asks."""
    with np.load(path) as stored:
        ends = np.cumsum(stored["lengths"])[:-1]
        prompts = np.split(stored["token_ids"].astype(np.int64), ends)
        return Prompts.of([one.tolist() for one in prompts], stored["asks"].tolist(), device)


def sample(
    target: Network, prompts: Prompts, ends: Sequence[int], recipe: Recipe, folder: Path, say: Say
) -> None:
    """Write files of answers into `folder`, until the recipe's time is over. Goes on if called
    again."""
    folder.mkdir(parents=True, exist_ok=True)
    device = target.embedding_VF.device
    used, number, longest = 0.0, 0, 0.0
    while (path := folder / f"answers-{number:04}.npz").exists():
        with np.load(path) as stored:
            used += float(stored["seconds"])
        number += 1
    while number == 0 or used + longest <= recipe.sample_seconds:
        began = time.monotonic()
        length = recipe.num_positions * (2 if number % 4 == 3 else 1)
        count = max(2, recipe.round_tokens // length)
        temperatures = torch.zeros(count, device=device)
        drawn = count - int(count * GREEDY_SHARE)
        warm = torch.tensor(TEMPERATURES[1:], device=device)
        temperatures[-drawn:] = warm[torch.arange(drawn, device=device) % len(warm)]
        generator = torch.Generator(device).manual_seed(recipe.seed * 10_000 + number)
        tokens, own = sample_rows(target, prompts, temperatures, length, ends, generator)
        seconds = time.monotonic() - began
        used, longest = used + seconds, max(longest, seconds)
        save_whole(
            folder / f"answers-{number:04}.npz",
            lambda path: _save(path, tokens=tokens.astype(np.uint32), own=own, seconds=seconds),  # noqa: B023
        )
        say(f"sampled {count} x {length} tokens in {seconds:.1f} s, {used:.0f} s in all")
        number += 1


def _save(path: Path, **arrays: Any) -> None:
    with path.open("wb") as stream:
        np.savez(stream, **arrays)


def read_rows(folder: Path, device: torch.device) -> tuple[list[Rows], Rows]:
    """The rows to train with, by length, and those held out for the report."""
    by_length: dict[int, list[tuple[Any, Any]]] = {}
    held: Rows | None = None
    for path in sorted(folder.glob("answers-*.npz")):
        with np.load(path) as stored:
            tokens, own = stored["tokens"].astype(np.int32), stored["own"]
        if held is None:
            count = min(HELD_OUT, len(tokens) // 4)
            held = Rows(*(torch.from_numpy(a[:count]).to(device) for a in (tokens, own)))
            tokens, own = tokens[count:], own[count:]
        by_length.setdefault(tokens.shape[1], []).append((tokens, own))
    assert held is not None
    groups = [
        Rows(*(torch.from_numpy(np.concatenate(parts)).to(device) for parts in zip(*files, strict=True)))
        for files in by_length.values()
    ]
    return groups, held


def frequent_tokens(
    groups: Sequence[Rows], count: int, vocab_size: int, ends: Sequence[int]
) -> list[int]:
    """The tokens that the target wrote most often, the likeliest first; `ends` come before all."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for group in groups:
        own = group.own_BS
        counts += torch.bincount(group.token_ids_BS[own].long(), minlength=vocab_size).cpu()
        counts += 0.01 * torch.bincount(
            group.token_ids_BS[~own].long(), minlength=vocab_size
        ).cpu()
    counts[list(ends)] = counts.max() + 1
    return torch.argsort(counts, descending=True, stable=True)[:count].tolist()


def train(
    target: Network,
    student: Network,
    rows: Sequence[Rows],
    head_ids_C: torch.Tensor,
    settings: TrainingSettings,
    state_path: Path,
    export: Callable[[Trainer], None],
    say: Say,
) -> Trainer:
    """Train `student`, or go on with what `state_path` has."""
    trainer = Trainer(target, student, target.head_VF[head_ids_C].float(), settings)
    if state_path.exists():
        trainer.load_state(torch.load(state_path, map_location=head_ids_C.device))
        say(f"going on at step {trainer.progress.steps}")

    def save() -> None:
        save_whole(state_path, lambda path: torch.save(trainer.state(), path))
        export(trainer)

    def show(progress: Progress) -> None:
        rate = progress.tokens / max(1e-9, progress.seconds)
        say(
            f"{progress.seconds:6.0f} s  step {progress.steps}  {progress.tokens / 1e6:.1f} M tokens "
            f"({rate:.0f}/s)  loss {progress.loss:.4f}  agreement {progress.agreement:.4f}  "
            f"overlap {progress.overlap:.4f}"
        )

    if target.embedding_VF.is_cuda:
        _warm_up(trainer, rows, say)
    trainer.run(rows, show, save, SAVE_SECONDS)
    return trainer


def _warm_up(trainer: Trainer, rows: Sequence[Rows], say: Say) -> None:
    """Compile, and try a pass of each length; without compiling if that fails."""
    began = time.monotonic()
    losses = trainer._losses
    try:
        trainer.compile()
        trainer.try_out(rows)
    except Exception as error:  # the compiler raises many kinds
        say(f"not compiled: {error}"[:500])
        torch._dynamo.reset()
        for network in (trainer.target, trainer.student):
            for layer in network.layers:
                layer._compiled_call_impl = None
        trainer._losses = losses
    say(f"warm-up took {time.monotonic() - began:.0f} s")


def distill(
    target_folder: Path,
    prompts_path: Path,
    work: Path,
    out: Path,
    recipe: Recipe,
    say: Say,
    ends: Sequence[int],
) -> None:
    """The whole run. `work` has what a later run goes on with, `out` the result."""
    began = time.monotonic()
    device = best_device()
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = read_network(target_folder, dtype).to(device).requires_grad_(False)
    say(f"{device}: the target is loaded after {time.monotonic() - began:.0f} s")
    sample(
        target, read_prompts(prompts_path, device), ends, recipe, work / "answers", say
    )
    groups, held = read_rows(work / "answers", device)
    own = sum(int(group.own_BS.sum()) for group in groups)
    say(f"{sum(g.token_ids_BS.numel() for g in groups)} tokens, {own} of them the target's own")
    head_ids = frequent_tokens(groups, recipe.head, target.head_VF.shape[0], ends)
    head_ids_C = torch.tensor(head_ids, device=device)
    layers = evenly_spaced(recipe.layers, target.config.num_hidden_layers)
    student = student_of(target, layers)
    told: dict[str, Any] = {"recipe": asdict(recipe), "layers": layers, "head": head_ids}

    def exporting(folder: Path, bits: int) -> Callable[[Trainer], None]:
        def export(trainer: Trainer) -> None:
            tensors = trainer.student.state_dict()
            progress = {n: getattr(trainer.progress, n) for n in Progress.__slots__}
            write_learned(folder, tensors, {**told, "progress": progress}, bits=bits)

        return export

    def finish(trainer: Trainer, folder: Path, bits: int) -> None:
        with torch.compiler.set_stance("force_eager"):
            told["acceptance"] = acceptance(
                target,
                trainer.student,
                held,
                head_ids_C,
                candidates=trainer.settings.candidates,
                temperatures=TEMPERATURES[1:],
            )
        say(f"acceptance {json.dumps(told['acceptance'])}")
        exporting(folder, bits)(trainer)

    settings = TrainingSettings(
        seconds=recipe.train_seconds,
        loss=recipe.loss,  # type: ignore[arg-type]
        rate=recipe.rate,
        batch_tokens=recipe.batch_tokens,
        seed=recipe.seed,
    )
    folder = out / "chain"
    trainer = train(
        target, student, groups, head_ids_C, settings, work / "chain.pt", exporting(folder, 16), say
    )
    finish(trainer, folder, 16)
    if recipe.parallel_seconds > 0:
        parallel = student_of(target, layers, masks=True)
        parallel.load_state_dict(trainer.student.state_dict(), strict=False)
        settings = replace(
            settings,
            seconds=recipe.parallel_seconds,
            candidates=recipe.candidates,
            rate=recipe.parallel_rate,
            batch_tokens=recipe.batch_tokens // 2,
        )
        folder = out / "parallel"
        trainer = train(
            target, parallel, groups, head_ids_C, settings, work / "parallel.pt",
            exporting(folder, 8), say,
        )
        finish(trainer, folder, 8)
    say(f"done after {time.monotonic() - began:.0f} s")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "prompts", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--end-token-ids", type=int, nargs="+", required=True)
    for name in Recipe.__dataclass_fields__:
        default = getattr(Recipe, name, None)
        value = Recipe.__dataclass_fields__[name].default
        kind = type(value) if isinstance(value, int | float | str) else float
        del default
        needed = not isinstance(value, int | float | str)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, required=needed,
            **({} if needed else {"default": value}),
        )
    given = vars(parser.parse_args())
    recipe = Recipe(**{name: given[name] for name in Recipe.__dataclass_fields__})
    began = time.monotonic()
    distill(
        given["target"], given["prompts"], given["work"], given["out"], recipe,
        lambda line: print(f"[{time.monotonic() - began:6.1f}] {line}", flush=True),
        given["end_token_ids"],
    )


if __name__ == "__main__":
    main()
