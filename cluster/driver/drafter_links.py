"""The links to drafters: a Draft stream each, which is opened again whenever it breaks.

Drafters may come, go and move while requests run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from cluster.decoding.events import DrafterJoined
from cluster.decoding.instructions import DraftInstruction
from cluster.driver.connections import (
    DESCRIBE_SECONDS,
    Outbox,
    keep_open,
    named_mismatch,
    one_line,
    open_channel,
    open_stream,
    run_until_one_ends,
    say_hello,
    start_heard,
)
from cluster.driver.meters import WorkerMeter
from cluster.driver.pool_lookup import ANYWHERE, Nearness
from cluster.driver.worker_messages import drafts_to_wire, rules_from_wire
from paceline.errors import (
    VersionMismatchError,
    VocabularyMismatchError,
    WorkerLostError,
)
from paceline.v1 import drafting_pb2, drafting_pb2_grpc
from workers.drafting.wire import (
    MAX_ENTRIES,
    MAX_RESPONSE_BYTES,
    PARTY_KEY,
    Told,
    count_entries,
)
from workers.process.handshake import DriverIdentity, split_life
from workers.process.mutual_tls import WorkerTls

MAX_UNSENT = 10_000
"""Messages that a drafter may leave unread. Beyond that it counts as hung."""

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Bytes of messages that a drafter may leave unread in the driver's memory. Opening 64 sequences of
100,000 tokens takes some 20 MB."""

MAX_REASON = 200
"""Characters of a drafter's reason to decline that are logged."""

_REFUSED_WAIT = 5.0

_log = logging.getLogger(__name__)


class DrafterListener(Protocol):
    """Receives events of drafters. Its methods do not wait."""

    def drafter_joined(self, joined: DrafterJoined) -> None:
        """The drafter has a fresh stream."""

    def drafter_lost(self, name: str) -> None:
        """The drafter's stream broke."""

    def proposed(self, name: str, batch: drafting_pb2.ProposalBatch, entries: int) -> int:
        """The drafter sent a message with `entries` entries (drafting.proto), at most MAX_ENTRIES.

        Returns how many of its proposals broke the contract.
        """

    def declined(self, name: str, sequence_id: int, reason: str, *, for_good: bool) -> None:
        """The drafter will not draft for a sequence. `for_good`: do not ask it again."""


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """The target's name and the digest of its vocabulary."""

    model: str
    digest: bytes


class DrafterLink:
    """Keeps the stream to one drafter open, as far as possible."""

    def __init__(
        self,
        meter: WorkerMeter,
        listener: DrafterListener,
        target: TargetVocabulary,
        identity: DriverIdentity,
        *,
        life: int | None,
        party: str = "",
        nearness: Nearness = ANYWHERE,
        target_addresses: Callable[[], Sequence[str]] = tuple,
        probe_timeout: float,
        tls: WorkerTls | None = None,
    ) -> None:
        """`life`: that of the drafter which is meant; None: whichever is at the address.

        `party`: whose share of the drafter is used; "": one of this driver's own.
        `target_addresses`: those of the shards at present.

        `probe_timeout`: seconds that a drafter has to answer that it is still alive.
        """
        self._tls = tls
        self.meter = meter
        self._party, self._nearness = party, nearness
        self._target_addresses = target_addresses
        self._identity = identity
        self._life = life
        self.first_try: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done after the first try. Holds VocabularyMismatchError if that is why it failed."""
        self._listener = listener
        self._target = target
        self._probe_timeout = probe_timeout
        self._outbox: Outbox[drafting_pb2.DraftRequest] | None = None
        self._overflown = asyncio.Event()
        self._suspected = asyncio.Event()
        self._suspicion = ""

    def suspect(self, reason: str) -> None:
        """Close the stream, and open no other to this process."""
        self._suspicion = reason
        self._suspected.set()

    def send(self, instructions: Sequence[DraftInstruction]) -> None:
        """Send instructions together. Drop them if the drafter is away: it has forgotten all."""
        if self._outbox is None:
            return
        try:
            requests = drafts_to_wire(instructions)
        except Exception:  # It ends this stream only.
            # The drafter's state would be wrong from here on, so it starts afresh.
            _log.exception("a defect kept a message from drafter %s", self.meter.name)
            self._overflown.set()
            return
        for request in requests:
            self._outbox.put(request)
        self._outbox.wake()
        if len(self._outbox) > MAX_UNSENT or self._outbox.num_bytes > MAX_UNSENT_BYTES:
            self._overflown.set()

    async def run(self) -> None:
        await keep_open(self._serve, [self.meter], f"drafter {self.meter.name}", self._failed)

    def _failed(self, error: Exception, _: str) -> float:
        if not self.first_try.done():
            if isinstance(error, VocabularyMismatchError):
                self.first_try.set_exception(error)
                self.first_try.exception()  # Marks it as seen, in case no task waits for it.
            else:
                self.first_try.set_result(None)
        is_refused = isinstance(error, VocabularyMismatchError | VersionMismatchError)
        return _REFUSED_WAIT if is_refused else 0.0

    async def _serve(self) -> None:
        async with open_channel(
            self.meter.address, self._tls, max_receive_bytes=MAX_RESPONSE_BYTES
        ) as channel:
            stub = drafting_pb2_grpc.DraftingServiceStub(channel)
            name, where = self.meter.name, f"drafter {self.meter.name} at {self.meter.address}"
            hello = self._identity.hello(name, self._life, stream=False)
            with named_mismatch(where):
                description = await stub.DescribeDrafter(
                    drafting_pb2.DescribeDrafterRequest(hello=hello), timeout=DESCRIBE_SECONDS
                )
            self._identity.check(description, where, self._life)
            self._check_vocabulary(description)
            if self._suspected.is_set():  # Its stream broke before it could be closed.
                await self._shun(stub, description.life)
            await self._use(stub, description)
            await self._shun(stub, description.life)

    async def _use(self, stub: Any, description: drafting_pb2.DescribeDrafterResponse) -> None:
        """Serve over a stream. Returns when the drafter is suspect; raises when it is lost."""
        name = self.meter.name
        metadata = [(PARTY_KEY, self._party)] if self._party else ()
        call = open_stream(stub.Draft, metadata=metadata)
        hello = self._identity.hello(name, description.life)
        try:
            await say_hello(call, drafting_pb2.DraftRequest(hello=hello), name)
        except BaseException:
            call.cancel()
            raise
        self._outbox = Outbox(call.write)
        self._overflown.clear()
        rules = rules_from_wire(description.rules)
        self.meter.join(
            kind=description.kind, pid=description.pid, model=description.model, rules=rules
        )
        try:
            self._listener.drafter_joined(
                DrafterJoined(
                    time.monotonic(),
                    name,
                    description.max_position,
                    kind=description.kind,
                    has_model=bool(description.model),
                    rules=rules,
                    wants_top_tokens=description.wants_top_tokens,
                    distance=self._nearness.distance_to(description.labels),
                    shares_host=shares_host(self.meter.address, self._target_addresses()),
                )
            )
            if not self.first_try.done():
                self.first_try.set_result(None)
            await run_until_one_ends(
                self._read(call),
                self._outbox.run(),
                self._watch(),
                self._probe(stub, description.life),
                self._until_suspect(),
            )
        finally:
            call.cancel()
            self._outbox = None
            self.meter.leave()
            self._listener.drafter_lost(name)

    async def _until_suspect(self) -> None:
        await self._suspected.wait()

    async def _shun(self, stub: Any, life: int) -> None:
        """Wait until the suspect's process is gone, then raise what shows it (`_probe`)."""
        self.meter.suspect = True
        _log.warning(
            "drafter %s (pid %d) is suspect: %s. It is not used until its process is started again",
            self.meter.name,
            self.meter.pid,
            self._suspicion,
        )
        try:
            await self._probe(stub, life)
        finally:
            self.meter.suspect = False
            self._suspected.clear()

    def _check_vocabulary(self, description: drafting_pb2.DescribeDrafterResponse) -> None:
        if description.vocab_size and description.vocabulary_digest != self._target.digest:
            raise VocabularyMismatchError(
                f"drafter {self.meter.name} ({description.model!r}, {description.vocab_size} "
                f"tokens) does not have the vocabulary of the target {self._target.model!r}; "
                "choose a drafter that was made with the target's tokenizer, or have it "
                "translate (docs/drafters.md#another-vocabulary)"
            )

    async def _read(self, call: Any) -> None:
        name = self.meter.name
        try:
            async for response in call:
                if self._suspected.is_set():
                    return
                if response.HasField("declined"):
                    declined = response.declined
                    self._listener.declined(
                        name,
                        declined.sequence_id,
                        declined.reason[:MAX_REASON],
                        for_good=declined.for_good,
                    )
                else:
                    self._take(response.proposals)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            # Our drafters never end a stream so. gRPC reports an oversized message this way.
            self.suspect(f"a message is larger than {MAX_RESPONSE_BYTES} bytes ({one_line(error)})")
            return
        raise WorkerLostError(f"{name} ended its stream")

    def _take(self, batch: drafting_pb2.ProposalBatch) -> None:
        entries = count_entries(batch)
        if entries > MAX_ENTRIES:
            self.meter.malformed += 1
            self.suspect(f"a message has {entries} entries or more, and {MAX_ENTRIES} are allowed")
            return
        self.meter.malformed += self._listener.proposed(self.meter.name, batch, entries)
        if batch.pass_seconds:  # Else the message continues the previous pass, or reports none.
            self.meter.passed(batch.pass_seconds, batch.overrun_seconds, shares=batch.shares)
        told: list[Told] = [*batch.proposals, *batch.tips]
        self.meter.tokens += sum(len(one.token_ids) for one in told)

    async def _probe(self, stub: Any, life: int) -> None:
        """Ask for a description now and then: a drafter that hangs answers pings, but not this.

        Raises if the drafter does not answer, or if another process or life does.
        """
        while True:
            await asyncio.sleep(self._probe_timeout / 2)
            description = await stub.DescribeDrafter(
                drafting_pb2.DescribeDrafterRequest(), timeout=self._probe_timeout
            )
            if (description.pid, description.life) != (self.meter.pid, life):
                raise WorkerLostError(f"{self.meter.name} is another process than before")

    async def _watch(self) -> None:
        await self._overflown.wait()
        raise WorkerLostError(
            f"{self.meter.name} left more than {MAX_UNSENT} messages unread and counts as hung, or "
            "a message could not be sent; its stream is opened again"
        )


def shares_host(address: str, others: Iterable[str]) -> bool:
    """Whether the host of an address "host:port" is that of one of `others`."""
    return _host_of(address) in map(_host_of, others)


def _host_of(address: str) -> str:
    """The host of "host:port"; one name for every address of the loopback interface."""
    host = address.rpartition(":")[0].strip("[]")
    return "localhost" if host == "::1" or host.startswith("127.") else host


class DrafterPool:
    """One link a drafter. `new_link` makes it, of a meter and the `life` that is meant."""

    def __init__(self, new_link: Callable[..., DrafterLink]) -> None:
        self._new_link = new_link
        self._told: dict[str, str] = {}
        self._meters: dict[str, WorkerMeter] = {}
        self._links: dict[str, DrafterLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def meters(self) -> list[WorkerMeter]:
        """The meters of the drafters in the pool. Removed drafters are not included."""
        return [self._meters[name] for name in self._links]

    async def start(self, addresses: Mapping[str, str], seconds: float) -> None:
        """Connect, and wait at most `seconds` until each was tried once.

        Raises VocabularyMismatchError. A drafter that cannot be reached is no error.
        """
        await self.update(addresses)
        tries = [link.first_try for link in self._links.values()]
        if tries:
            await asyncio.wait(tries, timeout=seconds)
        for first_try in tries:
            error = first_try.exception() if first_try.done() else None
            if isinstance(error, VocabularyMismatchError):
                raise error

    async def update(self, addresses: Mapping[str, str]) -> None:
        """Have exactly these drafters. A link whose address and life stay is kept.

        An address may tell the life of the drafter that is meant (handshake.with_life).
        """
        for name in list(self._links):
            if self._told[name] != addresses.get(name):
                await self._drop(name)
        for name, address in addresses.items():
            if name not in self._links:
                self._add(name, address)

    async def stop(self) -> None:
        for name in list(self._links):
            await self._drop(name)

    def send(self, name: str, instructions: Sequence[DraftInstruction]) -> None:
        link = self._links.get(name)
        if link is not None:
            link.send(instructions)

    def suspect(self, name: str, reason: str) -> None:
        """Do not use a drafter until it has another process."""
        link = self._links.get(name)
        if link is not None:
            link.suspect(reason)

    def _add(self, name: str, told: str) -> None:
        address, life = split_life(told)
        self._told[name] = told
        meter = self._meters.setdefault(name, WorkerMeter(name, "drafter", address))
        meter.address = address
        meter.suspect = False
        link = self._links[name] = self._new_link(meter, life=life)

        def tell(error: BaseException) -> None:
            _log.critical("a defect ended the link to %s", name, exc_info=error)

        self._tasks[name] = start_heard(link.run(), tell)

    async def _drop(self, name: str) -> None:
        task = self._tasks.pop(name)
        link = self._links[name]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        link.first_try.cancel()
        del self._links[name], self._told[name]
