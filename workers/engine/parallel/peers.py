"""Memory of each rank that all ranks can read and write, for kernels in which they meet.

GPUs of one host reach each other's memory over NVLink or PCIe. A rank exports its buffer as a CUDA
IPC handle, and the others map it. torch's symmetric memory does the same, but refuses ranks whose
processes each see one GPU only, as Ray starts them: all these GPUs have the number 0.

At each meeting ranks map the buffers of all members anew, since a member may be a new process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import torch
from torch._C._distributed_c10d import Store

from workers.engine.parallel.cuts import Place
from workers.engine.parallel.peer_kernels import NUM_SLOTS, Table, num_bytes_of

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""A text that distinguishes hosts."""


class PeerMemory:
    """This rank's buffer, and after `connect` those of all ranks. Not thread-safe."""

    def __init__(self, place: Place, device: torch.device, *, row_bytes: int) -> None:
        """Allocate the buffer. `row_bytes`: the size of the largest row that kernels exchange."""
        part_bytes = -(-row_bytes // 16) * 16
        self._own = torch.zeros(
            num_bytes_of(place.degree, part_bytes), dtype=torch.uint8, device=device
        )
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._mapped: list[torch.UntypedStorage] = []
        # Captured graphs refer to the tensors of the table, so these are never replaced.
        self.table = Table(
            torch.zeros(place.degree + 1, dtype=torch.int64, device=device),
            torch.zeros(NUM_SLOTS + 1, dtype=torch.int64, device=device),
            rank=place.rank,
            degree=place.degree,
            part_bytes=part_bytes,
        )

    def clear(self) -> None:
        """Prepare for a meeting: lower all flags. No kernel of any rank may use the buffers."""
        self._stop.zero_()
        self._own.zero_()
        self.table.epochs.zero_()

    def connect(self, store: Store) -> None:
        """Map the buffers of all ranks. Waits for their handles, which come through the store.

        Raises RuntimeError if a rank's buffer cannot be reached from here.
        """
        rank, host = self.table.rank, _BOOT.read_text().strip()
        others = [other for other in range(self.table.degree) if other != rank]
        for other in others:  # torch counts the users of each handle
            handle = msgpack.packb((host, export(self._own.untyped_storage())))
            store.set(f"buffer of {rank} for {other}", handle)
        addresses = [0] * self.table.degree + [self._stop.data_ptr()]
        addresses[rank] = self._own.data_ptr()
        for other in others:
            its_host, handle = msgpack.unpackb(store.get(f"buffer of {other} for {rank}"))
            if its_host != host:
                raise RuntimeError(f"rank {other} is on another host")
            self._mapped.append(attach(handle, self._own.device))
            addresses[other] = self._mapped[-1].data_ptr()
        self.table.addresses.copy_(torch.tensor(addresses))

    def disconnect(self) -> None:
        """Unmap the other ranks' buffers. No kernel of this rank may use them."""
        self._mapped = []

    def release(self) -> None:
        """End all waits of kernels for other ranks, until `clear`. Callable in any thread."""
        self._stop.fill_(1)


def export(storage: torch.UntypedStorage) -> list[Any]:
    """A description of GPU memory with which other processes of this host can map it."""
    # Without the number of the device, which may differ in the other process.
    return list(storage._share_cuda_())[1:]


def attach(handle: list[Any], device: torch.device) -> torch.UntypedStorage:
    """The memory that another process has exported. Raises RuntimeError if it cannot be reached."""
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device.index, *handle)
    return storage
