"""A process that compiles structures first: one that is too much for it ends this process alone.

A grammar library may overflow its stack or take gigabytes before its own limits see it. The process
has limits of memory, processor time and stack, which are tighter than those of the driver and the
workers, who compile a structure only after it has passed here.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import InvalidRequestError
from paceline.structure import Structure, StructureKind
from workers.verification.grammars import Grammars

MEMORY_BYTES = 2 * 1024**3
"""Most address space of the process, some 0.6 GiB of it for libraries and tokenizer."""

CPU_SECONDS = 2
"""Most processor time for a structure; the kernel counts whole seconds."""

_STACK_BYTES = 4 * 1024**2
"""Half of what a thread of the driver and of workers has."""

_ANSWER_SECONDS = 60.0
"""Longest time to begin, or to check a structure, on a busy host."""

_MAX_ANSWER = 4096


class StructureChecker:
    """Checks structures for one tokenizer. Thread-safe: one is checked at a time.

    The process begins with the first structure, and again after one that ended it. It ends with
    this process.
    """

    def __init__(self, folder: Path, *, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._arguments = json.dumps([str(folder), vocab_size, list(end_token_ids)])
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, structure: Structure) -> None:
        """Raises InvalidRequestError if the structure cannot be used."""
        asked = json.dumps([structure.kind.value, structure.text, structure.choices])
        with self._lock:
            try:
                answer = self._asked(asked)
            except OSError:
                answer = None
            if answer is None:
                self._end()
        if answer is None:
            raise InvalidRequestError(
                "structure",
                f"the {structure.kind.value} takes too much time or memory to compile; make it "
                "simpler",
            )
        if answer:
            raise InvalidRequestError("structure", answer)

    def close(self) -> None:
        """End the process. Closing twice is no error."""
        with self._lock:
            self._end()

    def _asked(self, asked: str) -> str | None:
        """What is wrong with a structure, "" for nothing; None: the process ended, or is late."""
        process = self._process
        if process is None:
            process = self._process = subprocess.Popen(
                (sys.executable, "-m", __name__, self._arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[2],
            )
        assert process.stdin is not None
        process.stdin.write(asked.encode() + b"\n")
        process.stdin.flush()
        return self._answer(process)

    def _answer(self, process: subprocess.Popen[bytes]) -> str | None:
        assert process.stdout is not None
        until = time.monotonic() + _ANSWER_SECONDS
        read = b""
        while not read.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], (), (), max(0, until - time.monotonic()))
            part = os.read(process.stdout.fileno(), _MAX_ANSWER) if ready else b""
            if not part:
                return None
            read += part
        answer: str = json.loads(read)
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _serve(grammars: Grammars) -> None:
    for line in sys.stdin:
        kind, text, choices = json.loads(line)
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + CPU_SECONDS, most))
        try:
            grammars.check(Structure(StructureKind(kind), text, tuple(choices)))
            answer = ""
        except InvalidRequestError as error:
            answer = str(error.args[1])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _main() -> None:
    folder, vocab_size, end_token_ids = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    grammars = Grammars(Path(folder), vocab_size=vocab_size, end_token_ids=end_token_ids)
    serving = threading.Thread(target=_serve, args=(grammars,))
    serving.start()
    serving.join()


if __name__ == "__main__":
    _main()
