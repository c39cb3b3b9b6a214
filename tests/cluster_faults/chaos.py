"""Random faults, one every few seconds, under streams that never pause. A seed names them all.

The deployment is that of `paceline bench faults`, on emulated devices. Their text is a pure
function of the prompt and the seed, so every answer is compared with the one that is computed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import psutil

from deploy.bench.fault_deployment import Deployed, deployed
from deploy.bench.faults import Stream, options_of, prompt_of, read_http
from paceline import AsyncClient, Chunk, GenerateOptions, Retries
from paceline.errors import PacelineError
from workers.emulated.replay_text import PrefixReader, ReplayText, spec_of
from workers.models.stand_in import VOCAB_SIZE

STREAMS, OVER_HTTP = 20, 4
HUNG_AFTER = 8.0
STUCK_SECONDS = 180.0
"""A worker that ended ten times recently waits 30 s before its next start, and several may wait one
after the other. A request that takes longer is stuck."""
PATIENT = Retries(attempts=1000, most_seconds=1.0, away_seconds=STUCK_SECONDS)
POLICIES = ("chain", "fanout", "lockstep", "pearl", "off")
QUIET_SECONDS = 60.0
MORE_FDS, MORE_RSS, MORE_PROCESSES = 40, 128 << 20, 6
"""What an actor's process may have beyond what it had at first; and the nodes beyond theirs."""
TEXT = ReplayText(VOCAB_SIZE)


@dataclass(frozen=True, slots=True)
class Event:
    """A fault. `after`: seconds since the one before. `seconds`: how long it lasts, if it ends."""

    after: float
    kind: str
    target: str
    seconds: float = 0.0


ACTORS = {"DrafterActor": 4, "ShardActor": 1, "DriverActor": 1, "GatewayActor": 1, "Controller": 1}
"""What is killed, and how often in proportion."""


def events_of(seed: int, *, has_cable: bool) -> list[Event]:
    """The faults of a seed: enough for half an hour."""
    rng = random.Random(seed)
    events = []
    for _ in range(600):
        kind = rng.choices(("kill", "stop", "cut"), (8, 3, 3 if has_cable else 0))[0]
        target, seconds = "", 0.0
        if kind == "kill":
            target = rng.choices(list(ACTORS), list(ACTORS.values()))[0]
        elif kind == "stop":
            target, seconds = rng.choice(list(ACTORS)), rng.uniform(0.2, 3.0)
        else:
            seconds = rng.uniform(0.2, 5.0)
        events.append(Event(rng.uniform(2.0, 6.0), kind, target, seconds))
    return events


def true_text(prompt: Sequence[int], options: GenerateOptions) -> list[int]:
    """The answer of the emulated target."""
    assert options.temperature is not None
    assert options.seed is not None
    assert options.max_tokens is not None
    spec = spec_of(len(prompt), options.temperature, options.seed)
    reader = PrefixReader().read(prompt, 0)
    answer: list[int] = []
    for position in range(len(prompt), len(prompt) + options.max_tokens):
        answer.append(TEXT.next_token(reader.digest(), spec))
        reader.read_one(answer[-1], position)
    return answer


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has."""

    rss: int
    num_fds: int


@dataclass(slots=True)
class Chaos:
    """One run. `said`: what happened, in order; `wrong`: what must not happen."""

    deployment: Deployed
    seed: int
    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0
    num_faults: int = 0
    num_tokens: int = 0
    """Tokens that callers by gRPC have received."""
    _began: float = field(default_factory=time.monotonic)

    async def run(self, seconds: float) -> None:
        """Break things for some seconds. Then all must be as before."""
        await self._check_quiet()
        await asyncio.gather(*(self._ask(number, time.monotonic()) for number in range(STREAMS)))
        before, num_processes = self._usage(), len(self.deployment.processes_of())
        until = time.monotonic() + seconds
        breaking = asyncio.create_task(self._break_until(until))
        await asyncio.gather(*(self._ask(number, until) for number in range(STREAMS)), breaking)
        self._say("no more faults")
        await self._check_quiet()
        await asyncio.gather(*(self._ask(number, time.monotonic()) for number in range(STREAMS)))
        await self._check_speculation()
        await self._check_quiet()
        self._check_usage(before, num_processes)

    def _say(self, line: str) -> None:
        self.said.append(f"{time.monotonic() - self._began:7.2f} {line}")

    async def _break_until(self, until: float) -> None:
        events = events_of(self.seed, has_cable=self.deployment.cable is not None)
        ending: set[asyncio.Task[None]] = set()
        for event in events:
            await asyncio.sleep(event.after)
            await self._text_comes(until)
            if time.monotonic() + event.seconds > until:
                break
            self._say(f"{event.kind} {event.target} {event.seconds:.1f}")
            task = asyncio.create_task(self._cause(event))
            ending.add(task)
            task.add_done_callback(ending.discard)
        await asyncio.gather(*ending)

    async def _text_comes(self, until: float) -> None:
        """Wait until text has come since the last fault. Without this, a slow machine would have
        the next fault before it could start anything again, and would decode nothing for minutes.
        """
        before = self.num_tokens
        while self.num_tokens < before + STREAMS and time.monotonic() < until:
            await asyncio.sleep(0.1)

    async def _cause(self, event: Event) -> None:
        self.num_faults += 1
        if event.kind == "cut":
            assert self.deployment.cable is not None
            self.deployment.cable.cut()
            await asyncio.sleep(event.seconds)
            self.deployment.cable.mend()
            return
        with contextlib.suppress(PacelineError, psutil.Error):  # It is away already.
            process = self.deployment.process(event.target)
            if event.kind == "kill":
                process.kill()
                return
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(event.seconds)
            process.send_signal(signal.SIGCONT)

    async def _ask(self, number: int, until: float) -> None:
        """Ask again and again until a time, at least once."""
        rng = random.Random(f"{self.seed}/{number}/{until}")
        async with AsyncClient(self.deployment.address, retries=PATIENT) as client:
            for turn in count():
                if turn and time.monotonic() > until:
                    return
                try:
                    async with asyncio.timeout(STUCK_SECONDS):
                        if number < OVER_HTTP:
                            await self._ask_http(rng)
                        else:
                            await self._ask_grpc(client, rng)
                except TimeoutError:
                    self.wrong.append(f"stream {number} is stuck")
                    return
                except PacelineError as error:
                    self.wrong.append(f"stream {number}: {type(error).__name__}: {error}")

    async def _ask_http(self, rng: random.Random) -> None:
        number, tokens = rng.randrange(3000), rng.randrange(20, 300)
        stream = Stream()
        await read_http(self.deployment.http_address, number, tokens, stream)
        self._compare(
            stream.token_ids, true_text(prompt_of(number), options_of(number, tokens)), "HTTP"
        )

    async def _ask_grpc(self, client: AsyncClient, rng: random.Random) -> None:
        prompt = [rng.randrange(16, VOCAB_SIZE) for _ in range(rng.randrange(3, 200))]
        options = replace(
            options_of(0, rng.randrange(20, 600)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1 << 30),
            policy=rng.choice(POLICIES),
        )
        leave_at = rng.randrange(1, 100) if rng.random() < 0.1 else None
        token_ids: list[int] = []
        events = client.stream(prompt, options)
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Chunk):
                    token_ids += event.token_ids
                    self.num_tokens += len(event.token_ids)
                if leave_at is not None and len(token_ids) >= leave_at:
                    break
        wanted = true_text(prompt, options)
        self._compare(token_ids, wanted if leave_at is None else wanted[: len(token_ids)], "gRPC")

    def _compare(self, got: Sequence[int], wanted: Sequence[int], way: str) -> None:
        self.num_answers += 1
        if list(got) != list(wanted):
            same = next(
                (n for n, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]),
                min(len(got), len(wanted)),
            )
            self.wrong.append(
                f"{way}: {len(got)} tokens, {len(wanted)} expected, different from token {same} on"
            )

    async def _check_quiet(self) -> None:
        """All workers are there, and no request, sequence or KV block is held by anybody."""
        give_up = time.monotonic() + QUIET_SECONDS
        async with AsyncClient(self.deployment.address, retries=PATIENT) as client:
            while True:
                left = "the driver does not answer"
                with contextlib.suppress(PacelineError):
                    stats = await client.stats()
                    away = [one.name for one in stats.workers if not one.connected]
                    left = f"away: {away}, running {stats.sequences_running}, "
                    left += f"waiting {stats.sequences_waiting}, held {stats.kv_blocks_held}"
                    open_requests = stats.sequences_running + stats.sequences_waiting
                    if not away and not open_requests and not stats.kv_blocks_held:
                        return
                if time.monotonic() > give_up:
                    self.wrong.append(f"not quiet: {left}")
                    return
                await asyncio.sleep(0.2)

    async def _check_speculation(self) -> None:
        """A drafter that forgot to close sequences would have no room for another."""
        async with AsyncClient(self.deployment.address, retries=PATIENT) as client:
            answer = await client.generate(prompt_of(1), options_of(1, 100))
        if not answer.stats.accepted:
            self.wrong.append("the drafter drafts no more")

    def _usage(self) -> dict[str, Usage]:
        found = {}
        for actor in ACTORS:
            process = self.deployment.process(actor)
            found[actor] = Usage(process.memory_info().rss, process.num_fds())
        return found

    def _check_usage(self, before: dict[str, Usage], num_processes: int) -> None:
        after = self._usage()
        for actor, early in before.items():
            late = after[actor]
            if late.num_fds > early.num_fds + MORE_FDS:
                self.wrong.append(f"{actor}: {early.num_fds} files, then {late.num_fds}")
            if late.rss > early.rss + MORE_RSS:
                self.wrong.append(f"{actor}: {early.rss >> 20} MiB, then {late.rss >> 20}")
        titles = [title_of(one) for one in self.deployment.processes_of()]
        for actor in ACTORS:
            number = sum(title.startswith(f"ray::{actor}") for title in titles)
            if number != 1:
                self.wrong.append(f"{number} processes of {actor}")
        if len(titles) > num_processes + MORE_PROCESSES:
            self.wrong.append(f"{num_processes} processes, then {len(titles)}")


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def defects_in(deployment: Deployed) -> list[str]:
    """What workers logged as an error or worse."""
    return [
        f"{told['time']} {log.stem}: {told['message']}\n{told.get('exception', '')}"
        for log in sorted(deployment.logs.glob("*.log"))
        for told in deployment.logged(log.stem)
        if told["level"] in {"ERROR", "CRITICAL"}
    ]


def run_chaos(folder: Path, *, seed: int, seconds: float) -> Chaos:
    """Run it, and fail with all that happened."""
    home = folder / "home"
    lines: list[str] = []
    home.mkdir()
    with deployed(home, folder, lines.append, hung_after=HUNG_AFTER) as deployment:
        chaos = Chaos(deployment, seed)
        with deployment.kept():
            asyncio.run(chaos.run(seconds))
    assert not chaos.wrong, "\n".join(
        [
            f"seed {seed} (--chaos-seed {seed} runs it again):",
            *chaos.wrong,
            "faults:",
            *chaos.said,
            "defects that the logs name:",
            *defects_in(deployment),
        ]
    )
    return chaos
