"""The driver: owns all requests and connects to the target's groups and to drafters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TypeVar

from cluster.decoding.events import Request, TargetJoined
from cluster.decoding.instructions import Finish
from cluster.decoding.policy import POLICIES
from cluster.decoding.scheduler import Scheduler
from cluster.driver.at_hand import OwnDrafters
from cluster.driver.dispatch import Dispatch
from cluster.driver.drafter_links import DrafterLink, DrafterPool, TargetVocabulary
from cluster.driver.fitting import Speculation, can_have
from cluster.driver.generation import MAX_UNREAD_SECONDS, NOTHING_DECODED, Generation, Sample
from cluster.driver.meters import WorkerMeter
from cluster.driver.pool_lookup import ANYWHERE, FindDrafters, Nearness, SharedDrafters
from cluster.driver.request_spans import RequestSpans
from cluster.driver.requests import RequestResolver, ResolvedRequest, num_characters
from cluster.driver.round_tap import RoundTap
from cluster.driver.steady import Pace
from cluster.driver.structure_check import StructureChecker
from cluster.driver.target_groups import room_in
from cluster.driver.target_links import StepTimeout, TargetLink, TargetPool
from cluster.driver.text import TextCodec
from paceline.chat import Chat
from paceline.errors import InvalidRequestError, OverloadedError, UnavailableError
from paceline.generation import (
    DefaultSpeculation,
    GenerateInput,
    ModelDescription,
    Stats,
    Tokens,
    Topology,
    WorkerLife,
)
from paceline.options import GenerateOptions, check_count
from workers.drafting.kind import DrafterOptions
from workers.emulated.latency_profiles import EMULATED
from workers.engine.load.checkpoint import CheckpointInfo, describe_checkpoint
from workers.process.handshake import DriverIdentity
from workers.process.mutual_tls import WorkerTls
from workers.process.tracing import Tracing
from workers.verification.grammars import Grammars
from workers.verification.rule import RULES

MAX_WAITING_MATCHERS = 64
"""Most waiting requests whose structures give candidates. Each matcher takes up to 20 MB."""

SHORT_PROMPT_CHARACTERS = 64 * 1024
"""Longest prompt that takes at most some 100 ms to tokenize. Longer ones take a second per million
characters, so they are tokenized one at a time; and so are short ones with a structure, which must
be compiled. That leaves a thread of three for other short ones."""

RETRY_SECONDS = 1.0
"""When to try again if the queue is full. It moves on within about this time."""

_SHORT_AT_ONCE = 16
"""Short prompts given to the threads at a time, so that these need not wait for the event loop."""

T = TypeVar("T")

_LOOK_SECONDS = 0.02
"""Interval at which draining checks whether requests have ended."""


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """What a driver serves, and with which workers. Times without a unit are seconds.

    - `folder`: the checkpoint, whose tokenizer and defaults the driver reads.
    - `served_model_name`: its name to callers; None: as the target names it.
    - `target_addresses`: of the shards of all `target_groups`, group by group, each by rank.
    - `drafter_addresses`: by name. Both may tell the lives that are meant (handshake.with_life).
    - `own_drafters`: those that draft in the driver's process, by name.
    - `shared_drafters`: addresses of drafters that other drivers may use as well (SharedDrafters).
    - `find_shared`: looks up further ones, which another deployment has started.
    - `nearness`: which drafters are near.
    - `party`: whose share of each drafter this driver uses; "": one of its own.
    - `identity`: who the driver is to its workers; None: a driver that is not started again.
    - `speculation`: the default for requests.
    - `wait_ms`: the most milliseconds that a waiting policy waits in a step.
    - `prefix_cache`: whether requests of one tenant share KV.
    - `max_waiting`: the most requests that may wait; further ones are refused. Requests that are
      being tokenized or paused count.
    - `max_unread_seconds`: how long a caller may leave any part of an answer unread.
    - `drafter_timeout`: time for a drafter to answer a question about itself.
    - `target_patience`: how long requests wait for a lost target.
    - `connect_seconds`: how long `start` waits for workers.
    - `tls`: for connections to workers; None: plain text.
    - `tracing`: makes a span for each request; None: no spans.
    """

    folder: Path
    served_model_name: str | None = field(default=None, kw_only=True)
    target_addresses: tuple[str, ...]
    target_groups: int = 1
    drafter_addresses: Mapping[str, str] = field(default_factory=dict)
    own_drafters: Mapping[str, DrafterOptions] = field(default_factory=dict, kw_only=True)
    shared_drafters: tuple[str, ...] = ()
    find_shared: FindDrafters | None = None
    party: str = ""
    nearness: Nearness = ANYWHERE
    speculation: Speculation = field(default_factory=Speculation)
    wait_ms: float = 1000.0
    max_num_seqs: int = 64
    max_step_tokens: int = 512
    prefix_cache: bool = True
    max_waiting: int = 1024
    max_unread_seconds: float = MAX_UNREAD_SECONDS
    step_timeout: StepTimeout = field(default_factory=StepTimeout)
    drafter_timeout: float = 10.0
    target_patience: float = 30.0
    connect_seconds: float = 30.0
    tls: WorkerTls | None = field(default=None, kw_only=True)
    tracing: Tracing | None = field(default=None, kw_only=True)
    identity: DriverIdentity | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class _Running:
    """The parts of a driver that has started."""

    codec: TextCodec
    checkpoint: CheckpointInfo
    resolver: RequestResolver
    checker: StructureChecker
    target: TargetPool
    drafters: DrafterPool


class Driver:
    """Serves requests. Create, start and use it inside one event loop."""

    def __init__(self, options: DriverOptions) -> None:
        self._at_hand = OwnDrafters(options.own_drafters)
        self.scheduler = Scheduler(
            max_num_seqs=options.max_num_seqs,
            max_step_tokens=options.max_step_tokens,
            wait_seconds=options.wait_ms / 1000,
            prefix_cache=options.prefix_cache,
            num_groups=options.target_groups,
            at_hand=self._at_hand,
        )
        self._options = options
        self._identity = options.identity or DriverIdentity()
        self._dispatch = Dispatch(
            self.scheduler,
            target_patience=options.target_patience,
            num_groups=options.target_groups,
            on_change=self._note_change,
            on_broken=lambda: self.on_broken(),
        )
        if options.tracing is not None:
            self._dispatch.spans = RequestSpans(options.tracing)
        self._running: _Running | None = None
        self._shared = SharedDrafters(options.shared_drafters, options.find_shared)
        self._updating = asyncio.Lock()
        self._own_drafters = options.drafter_addresses
        self._following: asyncio.Task[None] | None = None
        self._ready = self._draining = False
        self._began = time.monotonic()
        self._sequence_ids = count(1)
        self._lives: list[tuple[WorkerLife, float]] = []
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="tokenizer")
        self._short_prompts = asyncio.Semaphore(_SHORT_AT_ONCE)
        self._long_prompts = asyncio.Semaphore(1)
        self._pace = Pace()
        self._structures = asyncio.Semaphore(1)
        self._num_arriving = 0
        self.on_serving: Callable[[bool], None] = lambda serving: None
        """Called with `is_serving` whenever that changes."""
        self.on_broken: Callable[[], None] = lambda: None
        """Called when a defect has ended everything and the process is of no more use."""
        self._was_serving = False

    @property
    def is_serving(self) -> bool:
        """Whether a new request could run: the driver takes requests and the target is there."""
        return self._ready and not self._draining and self._dispatch.can_serve

    async def start(self) -> None:
        """Read the checkpoint and connect to all workers. Returns when requests can be served.

        A drafter that does not answer is tried again in the background. Raises CheckpointError,
        VocabularyMismatchError, and UnavailableError if a target group cannot be reached.
        """
        options = self._options
        try:
            codec, checkpoint = await asyncio.get_running_loop().run_in_executor(
                self._threads, read_checkpoint, options.folder
            )
            grammars = await asyncio.get_running_loop().run_in_executor(
                self._threads, partial(_grammars_of, options.folder, checkpoint)
            )
            running = self._running = self._connect(codec, checkpoint, grammars)
            await running.target.start(
                options.connect_seconds, self._dispatch.groups.all_joined_once
            )
            await self._at_hand.start(self._dispatch)
            await running.drafters.start(options.drafter_addresses, options.connect_seconds)
            await self._shared.look()
            await self._use_drafters()
        except BaseException:
            await self.stop()
            raise
        self._following = asyncio.create_task(self._shared.follow(self._use_drafters))
        self._ready = True
        self._note_change()

    async def stop(self) -> None:
        """End all requests with UnavailableError, and all streams. Stopping twice is no error."""
        self._dispatch.stop(UnavailableError("the server is shutting down"))
        self._at_hand.stop()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._running is not None:
            await self._running.drafters.stop()
            await self._running.target.stop()
            self._running.checker.close()
        self._threads.shutdown(wait=False)

    async def drain(self, seconds: float) -> int:
        """Take no more requests, and wait at most `seconds` until running ones have ended.

        Returns how many are left. `stop` will end them.
        """
        self._draining = True
        self._note_change()
        give_up = time.monotonic() + seconds
        while (num_open := self._dispatch.num_open + self._pace.num_open) and (
            time.monotonic() < give_up
        ):
            await asyncio.sleep(_LOOK_SECONDS)
        return num_open

    async def submit(
        self, generate_input: GenerateInput, options: GenerateOptions, *, priority: int = 0
    ) -> Generation:
        """Begin a request. Raises InvalidRequestError, OverloadedError or UnavailableError.

        Of waiting requests, those with a higher `priority` are let in first.
        """
        running, target = self._check_open()
        if options.structure is not None and target.model.startswith(EMULATED):
            raise InvalidRequestError(
                "structure", "expected none, since an emulated target has no logits to mask"
            )
        resolve = partial(
            running.resolver.resolve,
            generate_input,
            options,
            room=room_in(target),
            drafters=self._rules_by_kind,
            num_drafters=len(self._drafter_meters),
            num_groups=self._num_groups,
            most_matchers=max(0, MAX_WAITING_MATCHERS - self.scheduler.num_waiting),
        )
        num_samples = options.samples or 1
        self._check_samples(num_samples)
        # To detokenize a token takes at most as long as to tokenize some 16 characters.
        size = num_characters(generate_input) + 16 * len(options.resume)
        size += 16 * sum(map(len, options.resume_samples))
        size += len(options.prediction or "")
        has_structure = options.structure is not None
        turn = self._structures if has_structure and size <= SHORT_PROMPT_CHARACTERS else None
        resolved = await self._arriving(resolve, size, turn, num_samples)
        self._check_open()
        self._check_queue(num_samples)
        self.scheduler.check_fits(len(resolved.prompt_token_ids), resolved.max_tokens)
        generation = Generation(
            resolved,
            [next(self._sequence_ids) for _ in range(num_samples)],
            self._dispatch,
            self._pace,
            max_unread_seconds=self._options.max_unread_seconds,
        )
        first, *others = generation.samples
        self._admit(resolved, first, priority)

        def admit_others() -> None:
            for sample in others:
                self._admit(resolved, sample, priority)

        if first.lacks_prompt:
            # The prompt's log probabilities come before the output of any sample.
            first.on_prompt_told = admit_others
        else:
            admit_others()
        return generation

    def _admit(self, resolved: ResolvedRequest, sample: Sample, priority: int) -> None:
        own, sequence_id = resolved.samples[sample.number], sample.sequence_id
        if own.finish_reason is not None:
            sample.end(Finish(sequence_id, own.finish_reason, NOTHING_DECODED, 0))
            return
        request = Request(
            sequence_id=sequence_id,
            prompt_token_ids=resolved.prompt_token_ids,
            spec=resolved.spec_of(sample.number),
            max_tokens=resolved.max_tokens,
            policy=resolved.speculation.policy,
            window=resolved.speculation.window,
            stop_scanner=sample if resolved.stop else None,
            stopping=resolved.speculation.stopping,
            branches=resolved.speculation.branches,
            drafter_kind=resolved.speculation.drafter,
            merge=resolved.speculation.merge,
            tenant=resolved.tenant,
            priority=priority,
            prefix_hash=own.prefix_hash,
            output_token_ids=own.output_token_ids,
            # A matcher may hold megabytes, and is only help here: the target has its own.
            matcher=own.matcher if self.scheduler.num_waiting < MAX_WAITING_MATCHERS else None,
            prediction=own.prediction,
            tells_refused=resolved.tells_refused,
        )
        self._dispatch.admit(request, sample)

    async def tokenize(
        self, given: str | Chat, *, special_tokens: bool | None = None, strings: bool = False
    ) -> Tokens:
        """The tokens of a text or chat (RequestResolver.tokenize). Raises as `submit` does."""
        running, target = self._check_open()
        tokenize = partial(
            running.resolver.tokenize,
            given,
            special_tokens=special_tokens,
            strings=strings,
            room=room_in(target),
        )
        return await self._arriving(tokenize, num_characters(given))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises as `submit` does."""
        running, _ = self._check_open()
        detokenize = partial(running.resolver.detokenize, token_ids)
        return await self._arriving(detokenize, len(token_ids))

    async def _arriving(
        self,
        work: Callable[[], T],
        size: int,
        turn: asyncio.Semaphore | None = None,
        count: int = 1,
    ) -> T:
        """Run `work` in its turn, by default that of `size` characters.

        Meanwhile it counts as `count` requests that wait.
        """
        if turn is None:
            is_short = size <= SHORT_PROMPT_CHARACTERS
            turn = self._short_prompts if is_short else self._long_prompts
        self._check_queue(count)
        self._num_arriving += count
        try:
            return await self._in_turn(work, turn)
        finally:
            self._num_arriving -= count

    async def _in_turn(self, work: Callable[[], T], turn: asyncio.Semaphore) -> T:
        """Run `work` in a thread once its turn comes.

        A waiting call can be cancelled. A call that a thread has begun runs to its end. Until then
        it keeps its turn.
        """
        await turn.acquire()
        try:
            self._check_open()  # The state may have changed while waiting.
            working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except BaseException:
            turn.release()
            raise
        working.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(working)

    def set_target(self, addresses: Sequence[str]) -> None:
        """Set the addresses of all shards, used from the next connection on.

        They are ordered group by group, each by rank. There may be more groups than before, which
        join, or fewer: the last ones leave once their sequences have ended or moved. A driver that
        is starting uses the addresses too.
        """
        options = self._options
        if self._running is None:
            degree = len(options.target_addresses) // options.target_groups
            groups = len(addresses) // degree
            self._options = replace(
                options, target_addresses=tuple(addresses), target_groups=groups
            )
            self._dispatch.target_scaled(groups)
        else:
            self._running.target.move(addresses)

    async def until_scaled(self, groups: Collection[int], seconds: float) -> str | None:
        """Wait until these target groups have joined or left as they should (until_settled)."""
        return await self._started().target.until_settled(groups, seconds)

    @property
    def _num_groups(self) -> int:
        return self._dispatch.groups.num_groups

    def note_target(self, trouble: str) -> None:
        self._dispatch.note_target(trouble)

    def note_lives(self, lives: Sequence[WorkerLife]) -> None:
        self._lives = [(life, time.monotonic()) for life in lives]

    @property
    def meters(self) -> list[WorkerMeter]:
        """The meters of all workers; none before connecting begins."""
        if self._running is None:
            return []
        return [*self._running.target.meters, *self._drafter_meters]

    @property
    def _drafter_meters(self) -> list[WorkerMeter]:
        reached = [] if self._running is None else self._running.drafters.meters
        return [*reached, *self._at_hand.meters]

    @property
    def _rules_by_kind(self) -> Mapping[str, frozenset[str]] | None:
        """The kinds of all drafters, and the rules that those of a kind can draft for.

        None while a drafter of the deployment has not described itself yet. One of a pool may never
        do so.
        """
        joined = [meter for meter in self._drafter_meters if meter.joins]
        away = {meter.name for meter in self._drafter_meters if not meter.joins}
        if away - self._shared.addresses.keys() or (away and not joined):
            return None
        found: dict[str, frozenset[str]] = {}
        for meter in joined:
            found[meter.kind] = found.get(meter.kind, frozenset()) | meter.rules
        return found

    async def set_drafters(self, addresses: Mapping[str, str]) -> None:
        """Use these drafters, by name, from now on. Those with the same address are kept.

        Shared drafters are used besides. A driver that is starting must be told again.
        """
        if self._ready:
            self._own_drafters = addresses
            await self._use_drafters()

    async def _use_drafters(self) -> None:
        async with self._updating:  # The controller and the pool may change them at a time.
            if self._running is not None:
                addresses = {**self._own_drafters, **self._shared.addresses}
                await self._running.drafters.update(addresses)

    def set_defaults(self, speculation: Speculation, *, max_waiting: int) -> None:
        """Change what requests from now on get without options, and how many may wait."""
        self._options = replace(self._options, speculation=speculation, max_waiting=max_waiting)
        if self._running is not None:
            self._running.resolver.defaults = speculation

    @contextmanager
    def tapped(self, tap: RoundTap) -> Iterator[None]:
        self._dispatch.taps.append(tap)
        try:
            yield
        finally:
            if tap in self._dispatch.taps:  # A tap that failed was removed.
                self._dispatch.taps.remove(tap)

    def describe(self) -> ModelDescription:
        """Describe what is served. Raises UnavailableError before the start."""
        running, target = self._started(), self._dispatch.groups.target
        checkpoint = running.checkpoint
        assert target is not None
        layout = len(self._drafter_meters), self._num_groups
        return ModelDescription(
            model=self._options.served_model_name or target.model,
            vocab_size=checkpoint.vocab_size,
            max_model_len=room_in(target),
            end_token_ids=checkpoint.end_token_ids,
            default_sampling=checkpoint.default_sampling,
            policies=tuple(name for name in POLICIES if can_have(name, *layout)),
            default_policy=self._options.speculation.policy,
            default_window=self._options.speculation.window,
            tool_format=running.codec.chat_template.tool_format,
            reasoning_format=running.codec.chat_template.reasoning_format,
        )

    def topology(self) -> Topology:
        """The layout of the deployment. Raises UnavailableError before the start."""
        running, speculation = self._started(), self._options.speculation
        layout = len(self._drafter_meters), self._num_groups
        drafted = self._rules_by_kind
        return Topology(
            version=version("paceline"),
            target_groups=tuple(
                tuple(meter.placed() for meter in group) for group in running.target.groups
            ),
            drafters=tuple(meter.placed() for meter in self._drafter_meters),
            rules=tuple(
                rule
                for rule in RULES.all()
                if not drafted or any(rule in rules for rules in drafted.values())
            ),
            policies=tuple(name for name in POLICIES if can_have(name, *layout)),
            default_speculation=DefaultSpeculation(
                policy=speculation.policy,
                rule=speculation.rule,
                window=speculation.window,
                branches=speculation.branches,
                stopping=speculation.stopping.value,
                drafter=speculation.drafter or "",
                merge=speculation.merge,
            ),
        )

    def stats(self) -> Stats:
        """Counters since the driver was made. Raises UnavailableError before the start."""
        self._started()
        totals = self.scheduler.totals
        counts = totals.counts
        return Stats(
            uptime_seconds=time.monotonic() - self._began,
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
            workers=tuple(meter.stats() for meter in self.meters),
            lives=tuple(self._present_lives()),
            kv_blocks=self.scheduler.num_kv_blocks,
            kv_blocks_held=self.scheduler.num_kv_blocks_held,
        )

    def _present_lives(self) -> Iterator[WorkerLife]:
        """The noted lives. Seconds until the next try are counted down since they were noted."""
        for life, told_at in self._lives:
            left = life.next_try_seconds
            if left is not None:
                left = max(0.0, left - (time.monotonic() - told_at))
            yield replace(life, next_try_seconds=left)

    def _connect(
        self, codec: TextCodec, checkpoint: CheckpointInfo, grammars: Grammars
    ) -> _Running:
        options = self._options
        digest = checkpoint.vocabulary_digest
        target_link = partial(
            TargetLink,
            listener=self._dispatch,
            identity=self._identity,
            vocabulary_digest=digest,
            step_timeout=options.step_timeout,
            tls=options.tls,
        )
        target = TargetPool(
            options.target_addresses, options.target_groups, self._dispatch, target_link
        )
        drafters = DrafterPool(
            partial(
                DrafterLink,
                listener=self._dispatch,
                target=TargetVocabulary(checkpoint.name, digest),
                identity=self._identity,
                party=options.party,
                nearness=options.nearness,
                target_addresses=lambda: [meter.address for meter in target.meters],
                probe_timeout=options.drafter_timeout,
                tls=options.tls,
            )
        )
        self._dispatch.connect(target.send, drafters.send, drafters.suspect)
        checker = StructureChecker(
            options.folder,
            vocab_size=checkpoint.vocab_size,
            end_token_ids=checkpoint.end_token_ids,
        )
        return _Running(
            codec=codec,
            checkpoint=checkpoint,
            resolver=RequestResolver(codec, checkpoint, options.speculation, grammars, checker),
            checker=checker,
            target=target,
            drafters=drafters,
        )

    def _note_change(self) -> None:
        serving = self.is_serving
        if serving != self._was_serving:
            self._was_serving = serving
            self.on_serving(serving)

    def _started(self) -> _Running:
        if not self._ready or self._running is None:
            raise UnavailableError("the server is still starting; try again in a moment")
        return self._running

    def _check_open(self) -> tuple[_Running, TargetJoined]:
        """The running parts and the target. Raises the reason if no request can be taken."""
        running, target = self._started(), self._dispatch.groups.target
        if self._draining:
            raise UnavailableError(
                "the server is shutting down and takes no more requests; send it to another, or "
                "again once it is up"
            )
        if self._dispatch.unavailable is not None:
            raise self._dispatch.unavailable
        assert target is not None
        return running, target

    def _check_samples(self, count: int) -> None:
        """Raise InvalidRequestError for more samples than there can ever be places."""
        options = self._options
        check_count(
            "samples",
            count,
            self._num_groups * options.max_num_seqs + options.max_waiting,
            "sequences that run or wait here (target.max_num_seqs, server.max_waiting)",
        )

    def _check_queue(self, count: int) -> None:
        """Raise OverloadedError if the last of `count` more would find `max_waiting` waiting."""
        options, scheduler = self._options, self.scheduler
        free_places = self._num_groups * options.max_num_seqs - scheduler.num_running
        arriving = self._num_arriving + count - 1
        waiting = scheduler.num_waiting + max(0, arriving - max(0, free_places))
        if waiting >= options.max_waiting:
            raise OverloadedError(
                f"{waiting} requests are waiting, and server.max_waiting allows no more; "
                "try again later",
                retry_seconds=RETRY_SECONDS,
            )


def read_checkpoint(folder: Path) -> tuple[TextCodec, CheckpointInfo]:
    """Read what a driver must know of its target's checkpoint. Raises CheckpointError."""
    checkpoint = describe_checkpoint(folder)
    return TextCodec(folder), checkpoint


def _grammars_of(folder: Path, checkpoint: CheckpointInfo) -> Grammars:
    return Grammars(
        folder, vocab_size=checkpoint.vocab_size, end_token_ids=checkpoint.end_token_ids
    )
