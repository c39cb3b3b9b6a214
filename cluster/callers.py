"""What callers are told: their tokens, their ends, in the order in which they came about."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from cluster.decoding.instructions import Emit, Finish, Refuse
from cluster.generation import Generation
from paceline.errors import PacelineError
from workers.server import unexpected


class Callers:
    """The requests that have not ended, and what waits to be told of them."""

    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}
        self._untold: deque[Emit | Finish | Refuse] = deque()

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._generations)

    def add(self, sequence_id: int, generation: Generation) -> None:
        """A new request; what becomes of it is told to `generation`."""
        self._generations[sequence_id] = generation

    def get(self, sequence_id: int) -> Generation | None:
        """The request, if it has not ended."""
        return self._generations.get(sequence_id)

    def drop(self, sequence_id: int) -> bool:
        """Tell nothing more of a request; whether there was one."""
        return self._generations.pop(sequence_id, None) is not None

    def fail_all(self, error: PacelineError) -> Mapping[int, Generation]:
        """End all requests with an error; returns them."""
        failed, self._generations = self._generations, {}
        for generation in failed.values():
            generation.fail(error)
        return failed

    def later(self, instruction: Emit | Finish | Refuse) -> None:
        """Tell this at the next `tell`."""
        self._untold.append(instruction)

    def tell(self) -> list[int]:
        """Tell all that waits. A sequence's last tokens and its end are told together.

        Where telling a request fails, that request ends with InternalError; returns these.
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
