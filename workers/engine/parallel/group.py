"""The group of a target's ranks: a meeting connects them, and they compare, add and gather tensors.

A group meets under a name that is used once; a shard uses the name of the driver's session, so that
earlier failures have no effect. Every collective has a deadline. A collective that fails breaks the
group, which must then meet again. Sums are made in the order of the ranks and rounded once, so that
a row's bits do not depend on its place in a step. In the sums of gloo and NCCL the order depends on
an element's place.

CPU tensors use gloo, CUDA tensors NCCL. A collective of NCCL is only queued on the device. Before
the host reads a result it must call `settle`, which enforces the deadline. Where the host itself is
stuck in a call of a device that waits for a lost rank, NCCL's watchdog ends the process. Numbers of
the host are compared over gloo.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import (
    GatherOptions,
    PrefixStore,
    Store,
    TCPStore,
)

from paceline.errors import ConfigError, InternalError, ProtocolError, WorkerLostError
from workers.engine.parallel.weight_cuts import Place

_NO_NAME = "-"
_POLL_SECONDS = 20e-6
_WATCHDOG_PATIENCE = 3.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Maximum seconds for which ranks wait for each other: in a meeting, and in a collective."""

    meeting: float = 60.0
    collective: float = 30.0


class RankGroup:
    """One rank's view of the group. Not thread-safe."""

    def __init__(
        self,
        place: Place,
        *,
        host: str,
        interface: str | None = None,
        device: str = "cpu",
        device_name: str | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """`host`: the address of this machine at which the other ranks reach it.

        `interface`: the network interface that gloo's collectives use; None: that of `host`. NCCL
        reads the environment instead (NCCL_SOCKET_IFNAME). `device`: where the tensors are, by
        torch's name. `device_name` distinguishes this device from all others on all hosts; None: a
        GPU's own name, and none for a CPU. Rank 0 listens at `host` from now on. Raises
        WorkerLostError if it cannot, ConfigError for a device without collectives or an interface
        that this host does not have.
        """
        if interface is not None and interface not in (names := _interfaces()):
            raise ConfigError(
                f"this host ({host}) has no network interface {interface!r}; it has "
                f"{', '.join(names)}"
            )
        self.place = place
        self.device = device
        self._device_name = device_name or _name_of(device)
        self.rendezvous: str | None = None
        """The address "host:port" at which the ranks meet; only rank 0 knows it."""
        self._host = host
        self._interface = interface
        self._deadlines = deadlines or Deadlines()
        self._store: TCPStore | None = None
        self._members: Any = None
        self._on_host: Any = None
        self.is_alone = False
        if place.rank == 0:
            self._store = self._listen()

    @property
    def queues(self) -> bool:
        """Whether collectives are only queued on the device."""
        return self.device != "cpu"

    def meet(self, name: str, rendezvous: str) -> None:
        """Wait for the other ranks. All must use the same `name`, which no earlier meeting used.

        `rendezvous`: rank 0's address. Raises WorkerLostError if they do not all come in time,
        ProtocolError for an invalid address, ConfigError if ranks share a device.
        """
        self.leave()
        try:
            store = PrefixStore(name, self._store or self._reach(rendezvous))
            store.set(str(self.place.rank), self._device_name or _NO_NAME)
            others = [str(rank) for rank in range(self.place.degree)]
            store.wait(others, timedelta(seconds=self._deadlines.meeting))
            self._check_devices([store.get(rank).decode() for rank in others])
            if self.queues:
                self._on_host = self._make_gloo(PrefixStore("host", store))
                self._members = self._make_nccl(store)
            else:
                self._members = self._on_host = self._make_gloo(store)
            self.settle(self.all_gather(torch.zeros(1, device=self.device)))
        except RuntimeError as error:
            self.leave()
            raise WorkerLostError(
                f"rank {self.place.rank} did not meet the other shards, {self.place.degree} in "
                f"all, at {rendezvous} within {self._deadlines.meeting:g} s: {_first_line(error)}"
            ) from error

    def leave(self) -> None:
        """Break the connections to the other ranks. A rank that waits for this one then fails."""
        members, self._members = self._members, None
        self._on_host = None
        if members is not None:
            members.abort()

    def close(self) -> None:
        """Leave, and stop listening."""
        self.leave()
        self._store = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this context a sum is this rank's own part, so that a rank can compute alone."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, which have one shape, in their dtype."""
        if self.is_alone or part.numel() == 0:
            return part
        first, *others = self.all_gather(part)
        total: Tensor = first.to(torch.float32, copy=True)
        for other in others:
            total += other
        return total.to(part.dtype)

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' tensors, which have one shape and dtype, [degree, ...] by rank."""
        part = part.contiguous()
        gathered = part.new_empty((self.place.degree, *part.shape))
        if self.queues:
            self._run(lambda members: members._allgather_base(gathered, part))
        else:
            self._run(lambda members: members.allgather([list(gathered)], [part]))
        return gathered

    def gather(self, part: Tensor) -> list[Tensor] | None:
        """As all_gather at rank 0; None at the others."""
        part = part.contiguous()
        options = GatherOptions()
        options.rootRank = 0
        if self.place.rank:
            self._run(lambda members: members.gather([], [part], options))
            return None
        parts = list(part.new_empty((self.place.degree, *part.shape)))
        self._run(lambda members: members.gather([parts], [part], options))
        return parts

    def compare(self, step: int, content: int) -> None:
        """Raise WorkerLostError, on all ranks, unless all have the same step and 64-bit hash."""
        rows = self.exchange([step, content])
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise WorkerLostError(
                    "the shards are out of step: (step number, hash of its content) is "
                    f"{rows[0]} at rank 0, but {row} at rank {rank}"
                )

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """All ranks' lists of numbers, of one length, in the order of the ranks."""
        mine = torch.tensor(list(values), dtype=torch.int64)
        rows = mine.new_empty((self.place.degree, mine.numel()))
        with self._failing():
            self._connected(self._on_host).allgather([list(rows)], [mine]).wait()
        numbers: list[list[int]] = rows.tolist()
        return numbers

    def settle(self, result: Tensor) -> Tensor:
        """Wait until the device has finished all its work, including `result`; return `result`.

        Raises WorkerLostError and breaks the group if this takes longer than the deadline of a
        collective: a device would wait forever for ranks that are gone. On a CPU, results are never
        pending.
        """
        if result.device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(result.device))
            give_up = time.monotonic() + self._deadlines.collective
            while not done.query():
                if time.monotonic() > give_up:
                    self.leave()
                    raise WorkerLostError(
                        f"rank {self.place.rank} waited for the other shards for longer than "
                        f"{self._deadlines.collective:g} s"
                    )
                time.sleep(_POLL_SECONDS)
        return result

    def _make_nccl(self, store: Store) -> Any:
        """A process group outside torch's registry, since a process may have several groups."""
        kinds: Any = torch.distributed
        options = kinds.ProcessGroupNCCL.Options()
        # NCCL's own watchdog ends the whole process, so `settle` must notice first.
        options._timeout = timedelta(seconds=_WATCHDOG_PATIENCE * self._deadlines.collective)
        return kinds.ProcessGroupNCCL(store, self.place.rank, self.place.degree, options)

    def _make_gloo(self, store: Store) -> Any:
        """As _make_nccl, for tensors of the host."""
        kinds: Any = torch.distributed
        way = (
            {"hostname": self._host} if self._interface is None else {"interface": self._interface}
        )
        options = kinds.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=self._deadlines.collective)
        options._devices = [kinds.ProcessGroupGloo.create_device(**way)]
        return kinds.ProcessGroupGloo(store, self.place.rank, self.place.degree, options)

    def _check_devices(self, names: Sequence[str]) -> None:
        """Raise ConfigError if two ranks share a device: they would wait for each other."""
        named = [name for name in names if name != _NO_NAME]
        if len(set(named)) < len(named):
            of_each = ", ".join(f"rank {rank} has {name}" for rank, name in enumerate(names))
            self.leave()
            raise ConfigError(
                f"{self.place.degree} shards have {len(set(named))} devices: {of_each}; give each "
                "shard a GPU of its own (CUDA_VISIBLE_DEVICES), or lower tensor_parallel"
            )

    def _run(self, start: Callable[[Any], Any]) -> None:
        """Run a collective to its end. On failure raises WorkerLostError and breaks the group."""
        with self._failing():
            start(self._connected(self._members)).wait()

    def _connected(self, members: Any) -> Any:
        if members is None:
            raise InternalError("the shards have not met: expected RankGroup.meet before a step")
        return members

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns the failure of a collective into WorkerLostError, and breaks the group."""
        try:
            yield
        except RuntimeError as error:
            self.leave()
            raise WorkerLostError(
                f"rank {self.place.rank} lost another shard during a step, or waited for "
                f"it longer than {self._deadlines.collective:g} s: {_first_line(error)}"
            ) from error

    def _listen(self) -> TCPStore:
        """Listen at `host` only: torch's own socket would listen on all interfaces."""
        try:
            with socket.create_server((self._host, 0)) as listener:
                self.rendezvous = f"{self._host}:{listener.getsockname()[1]}"
                return self._open_store(self.rendezvous, listener.detach())
        except (OSError, RuntimeError) as error:
            raise WorkerLostError(
                f"rank 0 cannot listen at {self._host}: {_first_line(error)}; its other shards "
                "would meet it there"
            ) from error

    def _reach(self, rendezvous: str) -> TCPStore:
        try:
            return self._open_store(rendezvous)
        except RuntimeError as error:
            raise WorkerLostError(
                f"rank {self.place.rank} cannot reach rank 0 at {rendezvous}: {_first_line(error)}"
            ) from error

    def _open_store(self, rendezvous: str, listen_fd: int | None = None) -> TCPStore:
        host, _, port = rendezvous.rpartition(":")
        if not host or not port.isdecimal():
            raise ProtocolError(f"rendezvous: expected host:port, got {rendezvous!r}")
        return TCPStore(
            host,
            int(port),
            is_master=self.place.rank == 0,
            timeout=timedelta(seconds=self._deadlines.meeting),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )


def _name_of(device: str) -> str | None:
    """A name that distinguishes a GPU from all others. Raises ConfigError if torch lacks NCCL."""
    if device == "cpu":
        return None
    if not torch.distributed.is_nccl_available():
        raise ConfigError(
            f"tensor_parallel on {device} needs NCCL, which torch {torch.__version__} lacks: "
            'install a build of torch for CUDA, or set target.resources = "cpu"'
        )
    return str(torch.cuda.get_device_properties(device).uuid)


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _first_line(error: BaseException) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^]]*\] ", "", line)  # without the prefix that names the C++ line
