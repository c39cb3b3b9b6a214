"""The driver: the groups of a target, its drafters, and the requests of all callers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from cluster.decoding.events import Request
from cluster.decoding.policies import PolicyName
from cluster.decoding.scheduler import Scheduler
from cluster.dispatch import Dispatch
from cluster.drafter_link import TargetVocabulary
from cluster.drafter_pool import DrafterPool
from cluster.driver_clock import DriverClock
from cluster.fitting import can_have
from cluster.generation import Generation
from cluster.requests import RequestResolver, Speculation
from cluster.round_tap import RoundTap
from cluster.target_description import TargetDescription
from cluster.target_link import StepTimeout
from cluster.target_pool import TargetPool
from cluster.text import TextCodec, TextStream
from paceline.errors import OverloadedError, UnavailableError
from paceline.generation import GenerateInput, GenerateOptions, ModelDescription, Stats
from workers.engine.checkpoint import CheckpointInfo, describe_checkpoint

_LOOK_SECONDS = 0.02
"""How often it is looked whether requests have ended, while a driver is drained."""


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """What a driver serves, and with which workers.

    `folder`: the checkpoint, of which the driver reads the tokenizer and the defaults.
    `target_addresses`: of the shards of all `target_groups`, group by group, each by rank.
    `drafter_addresses`: by name. `speculation`: of requests that do not say. `wait_ms`: most that
    policies which wait do so in a step. `prefix_cache`: whether requests of one tenant share KV.
    `max_waiting`: requests beyond the running ones before callers are turned away.
    `drafter_timeout`: seconds in which a drafter must answer a question about itself.
    `target_patience`: seconds that requests wait for a lost target. `connect_seconds`: how long
    `start` waits for workers. `dilation`: how many times slower than the devices that they emulate
    the workers are.
    """

    folder: Path
    target_addresses: tuple[str, ...]
    target_groups: int = 1
    drafter_addresses: Mapping[str, str] = field(default_factory=dict)
    speculation: Speculation = field(default_factory=Speculation)
    wait_ms: float = 1000.0
    max_num_seqs: int = 64
    max_step_tokens: int = 512
    prefix_cache: bool = True
    max_waiting: int = 1024
    step_timeout: StepTimeout = field(default_factory=StepTimeout)
    drafter_timeout: float = 10.0
    target_patience: float = 30.0
    connect_seconds: float = 30.0
    dilation: float = 1.0


@dataclass(frozen=True, slots=True)
class _Running:
    """What there is once a driver has started."""

    codec: TextCodec
    checkpoint: CheckpointInfo
    resolver: RequestResolver
    target: TargetPool
    drafters: DrafterPool


class Driver:
    """Serves requests. Make, start and use it inside one event loop."""

    def __init__(self, options: DriverOptions) -> None:
        self.scheduler = Scheduler(
            max_num_seqs=options.max_num_seqs,
            max_step_tokens=options.max_step_tokens,
            wait_seconds=options.wait_ms / 1000,
            prefix_cache=options.prefix_cache,
            num_groups=options.target_groups,
        )
        self._options = options
        self.clock = DriverClock(options.dilation)
        self._dispatch = Dispatch(
            self.scheduler,
            target_patience=options.target_patience,
            clock=self.clock,
            num_groups=options.target_groups,
        )
        self._running: _Running | None = None
        self._ready = self._draining = False
        self._began = self.clock.now()
        self._sequence_ids = count(1)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def start(self) -> None:
        """Read the checkpoint, connect to all workers; return when requests can be served.

        A drafter that does not answer is tried again in the background. Raises CheckpointError,
        UnavailableError when a group of the target cannot be reached, VocabularyMismatchError.
        """
        options = self._options
        try:
            codec, checkpoint = await asyncio.get_running_loop().run_in_executor(
                self._threads, read_checkpoint, options.folder
            )
            running = self._running = self._connect(codec, checkpoint)
            await running.target.start(
                options.connect_seconds, self._dispatch.groups.all_joined_once
            )
            await running.drafters.start(options.drafter_addresses, options.connect_seconds)
        except BaseException:
            await self.stop()
            raise
        self._ready = True

    async def stop(self) -> None:
        """End all requests with UnavailableError, and all streams. Stopping twice is no error."""
        self._dispatch.stop(UnavailableError("the server is shutting down"))
        if self._running is not None:
            await self._running.drafters.stop()
            await self._running.target.stop()
        self._threads.shutdown(wait=False)

    async def drain(self, seconds: float) -> int:
        """Take no more requests, and wait until those that run have ended, at most so long.

        Returns how many are left; `stop` will end them.
        """
        self._draining = True
        give_up = self.clock.now() + seconds
        while self._dispatch.num_open and self.clock.now() < give_up:
            await asyncio.sleep(_LOOK_SECONDS)
        return self._dispatch.num_open

    async def submit(self, generate_input: GenerateInput, options: GenerateOptions) -> Generation:
        """Begin a request. Raises InvalidRequestError, OverloadedError or UnavailableError."""
        running, target = self._open_for_requests()
        resolve = partial(
            running.resolver.resolve,
            generate_input,
            options,
            room=target.room,
            drafters=running.drafters.kinds,
            num_drafters=len(running.drafters.meters),
            num_groups=self._options.target_groups,
        )
        loop = asyncio.get_running_loop()
        resolved = await loop.run_in_executor(self._threads, resolve)
        self._open_for_requests()  # things may have changed meanwhile
        self.scheduler.check_fits(len(resolved.prompt_token_ids), resolved.max_tokens)
        sequence_id = next(self._sequence_ids)
        text = TextStream(
            running.codec, stop=resolved.stop, end_token_ids=resolved.spec.end_token_ids
        )
        generation = Generation(resolved, sequence_id, text, self._dispatch.cancel)
        request = Request(
            sequence_id=sequence_id,
            prompt_token_ids=resolved.prompt_token_ids,
            spec=resolved.spec,
            max_tokens=resolved.max_tokens,
            policy=resolved.speculation.policy,
            window=resolved.speculation.window,
            stop_scanner=text if resolved.stop else None,
            stopping=resolved.speculation.stopping,
            branches=resolved.speculation.branches,
            drafter_kind=resolved.speculation.drafter,
            merge=resolved.speculation.merge,
            tenant=resolved.tenant,
            prompt_hash=resolved.prompt_hash,
        )
        self._dispatch.admit(request, generation)
        return generation

    def set_target(self, addresses: Sequence[str]) -> None:
        """The target's shards are at these addresses from the next connection on.

        All of them, group by group, each by rank.
        """
        self._started().target.move(addresses)

    def note_target(self, trouble: str) -> None:
        """Why the target is not back yet, for requests that fail for it."""
        self._dispatch.note_target(trouble)

    async def set_drafters(self, addresses: Mapping[str, str]) -> None:
        """Use these drafters, by name, from now on; those with the same address are kept."""
        await self._started().drafters.update(addresses)

    @contextmanager
    def tapped(self, tap: RoundTap) -> Iterator[None]:
        """Have `tap` hear every round, for as long as the block runs."""
        self._dispatch.taps.append(tap)
        try:
            yield
        finally:
            self._dispatch.taps.remove(tap)

    def describe(self) -> ModelDescription:
        """What is served. Raises UnavailableError before the start."""
        running, target = self._started(), self._dispatch.groups.target
        checkpoint = running.checkpoint
        assert target is not None
        layout = len(running.drafters.meters), self._options.target_groups
        return ModelDescription(
            model=target.model,
            vocab_size=checkpoint.vocab_size,
            max_model_len=target.room,
            end_token_ids=checkpoint.end_token_ids,
            default_sampling=checkpoint.default_sampling,
            policies=tuple(policy.value for policy in PolicyName if can_have(policy, *layout)),
            default_policy=self._options.speculation.policy.value,
            default_window=self._options.speculation.window,
        )

    def stats(self) -> Stats:
        """Counters since the driver was made. Raises UnavailableError before the start."""
        running = self._started()
        totals = self.scheduler.totals
        counts = totals.counts
        return Stats(
            uptime_seconds=self.clock.now() - self._began,
            steps=totals.steps,
            committed_tokens=counts.committed,
            drafted=counts.drafted,
            accepted=counts.accepted,
            verdicts=counts.verdicts,
            requests_finished=totals.finished,
            sequences_running=self.scheduler.num_running,
            sequences_waiting=self.scheduler.num_waiting,
            gap_ms_p50=self._dispatch.gaps.median_ms,
            prefilled_tokens=totals.prefilled,
            prefix_hit_tokens=self.scheduler.prefix_hit_tokens,
            preemptions=self.scheduler.num_preemptions,
            driver_ms_p50=self._dispatch.driver_time.median_ms,
            speculation=self.scheduler.speculation(),
            workers=tuple(
                meter.stats() for meter in (*running.target.meters, *running.drafters.meters)
            ),
        )

    def _connect(self, codec: TextCodec, checkpoint: CheckpointInfo) -> _Running:
        options = self._options
        digest = checkpoint.vocabulary_digest
        target = TargetPool(
            options.target_addresses,
            self._dispatch,
            num_groups=options.target_groups,
            vocabulary_digest=digest,
            step_timeout=options.step_timeout,
        )
        drafters = DrafterPool(
            self._dispatch,
            TargetVocabulary(checkpoint.name, digest),
            probe_timeout=options.drafter_timeout,
        )
        self._dispatch.connect(target.send, drafters.send, drafters.suspect)
        return _Running(
            codec=codec,
            checkpoint=checkpoint,
            resolver=RequestResolver(codec, checkpoint, options.speculation),
            target=target,
            drafters=drafters,
        )

    def _started(self) -> _Running:
        if not self._ready or self._running is None:
            raise UnavailableError("the server is still starting; try again in a moment")
        return self._running

    def _open_for_requests(self) -> tuple[_Running, TargetDescription]:
        running, target = self._started(), self._dispatch.groups.target
        if self._draining:
            raise UnavailableError(
                "the server is shutting down and takes no more requests; send it to another, or "
                "again once it is up"
            )
        if self._dispatch.unavailable is not None:
            raise self._dispatch.unavailable
        if self.scheduler.num_waiting >= self._options.max_waiting:
            raise OverloadedError(
                f"{self.scheduler.num_waiting} requests are waiting, as many as may; "
                "try again later"
            )
        assert target is not None
        return running, target


def read_checkpoint(folder: Path) -> tuple[TextCodec, CheckpointInfo]:
    """What a driver must know of its target's. Raises CheckpointError."""
    checkpoint = describe_checkpoint(folder)
    return TextCodec(folder), checkpoint
