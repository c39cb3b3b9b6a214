"""transformers' own decoding in a process of its own, so that no thread or cache is shared with us.

    python -m deploy.bench.transformers_process TARGET_FOLDER DRAFT_FOLDER DRAFT_WEIGHTS THREADS

reads one JSON request a line and answers each with one JSON line (`Task`, `Answer`). Both models
are those that Paceline serves: the target in float32, the drafter with the very int8 weights of
our engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from paceline.errors import UnavailableError


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


class TransformersProcess:
    """Starts the process and asks it; an idle one waits on a pipe and takes no processor time."""

    def __init__(
        self, target: Path, draft: Path, *, draft_weights: str, threads: int, log: Path
    ) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "deploy.bench.transformers_process"),
                    *(str(target), str(draft), draft_weights, str(threads)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )

    def generate(
        self, prompt_token_ids: Sequence[int], *, max_tokens: int, assistance: Assistance | None
    ) -> Answer:
        """Decode greedily. Raises UnavailableError when the process is gone."""
        task = {
            "prompt_token_ids": list(prompt_token_ids),
            "max_tokens": max_tokens,
            "assistance": None if assistance is None else asdict(assistance),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace").strip()[-400:]
            raise UnavailableError(f"transformers' process ended: {tail}")
        answer = json.loads(line)
        return Answer(tuple(answer["token_ids"]), answer["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def serve(target: Path, draft: Path, draft_weights: str, threads: int, answers: IO[str]) -> None:
    """Answer the tasks of stdin until it ends."""
    import torch
    from transformers import AutoModelForCausalLM

    from deploy.peers import greedy_config
    from workers.engine.linears import quantise_model

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    drafter: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    if draft_weights == "int8":
        quantise_model(drafter)
    for line in sys.stdin:
        task: Mapping[str, Any] = json.loads(line)
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
        token_ids = sequences_BT[0, prompt_BT.shape[1] :].tolist()
        answers.write(json.dumps({"token_ids": token_ids, "seconds": seconds}) + "\n")
        answers.flush()


if __name__ == "__main__":
    # Whatever transformers prints must not mix with the answers.
    answers_file = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), answers_file)
