"""Delivers tokens and ends to the callers of requests, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from cluster.decoding.instructions import Emit, Finish, Refuse
from cluster.driver.generation import Generation
from paceline.errors import PacelineError
from workers.process.server import unexpected


class Callers:
    """The open requests, and instructions that were not delivered yet."""

    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}
        self._untold: deque[Emit | Finish | Refuse] = deque()

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._generations)

    def add(self, sequence_id: int, generation: Generation) -> None:
        """Add a request. Everything about it is delivered to `generation`."""
        self._generations[sequence_id] = generation

    def get(self, sequence_id: int) -> Generation | None:
        """The request's generation; None: it has ended."""
        return self._generations.get(sequence_id)

    def drop(self, sequence_id: int) -> bool:
        """Deliver nothing more for a request. Whether there was one."""
        return self._generations.pop(sequence_id, None) is not None

    def fail_all(self, error: PacelineError) -> Mapping[int, Generation]:
        """End all requests with an error. Returns them."""
        failed, self._generations = self._generations, {}
        for generation in failed.values():
            generation.fail(error)
        return failed

    def later(self, instruction: Emit | Finish | Refuse) -> None:
        """Deliver this instruction at the next `tell`."""
        self._untold.append(instruction)

    def tell(self) -> list[int]:
        """Deliver everything that waits. A sequence's last tokens and its end go together.

        If delivery fails, that request ends with InternalError. Returns the ids of these requests.
        """
        waiting, failed = self._untold, []
        while waiting:
            instruction, finish = waiting.popleft(), None
            if isinstance(instruction, Emit) and waiting:
                follows = waiting[0]
                if isinstance(follows, Finish) and follows.sequence_id == instruction.sequence_id:
                    finish = follows
                    waiting.popleft()
            generation = self._generations.get(instruction.sequence_id)
            if generation is None:
                continue  # Its caller has gone.
            if finish is not None or not isinstance(instruction, Emit):
                del self._generations[instruction.sequence_id]
            try:
                _tell(generation, instruction, finish)
            except Exception:
                generation.fail(unexpected(generation.request_id))
                if self.drop(instruction.sequence_id):
                    failed.append(instruction.sequence_id)
        return failed


def _tell(
    generation: Generation, instruction: Emit | Finish | Refuse, finish: Finish | None
) -> None:
    match instruction:
        case Emit():
            generation.emit(instruction, finish)
        case Finish():
            generation.finish(instruction)
        case Refuse():
            generation.fail(instruction.error)
