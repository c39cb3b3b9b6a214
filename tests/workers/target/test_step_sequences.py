"""Malformed steps: each is refused with the name of the wrong field."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from paceline.errors import ProtocolError
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2, types_pb2
from paceline.wire.sequences import spec_to_wire
from workers.target.step_sequences import EngineLimits, StepWork, TargetSession
from workers.verification.distribution import WindowRows

LIMITS = EngineLimits(vocab_size=100, max_model_len=40, block_size=16, num_blocks=5)
SPEC = SequenceSpec(SamplingParams(), seed=1, prompt_length=3)


def opened(sequence_id: int, spec: SequenceSpec = SPEC) -> target_pb2.TargetSequence:
    return target_pb2.TargetSequence(sequence_id=sequence_id, spec=spec_to_wire(spec))


def piece(**fields: Any) -> target_pb2.Slice:
    """A slice of sequence 1 that decodes plainly, except for the fields given."""
    return target_pb2.Slice(
        **{"sequence_id": 1, "start": 3, "token_ids": [7], "verdict": True, **fields}
    )


def candidates_of(work: StepWork) -> list[int]:
    """The token ids of the first task's candidates."""
    return list(work.tasks[0].candidates.tree.token_ids)


@pytest.fixture
def session() -> TargetSession:
    """A session: sequence 1 holds three tokens in block 0, sequence 2 one in block 1."""
    session = TargetSession(LIMITS)
    session.begin_step(
        target_pb2.StepRequest(
            step=1,
            open=[opened(1), opened(2)],
            slices=[
                piece(start=0, token_ids=[1, 2, 3], new_blocks=[0]),
                piece(sequence_id=2, start=0, token_ids=[4], new_blocks=[1]),
            ],
        )
    )
    return session


BAD_SLICES: dict[str, dict[str, Any]] = {
    "sequence_id: sequence 9 is not open": {"sequence_id": 9},
    "token_ids: expected at least one": {"token_ids": []},
    "token_ids: expected ids below 100, got 100": {"token_ids": [7, 100]},
    "start: expected at most 3": {"start": 4},
    "token_ids: 41 tokens exceed max_model_len": {
        "token_ids": [7] * 38,
        "new_blocks": [2, 3],
    },
    "window: expected less than the 2 token_ids": {"token_ids": [7, 8], "window": 2},
    "window: expected 0 if no verdict": {"token_ids": [7, 8], "window": 1, "verdict": False},
    "new_blocks: expected ids below 5, got 5": {"new_blocks": [5]},
    "new_blocks: block 1 is in a block table": {"new_blocks": [1]},
    "new_blocks: block 0 is in a block table": {"new_blocks": [0]},
    "new_blocks: block 3 is in a block table": {"new_blocks": [3, 3]},
    "new_blocks: 17 tokens need": {"token_ids": [7] * 14},
    "logprobs_of: expected at most 1": {"token_ids": [7, 8], "window": 1, "logprobs_of": [1, 2]},
    "logprobs_of: expected ids below 100, got 100": {"logprobs_of": [100]},
    "logprobs_of: expected none": {"logprobs_of": [1]},
}


@pytest.mark.parametrize("message", BAD_SLICES)
def test_a_bad_slice_is_named(session: TargetSession, message: str) -> None:
    good = piece(sequence_id=2, start=1)
    request = target_pb2.StepRequest(step=2, slices=[good, piece(**BAD_SLICES[message])])
    with pytest.raises(ProtocolError) as refusal:
        session.begin_step(request)
    assert str(refusal.value).startswith(f"slices[1].{message}")


BAD_SPECS: dict[str, types_pb2.SequenceSpec] = {
    "logprobs: expected an integer from 0 to 20, got 21": spec_to_wire(
        SequenceSpec(SamplingParams(), seed=0, prompt_length=1, logprobs=21)
    ),
    "rule: expected one of coupled, kseq": spec_to_wire(
        SequenceSpec(SamplingParams(), seed=0, prompt_length=1, rule="unheard-of")
    ),
    "temperature: expected a finite": spec_to_wire(
        SequenceSpec(SamplingParams(temperature=-1), seed=0, prompt_length=1)
    ),
    "logit_bias: token id 100 is not": spec_to_wire(
        SequenceSpec(SamplingParams(logit_bias={100: 1}), seed=0, prompt_length=1)
    ),
    "sampling: expected sampling": types_pb2.SequenceSpec(rule="coupled"),
}


@pytest.mark.parametrize("message", BAD_SPECS)
def test_a_bad_spec_is_the_fault_of_its_sequence(session: TargetSession, message: str) -> None:
    """It is fed like the others, because they may share its prefix. It gets no logits."""
    bad = target_pb2.TargetSequence(sequence_id=3, spec=BAD_SPECS[message])
    chunk = piece(sequence_id=3, start=0, token_ids=[5], verdict=False, new_blocks=[2])
    work = session.begin_step(target_pb2.StepRequest(step=2, open=[bad], slices=[chunk]))
    assert (len(work.slices), work.tasks, work.faults) == (1, [], {})
    last = piece(sequence_id=3, start=1, token_ids=[6])
    work = session.begin_step(target_pb2.StepRequest(step=3, slices=[piece(), last]))
    assert [task.sequence_id for task in work.tasks] == [1]
    assert [one.num_logits for one in work.slices] == [1, 0]
    assert work.faults[3].startswith(f"the target refuses its parameters: {message}")
    session.begin_step(target_pb2.StepRequest(step=4, close=[3]))
    session.check_integrity()


BAD_STEPS: dict[str, dict[str, Any]] = {
    "step: expected 2, got 3": {"step": 3},
    "step: expected 2, got 1": {"step": 1},
    "close: sequence 3 is not open": {"close": [3]},
    "close: sequence 1 is not open": {"close": [1, 1]},
    "open: sequence 1 is open already": {"open": [opened(1)]},
    "slices[1].sequence_id: sequence 1 has a slice": {"slices": [piece(), piece()]},
    "slices[0].sequence_id: sequence 1 is not open": {"close": [1], "slices": [piece()]},
}


@pytest.mark.parametrize("message", BAD_STEPS)
def test_a_bad_step_is_named(session: TargetSession, message: str) -> None:
    with pytest.raises(ProtocolError) as refusal:
        session.begin_step(target_pb2.StepRequest(**{"step": 2, **BAD_STEPS[message]}))
    assert str(refusal.value).startswith(message)


def test_closed_sequences_give_their_blocks_and_ids_back(session: TargetSession) -> None:
    work = session.begin_step(
        target_pb2.StepRequest(
            step=2,
            close=[1],
            open=[opened(1)],
            slices=[piece(start=0, token_ids=[8, 9], new_blocks=[0])],
        )
    )
    session.check_integrity()
    assert (list(work.slices[0].block_table), work.slices[0].num_logits) == ([0], 1)
    assert (list(work.tasks[0].prefix), candidates_of(work)) == ([8, 9], [])


def test_a_verdict_sees_every_token_before_the_window(session: TargetSession) -> None:
    session.begin_step(
        target_pb2.StepRequest(step=2, slices=[piece(token_ids=[10, 11, 12], window=2)])
    )
    # Both candidates were refused: the next slice begins before them and drops them.
    work = session.begin_step(
        target_pb2.StepRequest(step=3, slices=[piece(start=4, token_ids=[20, 21], window=1)])
    )
    assert (list(work.tasks[0].prefix), candidates_of(work)) == ([1, 2, 3, 10, 20], [21])
    assert (work.slices[0].start, work.slices[0].num_logits) == (4, 2)


def test_a_step_may_hold_closes_alone(session: TargetSession) -> None:
    assert session.begin_step(target_pb2.StepRequest(step=2, close=[1, 2])) == StepWork()
    session.check_integrity()


def shared_step(
    step: int, token_ids: Iterable[int], *, shared_blocks: Iterable[int] = (0,)
) -> target_pb2.StepRequest:
    """Sequence 3 begins behind the 16 tokens in block 0, whose KV sequence 1 computed."""
    begun = target_pb2.TargetSequence(
        sequence_id=3, spec=spec_to_wire(SPEC), token_ids=token_ids, shared_blocks=shared_blocks
    )
    return target_pb2.StepRequest(step=step, open=[begun])


def test_a_shared_block_is_read_by_several_and_written_by_none(session: TargetSession) -> None:
    prompt = [1, 2, 3, *range(20, 33)]
    session.begin_step(
        target_pb2.StepRequest(step=2, slices=[piece(token_ids=prompt[3:], verdict=False)])
    )
    begun = shared_step(3, prompt)
    begun.slices.append(piece(sequence_id=3, start=16, token_ids=[9], new_blocks=[2]))
    work = session.begin_step(begun)
    assert list(work.slices[0].block_table) == [0, 2]
    assert list(work.tasks[0].prefix) == [*prompt, 9]
    session.check_integrity()
    with pytest.raises(ProtocolError, match="start: expected a position in a block of the seq"):
        session.begin_step(target_pb2.StepRequest(step=4, slices=[piece(start=15)]))


def test_a_shared_block_belongs_to_who_is_left(session: TargetSession) -> None:
    session.begin_step(shared_step(2, range(16)))
    session.begin_step(target_pb2.StepRequest(step=3, close=[3]))
    session.begin_step(target_pb2.StepRequest(step=4, slices=[piece()]))
    session.check_integrity()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": range(15)}, "token_ids: expected 16, as many as the shared blocks have"),
        ({"token_ids": [100] * 16}, "token_ids: expected ids below 100, got 100"),
        ({"token_ids": [1] * 16, "shared_blocks": [5]}, "shared_blocks: expected ids below 5"),
    ],
)
def test_a_malformed_begin_behind_shared_blocks_is_refused(
    session: TargetSession, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProtocolError, match=f"open: sequence 3: {message}"):
        session.begin_step(shared_step(2, **fields))


@pytest.mark.parametrize("seed", range(6))
def test_counts_follow_windows_trees_moves_and_rollbacks(seed: int) -> None:
    """A session's counts give the rows of plain lists that are counted anew."""
    draw = random.Random(seed)
    limits = EngineLimits(vocab_size=12, max_model_len=4000, block_size=16, num_blocks=250)
    session, text = TargetSession(limits), [draw.randrange(12) for _ in range(20)]
    sampling = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2)
    spec = SequenceSpec(sampling, seed=1, prompt_length=draw.randrange(1, 30))
    begun = piece(start=0, token_ids=text[:9], new_blocks=range(250), verdict=False)
    session.begin_step(target_pb2.StepRequest(step=1, open=[opened(1, spec)], slices=[begun]))
    start, moves = 9, list[target_pb2.KvMove]()
    for step in range(2, 60):
        window = draw.randrange(6)
        parents = [draw.randrange(index + 1) for index in range(window)]
        if draw.random() < 0.5:
            parents = list(range(window))
        candidates = _different_siblings(draw, parents)
        message = piece(
            start=start,
            token_ids=[*text[start:], *candidates],
            window=window,
            parents=parents,
            kv_moves=moves,
        )
        (task,) = session.begin_step(target_pb2.StepRequest(step=step, slices=[message])).tasks
        assert list(task.prefix) == text
        logits_RV = torch.randn(1 + window, 12, generator=torch.Generator().manual_seed(step))
        rows, anew = (
            WindowRows(logits_RV, task.candidates.tree, spec, prefix)
            for prefix in (task.prefix, list(task.prefix))
        )
        path = list[int]()
        for node in range(1 + window):
            path = _path_to(parents, node)
            assert rows.adjusted_V(node, path).tobytes() == anew.adjusted_V(node, path).tobytes()
        first, chain = len(text), parents == list(range(window))
        path = _path_to(parents, draw.randrange(1 + window))
        moves = [
            target_pb2.KvMove(from_position=first + index, to_position=first + place)
            for place, index in enumerate(path)
            if index != place
        ]
        text += [*(candidates[index] for index in path), draw.randrange(12)]
        start = len(text) - 1
        if chain and draw.random() < 0.2:  # a driver may take back what was committed
            del text[draw.randrange(5, len(text)) :]
            start = draw.randrange(len(text))


def _different_siblings(draw: random.Random, parents: list[int]) -> list[int]:
    taken, token_ids = set[tuple[int, int]](), []
    for parent in parents:
        token_id = draw.choice([one for one in range(12) if (parent, one) not in taken])
        taken.add((parent, token_id))
        token_ids.append(token_id)
    return token_ids


def _path_to(parents: list[int], node: int) -> list[int]:
    """The candidates from the root to a node."""
    path = []
    while node:
        path.append(node - 1)
        node = parents[node - 1]
    return path[::-1]
