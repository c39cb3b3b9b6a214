"""Ranks over gloo that choose as on a device give the verdicts of one rank with whole rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import InternalError
from paceline.limits import MAX_LOGPROBS
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.structure import Structure
from paceline.v1 import target_pb2
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.parallel.ranks import Ranks
from tests.workers.verification.remainders import Remainders
from workers.engine.cpu.engine import CpuEngine
from workers.engine.parallel.cuts import vocabulary_width
from workers.engine.parallel.group import RankGroup
from workers.target import group_verdicts as module
from workers.target.group_verdicts import group_verdicts
from workers.target.session import Candidates, VerdictTask
from workers.target.verdicts import verdicts_of
from workers.verification.candidates import (
    CandidateTree,
    DraftProbs,
    SparseProbs,
    check_proposal,
    merge_paths,
)
from workers.verification.prefix import CountedText
from workers.verification.rule import RULES, rule_named
from workers.verification.structure import Follower

VOCAB = 302
NAMES = tuple(RULES)
LIKELY = 4
"""Token ids below this have large logits, and are the candidates: many of them are accepted."""
END_IDS = (2, VOCAB + 3)
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.4),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1, temperature=1.5),
    SamplingParams(temperature=1.7, top_k=40, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, top_p=0.9),
    SamplingParams(logit_bias={3: -2.0, 150: 4.0, 299: 5.0}, min_tokens=3),
)
ABOUT = 1e-6
"""Bound on the difference of log probabilities: one rank on a CPU takes exp in float32."""


class Broken(Remainders):
    """A matcher that fails."""

    def allowed_V(self) -> Any:
        raise InternalError("the structure is too much")


@dataclass(frozen=True)
class Met:
    """Ranks that have met, and their engines. Of the model, only its sizes matter here."""

    ranks: Ranks
    engines: list[CpuEngine]


@pytest.fixture(scope="module", params=[2, 3])
def met(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Met]:
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB, num_attention_heads=8
    )
    with Ranks(request.param) as ranks:
        engines = ranks.together(lambda group: engine_of(folder, group))
        ranks.meet()
        yield Met(ranks, engines)


def engine_of(folder: Path, group: RankGroup) -> CpuEngine:
    return CpuEngine(folder, threads=1, kv_memory_bytes=1 << 21, group=group)


def tree_for(rule: str, chance: random.Random) -> CandidateTree:
    """A tree of the shape that the rule allows."""
    size = chance.randrange(0, 10)
    if rule_named(rule).chain_only:
        return CandidateTree.chain(chance.choices(range(LIKELY), k=size))
    if rule_named(rule).counts_paths:
        return merge_paths([chance.choices(range(LIKELY), k=3) for _ in range(size // 2)])
    parents: list[int] = []
    token_ids: list[int] = []
    for _ in range(size):
        parent, token_id = chance.randint(0, len(parents)), chance.randrange(LIKELY)
        is_new = (parent, token_id) not in zip(parents, token_ids, strict=True)
        if is_new or rule_named(rule).equal_siblings:
            parents.append(parent)
            token_ids.append(token_id)
    return CandidateTree(tuple(token_ids), tuple(parents))


def probs_for(tree: CandidateTree, chance: random.Random) -> DraftProbs:
    """Each node's children and some other tokens of any part of the vocabulary."""
    of_node = {}
    for node in range(len(tree) + 1):
        if children := tree.children(node):
            others = chance.sample(range(VOCAB), chance.randrange(0, 12))
            ids = np.unique([*tree.tokens_of(children), *others])
            probs = np.array([chance.random() + 0.05 for _ in ids], dtype=np.float32)
            of_node[node] = SparseProbs(ids, probs / probs.sum())
    return DraftProbs(of_node)


def task_of(
    number: int,
    rule: str,
    sampling: SamplingParams,
    *,
    follows: type[Remainders] | None = None,
    **changes: Any,
) -> VerdictTask:
    """A task of `number`'s own tree and prefix. `changes`: to its spec."""
    chance = random.Random(number)
    prompt = chance.choices(range(VOCAB), k=5)
    output = [] if follows else chance.choices(range(VOCAB), k=number % 3)
    tree = tree_for(rule, chance)
    spec = SequenceSpec(sampling, chance.randrange(2**64), 5, end_token_ids=END_IDS, rule=rule)
    if follows:
        spec = replace(spec, structure=Structure.regex("x"))
    follower = Follower(lambda: follows(VOCAB), END_IDS) if follows else None
    text = CountedText([*prompt, *output], prompt_length=5, follower=follower)
    probs = probs_for(tree, chance) if rule_named(rule).needs_draft_probs else None
    check_proposal(rule, tree, probs, vocab_size=VOCAB, max_nodes=64)
    return VerdictTask(
        number,
        replace(spec, **changes),
        text.prefix(len(prompt) + len(output)),
        Candidates(tree, probs),
        names_path=True,
        has_verdict=True,
        fed=(),
    )


def all_tasks() -> list[VerdictTask]:
    """Each rule with each sampling; some with a structure, log probabilities or top ids."""
    tasks = []
    for number in range(6 * len(NAMES) * len(SAMPLINGS)):
        rule = NAMES[number % len(NAMES)]
        sampling = SAMPLINGS[number // len(NAMES) % len(SAMPLINGS)]
        follows = Remainders if number % 5 in (0, 3) else None
        changes = {"logprobs": number % 7} if number % 4 == 0 else {}
        task = task_of(number, rule, sampling, follows=follows, **changes)
        tree = task.candidates.tree
        if number % 11 == 0:
            task.fed = (*task.prefix[-3:], *tree.token_ids)
        if number % 13 == 0:  # entries for some of the tokens before the candidates
            task.spec = replace(task.spec, prompt_logprobs=number % 4)
            task.num_fed = 3 + len(tree)
            task.logprobs_of = (5, 300, 151)[: 1 + number % 3]
            task.fed = (*task.prefix[-3:], *tree.token_ids) if task.fed else ()
        if number % 17 == 0:
            task.has_verdict = False
            task.fed = (*task.prefix[-3:], *tree.token_ids)
        tasks.append(task)
    return tasks


def logits_for(tasks: Sequence[VerdictTask]) -> Tensor:
    count = sum(task.num_rows for task in tasks)
    logits_TV = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(8)) * 2
    logits_TV[:, :LIKELY] += 5.0
    return logits_TV


def judged_by(
    met: Met, logits_TV: Tensor, tasks_of: Callable[[int], list[VerdictTask]]
) -> tuple[list[target_pb2.Verdict], list[VerdictTask]]:
    """Rank 0's verdicts and its tasks; `tasks_of(rank)` makes those of a rank."""
    degree = len(met.engines)
    width = vocabulary_width(VOCAB, degree=degree)
    padded_TV = torch.nn.functional.pad(logits_TV, (0, degree * width - VOCAB), value=1e30)

    def work(group: RankGroup) -> tuple[list[target_pb2.Verdict], list[VerdictTask]]:
        rank = group.place.rank
        tasks = tasks_of(rank)
        part_TV = padded_TV[:, rank * width : (rank + 1) * width]
        return group_verdicts(met.engines[rank], part_TV, tasks), tasks

    found, *others = met.ranks.together(work)
    assert all(verdicts == [] for verdicts, _ in others)
    return found


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_chooses_on_device", lambda group: True)


def without_logprobs(verdict: target_pb2.Verdict) -> target_pb2.Verdict:
    bare = target_pb2.Verdict()
    bare.CopyFrom(verdict)
    bare.ClearField("logprobs")
    return bare


def assert_about(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Log probabilities of the same tokens, with the same ranks."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.rank == other.rank
        assert list(one.top_ids) == list(other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=ABOUT)
        assert list(one.top_logprobs) == pytest.approx(list(other.top_logprobs), abs=ABOUT)


def test_verdicts_are_those_of_whole_rows(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule and sampling, trees and windows; no row is gathered."""

    def refuse(*_: object) -> None:
        raise AssertionError("a whole row was asked for")

    monkeypatch.setattr(RankGroup, "gather", refuse)
    expected_tasks = all_tasks()
    logits_TV = logits_for(expected_tasks)
    expected = verdicts_of(logits_TV, expected_tasks)
    found, tasks = judged_by(met, logits_TV, lambda rank: all_tasks())
    assert not any(verdict.error for verdict in expected)
    assert [without_logprobs(one) for one in found] == [without_logprobs(one) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert_about(one.logprobs, other.logprobs)
    for task, other_task in zip(tasks, expected_tasks, strict=True):
        assert task.top_tokens == other_task.top_tokens
        assert_about(task.prompt_logprobs, other_task.prompt_logprobs)
    # Nothing of this is vacuous.
    for rule in NAMES:
        lengths = [
            (verdict.num_accepted, len(task.candidates.tree))
            for verdict, task in zip(expected, [t for t in tasks if t.has_verdict], strict=True)
            if task.spec.rule == rule
        ]
        assert max(accepted for accepted, _ in lengths) >= 2
        assert sum(accepted == 0 and size > 0 for accepted, size in lengths) >= 2
    assert sum(len(verdict.logprobs) for verdict in expected) > 50
    assert sum(len(task.prompt_logprobs) for task in tasks) > 20
    assert sum(len(task.top_tokens) for task in tasks) > 50


def test_rules_that_need_whole_rows_stand_beside(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gets their rows, and no others."""
    monkeypatch.setattr(RULES, "_entries", dict(RULES.all()))
    RULES.add(replace(rule_named("one-hot"), name="whole", others_as_one=False))
    gathered: list[int] = []
    gather = RankGroup.gather

    def counted(group: RankGroup, part: Tensor) -> list[Tensor] | None:
        gathered.append(part.shape[0])
        return gather(group, part)

    monkeypatch.setattr(RankGroup, "gather", counted)

    def tasks_of(rank: int) -> list[VerdictTask]:
        return [task_of(n, ("whole", *NAMES)[n % 3], SAMPLINGS[n % 10]) for n in range(30)]

    tasks = tasks_of(0)
    logits_TV = logits_for(tasks)
    found, _ = judged_by(met, logits_TV, tasks_of)
    assert found == verdicts_of(logits_TV, tasks)
    whole = sum(task.num_rows for task in tasks if task.spec.rule == "whole")
    assert gathered == [whole] * len(met.engines)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_structure_that_fails_at_one_rank_costs_its_request(met: Met, failing: int) -> None:
    """Rank 0 says why; where another rank has no mask, no token is chosen without it."""

    def tasks_of(rank: int, broken: int | None = failing) -> list[VerdictTask]:
        tasks = [
            task_of(number, rule, SamplingParams(top_k=9), follows=Remainders)
            for number, rule in enumerate(("coupled", "one-hot", "recursive", "coupled"))
        ]
        if rank == broken:
            for number in (1, 3):
                old = tasks[number]
                tasks[number] = task_of(
                    number, old.spec.rule, SamplingParams(top_k=9), follows=Broken
                )
        return tasks

    logits_TV = logits_for(tasks_of(0, None))
    expected = verdicts_of(logits_TV, tasks_of(0, None))
    found, _ = judged_by(met, logits_TV, tasks_of)
    assert [found[0], found[2]] == [expected[0], expected[2]]
    for verdict in (found[1], found[3]):
        told = "structure is too much" if failing == 0 else "expected finite logits, got nan"
        assert told in verdict.error


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_decide_must_be_numbers(met: Met, bad: float) -> None:
    def tasks_of(rank: int) -> list[VerdictTask]:
        return [
            task_of(number, rule, SamplingParams(), logprobs=2)
            for number, rule in enumerate(NAMES, 20)
        ]

    logits_TV = logits_for(tasks_of(0))
    first = tasks_of(0)[0].num_rows
    logits_TV[:first] = bad
    logits_TV[first, 150] = bad  # the first row of the next task
    expected = verdicts_of(logits_TV, tasks_of(0))
    found, _ = judged_by(met, logits_TV, tasks_of)
    assert [without_logprobs(one) for one in found] == [without_logprobs(one) for one in expected]
    assert found[0].error
    assert bool(found[1].error) == (bad != -torch.inf)


def test_ranks_exchange_some_bytes_a_row(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not depend on the vocabulary."""
    gathered: list[int] = []
    all_gather = RankGroup.all_gather

    def counted(group: RankGroup, part: Tensor) -> Tensor:
        if not group.place.rank:
            gathered.append(part.nbytes)
        return all_gather(group, part)

    monkeypatch.setattr(RankGroup, "all_gather", counted)

    def bytes_of(**options: Any) -> tuple[int, VerdictTask]:
        rule = options.pop("rule", "coupled")
        number = next(n for n in range(99) if len(task_of(n, rule, SAMPLINGS[1]).candidates.tree))
        sampling = options.pop("sampling", SAMPLINGS[1])

        def tasks_of(rank: int) -> list[VerdictTask]:
            return [task_of(number, rule, sampling, **options)]

        gathered.clear()
        _, (task,) = judged_by(met, logits_for(tasks_of(0)), tasks_of)
        return sum(gathered), task

    found, task = bytes_of(sampling=SAMPLINGS[0])
    assert found == 8 * task.num_rows
    found, task = bytes_of()
    assert found == 16 * task.num_rows
    found, task = bytes_of(sampling=SamplingParams(min_p=0.1, repetition_penalty=1.3))
    assert found == 16 * task.num_rows
    found, task = bytes_of(follows=Remainders)
    assert found == 16 * task.num_rows
    found, task = bytes_of(rule="recursive")
    probs = task.candidates.draft_probs
    assert probs is not None
    most_named = max(len(pairs.token_ids_M) for pairs in probs.of_node.values())
    assert found == 16 * task.num_rows + 8 * (most_named + 2) * len(probs.of_node)
    found, task = bytes_of(logprobs=5)
    entries = 32  # a block
    assert found == 16 * task.num_rows + entries * 8 * (2 + 2 + MAX_LOGPROBS + 2)
