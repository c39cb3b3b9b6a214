"""Workers that break the contract. They must hurt nobody.

`python -m tests.cluster.hostile PORT` serves a lying drafter, for tests in another environment.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from paceline.prefix_hash import hash_prefix
from paceline.v1 import (
    drafting_pb2,
    drafting_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
    types_pb2,
)
from tests.cluster.system import HOST
from workers.process.handshake import LIFE_KEY, own_version
from workers.process.server import RunningServer, start_server
from workers.verification.rule import RULES


async def let_in(context: Any) -> None:
    """Let a stream in, as a worker does. Its hello comes as a message."""
    await context.send_initial_metadata(((LIFE_KEY, "1"),))


class LyingDrafter(drafting_pb2_grpc.DraftingServiceServicer):
    """Answers each message with well-formed proposals of wrong tokens and wrong bases.

    `told` counts messages on its streams, `streams` the opened streams, `asked` how often it was
    asked to describe itself.
    """

    def __init__(self) -> None:
        self.random = random.Random(1)
        self.told = 0
        self.asked = 0
        self.streams = 0
        self.pid = 1
        self.kind = "ngram"
        self.digest = b""
        self.rules: list[str] = []

    async def DescribeDrafter(
        self, request: drafting_pb2.DescribeDrafterRequest, context: Any
    ) -> drafting_pb2.DescribeDrafterResponse:
        self.asked += 1
        return drafting_pb2.DescribeDrafterResponse(
            kind=self.kind,
            max_position=1 << 30,
            pid=self.pid,
            rules=self.rules,
            vocabulary_digest=self.digest,
            version=own_version(),
            life=1,
        )

    async def Draft(
        self, request_iterator: AsyncIterator[drafting_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafting_pb2.DraftResponse]:
        await let_in(context)
        self.streams += 1
        tokens: dict[int, list[int]] = {}
        async for request in request_iterator:
            if request.HasField("hello"):
                continue
            self.told += 1
            alone = [request] if not request.HasField("batch") else request.batch.requests
            for one in alone:
                if one.HasField("open"):
                    tokens[one.open.sequence_id] = list(one.open.token_ids)
                elif one.HasField("outcome"):
                    known = tokens.setdefault(one.outcome.sequence_id, [])
                    known[one.outcome.position :] = one.outcome.token_ids
            for sequence_id, known in tokens.items():
                batch = drafting_pb2.ProposalBatch(
                    proposals=[self._lie(sequence_id, known) for _ in range(3)],
                    tips=self._lies_in_columns(sequence_id, known),
                    pass_seconds=1e-3,
                )
                yield drafting_pb2.DraftResponse(proposals=batch)
            if self.told % 5 == 0:
                yield drafting_pb2.DraftResponse()
            if self.told % 7 == 0:
                yield drafting_pb2.DraftResponse(
                    declined=drafting_pb2.Declined(sequence_id=self.random.getrandbits(20))
                )

    def _lie(self, sequence_id: int, known: list[int]) -> drafting_pb2.Proposal:
        kind = self.random.randrange(4)
        right_base = types_pb2.Base(length=len(known), hash=hash_prefix(known))
        wrong_base = types_pb2.Base(
            length=self.random.getrandbits(32), hash=self.random.getrandbits(64)
        )
        small = self.random.sample(range(384), 4)
        return drafting_pb2.Proposal(
            sequence_id=self.random.getrandbits(60) if kind == 0 else sequence_id,
            base=wrong_base if kind == 1 else right_base,
            token_ids=[] if kind == 2 else small,
            last=self.random.random() < 0.3,
        )

    def _lies_in_columns(self, sequence_id: int, known: list[int]) -> list[drafting_pb2.Tips]:
        """Wrong tokens under the right base, beside entries for no sequence and under no base."""
        nobody = self.random.getrandbits(60)
        small = self.random.sample(range(384), 3)
        tips = drafting_pb2.Tips(
            sequence_ids=[sequence_id, sequence_id, nobody],
            base_lengths=[len(known), self.random.getrandbits(32), len(known)],
            base_hashes=[hash_prefix(known), self.random.getrandbits(64), hash_prefix(known)],
            token_ids=small,
            last_of=[nobody] if self.random.random() < 0.7 else [nobody, sequence_id],
        )
        return [tips]


BREACHES: dict[str, dict[str, Any]] = {
    "ids out of range": {"token_ids": [5, 384]},
    "huge ids": {"token_ids": [1 << 31]},
    "parents out of order": {"token_ids": [5, 6], "parents": [2, 0]},
    "too few parents": {"token_ids": [5, 6], "parents": [0]},
    "too many tokens": {"token_ids": [5] * 1025},
    "a tree where a chain is granted": {"token_ids": [5, 6], "parents": [0, 0]},
    "equal siblings": {"token_ids": [5, 5], "parents": [0, 0]},
    "paths where there are none": {"token_ids": [5], "multiplicities": [2]},
    "no number": {"token_ids": [5], "stopping_state": {"entropy": math.nan}},
    "a node twice": {
        "token_ids": [5],
        "distributions": 2 * [types_pb2.DraftDistribution(token_ids=[5], probabilities=[1.0])],
    },
}
"""Proposals that break the contract under the coupled rule."""


def _drawn(token_ids: list[int], probabilities: list[float]) -> dict[str, Any]:
    pairs = types_pb2.DraftDistribution(token_ids=token_ids, probabilities=probabilities)
    return {"token_ids": [5], "distributions": [pairs]}


PROBABILITY_BREACHES: dict[str, dict[str, Any]] = {
    "none": {"token_ids": [5]},
    "a sum below 1": _drawn([5, 6], [0.5, 0.4]),
    "a sum above 1": _drawn([5, 6], [0.6, 0.5]),
    "less than 0": _drawn([5, 6], [1.5, -0.5]),
    "no number": _drawn([5, 6], [math.nan, 0.5]),
    "an id out of range": _drawn([5, 384], [0.5, 0.5]),
    "ids out of order": _drawn([6, 5], [0.5, 0.5]),
    "an id twice": _drawn([5, 5], [0.5, 0.5]),
    "fewer probabilities than ids": _drawn([5, 6], [1.0]),
    "not the token's": _drawn([6, 7], [0.5, 0.5]),
}
"""Draft probabilities that break the contract under a rule that needs them."""


class MalformedDrafter(LyingDrafter):
    """Answers each message with a proposal that breaks the contract in one way."""

    def __init__(self, breach: dict[str, Any]) -> None:
        super().__init__()
        self.breach = breach

    def _lies_in_columns(self, sequence_id: int, known: list[int]) -> list[drafting_pb2.Tips]:
        return []

    def _lie(self, sequence_id: int, known: list[int]) -> drafting_pb2.Proposal:
        base = types_pb2.Base(length=len(known), hash=hash_prefix(known))
        return drafting_pb2.Proposal(sequence_id=sequence_id, base=base, **self.breach)


class HungDrafter(LyingDrafter):
    """Describes itself once, then answers nothing. A restarted one would answer again."""

    async def DescribeDrafter(
        self, request: drafting_pb2.DescribeDrafterRequest, context: Any
    ) -> drafting_pb2.DescribeDrafterResponse:
        self.told += 1
        if self.told % 2 == 0:
            await asyncio.sleep(30)
        return await super().DescribeDrafter(request, context)

    async def Draft(
        self, request_iterator: AsyncIterator[drafting_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafting_pb2.DraftResponse]:
        await let_in(context)
        async for _ in request_iterator:
            pass
        yield drafting_pb2.DraftResponse()


class HungTarget(target_pb2_grpc.TargetServiceServicer):
    """Takes steps and answers none."""

    def __init__(self, vocabulary_digest: bytes) -> None:
        self.digest = vocabulary_digest
        self.rules = list(RULES)

    async def DescribeTarget(
        self, request: target_pb2.DescribeTargetRequest, context: Any
    ) -> target_pb2.DescribeTargetResponse:
        return target_pb2.DescribeTargetResponse(
            model="hung",
            vocab_size=384,
            vocabulary_digest=self.digest,
            max_model_len=512,
            block_size=128,
            num_blocks=8,
            tensor_parallel=1,
            rules=self.rules,
            version=own_version(),
            life=1,
        )

    async def Step(
        self, request_iterator: AsyncIterator[target_pb2.StepRequest], context: Any
    ) -> AsyncIterator[target_pb2.StepResponse]:
        await let_in(context)
        async for _ in request_iterator:
            pass
        yield target_pb2.StepResponse()


class LyingTarget(HungTarget):
    """Answers each step with verdicts that were not requested."""

    async def Step(
        self, request_iterator: AsyncIterator[target_pb2.StepRequest], context: Any
    ) -> AsyncIterator[target_pb2.StepResponse]:
        await let_in(context)
        async for request in request_iterator:
            if request.HasField("hello"):
                continue
            verdict = target_pb2.Verdict(sequence_id=99, num_accepted=7, token_id=1 << 31)
            yield target_pb2.StepResponse(step=request.step, verdicts=[verdict])


async def serve_lying_drafter(drafter: LyingDrafter, *, port: int = 0) -> RunningServer:
    def add(server: grpc.aio.Server) -> tuple[str]:
        drafting_pb2_grpc.add_DraftingServiceServicer_to_server(drafter, server)
        return ("paceline.v1.DraftingService",)

    return await start_server(add, host=HOST, port=port)


async def serve_false_target(target: HungTarget, *, port: int = 0) -> RunningServer:
    def add(server: grpc.aio.Server) -> tuple[str]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
        return ("paceline.v1.TargetService",)

    return await start_server(add, host=HOST, port=port)


class Flood(LyingDrafter):
    """Sends messages without end from its first grant on, as fast as they are taken.

    `message` makes a message from an open sequence. `sent` counts them.
    """

    def __init__(self, message: Callable[[int, list[int]], drafting_pb2.DraftResponse]) -> None:
        super().__init__()
        self.message = message
        self.sent = 0

    async def Draft(
        self, request_iterator: AsyncIterator[drafting_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafting_pb2.DraftResponse]:
        await let_in(context)
        self.streams += 1
        async for request in request_iterator:
            alone = [request] if not request.HasField("batch") else request.batch.requests
            opened = next((one.open for one in alone if one.HasField("open")), None)
            if opened is not None:
                break
        else:
            return
        message = self.message(opened.sequence_id, list(opened.token_ids))
        while True:
            self.sent += 1
            yield message


def _unknown_bases(sequence_id: int, count: int) -> list[drafting_pb2.Proposal]:
    return [
        drafting_pb2.Proposal(
            sequence_id=sequence_id, base=types_pb2.Base(length=3, hash=number), token_ids=[5]
        )
        for number in range(count)
    ]


def _batch(**fields: Any) -> drafting_pb2.DraftResponse:
    return drafting_pb2.DraftResponse(
        proposals=drafting_pb2.ProposalBatch(pass_seconds=1e-3, **fields)
    )


def _huge(sequence_id: int, known: list[int]) -> drafting_pb2.DraftResponse:
    return _batch(proposals=_unknown_bases(sequence_id, 300_000))


def _crowded(sequence_id: int, known: list[int]) -> drafting_pb2.DraftResponse:
    return _batch(proposals=_unknown_bases(sequence_id, 5_000))


def _steady(sequence_id: int, known: list[int]) -> drafting_pb2.DraftResponse:
    return _batch(proposals=_unknown_bases(sequence_id, 500))


def _disagreeing(sequence_id: int, known: list[int]) -> drafting_pb2.DraftResponse:
    """Chains under the right base, each of which replaces the one before."""
    base = types_pb2.Base(length=len(known), hash=hash_prefix(known))
    chains = [
        drafting_pb2.Proposal(sequence_id=sequence_id, base=base, token_ids=[5 + number % 2] * 8)
        for number in range(200)
    ]
    return _batch(proposals=chains)


def _strangers(sequence_id: int, known: list[int]) -> drafting_pb2.DraftResponse:
    tips = drafting_pb2.Tips(
        sequence_ids=range(10_000, 11_000),
        base_lengths=[3] * 1000,
        base_hashes=[7] * 1000,
        token_ids=[5] * 1000,
    )
    return _batch(tips=[tips])


def _nothing(sequence_id: int, known: list[int]) -> drafting_pb2.DraftResponse:
    return drafting_pb2.DraftResponse()


def _declined(sequence_id: int, known: list[int]) -> drafting_pb2.DraftResponse:
    declined = drafting_pb2.Declined(sequence_id=10_000 + sequence_id, reason="no " * 5_000)
    return drafting_pb2.DraftResponse(declined=declined)


def _named(sequence_id: int, known: list[int]) -> drafting_pb2.DraftResponse:
    base = types_pb2.Base(length=len(known), hash=hash_prefix(known))
    state = {f"{number}" * 70: 1.0 for number in range(8)}
    told = drafting_pb2.Proposal(
        sequence_id=sequence_id, base=base, token_ids=[5], stopping_state=state
    )
    return _batch(proposals=[told])


FLOODS: dict[str, Callable[[int, list[int]], drafting_pb2.DraftResponse]] = {
    "a message of 300,000 proposals": _huge,
    "messages of 5,000 proposals": _crowded,
    "proposals for unknown bases without end": _steady,
    "proposals that replace each other": _disagreeing,
    "proposals for unknown sequences": _strangers,
    "empty messages": _nothing,
    "refusals with long reasons": _declined,
    "long names": _named,
}
"""A drafter sends well-formed messages without end."""


class ContradictingDrafter(LyingDrafter):
    """Sends proposals that are each in order but contradict each other.

    Together they have several distributions under one node, and more draws and paths than were
    granted.
    """

    def __init__(self, rule: str, digest: bytes) -> None:
        super().__init__()
        self.kind, self.rules, self.digest = "model", [rule], digest

    def _lies_in_columns(self, sequence_id: int, known: list[int]) -> list[drafting_pb2.Tips]:
        return []

    def _lie(self, sequence_id: int, known: list[int]) -> drafting_pb2.Proposal:
        token_id = self.random.randrange(5, 380)
        drawn = types_pb2.DraftDistribution(
            node=0, token_ids=[token_id, token_id + 1], probabilities=[0.25, 0.75]
        )
        counts = self.rules == ["kseq"]
        return drafting_pb2.Proposal(
            sequence_id=sequence_id,
            base=types_pb2.Base(length=len(known), hash=hash_prefix(known)),
            token_ids=[token_id],
            distributions=[drawn],
            multiplicities=[2] if counts else [],
        )


async def _serve_lies(port: int) -> None:
    server = await serve_lying_drafter(LyingDrafter(), port=port)
    sys.stdout.write(f"{server.address}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve_lies(int(sys.argv[1])))
