"""transformers' own decoding in a process of its own, so that no thread or cache is shared with us.

    python -m deploy.bench.transformers_process TARGET_FOLDER DRAFT_FOLDER DRAFT_WEIGHTS THREADS

reads one JSON request a line and answers each with one JSON line (`Task`, `Answer`). Both models
are those that Paceline serves: the target in float32, the drafter with the very int8 weights of
our engine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.bench.line_process import LineProcess, answer_lines


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


@dataclass(frozen=True, slots=True)
class Answer:
    """The new tokens and how long `generate` took for them, prefill included."""

    token_ids: tuple[int, ...]
    seconds: float


class TransformersProcess(LineProcess):
    """Both models in one process; UnavailableError says why it ended, if it did."""

    def __init__(
        self, target: Path, draft: Path, *, draft_weights: str, threads: int, log: Path
    ) -> None:
        super().__init__(
            "deploy.bench.transformers_process",
            (str(target), str(draft), draft_weights, str(threads)),
            name="transformers",
            threads=threads,
            log=log,
        )

    def generate(
        self, prompt_token_ids: Sequence[int], *, max_tokens: int, assistance: Assistance | None
    ) -> Answer:
        """Decode greedily."""
        answer = self.ask(
            {
                "prompt_token_ids": list(prompt_token_ids),
                "max_tokens": max_tokens,
                "assistance": None if assistance is None else asdict(assistance),
            }
        )
        return Answer(tuple(answer["token_ids"]), answer["seconds"])


def load(
    target: Path, draft: Path, draft_weights: str, threads: int
) -> Callable[[Mapping[str, Any]], Mapping[str, object]]:
    """Load both models; what answers a task."""
    import torch
    from transformers import AutoModelForCausalLM

    from deploy.peers import greedy_config
    from workers.engine.linears import convert_weights
    from workers.standalone import parse_weights

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    drafter: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    if draft_weights != "float32":
        convert_weights(drafter, parse_weights(draft_weights))

    def answer(task: Mapping[str, Any]) -> Mapping[str, object]:
        extra: dict[str, Any] = {}
        if task["assistance"] is not None:
            # Set anew for every task: the heuristic schedule writes into it.
            for name, value in task["assistance"].items():
                setattr(drafter.generation_config, name, value)
            extra["assistant_model"] = drafter
        prompt_BT = torch.tensor([task["prompt_token_ids"]])
        config = greedy_config(model.generation_config, task["max_tokens"])
        with torch.inference_mode():
            start = time.perf_counter()
            sequences_BT = model.generate(
                prompt_BT,
                attention_mask=torch.ones_like(prompt_BT),
                generation_config=config,
                **extra,
            )
            seconds = time.perf_counter() - start
        return {
            "token_ids": sequences_BT[0, prompt_BT.shape[1] :].tolist(),
            "seconds": seconds,
        }

    return answer


if __name__ == "__main__":
    answer_lines(lambda: load(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
