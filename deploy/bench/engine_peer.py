"""transformers' batching beside us, in a process of its own.

    python -m deploy.bench.engine_peer FOLDER DTYPE

Static batching is `generate` over a padded batch, which runs until its longest output is done.
Continuous batching is what `generate_batch` uses, request by request, so that each may have an
output length of its own. No end token ends a sequence.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.bench.engine_load import Request
from deploy.bench.line_process import LineProcess, answer_lines

PAGE_TOKENS = 128
STEP_TOKENS = 512
"""Most tokens of a step of continuous batching: what our driver takes as well."""


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """New tokens of each sequence, and how long it took."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class ContinuousAnswer:
    """Output tokens made in `seconds`; `error` says why there are none."""

    tokens: int
    finished: int
    seconds: float
    error: str | None


class PeerProcess(LineProcess):
    """Asks the process."""

    def __init__(self, folder: Path, *, dtype: str, threads: int, log: Path) -> None:
        """`threads`: the most that a task may ask for."""
        self.dtype = dtype
        super().__init__(
            "deploy.bench.engine_peer",
            (str(folder), dtype),
            name="transformers",
            threads=threads,
            log=log,
        )

    def static(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, threads: int
    ) -> BatchAnswer:
        """Continue every prompt by `max_tokens`, greedily."""
        answer = self.ask(
            {
                "kind": "static",
                "prompts": [list(prompt) for prompt in prompts],
                "max_tokens": max_tokens,
                "threads": threads,
            }
        )
        return BatchAnswer(tuple(tuple(ids) for ids in answer["token_ids"]), answer["seconds"])

    def continuous(
        self, requests: Sequence[Request], *, batch: int, threads: int, limit_seconds: float
    ) -> ContinuousAnswer:
        """Serve all requests at once, at most `batch` in a step, until done or out of time."""
        answer = self.ask(
            {
                "kind": "continuous",
                "requests": [
                    (list(request.prompt_token_ids), request.output_tokens) for request in requests
                ],
                "batch": batch,
                "threads": threads,
                "limit_seconds": limit_seconds,
            }
        )
        return ContinuousAnswer(**answer)


def load(folder: Path, dtype: str) -> Callable[[Mapping[str, Any]], Mapping[str, object]]:
    """Load the model; what answers a task."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def answer(task: Mapping[str, Any]) -> Mapping[str, object]:
        torch.set_num_threads(task["threads"])
        with torch.inference_mode():
            if task["kind"] == "static":
                return _static(model, task)
            return _continuous(model, task)

    return answer


def _endless(model: Any, max_tokens: int) -> Any:
    from deploy.peers import greedy_config

    config = greedy_config(model.generation_config, max_tokens)
    config.eos_token_id = None
    config.pad_token_id = 0
    return config


def _static(model: Any, task: Mapping[str, Any]) -> Mapping[str, object]:
    import torch

    prompts = task["prompts"]
    width = max(map(len, prompts))
    prompts_BT = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = _endless(model, task["max_tokens"])
    start = time.perf_counter()
    answer_BT = model.generate(prompts_BT, attention_mask=mask_BT, generation_config=config)
    seconds = time.perf_counter() - start
    return {"token_ids": answer_BT[:, width:].tolist(), "seconds": seconds}


def _continuous(model: Any, task: Mapping[str, Any]) -> Mapping[str, object]:
    """Whatever goes wrong in transformers' own thread is the answer, not the end."""
    from transformers import ContinuousBatchingConfig

    requests = task["requests"]
    lengths = sorted((len(prompt) + count for prompt, count in requests), reverse=True)
    pages = sum(1 + length // PAGE_TOKENS for length in lengths[: task["batch"]])
    config = _endless(model, max(count for _, count in requests))
    config.eos_token_id = -1  # None is asked of the checkpoint there
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=pages + task["batch"],
        max_batch_tokens=STEP_TOKENS,
        max_requests_per_batch=task["batch"],
    )
    made: dict[str, int] = {}
    finished, error = 0, None
    with model.continuous_batching_context_manager(
        generation_config=config,
        continuous_batching_config=batching,
        block=True,
        timeout=5,
        warmup=False,
    ) as manager:
        start = time.perf_counter()
        for prompt, count in requests:
            manager.add_request(prompt, max_new_tokens=count, streaming=True)
        while finished < len(requests) and time.perf_counter() - start < task["limit_seconds"]:
            result = manager.get_result(timeout=0.5)
            if result is None:
                if not manager.is_running():
                    error = "its generation thread ended"
                    break
                continue
            made[result.request_id] = len(result.generated_tokens)
            finished += result.is_finished()
            error = error or result.error
        seconds = time.perf_counter() - start
    return {
        "tokens": sum(made.values()),
        "finished": finished,
        "seconds": seconds,
        "error": error,
    }


if __name__ == "__main__":
    answer_lines(lambda: load(Path(sys.argv[1]), sys.argv[2]))
