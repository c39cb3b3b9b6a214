"""Servers for the tests: vLLM as users start it, and our drafters beside it.

vLLM runs in its own environment, `.venv-vllm`, as these tests do. Drafters run in `.venv`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
START_SECONDS = 300.0
"""How long vLLM may take to serve: most of it imports packages."""

HOOK = {"method": "custom_class", "model": "paceline_vllm.RemoteDrafters"}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@dataclass
class Process:
    """A process and what it writes."""

    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=out, env={**os.environ, **environ},
                start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def memory(self) -> int:
        """Bytes that it and all that it started hold for themselves."""
        own = psutil.Process(self.process.pid)
        return sum(one.memory_full_info().uss for one in [own, *own.children(recursive=True)])

    def stop(self) -> None:
        """End the process and all that it started."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class OwnProcess(Process):
    """A program of ours, `python -m MODULE ...`, that prints its address once it serves."""

    def __init__(self, log: Path, *command: str) -> None:
        super().__init__(log)
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.start([str(PYTHON), "-m", *command], {"PYTHONPATH": path})

    def wait(self) -> int:
        """Until it serves. Returns its port."""
        give_up = time.monotonic() + START_SECONDS
        while (found := re.search(r"127\.0\.0\.1:(\d+)", self.said)) is None:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < give_up, self.said
            time.sleep(0.05)
        return int(found[1])


class DrafterProcess(OwnProcess):
    """A drafter of ours at a port."""

    def __init__(self, folder: Path, log: Path, port: int) -> None:
        command = ("drafter", str(folder), "--weights", "float32", "--port", str(port))
        super().__init__(log, "deploy.cli", *command)


class VllmServer(Process):
    """`vllm serve` of a folder. `drafters`: ports of ours; None: without speculation."""

    def __init__(
        self,
        folder: Path,
        log: Path,
        *arguments: str,
        drafters: Sequence[int] | None = None,
        environ: Mapping[str, str] | None = None,
        window: int = 4,
    ) -> None:
        super().__init__(log)
        self.port, self.metrics_port = free_port(), free_port()
        self.name = str(folder)
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **(environ or {})}
        more = list(arguments)
        if drafters is not None:
            own["PACELINE_DRAFTERS"] = ",".join(f"127.0.0.1:{port}" for port in drafters)
            own["PACELINE_METRICS_PORT"] = str(self.metrics_port)
            hook = {**HOOK, "num_speculative_tokens": window}
            more += ["--speculative-config", json.dumps(hook)]
        command = [
            # What `vllm serve` runs; that command itself looks for a distribution named "vllm".
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", *more),
        ]
        self.start(command, own)

    def wait(self) -> VllmServer:
        """Until it serves."""
        give_up = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.said[-4000:]
            assert time.monotonic() < give_up, self.said[-4000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.3)

    def ask(self, prompt: Sequence[int], **options: Any) -> list[list[int]]:
        """The token ids of each choice."""
        body = {
            "model": self.name,
            "prompt": list(prompt),
            "return_token_ids": True,
            "temperature": 0.0,
            **options,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                choices = json.load(answer)["choices"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        return [choice["token_ids"] for choice in sorted(choices, key=lambda one: one["index"])]

    def ask_all(
        self, prompts: Sequence[Sequence[int]], *, at_once: int, **options: Any
    ) -> list[list[int]]:
        """The token ids of the only choice of each prompt. `max_tokens` may be a list."""
        lengths = options.pop("max_tokens", 24)
        each = lengths if isinstance(lengths, list) else [lengths] * len(prompts)
        with ThreadPoolExecutor(at_once) as threads:
            waiting = [
                threads.submit(self.ask, prompt, max_tokens=length, **options)
                for prompt, length in zip(prompts, each, strict=True)
            ]
            return [one.result()[0] for one in waiting]

    def top_two(self, prompt: Sequence[int]) -> float:
        """The margin between the two likeliest next tokens, in log probability."""
        body = {"model": self.name, "prompt": list(prompt), "max_tokens": 1, "logprobs": 2}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({**body, "temperature": 0.0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            top = json.load(answer)["choices"][0]["logprobs"]["top_logprobs"][0]
        high, low = sorted(top.values(), reverse=True)[:2]
        return float(high - low)

    def metric(self, name: str, *, own: bool = False) -> float:
        """The sum of a metric's values: of vLLM, or our `own`."""
        port = self.metrics_port if own else self.port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(map(float, found))


def differences(
    plain: VllmServer,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[str]:
    """Where answers differ from plain decoding's though the two tokens were no tie.

    Float32 kernels give other sums for other shapes, so tokens whose log probabilities are within
    1e-4 may change places, as in `paceline verify`.
    """
    found = []
    for number, (prompt, own, other) in enumerate(zip(prompts, expected, answers, strict=True)):
        if own == other:
            continue
        place = next(
            (
                index
                for index, pair in enumerate(zip(own, other, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(own), len(other)),
        )
        margin = plain.top_two([*prompt, *own[:place]])
        if margin > 1e-4:
            found.append(f"prompt {number} at token {place}: {own} {other}, margin {margin:g}")
    return found
