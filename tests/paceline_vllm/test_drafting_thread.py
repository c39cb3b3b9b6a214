"""The thread of drafters, with real drafters over gRPC and a pretended vLLM that calls the hook."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from cluster.decoding.reported_target import ReportedOptions
from cluster.driver.drafter_links import TargetVocabulary
from paceline_vllm.drafting_thread import DraftingThread
from paceline_vllm.settings import read_settings
from tests.cluster.hostile import LyingDrafter, serve_lying_drafter
from tests.held_ports import held_port

ROWS, WIDTH, PERIOD = 8, 4096, 23


@contextmanager
def _drafter(port: int) -> Iterator[subprocess.Popen[str]]:
    """A drafter without a model, which copies what repeats."""
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.drafting.drafter", "--kind", "ngram", "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert str(port) in process.stdout.readline()
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdout.close()


class _PretendedVllm:
    """Decodes ROWS texts that repeat themselves, and calls the hook as vLLM does."""

    def __init__(self, thread: DraftingThread) -> None:
        self.thread = thread
        self.table = np.zeros((ROWS, WIDTH), dtype=np.int32)
        for row in range(ROWS):
            self.table[row] = [1 + (place * (row + 3)) % PERIOD for place in range(WIDTH)]
        self.lengths = [2 * PERIOD] * ROWS
        self.sampled = [1] * ROWS
        self.accepted, self.longest = 0, 0.0

    def step(self) -> None:
        begin = time.perf_counter()
        shown = self.table.copy()
        for row, length in enumerate(self.lengths):
            shown[row, length:] = 0  # The future is not in vLLM's table.
        windows = self.thread.propose(list(self.lengths), shown, list(self.sampled))
        self.longest = max(self.longest, time.perf_counter() - begin)
        for row, window in enumerate(windows):
            length = self.lengths[row]
            right = 0
            while right < len(window) and window[right] == self.table[row, length + right]:
                right += 1
            self.accepted += right
            self.sampled[row] = right + 1
            self.lengths[row] = 2 * PERIOD if length > WIDTH - 50 else length + right + 1
        time.sleep(0.005)

    def until(self, what: Callable[[], bool], seconds: float = 30.0) -> None:
        give_up = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < give_up
            self.step()

    def drafts_again(self) -> None:
        before = self.accepted
        self.until(lambda: self.accepted > before + 100)


@contextmanager
def _vllm(*ports: int) -> Iterator[_PretendedVllm]:
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    thread = DraftingThread(
        read_settings({"PACELINE_DRAFTERS": addresses}, 8),
        ReportedOptions(vocab_size=384, max_model_len=WIDTH),
        TargetVocabulary("pretended", b"digest"),
        max_num_seqs=ROWS,
        shares_host=True,
    )
    thread.start()
    try:
        yield _PretendedVllm(thread)
    finally:
        thread.stop()
        assert thread.counts.failed == 0


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


def test_candidates_come_and_nothing_is_left_once_vllm_rests(port: int) -> None:
    with _drafter(port), _vllm(port) as vllm:
        vllm.drafts_again()
        stats = vllm.thread.stats()
        assert stats.accepted > 0
        assert stats.sequences_running == ROWS
        assert stats.workers[0].connected
        give_up = time.monotonic() + 20
        while vllm.thread.stats().sequences_running:
            assert time.monotonic() < give_up, "sequences are left at the drafter"
            time.sleep(0.1)
        vllm.drafts_again()  # They are opened anew.


def test_without_drafters_it_decodes_plainly(port: int) -> None:
    with _vllm(port) as vllm:
        for _ in range(50):
            vllm.step()
        assert vllm.accepted == 0
        with _drafter(port):
            vllm.drafts_again()


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.timing
def test_a_drafter_that_is_lost_stops_nobody_and_is_used_again(
    port: int, way: signal.Signals
) -> None:
    with _vllm(port) as vllm:
        with _drafter(port) as drafter:
            vllm.drafts_again()
            vllm.longest = 0.0
            os.kill(drafter.pid, way)
            for _ in range(200):
                vllm.step()
            assert vllm.longest < 0.5
        with _drafter(port):
            vllm.drafts_again()


def test_a_drafter_that_sends_garbage_ends_nothing(port: int) -> None:
    with _lying(port), _vllm(port) as vllm:
        for _ in range(100):
            vllm.step()


@contextmanager
def _lying(port: int) -> Iterator[None]:
    """A drafter that breaks the contract, on a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    ready, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        server = await serve_lying_drafter(LyingDrafter(), port=port)
        ready.set()
        await ended.wait()
        await server.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()
