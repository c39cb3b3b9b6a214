"""Runs transformers' own decoding in another process, which shares no thread or cache with us.

    python -m deploy.bench.transformers_peer FOLDER DTYPE [DRAFT_FOLDER DRAFT_WEIGHTS]

A batch is padded and runs until its longest output is done. An assistant computes in float32 with
exactly the weights of our engine's drafter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deploy.bench.harness import CORES, Asked
from deploy.bench.processes import LineProcess, model_drafters
from deploy.rows.measure import Sample
from workers.models.catalog import ModelFiles, resolve_model
from workers.process.lines import answer_lines


@dataclass(frozen=True, slots=True)
class Assistance:
    """Settings of assisted generation, as transformers names them."""

    num_assistant_tokens: int
    num_assistant_tokens_schedule: str
    assistant_confidence_threshold: float

    def __str__(self) -> str:
        return (
            f"{self.num_assistant_tokens} tokens, {self.num_assistant_tokens_schedule}, "
            f"threshold {self.assistant_confidence_threshold:g}"
        )


ASSISTANCES = tuple(
    Assistance(tokens, schedule, threshold)
    for tokens, schedule, threshold in (
        (2, "constant", 0.0),
        (3, "constant", 0.0),
        (4, "constant", 0.0),
        (6, "constant", 0.0),
        (5, "heuristic", 0.0),
        (6, "constant", 0.4),
        (10, "constant", 0.4),
        (20, "constant", 0.4),
        (10, "constant", 0.6),
    )
)
"""Settings of transformers' assistant that are tried."""
USUAL_ASSISTANCE = ASSISTANCES[-2]
"""Its default."""


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens of each prompt, and how long `generate` took for them, prefill included."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float


class TransformersProcess(LineProcess):
    """The process as its user sees it. Raises UnavailableError with the reason if it has ended."""

    def __init__(
        self,
        folder: Path,
        *,
        threads: int,
        log: Path,
        dtype: str = "float32",
        draft: ModelFiles | None = None,
    ) -> None:
        """`threads`: the most that a task may ask for. `draft`: the assistant."""
        self.dtype = dtype
        assistant = () if draft is None else (str(draft.folder), draft.weights)
        super().__init__(
            "deploy.bench.transformers_peer",
            (str(folder), dtype, *assistant),
            threads=threads,
            log=log,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        threads: int,
        assistance: Assistance | None = None,
        ignore_eos: bool = False,
    ) -> Answer:
        """Continue every prompt greedily. An assistant can help with a single prompt only."""
        answer = self.ask(
            {
                "prompts": [list(prompt) for prompt in prompts],
                "max_tokens": max_tokens,
                "threads": threads,
                "assistance": None if assistance is None else asdict(assistance),
                "ignore_eos": ignore_eos,
            }
        )
        return Answer(tuple(tuple(ids) for ids in answer["token_ids"]), answer["seconds"])


@contextmanager
def assisted_transformers(
    asked: Asked,
) -> Iterator[tuple[TransformersProcess, ModelFiles, ModelFiles]]:
    """transformers while the block runs, with the target and the drafter of the configuration."""
    config = asked.config
    names = (config.target.model, model_drafters(config)[0].model or "")
    target, draft = (resolve_model(name, home=asked.home) for name in names)
    log = asked.folder / "transformers.log"
    with TransformersProcess(target.folder, draft=draft, threads=CORES, log=log) as process:
        yield process, target, draft


@dataclass(frozen=True, slots=True)
class PeerContender:
    """A way in which another's process decodes, with its setting in words.

    `generate` gets prompts and `max_tokens`; the process measures the time.
    """

    name: str
    setting: str
    generate: Callable[..., Answer]

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """Decode in the peer's process."""
        answer = self.generate([prompt_token_ids], max_tokens=max_tokens)
        return Sample(answer.token_ids[0], answer.seconds)


def transformers_row(
    name: str, process: TransformersProcess, assistance: Assistance | None
) -> PeerContender:
    """transformers' generate, with or without an assistant."""
    helped = "" if assistance is None else f"{assistance}; "
    generate = partial(process.generate, threads=CORES, assistance=assistance)
    return PeerContender(name, f"{helped}{CORES} threads", generate)


def load(
    folder: str, dtype: str, *assistant: str
) -> Callable[[Mapping[str, Any]], Mapping[str, object]]:
    """Load the models. Returns the function that answers a task.

    `assistant`: its folder and the form of its weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from deploy.rows.peers import greedy_config
    from workers.engine.cpu.linears import convert_weights
    from workers.engine.options import WEIGHT_FORMS
    from workers.process.standalone import parse_choice

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    drafter: Any = None
    if assistant:
        draft_folder, weights = assistant
        drafter = AutoModelForCausalLM.from_pretrained(draft_folder, dtype=torch.float32)
        if weights != "float32":
            convert_weights(drafter, parse_choice("weights", weights, WEIGHT_FORMS))

    def answer(task: Mapping[str, Any]) -> Mapping[str, object]:
        torch.set_num_threads(task["threads"])
        extra: dict[str, Any] = {}
        if task["assistance"] is not None:
            # Set again for every task, because the heuristic schedule changes it.
            for name, value in task["assistance"].items():
                setattr(drafter.generation_config, name, value)
            extra["assistant_model"] = drafter
        config = greedy_config(model.generation_config, task["max_tokens"])
        if task["ignore_eos"]:
            config.eos_token_id = None
            config.pad_token_id = 0
        prompts = task["prompts"]
        width = max(map(len, prompts))
        prompts_BT = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
        mask_BT = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
        with torch.inference_mode():
            start = time.perf_counter()
            answer_BT = model.generate(
                prompts_BT, attention_mask=mask_BT, generation_config=config, **extra
            )
            seconds = time.perf_counter() - start
        return {"token_ids": answer_BT[:, width:].tolist(), "seconds": seconds}

    return answer


if __name__ == "__main__":
    answer_lines(lambda: load(*sys.argv[1:]))
