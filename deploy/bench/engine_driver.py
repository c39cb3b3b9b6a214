"""Part "driver" of `bench engine`: the driver's own processor time for a step.

It measures the processor time of the driver's event loop from one answer of the target to the next,
by batch size and prompt length. The driver's own parts run: scheduler, messages to and from
workers, text, and messages to callers. Plain functions in the same thread replace the target and
the drafter, and their time is subtracted. gRPC is left out. The text of a sequence is a function of
its seed and the position, so long texts cost the bench nothing. All prompts share all tokens but
the last OWN_TOKENS, so they are prefilled once.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cluster.decoding.events import DrafterJoined, Request, TargetJoined
from cluster.decoding.instructions import RunStep
from cluster.decoding.policy import policy_named
from cluster.decoding.scheduler import Scheduler
from cluster.driver.dispatch import Dispatch
from cluster.driver.fitting import Speculation
from cluster.driver.generation import Generation
from cluster.driver.requests import ResolvedRequest, ResolvedSample
from cluster.driver.steady import Pace
from cluster.driver.stop_strings import StopStrings
from cluster.driver.text import TextCodec, TextStream
from cluster.driver.worker_messages import DraftInstruction, drafts_to_wire, step_messages
from deploy.bench.engine import EngineRow, EngineTask, measures, random_tokens
from paceline.errors import PacelineError, UnavailableError
from paceline.prefix_hash import hash_on, hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import drafting_pb2, inference_pb2, target_pb2
from paceline.wire.answers import fill_response
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.kind import Draft, DrafterInfo, Pass, TakesNoTime, TopTokens
from workers.drafting.tree import DraftTree, Kept, NewNodes
from workers.drafting.wire import apply_request, count_entries, to_responses
from workers.engine.load.checkpoint import describe_checkpoint
from workers.process.settings import freeze_present_objects

POLICIES = ("off", "chain")
AIM_MS, AIM_MS_A_SEQUENCE = 1.0, 0.05
WINDOW = 8
PASSES = 4
"""Passes of the drafter during a step. Each drafts a token for every sequence with a grant."""
ACCEPTANCE = 0.75
STEP_SECONDS, STEP_SECONDS_A_TOKEN = 0.02, 1e-6
"""Seconds of a step, and seconds of each of its tokens, as the target reports them."""
BLOCK_SIZE = 128
OWN_TOKENS = 8
"""Tokens at the end of each prompt that no other prompt has."""
MAX_TOKENS = 4096
"""Output tokens of a sequence: enough that no sequence ends while it is measured."""
_LOOP_TURNS = 6
"""Turns of the event loop after an event. The driver spreads its work over fewer."""
_DRAFTER = "drafter-0"


@dataclass(frozen=True, slots=True)
class DriverLoad:
    """Sequences that decode at once, each with a prompt of `prompt_tokens` tokens."""

    policy: str
    sequences: int
    prompt_tokens: int


LOADS = tuple(
    DriverLoad(policy, sequences, prompt_tokens)
    for sequences in (64, 1000)
    for policy in POLICIES
    for prompt_tokens in (1_000, 8_000, 32_000)
)
QUICK_LOADS = tuple(one for one in LOADS if one.sequences == 64)
LOAD_STEPS, QUICK_LOAD_STEPS = 60, 15


@measures("driver")
def measure_driver(task: EngineTask) -> Iterator[EngineRow]:
    """A row for each policy, number of sequences and length of the prompts."""
    loads = QUICK_LOADS if task.quick else LOADS
    chosen = task.batches_of({load.sequences for load in loads})
    for load in (one for one in loads if one.sequences in chosen):
        yield measure_load(task, load)


def measure_load(task: EngineTask, load: DriverLoad) -> EngineRow:
    """The driver's work for prompts of one length."""
    task.tell(
        f"driver: {load.policy}, {load.sequences} sequences, prompts of {load.prompt_tokens} tokens"
    )
    files = task.target_files()
    vocab_size = describe_checkpoint(files.folder).vocab_size
    steps = QUICK_LOAD_STEPS if task.quick else LOAD_STEPS
    taken = driver_milliseconds(load, files.folder, vocab_size, steps)
    return EngineRow(
        part="driver",
        name=f"{load.policy}, prompts of {load.prompt_tokens}",
        engine="paceline",
        batch=load.sequences,
        window=0,
        degree=1,
        dtype=files.weights,
        threads=1,
        details={
            "driver_ms_p50": statistics.median(taken),
            "driver_ms_least": min(taken),
            "aim_ms": AIM_MS + AIM_MS_A_SEQUENCE * load.sequences,
            "prompt_tokens": load.prompt_tokens,
            "steps": len(taken),
            "emulated": True,
        },
    )


def driver_milliseconds(load: DriverLoad, folder: Path, vocab_size: int, steps: int) -> list[float]:
    """Processor time in milliseconds of each of `steps` steps in which all sequences decode.

    `folder`: the checkpoint whose tokenizer makes the text.
    """
    return asyncio.run(_Loop(load, TextCodec(folder), vocab_size).run(steps))


class _Loop:
    def __init__(self, load: DriverLoad, codec: TextCodec, vocab_size: int) -> None:
        self._load = load
        self._codec = codec
        self._text = _Text(vocab_size)
        self._elsewhere = 0.0
        self._sent: list[bytes] = []
        self._for_drafter: list[bytes] = []
        self._told: list[Generation] = []

    async def run(self, steps: int) -> list[float]:
        load = self._load
        dispatch = Dispatch(
            Scheduler(
                max_num_seqs=load.sequences,
                max_step_tokens=max(512, (1 + WINDOW) * load.sequences),
                serves_auto=False,
            ),
            target_patience=600.0,
        )
        dispatch.connect(self._send_step, self._send_drafts, _no_suspect)
        room = load.prompt_tokens + MAX_TOKENS
        own_blocks = -(-(OWN_TOKENS + MAX_TOKENS) // BLOCK_SIZE) + 1
        num_blocks = room // BLOCK_SIZE + own_blocks * load.sequences
        dispatch.target_joined(
            TargetJoined(0.0, self._text.vocab_size, room, BLOCK_SIZE, num_blocks)
        )
        target = _Target(self._text)
        drafter = DraftingDesk(_Proposer(self._text, room), max_sequences=load.sequences)
        session = drafter.open_session()
        if policy_named(load.policy).drafts:
            dispatch.drafter_joined(DrafterJoined(0.0, _DRAFTER, room))
        freeze_present_objects()
        self._admit(dispatch)
        taken: list[float] = []
        while len(taken) < steps:
            begin = time.thread_time()
            self._elsewhere = 0.0
            await _turn()
            with self._beside():
                answer = target.answer(self._sent)
                self._sent.clear()
            for _ in range(PASSES):
                with self._beside():
                    passed = self._draft(drafter, session)
                for message in passed:
                    batch = drafting_pb2.DraftResponse.FromString(message).proposals
                    dispatch.proposed(_DRAFTER, batch, count_entries(batch))
                await _turn()
            dispatch.step_answered(0, target_pb2.StepResponse.FromString(answer))
            await _turn()
            self._tell()
            if target.only_decoded:
                taken.append(1000 * (time.thread_time() - begin - self._elsewhere))
        dispatch.stop(UnavailableError("the bench is over"))
        return taken

    def _admit(self, dispatch: Dispatch) -> None:
        """Admit all requests, as the driver does."""
        load, vocab_size = self._load, self._text.vocab_size
        count = load.prompt_tokens - OWN_TOKENS
        shared = tuple(random_tokens(count, vocab_size=vocab_size, seed=0))
        shared_hash = hash_prefix(shared)
        pace = Pace()
        for number in range(1, load.sequences + 1):
            own = random_tokens(OWN_TOKENS, vocab_size=vocab_size, seed=number)
            prompt = (*shared, *own)
            spec = SequenceSpec(
                SamplingParams(temperature=0.0), seed=number, prompt_length=len(prompt)
            )
            speculation = Speculation(load.policy, WINDOW)
            resolved = ResolvedRequest(
                str(number),
                prompt,
                spec,
                MAX_TOKENS,
                StopStrings(()),
                speculation,
                tenant="",
                samples=(ResolvedSample(hash_on(shared_hash, own), TextStream(self._codec)),),
            )
            generation = Generation(resolved, [number], dispatch, pace)
            generation.on_told(partial(self._told.append, generation))
            request = Request(
                number,
                prompt,
                spec,
                MAX_TOKENS,
                policy=speculation.policy,
                window=WINDOW,
                prefix_hash=resolved.samples[0].prefix_hash,
            )
            dispatch.admit(request, generation.samples[0])

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Exclude the block's time from the driver's work."""
        begin = time.thread_time()
        yield
        self._elsewhere += time.thread_time() - begin

    def _send_step(self, step: RunStep) -> None:
        self._sent += [message.SerializeToString() for message in step_messages(step)]

    def _send_drafts(self, name: str, instructions: Sequence[DraftInstruction]) -> None:
        for message in drafts_to_wire(instructions):
            self._for_drafter.append(message.SerializeToString())

    def _tell(self) -> None:
        """Make one message to the callers, as cluster/driver/many_requests.py does."""
        message = inference_pb2.GenerateManyResponse()
        for generation in self._told:
            while generation.unread:
                event = generation.take()
                if isinstance(event, PacelineError):
                    raise event
                numbered = message.responses.add()
                numbered.number = generation.samples[0].sequence_id
                fill_response(numbered.response, event)
        message.SerializeToString()
        self._told.clear()

    def _draft(self, desk: DraftingDesk, session: DraftingSession) -> list[bytes]:
        """Run a drafting pass over the driver's messages."""
        for message in self._for_drafter:
            apply_request(session, drafting_pb2.DraftRequest.FromString(message))
        self._for_drafter.clear()
        news = desk.run_pass() if desk.has_work else []
        while desk.num_opening:  # read long texts at once, not over several passes
            news += desk.run_pass()
        return [answer.SerializeToString() for one in news for answer in to_responses(one, 0.003)]


def _no_suspect(drafter: str, reason: str) -> None:
    raise AssertionError(f"{drafter}: {reason}")


async def _turn() -> None:
    """Let the driver do the work that it left for later turns of the event loop."""
    for _ in range(_LOOP_TURNS):
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class _Text:
    vocab_size: int

    def token(self, seed: int, position: int) -> int:
        """The true token at a position."""
        return 3 + (seed * 7919 + position * 104729) % (self.vocab_size - 4)

    def guess(self, seed: int, position: int) -> int:
        """The drafter's token at a position: the true one at the rate ACCEPTANCE."""
        luck = (seed * 31 + position * 17) * 2654435761 % 2**32
        return self.token(seed, position) + (luck >= ACCEPTANCE * 2**32)


@dataclass(slots=True)
class _Target:
    text: _Text
    only_decoded: bool = False
    """Whether the last step had a slice of every sequence, and all of them decoded."""
    _seeds: dict[int, int] = field(default_factory=dict)

    def answer(self, sent: Sequence[bytes]) -> bytes:
        """Answer the one step that was sent, in one message or several."""
        request = target_pb2.StepRequest()
        for message in sent:
            request.MergeFromString(message)
        for opened in request.open:
            self._seeds[opened.sequence_id] = opened.spec.seed
        response = target_pb2.StepResponse(step=request.step)
        tokens = 0
        for part in request.slices:
            tokens += len(part.token_ids)
            if part.verdict:
                self._judge(part, response.verdicts.add())
        decoding = [one.verdict and len(one.token_ids) <= 1 + WINDOW for one in request.slices]
        self.only_decoded = all(decoding) and len(decoding) == len(self._seeds)
        response.step_seconds = STEP_SECONDS + STEP_SECONDS_A_TOKEN * tokens
        return response.SerializeToString()

    def _judge(self, part: target_pb2.Slice, verdict: target_pb2.Verdict) -> None:
        seed, end = self._seeds[part.sequence_id], part.start + len(part.token_ids)
        accepted = 0
        for position in range(end - part.window, end):
            if part.token_ids[position - part.start] != self.text.token(seed, position):
                break
            accepted += 1
        verdict.sequence_id = part.sequence_id
        verdict.num_accepted = accepted
        verdict.token_id = self.text.token(seed, end - part.window + accepted)


class _Proposer(TakesNoTime):
    """Drafts one token of each chain per pass, as a model does."""

    def __init__(self, text: _Text, max_position: int) -> None:
        self._text = text
        rules = frozenset({"coupled"})
        self.info = DrafterInfo("model", rules, "recorded", max_position=max_position)

    def open(self, tree: DraftTree) -> None:
        pass

    def close(self, tree: DraftTree) -> None:
        pass

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        pass

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass(took_part=list(trees))
        for tree in trees:
            position = tree.num_committed + tree.num_nodes
            token_id = self._text.guess(tree.spec.seed, position)
            new = NewNodes((token_id,)) if tree.chain_room else NewNodes()
            result.drafts.append(Draft(tree, new, grant_used=not new.token_ids))
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        pass
