"""Shared by the checks: cases that print a line each, torch's operations, times in CUDA graphs."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from workers.process.kernels import use_kernels

WRONG = "WRONG"
CALLS = 20
"""Number of calls in one graph: enough that the time between two replays hardly counts."""
_measures = True
_WARM_UPS = 3
_REPLAYS = 15
_SHOWN = ("_add_and_norm", "_rotate_and_store", "_gate", "layer_norm", "index_copy", "silu")
"""Parts of the names of kernels whose times are shown: our kernels, and those that they replace."""


@dataclass(frozen=True, slots=True)
class Case:
    """`check` returns the text to print after `name`. The text has WRONG if a promise is broken."""

    name: str
    check: Callable[[], str]


def run(cases: Iterable[Case], device: torch.device) -> int:
    """Run all cases and print a line for each. Returns 1 if one is wrong or failed, else 0."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "dry run on a CPU"
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    status = 0
    for case in cases:
        began = time.perf_counter()
        try:
            found = case.check()
        except Exception as error:
            found = f"FAILED {type(error).__name__}: {str(error)[:300]}"
            traceback.print_exc(limit=-3)
        status |= WRONG in found or found.startswith("FAILED")
        print(f"{case.name}: {found} [{time.perf_counter() - began:.1f} s]", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return int(status)


def measure_no_times() -> None:
    """Let `times` call each way once, and measure nothing."""
    global _measures
    _measures = False


def measures_times() -> bool:
    """Whether times are measured, in captured graphs."""
    return _measures


@contextmanager
def by_torch() -> Iterator[None]:
    """In this context torch's operations take the place of our kernels."""
    use_kernels(False)
    try:
        yield
    finally:
        use_kernels(True)


def verdict(right: bool, word: str) -> str:
    """`word` if `right`, else WRONG and "not `word`"."""
    return word if right else f"{WRONG}: not {word}"


def difference(found: Tensor, expected: Tensor) -> str:
    """A text about the difference of two tensors."""
    if torch.equal(found, expected):
        return "equal"
    largest = float((found.double() - expected.double()).abs().max())
    share = float((found != expected).double().mean())
    return (
        f"{share:.1e} of them differ, by at most "
        f"{largest / float(expected.double().abs().max()):.1e} of the largest"
    )


def times(**ways: Callable[[int], object]) -> str:
    """A text with the microseconds of a call of each way. A way gets the number of the call.

    Where no times are measured, each way is called once.
    """
    if not _measures:
        for way in ways.values():
            way(0)
        return "not timed"
    return ", ".join(f"{name} {_captured_us(way):.1f} us" for name, way in ways.items())


def _captured_us(way: Callable[[int], object]) -> float:
    """Microseconds of a call: the median over the replays of a graph with several calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for number in range(_WARM_UPS):
            way(number)
        with torch.cuda.graph(graph, stream=stream):
            for number in range(CALLS):
                way(number)
    torch.cuda.synchronize()
    microseconds = []
    for _ in range(_REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        microseconds.append(first.elapsed_time(last) * 1000 / CALLS)
    return statistics.median(microseconds)


def profiled(run: Callable[[], Tensor]) -> tuple[Tensor, str]:
    """The result of a captured call, and a text: the number of its kernels, some of their times."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in watched.events() if event.device_type == DeviceType.CUDA]
    shown = [f"{len(events)} launched"]
    for name in _SHOWN:
        took = [event.device_time for event in events if name in event.name]
        if took:
            shown.append(f"{name} {len(took)} times {statistics.median(took):.2f} us")
    return result, ", ".join(shown)
