"""Decides whether an exception in a step is the fault of one slice, of the step, or of the device.

An error of one slice only (its parameters, the choice of its tokens, its verification) gives that
slice a `SliceFault` in place of a verdict. Any other exception fails the step: the stream ends, and
its sequences are computed again. A process that cannot compute any more ends, and a new one is
started. So no request gets the blame for an earlier failure of the device.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from paceline.errors import InternalError, PacelineError
from workers.target.step_sequences import VerdictTask

MOST_FAILED_STEPS = 3
"""Number of failed steps in a row, on any streams, after which the process ends. It takes fewer to
find and refuse a request that no device can compute.
"""

MAX_REASON_CHARACTERS = 1000
"""Maximum length of Verdict.error, and of the reason with which a stream ends."""

_OF_THE_DEVICE = re.compile(
    r"\bCUDA\b|\bcuBLAS\b|CUBLAS_STATUS|CUDNN_STATUS|Triton Error|NCCL error"
)
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SliceFault:
    """Why a slice has no verdict, in words for the request's caller."""

    reason: str


ByT = TypeVar("ByT")
VerdictT = TypeVar("VerdictT")
Part = tuple[VerdictTask, ByT]
"""A slice to judge, and the data for that, such as the span of its logits."""


def judge_each(
    judge: Callable[[Sequence[Part[ByT]]], Sequence[VerdictT]], parts: Sequence[Part[ByT]]
) -> list[VerdictT | SliceFault]:
    """A verdict for each part. `judge` judges several parts at once.

    If it raises, the parts are halved and judged again, until the slices at fault are found. Raises
    an error that is the fault of the device, or of its memory.
    """
    if not parts:
        return []
    try:
        return list(judge(parts))
    except Exception as error:
        if is_out_of_memory(error) or is_of_the_device(error):
            raise
        if len(parts) == 1:
            return [SliceFault(_reason_of(error, parts[0][0].sequence_id))]
    middle = len(parts) // 2
    return judge_each(judge, parts[:middle]) + judge_each(judge, parts[middle:])


def _reason_of(error: Exception, sequence_id: int) -> str:
    """The reason for the caller. Unexpected errors are logged: their text may hold others' data."""
    if isinstance(error, PacelineError):
        _log.warning("sequence %d has no verdict: %s", sequence_id, error)
        return str(error)[:MAX_REASON_CHARACTERS]
    _log.error("a defect left sequence %d without a verdict", sequence_id, exc_info=error)
    return f"an unexpected {type(error).__name__} while its next token was chosen"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device ran out of memory, which is not the fault of a single slice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def is_of_the_device(error: BaseException) -> bool:
    """Whether this error, or its cause, says that a device failed."""
    if error.__cause__ is not None and is_of_the_device(error.__cause__):
        return True
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_THE_DEVICE.search(str(error)))


def _device_is_lost() -> bool:
    """Whether CUDA answers every call with an error from now on. Does not wait."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.current_stream().query()
    except RuntimeError:
        return True
    return False


class StepFailures:
    """Counts the failed steps of a process, on all its streams."""

    def __init__(self, give_up: Callable[[str], None], check: Callable[[], None]) -> None:
        """`give_up` is called with the reason why the process must end.

        `check` is called after each failure, and raises if the device cannot compute at all.
        """
        self._give_up = give_up
        self._check = check
        self._in_a_row = 0

    def step_answered(self) -> None:
        """Note that a forward pass succeeded."""
        self._in_a_row = 0

    def step_failed(self, number: int, error: Exception) -> InternalError | None:
        """Count the failure of step `number`. Returns the error to send to the driver.

        None: the failure is not ours. An error of the driver or of another rank is a PacelineError,
        and the caller sends it unchanged.
        """
        lost = is_of_the_device(error) or _device_is_lost()
        if isinstance(error, PacelineError) and not lost:
            return None
        self._in_a_row += 1
        reason = f"step {number} failed: {_told(error)}"
        _log.error("%s (failure %d in a row)", reason, self._in_a_row, exc_info=error)
        if lost or not self._computes():
            self._give_up(f"the device does not work any more: {reason}")
        elif self._in_a_row >= MOST_FAILED_STEPS:
            self._give_up(f"{self._in_a_row} steps in a row failed, the last one so: {reason}")
        return InternalError(reason)

    def _computes(self) -> bool:
        try:
            self._check()
        except Exception as error:
            _log.error("a pass over two tokens fails as well: %s", _told(error))
            return False
        return True


def _told(error: Exception) -> str:
    first_line = (str(error).strip() or "no more is known").splitlines()[0]
    return f"{type(error).__name__}: {first_line}"[:MAX_REASON_CHARACTERS]
