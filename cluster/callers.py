"""What callers are told: their tokens, their ends, in the order in which they came about."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from cluster.decoding.instructions import Emit, Finish, Refuse
from cluster.generation import Generation
from paceline.errors import PacelineError


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

    def tell(self) -> None:
        """Tell all that waits. A sequence's last tokens and its end are told together."""
        waiting = self._untold
        while waiting:
            match waiting.popleft():
                case Emit() as emit:
                    follows = waiting[0] if waiting else None
                    finish = None
                    if isinstance(follows, Finish) and follows.sequence_id == emit.sequence_id:
                        finish = follows
                        waiting.popleft()
                    self._emit(emit, finish)
                case Finish() as finish:
                    generation = self._generations.pop(finish.sequence_id, None)
                    if generation is not None:
                        generation.finish(finish)
                case Refuse() as refuse:
                    generation = self._generations.pop(refuse.sequence_id, None)
                    if generation is not None:
                        generation.fail(refuse.error)

    def _emit(self, emit: Emit, finish: Finish | None) -> None:
        if finish is None:
            generation = self._generations.get(emit.sequence_id)
        else:
            generation = self._generations.pop(emit.sequence_id, None)
        if generation is not None:  # else its caller has gone
            generation.emit(emit, finish)
