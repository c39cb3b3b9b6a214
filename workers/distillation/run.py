"""Distills a drafter from a target: samples answers, trains a student, writes it with a report.

`python -m workers.distillation.run --help` runs on machines with torch, transformers, safetensors
and numpy alone; `paceline distill` calls the same functions. The work folder keeps the answers and
the state of the training, so that a later run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.text import one_line
from workers.distillation.network import Network, evenly_spaced, read_network, student_of
from workers.distillation.sampling import Prompts, sample_rows
from workers.distillation.training import (
    LOSSES,
    Progress,
    Rows,
    Trainer,
    TrainingSettings,
    acceptance,
    product_dtype,
)
from workers.models.learned import (
    EMBEDDING,
    assemble,
    embedding_digest,
    shared_tensors,
    write_learned,
)
from workers.process.atomic_files import replaced, replaced_folder

TEMPERATURES = (0.0, 0.7, 1.0)
GREEDY_SHARE = 0.5
"""Share of the rows that the target writes at temperature 0; the others share the rest."""
HELD_OUT = 64
"""Greedy rows of the first round that are kept for the report."""
LONG_EVERY = 4
"""One round in this number has texts of twice the length."""
SAVE_SECONDS = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a drafter is made. `sample_seconds`, `train_seconds`, `parallel_seconds`: at most.

    `layers`: number of the target's layers that the student begins with. `head`: number of tokens
    that it proposes. `round_tokens`: positions that are sampled at once, in texts of
    `num_positions`. `parallel_seconds`: then the student also learns to fill masks, for
    `candidates` candidates a forward.
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

    def on_this_machine(self) -> Recipe:
        """With rounds and batches that suit a CPU, if there is no GPU."""
        if best_device().type == "cuda":
            return self
        return replace(self, round_tokens=32 * self.num_positions, batch_tokens=2048)

    def check(self, target: Network) -> None:
        """Raise ConfigError if no student of this target can be made so."""
        config = target.config
        vocab_size = target.head_VF.shape[0]
        if not 0 < self.layers < config.num_hidden_layers:
            raise ConfigError(
                f"layers must be from 1 to {config.num_hidden_layers - 1}, below the target's "
                f"{config.num_hidden_layers}, got {self.layers}: a student is smaller"
            )
        if not 0 < self.head <= vocab_size:
            raise ConfigError(
                f"head must be from 1 to the target's {vocab_size} tokens, got {self.head}"
            )
        longest = self.num_positions * 2
        if not self.num_positions >= 16 or longest > config.max_position_embeddings:
            raise ConfigError(
                f"num_positions must be from 16 to {config.max_position_embeddings // 2}, half of "
                f"the target's positions, got {self.num_positions}"
            )
        if self.loss not in LOSSES:
            raise ConfigError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_prompts(path: Path) -> tuple[list[list[int]], list[bool]]:
    """Prompts as tokens, from an npz file with token_ids, lengths and asks. Raises ConfigError."""
    try:
        with np.load(path) as stored:
            ends = np.cumsum(stored["lengths"])[:-1]
            prompts = np.split(stored["token_ids"].astype(np.int64), ends)
            return [one.tolist() for one in prompts], stored["asks"].tolist()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} is no npz file with token_ids, lengths and asks: {one_line(error)}"
        ) from error


@contextmanager
def _kept(path: Path) -> Iterator[Path]:
    """As `replaced`, but raises ConfigError if the disk is full."""
    try:
        with replaced(path) as partial:
            yield partial
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"could not write {path}: {one_line(error)}; what was saved before is kept: free space, "
        "and run the command again to go on"
    )


def sample(
    target: Network, prompts: Prompts, ends: Sequence[int], recipe: Recipe, folder: Path, say: Say
) -> None:
    """Write files of answers into `folder` until the recipe's time is over, or go on with it."""
    folder.mkdir(parents=True, exist_ok=True)
    device = target.embedding_VF.device
    used, number, longest = 0.0, 0, 0.0
    while (path := folder / f"answers-{number:04}.npz").exists():
        with np.load(path) as stored:
            used += float(stored["seconds"])
        number += 1
    while number == 0 or used + longest <= recipe.sample_seconds:
        began = time.monotonic()
        is_long = number % LONG_EVERY == LONG_EVERY - 1
        length = recipe.num_positions * (2 if is_long else 1)
        count = max(4, recipe.round_tokens // length)
        temperatures = torch.zeros(count, device=device)
        num_warm = count - int(count * GREEDY_SHARE)
        warm = torch.tensor(TEMPERATURES[1:], device=device)
        temperatures[-num_warm:] = warm[torch.arange(num_warm, device=device) % len(warm)]
        generator = torch.Generator(device).manual_seed(recipe.seed * 10_000 + number)
        tokens, own = sample_rows(target, prompts, temperatures, length, ends, generator)
        seconds = time.monotonic() - began
        used, longest = used + seconds, max(longest, seconds)
        with _kept(path) as partial, partial.open("wb") as stream:
            np.savez(stream, tokens=tokens.astype(np.uint32), own=own, seconds=seconds)
        say(f"sampled {count} x {length} tokens in {seconds:.1f} s, {used:.0f} s in all")
        number += 1
        path = folder / f"answers-{number:04}.npz"


def read_rows(folder: Path, device: torch.device) -> tuple[list[Rows], Rows]:
    """The rows to train with, by length, and those held out for the report."""
    by_length: dict[int, list[Rows]] = {}
    held: Rows | None = None
    for path in sorted(folder.glob("answers-*.npz")):
        with np.load(path) as stored:
            tokens, own = stored["tokens"].astype(np.int32), stored["own"]
        rows = Rows(torch.from_numpy(tokens).to(device), torch.from_numpy(own).to(device))
        if held is None:
            count = min(HELD_OUT, len(tokens) // 4)
            held = Rows(rows.token_ids_BS[:count], rows.own_BS[:count])
            rows = Rows(rows.token_ids_BS[count:], rows.own_BS[count:])
        by_length.setdefault(tokens.shape[1], []).append(rows)
    assert held is not None
    groups = [
        Rows(
            torch.cat([one.token_ids_BS for one in files]), torch.cat([one.own_BS for one in files])
        )
        for files in by_length.values()
    ]
    return groups, held


def frequent_tokens(
    groups: Sequence[Rows], count: int, vocab_size: int, ends: Sequence[int]
) -> list[int]:
    """The tokens that the target wrote most often, the likeliest first; `ends` come before all."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for group in groups:
        for wanted, weight in ((group.own_BS, 1.0), (~group.own_BS, 0.01)):
            found = torch.bincount(group.token_ids_BS[wanted].long(), minlength=vocab_size)
            counts += weight * found.cpu()
    counts[list(ends)] = counts.max() + 1
    chosen: list[int] = torch.argsort(counts, descending=True, stable=True)[:count].tolist()
    return chosen


class Distillation:
    """One run: a target, prompts and a recipe. `work` has what a later run goes on with."""

    def __init__(
        self, target_folder: Path, work: Path, recipe: Recipe, ends: Sequence[int], say: Say
    ) -> None:
        """Load the target. Raises CheckpointError, and ConfigError if recipe or `work` do not
        fit it.
        """
        self._folder, self._work, self._recipe, self._say = target_folder, work, recipe, say
        self._ends = ends
        self.device = best_device()
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        target = read_network(target_folder, product_dtype(self.device))
        recipe.check(target)
        self._digest = embedding_digest(shared_tensors(target_folder)[EMBEDDING])
        self._check_work()
        self._target = target.to(self.device).requires_grad_(False)
        say(f"loaded the target on {self.device}")

    def _check_work(self) -> None:
        """Note whose work folder this is. Raises ConfigError if it is that of other work."""
        recipe = asdict(self._recipe)
        kept = {n: recipe[n] for n in ("layers", "head", "num_positions", "candidates", "seed")}
        ours = {"target": self._digest, **kept}
        path = self._work / "made-for.json"
        self._work.mkdir(parents=True, exist_ok=True)
        if path.exists():
            found = json.loads(path.read_text())
            other = [name for name in ours if found.get(name) != ours[name]]
            if other:
                raise ConfigError(
                    f"{self._work} is the work folder of another distillation, with other values "
                    f"of {', '.join(other)}: give a new one, or the same target and options"
                )
        for left in self._work.rglob(".*.part"):  # By a process that was killed.
            left.unlink()
        with _kept(path) as partial:
            partial.write_text(json.dumps(ours))

    def run(self, prompts: Sequence[Sequence[int]], asks: Sequence[bool]) -> Path:
        """Sample and train, or go on with both. Returns the folder of what was learned.

        Raises ConfigError for prompts that do not fit, a loss that is not finite, or a full disk.
        """
        target, recipe, say, work = self._target, self._recipe, self._say, self._work
        vocab_size = target.head_VF.shape[0]
        if len(prompts) < 2 or any(not 0 <= one < vocab_size for row in prompts for one in row):
            raise ConfigError(
                f"expected prompts of token ids below the target's {vocab_size}, got "
                f"{max(0, len(prompts) - 1)} prompts: make them with this target's tokenizer"
            )
        on_device = Prompts.of(prompts, asks, self.device)
        sample(target, on_device, self._ends, recipe, work / "answers", say)
        groups, held = read_rows(work / "answers", self.device)
        own, total = (
            sum(int(one.own_BS.sum()) for one in groups),
            sum(one.own_BS.numel() for one in groups),
        )
        say(f"{total} tokens to train with, {own} of them the target's own")
        head = frequent_tokens(groups, recipe.head, vocab_size, self._ends)
        layers = evenly_spaced(recipe.layers, target.config.num_hidden_layers)
        told: dict[str, Any] = {
            "target": self._digest,
            "layers": layers,
            "head": head,
            "recipe": asdict(recipe),
            "tokens": {"all": total, "own": own},
            "mask_token": None,
        }
        settings = TrainingSettings(
            seconds=recipe.train_seconds,
            loss=recipe.loss,  # type: ignore[arg-type]
            rate=recipe.rate,
            batch_tokens=recipe.batch_tokens,
            seed=recipe.seed,
        )
        head_C = torch.tensor(head, device=self.device)
        student = student_of(target, layers)
        learned = self._train(student, groups, held, head_C, settings, told, "chain")
        if recipe.parallel_seconds <= 0:
            return learned
        parallel = student_of(target, layers, masks=True)
        parallel.load_state_dict(student.state_dict(), strict=False)
        settings = replace(
            settings,
            seconds=recipe.parallel_seconds,
            candidates=recipe.candidates,
            rate=recipe.parallel_rate,
            batch_tokens=max(recipe.num_positions, recipe.batch_tokens // 2),
        )
        # The token that occurs least has no other use.
        told["mask_token"] = frequent_tokens(groups, vocab_size, vocab_size, self._ends)[-1]
        return self._train(parallel, groups, held, head_C, settings, told, "parallel")

    def _train(
        self,
        student: Network,
        rows: Sequence[Rows],
        held: Rows,
        head_C: Tensor,
        settings: TrainingSettings,
        told: dict[str, Any],
        name: str,
    ) -> Path:
        """Train a student, or go on. Returns the folder of what it has learned."""
        target, say, state_path = self._target, self._say, self._work / f"{name}.pt"
        trainer = Trainer(target, student, target.head_VF[head_C].float(), settings)
        if state_path.exists():
            trainer.load_state(torch.load(state_path, map_location=self.device))
            say(f"{name}: going on at step {trainer.progress.steps}")
        folder = self._work / name

        def export() -> None:
            progress = asdict(trainer.progress)
            try:
                write_learned(folder, student.state_dict(), {**told, "progress": progress})
            except OSError as error:
                raise _unwritable(folder, error) from error

        def save() -> None:
            with _kept(state_path) as partial:
                torch.save(trainer.state(), partial)
            export()

        def show(progress: Progress) -> None:
            say(
                f"{name} {progress.seconds:.0f} s  step {progress.steps}  "
                f"{progress.tokens / 1e6:.2f} M tokens  loss {progress.loss:.4f}  acceptance "
                f"{progress.agreement:.3f} at T = 0, {progress.overlap:.3f} at T = 1"
            )

        if self.device.type == "cuda" and trainer.progress.seconds < settings.seconds:
            _warm_up(trainer, rows, say)
        trainer.run(rows, show, save, SAVE_SECONDS)
        with torch.compiler.set_stance("force_eager"):
            told["acceptance"] = acceptance(
                target,
                student,
                held,
                head_C,
                candidates=settings.candidates,
                temperatures=TEMPERATURES[1:],
            )
        export()
        say(f"{name} acceptance {json.dumps(told['acceptance'])}")
        return folder


def _warm_up(trainer: Trainer, rows: Sequence[Rows], say: Say) -> None:
    """Compile, and try a batch of each length; without compiled code if that fails."""
    began = time.monotonic()
    torch._dynamo.config.recompile_limit = 64
    try:
        trainer.compile()
        trainer.try_out(rows)
    except Exception as error:  # the compiler raises many kinds
        say(f"not compiled: {one_line(error)[:300]}")
        trainer.forget_compiled()
    say(f"compiling took {time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--prompts", type=Path, required=True, help="npz file")
    parser.add_argument("--work", type=Path, required=True, help="folder to go on with")
    parser.add_argument("--out", type=Path, help="folder for the drafter's checkpoint")
    parser.add_argument("--end-token-ids", type=int, nargs="+", required=True)
    usual = Recipe(0.0, 0.0).on_this_machine()
    for one in fields(Recipe):
        is_needed = one.name in ("sample_seconds", "train_seconds")
        kind = float if is_needed else type(one.default)
        option = f"--{one.name.replace('_', '-')}"
        if is_needed:
            parser.add_argument(option, type=kind, required=True)
        else:
            parser.add_argument(option, type=kind, default=getattr(usual, one.name))
    given = vars(parser.parse_args())
    recipe = Recipe(**{one.name: given[one.name] for one in fields(Recipe)})
    began = time.monotonic()

    def say(line: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - began:6.1f}] {line}\n")
        sys.stdout.flush()

    run = Distillation(given["target"], given["work"], recipe, given["end_token_ids"], say)
    learned = run.run(*read_prompts(given["prompts"]))
    if given["out"] is not None:
        with replaced_folder(given["out"]) as into:
            assemble(given["target"], learned, into)


if __name__ == "__main__":
    main()
