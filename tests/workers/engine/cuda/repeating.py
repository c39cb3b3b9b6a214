"""A stand-in for CUDA graphs on a CPU: it records work as itself, on the same tensors.

So all logic but the GPU's runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from workers.engine.cuda import engine as engine_module
from workers.engine.cuda.step import DeviceInputs, Layout, Shape, read_inputs, split


class Repeating:
    """Records work as itself."""

    def __init__(self, fails: bool) -> None:
        self.num_replayed = 0
        self._fails = fails

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        work()

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


class Recorders:
    """The stand-ins that engines make, in order. `fail`: whether new ones can record nothing."""

    def __init__(self) -> None:
        self.made: list[Repeating] = []
        self.fail = False

    def make(self, device: torch.device) -> Repeating:
        self.made.append(Repeating(self.fail))
        return self.made[-1]

    @property
    def num_replayed(self) -> int:
        return sum(one.num_replayed for one in self.made)


def read_by_the_array(array: torch.Tensor, layout: Layout, *, table_pages: int) -> DeviceInputs:
    """As read_inputs, with the lengths of the step's array, which kernels read.

    The reference attention reads the host's, which are those of the step that was recorded.
    """
    parts = split(array, layout.shape, table_pages)

    def lengths(kind: str) -> tuple[tuple[int, int], ...]:
        ends, used = parts[f"{kind}_ends"].tolist(), parts[f"{kind}_used"].tolist()
        widths = [end - begin for begin, end in pairwise(ends)]
        return tuple(zip(widths, used, strict=True))

    now = replace(layout, chain_lengths=lengths("chain"), tree_lengths=lengths("tree"))
    return read_inputs(array, now, table_pages=table_pages)


def stand_in_for_graphs(monkeypatch: pytest.MonkeyPatch, shapes: Sequence[Shape]) -> Recorders:
    """Engines on a CPU "capture" these shapes from now on."""
    found = Recorders()
    monkeypatch.setattr(engine_module, "can_use_kernel", lambda *_: True)
    monkeypatch.setattr(engine_module, "recorder_for", found.make)
    monkeypatch.setattr(engine_module, "read_inputs", read_by_the_array)
    monkeypatch.setattr(engine_module, "shapes_to_capture", lambda **_: list(shapes))
    return found
