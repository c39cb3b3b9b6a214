"""Drafters that are lost, frozen, replaced, lie, or cannot be reached, with 8 streams in vLLM.

vLLM is real. Its model is the emulated one, whose passes sleep: a model that computes here leaves
a drafter on the same two cores no time, so that it would be lost without any fault.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from tests.tiny import make_tiny_checkpoint
from tests.vllm.conftest import random_prompts
from tests.vllm.servers import OwnProcess, Process, VllmServer, free_port

STREAMS, TOKENS = 8, 100
LONGEST_PAUSE = 0.5
"""Seconds between two pieces of a text while drafters fail."""


class _Streams:
    """Texts that are asked for again and again, STREAMS at a time.

    `texts`: each text that came, by prompt. `pieces`: when pieces came, a list a stream.
    """

    def __init__(self, server: VllmServer, prompts: Sequence[Sequence[int]]) -> None:
        self._server = server
        self._ended = threading.Event()
        self.texts: list[list[list[int]]] = [[] for _ in prompts]
        self.pieces: list[list[float]] = [[] for _ in prompts]
        self.failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number, prompt))
            for number, prompt in enumerate(prompts)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int, prompt: Sequence[int]) -> None:
        try:
            while not self._ended.is_set():
                self.texts[number].append(self._ask(number, prompt))
        except BaseException as error:
            self.failures.append(error)

    def _ask(self, number: int, prompt: Sequence[int]) -> list[int]:
        body = {
            "model": self._server.name, "prompt": list(prompt), "max_tokens": TOKENS,
            "temperature": 0.0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._server.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        # Read as it comes and parsed at the end: the test must leave the processor to vLLM.
        told: list[bytes] = []
        with urllib.request.urlopen(request, timeout=60) as answer:
            while came := answer.read1():
                told.append(came)
                self.pieces[number].append(time.monotonic())
        found: list[int] = []
        for line in b"".join(told).splitlines():
            if line.startswith(b"data: {"):
                found += json.loads(line[6:])["choices"][0]["token_ids"] or ()
        return found

    def longest_pause(self, begin: float, end: float) -> float:
        """The longest time without a piece in any stream, between two moments."""
        longest = 0.0
        for times in self.pieces:
            within = [begin, *(one for one in times if begin <= one <= end), end]
            pauses = (later - one for one, later in pairwise(within))
            longest = max(longest, *pauses)
        return longest


@contextmanager
def _streams(server: VllmServer, prompts: Sequence[Sequence[int]]) -> Iterator[_Streams]:
    streams = _Streams(server, prompts)
    streams.start()
    try:
        yield streams
    finally:
        streams.end()


def _accepted(server: VllmServer) -> float:
    return server.metric("vllm:spec_decode_num_accepted_tokens_total")


def _wait_for_drafts(server: VllmServer) -> None:
    """Until candidates are accepted."""
    before, give_up = _accepted(server), time.monotonic() + 60
    while _accepted(server) < before + 50:
        assert time.monotonic() < give_up, server.said[-2000:]
        time.sleep(0.2)


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """What is added here is ended after the test."""
    started: list[Process] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.kill(process.process.pid, signal.SIGCONT)
        process.stop()


def test_faults_change_no_text_and_stop_nobody(tmp_path: Path, processes: list[Process]) -> None:
    """Frozen, cut off, killed, of another vocabulary, lying; after each the drafter is used again.

    Pauses are looked at from the fault until two seconds later.
    """
    folder = make_tiny_checkpoint(tmp_path / "model", num_attention_heads=1, num_key_value_heads=1)
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    port = free_port()

    def start(name: str, module: str, *arguments: str) -> OwnProcess:
        process = OwnProcess(tmp_path / f"{len(processes)}-{name}.log", module, *arguments)
        processes.append(process)
        return process

    def drafter(of: Path = folder) -> OwnProcess:
        guess = (str(of), "0.85/0.85/1", "--profile", "1b-h100", "--port", str(port))
        return start("drafter", "workers.emulated.drafter", *guess)

    link = start("link", "workers.emulated.relay", f"127.0.0.1:{port}")
    overrides = {"architectures": ["PacelineEmulated"], "hidden_size": 64, "head_dim": 64}
    server = VllmServer(
        folder,
        tmp_path / "vllm.log",
        *("--hf-overrides", json.dumps(overrides), "--load-format", "dummy"),
        *("--max-model-len", "512", "--max-num-seqs", str(STREAMS)),
        drafters=[link.wait()],
        environ={"PACELINE_EMULATED_TARGET": "70b-4xh100"},
        window=8,
    )
    processes.append(server)
    server.wait()
    prompts = random_prompts(STREAMS, seed=6, longest=60)
    expected = server.ask_all(prompts, at_once=STREAMS, max_tokens=TOKENS, ignore_eos=True)
    assert _accepted(server) == 0, "the expected text is that without drafters"
    pauses: dict[str, float] = {}

    with _streams(server, prompts) as streams:

        def look(fault: str) -> None:
            began = time.monotonic()
            time.sleep(2)
            pauses[fault] = streams.longest_pause(began, time.monotonic())

        def stopped(process: OwnProcess, fault: str) -> None:
            os.kill(process.process.pid, signal.SIGSTOP)
            look(fault)
            time.sleep(2)
            os.kill(process.process.pid, signal.SIGCONT)
            _wait_for_drafts(server)

        first = drafter()
        first.wait()
        _wait_for_drafts(server)
        stopped(first, "frozen")
        stopped(link, "cut off")
        os.kill(first.process.pid, signal.SIGKILL)
        look("killed")
        stranger = drafter(other)
        stranger.wait()
        look("other vocabulary")
        assert "does not have the vocabulary" in server.said
        stranger.stop()
        second = drafter()
        second.wait()
        _wait_for_drafts(server)
        second.stop()
        liar = start("liar", "tests.cluster.hostile", str(port))
        liar.wait()
        time.sleep(2)
        look("lying")
        liar.stop()
        drafter().wait()
        _wait_for_drafts(server)

    assert not streams.failures
    for texts, wanted in zip(streams.texts, expected, strict=True):
        assert len(texts) > 3
        assert all(text == wanted for text in texts)
    assert server.metric("paceline:vllm_hook_failed_total", own=True) == 0
    assert max(pauses.values()) < LONGEST_PAUSE, pauses
