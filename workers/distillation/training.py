"""Trains a student to draft what the target would write.

The target's distribution at each position is computed beside the student's, so no logits are
stored. A parallel student (PARD, An et al. 2025) also learns to fill mask tokens: the mask at depth
k after a position sees the text up to that position and the masks before it, and learns what the
target writes k tokens later. Only a part of the masks of each depth is kept, a part of those kept
at the depth before (conditional drop), or an epoch would take `candidates` times as long.

Shapes: B rows, S positions, M masks, R rows of a chunk, C tokens of the cut head, F features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from workers.distillation.network import Network

LossName = Literal["forward", "reverse", "variation", "mixed"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
KEPT_MASKS = 0.7
"""Share of the masks of one depth that have a mask at the next depth."""
PROMPT_WEIGHT = 0.25
"""Weight of a position that a prompt wrote: the drafter never drafts it, but it teaches too."""
WARM_UP, LAST_RATE = 0.03, 0.02
"""Share of the time in which the learning rate rises; its last value, as a share of the highest."""
BETAS, DECAY, CLIP = (0.9, 0.95), 0.05, 1.0
CHUNK = 8192
"""Rows of logits at once."""
MOST_BAD_STEPS = 10
"""Steps without finite gradients that are left out one after another before training ends."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Texts of one length [B, S], and whether the target wrote each token."""

    token_ids_BS: Tensor
    own_BS: Tensor


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """`seconds` of training in all. `candidates`: that a forward gives; above 1, by masks.

    `rate`: highest learning rate. `batch_tokens`: of a step, masks not counted.
    """

    seconds: float
    loss: LossName = "mixed"
    candidates: int = 1
    rate: float = 1e-3
    batch_tokens: int = 32768
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """How far a training is. `agreement`: share of positions, weighted, where student and target
    have the same likeliest token; `overlap`: 1 - total variation, the acceptance at temperature 1.
    Both are running means over some 50 steps.
    """

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    bad_steps: int = 0
    loss: float = math.nan
    agreement: float = math.nan
    overlap: float = math.nan

    def add(self, values: Sequence[float]) -> None:
        """Count the loss, the agreement and the overlap of a step in."""
        for name, value in zip(("loss", "agreement", "overlap"), values, strict=True):
            before = getattr(self, name)
            weight = 1.0 if math.isnan(before) else max(0.02, 1 / self.steps)
            setattr(self, name, value if math.isnan(before) else before + weight * (value - before))


def losses_of(
    student_RF: Tensor, target_RF: Tensor, head_CF: Tensor, loss: LossName, lean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: the loss, whether the likeliest tokens agree, and the overlap.

    `lean`, 0 to 1: how far "mixed" has gone from divergence to variation. Divergence teaches a
    student that is far off; variation is what acceptance is made of (DistillSpec, Zhou et al.
    2024), at temperature 1 by whole distributions and at 0 by the target's likeliest token.
    """
    student_logs = (student_RF.float() @ head_CF.T).log_softmax(-1)
    target_logs = (target_RF.float() @ head_CF.T).log_softmax(-1)
    student, target = student_logs.exp(), target_logs.exp()
    best = target_logs.argmax(-1, keepdim=True)
    variation = (target - student).abs().sum(-1) / 2
    agrees = (student_logs.argmax(-1, keepdim=True) == best).squeeze(-1).float()
    if loss == "variation":
        result = variation
    elif loss == "reverse":
        result = (student * (student_logs - target_logs)).sum(-1)
    else:
        result = (target * (target_logs - student_logs)).sum(-1)
    if loss == "mixed":
        missed = 1 - student.gather(-1, best).squeeze(-1)
        result = (1 - lean) * result + lean * (variation + missed)
    return result, agrees, (1 - variation).detach()


@dataclass(frozen=True, slots=True)
class Masks:
    """The mask tokens behind S real ones: positions of all rows, and who sees whom.

    `places_M`: the position of each mask.
    """

    positions_S: Tensor
    seen_SS: Tensor
    places_M: Tensor

    @classmethod
    def drawn(
        cls, num_positions: int, candidates: int, generator: np.random.Generator, device: Any
    ) -> Masks:
        """Masks for a batch, the same in each of its rows."""
        # Of each depth the same number in every batch: compiled code is made for one shape.
        anchors = [np.arange(num_positions)]
        most = max(1, num_positions - candidates + 1)
        for depth in range(1, candidates):
            allowed = anchors[-1][:most] if depth == 1 else anchors[-1]
            kept = generator.permutation(len(allowed))[: max(1, round(most * KEPT_MASKS**depth))]
            anchors.append(allowed[np.sort(kept)])
        # The fast attention of GPUs reads masks in eights.
        surplus = sum(len(one) for one in anchors) % 8
        anchors[-1] = anchors[-1][: max(1, len(anchors[-1]) - surplus)]
        return cls.of(anchors, device)

    @classmethod
    def of(cls, anchors: Sequence[np.ndarray[Any, Any]], device: Any) -> Masks:
        """The masks of each depth after these positions; at depth 0, all positions of the text."""
        anchor = np.concatenate(anchors)
        depths = np.repeat(np.arange(len(anchors)), [len(one) for one in anchors])
        # A row sees real tokens up to its anchor, and the masks of its anchor up to itself.
        before = (depths[None, :] == 0) & (anchor[None, :] <= anchor[:, None])
        beside = (anchor[None, :] == anchor[:, None]) & (depths[None, :] <= depths[:, None])
        positions = torch.from_numpy(anchor + depths).to(device)
        seen_SS = torch.from_numpy(before | beside).to(device)
        return cls(positions, seen_SS, positions[len(anchors[0]) :])


@dataclass(slots=True)
class Trainer:
    """A student in training. `head_CF`: the rows of the target's head that it drafts, in float32:
    logits in bfloat16 would have ties."""

    target: Network
    student: Network
    head_CF: Tensor
    settings: TrainingSettings
    progress: Progress = field(default_factory=Progress)
    optimizer: torch.optim.Optimizer = field(init=False)
    _losses: Callable[..., tuple[Tensor, Tensor, Tensor]] = field(default=losses_of)

    def __post_init__(self) -> None:
        parameters = list(self.student.parameters())
        matrices = [one for one in parameters if one.dim() > 1]
        others = [one for one in parameters if one.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": DECAY},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self.settings.rate,
            betas=BETAS,
            fused=self.head_CF.is_cuda,
        )

    def compile(self) -> None:
        """Compile layers and losses, for a GPU. Code is made once for all layers of a network."""
        for network in (self.target, self.student):
            for layer in network.layers:
                layer.compile(dynamic=False)
        self._losses = torch.compile(losses_of, dynamic=False)

    def forget_compiled(self) -> None:
        """Go on without compiled code."""
        torch._dynamo.reset()
        for network in (self.target, self.student):
            for layer in network.layers:
                layer._compiled_call_impl = None
        self._losses = losses_of
        self.optimizer.zero_grad(set_to_none=True)

    def run(
        self,
        rows: Sequence[Rows],
        report: Callable[[Progress], None],
        save: Callable[[], None],
        save_every: float,
    ) -> None:
        """Train until the time is over. `save` is called now and then, and at the end.

        Raises ConfigError if the loss is not finite for several steps; what was saved last is good.
        """
        settings, progress = self.settings, self.progress
        batches = _batches(rows, settings, np.random.default_rng([settings.seed, progress.steps]))
        last = saved = reported = time.monotonic()
        bad = 0
        while progress.seconds < settings.seconds:
            values = self.step(next(batches))
            now = time.monotonic()
            progress.seconds, last = progress.seconds + now - last, now
            if values is None:
                bad += 1
                progress.bad_steps += 1
                if bad >= MOST_BAD_STEPS:
                    raise ConfigError(
                        f"the loss was not finite in {bad} steps one after another (step "
                        f"{progress.steps}): start again from the last checkpoint with a lower "
                        f"rate than {settings.rate:g}"
                    )
                continue
            bad = 0
            progress.add(values)
            if now - reported >= 5:
                report(progress)
                reported = now
            if now - saved >= save_every:
                save()
                saved = last = time.monotonic()
        report(progress)
        save()

    def step(self, batch: Rows) -> tuple[float, ...] | None:
        """One step: mean loss, agreement and overlap; None if they are not finite (left out)."""
        settings, progress = self.settings, self.progress
        share = min(1.0, progress.seconds / settings.seconds)
        rate = settings.rate * _shape(share, progress.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums = self._sums(batch, share)
        loss = sums[1] / sums[0]
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.student.parameters(), CLIP)
        progress.steps += 1
        progress.tokens += batch.token_ids_BS.numel()
        if not math.isfinite(float(norm) + float(loss.detach())):
            return None
        self.optimizer.step()
        return tuple((sums[1:] / sums[0]).detach().tolist())

    def try_out(self, rows: Sequence[Rows]) -> None:
        """Compute gradients of a batch of each length, and forget them."""
        for group in rows:
            count = max(1, self.settings.batch_tokens // group.token_ids_BS.shape[1])
            self._sums(Rows(group.token_ids_BS[:count].long(), group.own_BS[:count]), 0.0)[
                1
            ].backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _sums(self, batch: Rows, share: float) -> Tensor:
        """Sums over rows of logits: weights, then weighted losses, agreements and overlaps."""
        settings, device = self.settings, self.head_CF.device
        masks = None
        if settings.candidates > 1:
            generator = np.random.default_rng([settings.seed, 1, self.progress.steps])
            num_positions = batch.token_ids_BS.shape[1]
            masks = Masks.drawn(num_positions, settings.candidates, generator, device)
        lean = torch.tensor(0.1 + 0.8 * share, device=device)
        tokens_BS = batch.token_ids_BS
        with torch.no_grad():
            target_BSF = self.target(tokens_BS)
        with mixed_precision(device):
            if masks is None:
                student_BSF = self.student(tokens_BS)
            else:
                student_BSF = self.student(
                    tokens_BS, masks.positions_S, masks.seen_SS, len(masks.places_M)
                )
        # Row i predicts token i + 1, which counts if the target wrote it.
        weights_BS = torch.full(tokens_BS.shape, PROMPT_WEIGHT, device=tokens_BS.device)
        weights_BS[:, :-1][batch.own_BS[:, 1:]] = 1.0
        if masks is not None:
            target_BSF = torch.cat([target_BSF, target_BSF[:, masks.places_M]], dim=1)
            weights_BS = torch.cat([weights_BS, weights_BS[:, masks.places_M]], dim=1)
        student, target = student_BSF.flatten(0, 1), target_BSF.flatten(0, 1)
        weights, sums = weights_BS.flatten(), torch.zeros(4, device=device)
        for start in range(0, len(student), CHUNK):
            part = slice(start, start + CHUNK)
            result = self._losses(student[part], target[part], self.head_CF, settings.loss, lean)
            own = weights[part]
            sums = sums + torch.stack([own.sum(), *((one * own).sum() for one in result)])
        return sums

    def state(self) -> dict[str, Any]:
        """Everything that a later run needs to go on."""
        return {
            "student": self.student.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.student.load_state_dict(state["student"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, and on a CPU that multiplies it; on other CPUs float32."""
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device.type == "cuda" or multiplies else torch.float32


def mixed_precision(device: torch.device) -> Any:
    """Products in `product_dtype`, everything else in float32."""
    dtype = product_dtype(device)
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def _shape(share: float, steps: int) -> float:
    """The learning rate after this share of the time, as a share of the highest."""
    rising = min(1.0, share / WARM_UP, (steps + 1) / 20)
    falling = (1 + math.cos(math.pi * share)) / 2
    return rising * (LAST_RATE + (1 - LAST_RATE) * falling)


def _batches(
    rows: Sequence[Rows], settings: TrainingSettings, generator: np.random.Generator
) -> Iterator[Rows]:
    """Batches without end, each of texts of one length; every epoch in another order."""
    while True:
        batches: list[tuple[Rows, Any]] = []
        for group in rows:
            count = max(1, settings.batch_tokens // group.token_ids_BS.shape[1])
            order = generator.permutation(len(group.token_ids_BS))
            count = min(count, len(order))
            batches += [
                (group, order[start : start + count])
                for start in range(0, len(order) - count + 1, count)
            ]
        for number in generator.permutation(len(batches)):
            group, chosen = batches[number]
            index = torch.from_numpy(chosen).to(group.token_ids_BS.device)
            yield Rows(group.token_ids_BS[index].long(), group.own_BS[index])


@torch.no_grad()
def acceptance(
    target: Network,
    student: Network,
    rows: Rows,
    head_ids_C: Tensor,
    *,
    candidates: int,
    temperatures: Sequence[float],
    depth: int = 8,
) -> dict[str, list[float]]:
    """Acceptance of each of `depth` candidates of a chain, if all before it were accepted.

    "greedy": from windows at each of the target's own tokens, in texts that it wrote greedily. By
    temperature: the overlap of the distributions along the text, for the first candidate only
    unless the student is parallel. A parallel student fills masks, another one goes on from the
    text, which its accepted candidates repeat.
    """
    device, num_positions = head_ids_C.device, rows.token_ids_BS.shape[1]
    head_VF = target.head_VF.float()
    head_CF = head_VF[head_ids_C]
    hits, tries = np.zeros(depth), np.zeros(depth)
    overlaps = {temperature: [0.0, 0] for temperature in temperatures}
    for start in range(0, len(rows.token_ids_BS), 8):
        tokens = rows.token_ids_BS[start : start + 8].long()
        own = rows.own_BS[start : start + 8]
        target_BSF = target(tokens)
        with mixed_precision(device):
            if candidates == 1:
                by_depth = [student(tokens)] * depth
            else:
                by_depth = _by_depth(student, tokens, depth)
        alive = torch.ones_like(own)
        for k, student_BSF in enumerate(by_depth):
            # Row i of a student's depth k says what comes after the text up to i + k.
            end = num_positions - 1 - k
            best = (target_BSF[:, k : k + end].float() @ head_VF.T).argmax(-1)
            rows_BEF = student_BSF[:, k : k + end] if candidates == 1 else student_BSF[:, :end]
            drafted = head_ids_C[(rows_BEF.float() @ head_CF.T).argmax(-1)]
            counts = alive[:, :end] & own[:, 1 : end + 1] & own[:, k + 1 : k + 1 + end]
            agrees = counts & (best == drafted)
            hits[k] += int(agrees.sum())
            tries[k] += int(counts.sum())
            alive = agrees
        first = by_depth[0][:, : num_positions - 1][own[:, 1:]]
        expected = target_BSF[:, : num_positions - 1][own[:, 1:]]
        for temperature in temperatures:
            for part in range(0, len(first), 2048):
                chunk = slice(part, part + 2048)
                logits = (expected[chunk].float() @ head_VF.T) / temperature
                drafts = (first[chunk].float() @ head_CF.T) / temperature
                wanted = logits.softmax(-1)[:, head_ids_C]
                overlaps[temperature][0] += float(torch.minimum(wanted, drafts.softmax(-1)).sum())
                overlaps[temperature][1] += len(logits)
    found = {f"{t:g}": [total / max(1, count)] for t, (total, count) in overlaps.items()}
    return {"greedy": (hits / np.maximum(tries, 1)).tolist(), **found}


def _by_depth(student: Network, tokens_BS: Tensor, depth: int) -> list[Tensor]:
    """Rows [B, S, F] of each depth: row i is that of the mask at depth k after the text up to i.

    Computed for 64 positions at a time.
    """
    num_positions, device = tokens_BS.shape[1], tokens_BS.device
    shape = (*tokens_BS.shape, student.norm.weight.shape[0])
    results = [torch.zeros(shape, device=device) for _ in range(depth)]
    for first in range(0, num_positions, 64):
        anchors = np.arange(first, min(first + 64, num_positions))
        masks = Masks.of([np.arange(num_positions), *[anchors] * (depth - 1)], device)
        rows = student(tokens_BS, masks.positions_S, masks.seen_SS, len(masks.places_M))
        results[0] = rows[:, :num_positions].float()
        for k in range(1, depth):
            begin = num_positions + (k - 1) * len(anchors)
            results[k][:, anchors] = rows[:, begin : begin + len(anchors)].float()
    return results
