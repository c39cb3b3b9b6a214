"""Branches for other outcomes: where they begin, how they grow, what is told of them."""

from __future__ import annotations

from itertools import combinations

import pytest

from paceline.errors import ProtocolError
from paceline.prefix_hash import hash_prefix
from paceline.rules import Rule
from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.drafting.mirror import FreshDrafter
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.fan_out import RANKS, Fork, HitCurve, spread_over
from workers.drafting.model import ModelProposer
from workers.drafting.proposal import Proposal
from workers.drafting.tree import Grant
from workers.engine.engine import Engine
from workers.verification.draws import top_children

PROMPT = [5, 6, 7]
SPEC = SequenceSpec(SamplingParams(temperature=1.0), seed=5, prompt_length=3)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_branches_are_spread_by_weight(exponent: float) -> None:
    """F proportional to weight^(1/(1+r)), as far as whole numbers and RANKS allow."""
    weights = [0.85**ahead * 0.15 for ahead in range(40)]
    forks = [Fork(node, weight) for node, weight in enumerate(weights)]
    budget = 30
    counts = spread_over(forks, budget, exponent)
    assert sum(counts.values()) == budget
    shares = [weight ** (1 / (1 + exponent)) for weight in weights]
    # The continuous law with one scale for all that have some, but not RANKS of them.
    inside = [node for node, count in counts.items() if 0 < count < RANKS]
    scale = sum(counts[node] for node in inside) / sum(shares[node] for node in inside)
    assert all(abs(counts[node] - scale * shares[node]) < 1 for node in inside)


def test_forks_that_are_to_come_keep_their_part() -> None:
    now = [Fork(0, 0.2), Fork(1, 0.1)]
    assert spread_over(now, 3, 1.0) == {0: 2, 1: 1}
    assert spread_over([*now, Fork(None, 0.15)], 3, 1.0) == {0: 1, 1: 1}


def test_the_hit_curve_is_learned() -> None:
    curve = HitCurve()
    assert curve.exponent == pytest.approx(1.0)
    for _ in range(200):
        curve.observe(1)
    assert curve.exponent > 2
    for _ in range(400):
        curve.observe(2)
    assert curve.exponent == 0


def _pass(session: DraftingSession, desk: DraftingDesk) -> list[Proposal]:
    return [proposal for news in desk.run_pass() for proposal in news.proposals]


def _all_passes(session: DraftingSession, desk: DraftingDesk) -> list[Proposal]:
    proposals = []
    while desk.has_work:
        proposals += _pass(session, desk)
        desk.check_integrity()
    return proposals


def _paths(proposals: list[Proposal], prompt: list[int]) -> set[tuple[int, ...]]:
    """What a driver holds: each candidate as the tokens that lead to it, told once alone."""
    by_hash = {hash_prefix(prompt): tuple(prompt)}
    for one in proposals:
        places = [by_hash[one.base_hash]]
        assert len(places[0]) == one.base_length
        parents = one.parents or tuple(range(len(one.token_ids)))
        for token_id, parent in zip(one.token_ids, parents, strict=True):
            path = (*places[parent], token_id)
            assert hash_prefix(path) not in by_hash, "told twice"
            by_hash[hash_prefix(path)] = path
            places.append(path)
    return {path[len(prompt) :] for path in by_hash.values()} - {()}


def _drafted(engine: Engine, **grant: object) -> set[tuple[int, ...]]:
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, SPEC, PROMPT)
    session.grant(1, Grant(3 + 5, nodes=60, **grant))  # type: ignore[arg-type]
    proposals = _all_passes(session, desk)
    assert not any(one.last for one in proposals[:-1])
    desk.close_session(session)
    return _paths(proposals, PROMPT)


def _rank(fresh: FreshDrafter, path: tuple[int, ...]) -> int:
    """The place of a path's last token among the best candidates there."""
    before = (*PROMPT, *path[:-1])
    return top_children(fresh.logits(before), SPEC, before, 1 + RANKS + 1).index(path[-1])


def test_branches_begin_with_the_next_best_and_go_on_as_chains(
    engine: Engine, fresh: FreshDrafter
) -> None:
    paths = _drafted(engine, fan_out=6)
    chain = _drafted(engine)
    assert chain < paths
    heads = []
    for path in paths:
        rank = _rank(fresh, path)
        assert rank <= RANKS
        if rank:
            heads.append(path)
    assert len(heads) == 6
    ends = {path for path in paths if not any(p[:-1] == path for p in paths)}
    assert len(ends) == 7, "one chain and six branches, each without forks of its own but those"
    assert {len(end) for end in ends} == {5}, "all of them grew to the end of the grant"


def test_drafters_that_share_the_branches_draw_each_once(
    engine: Engine, fresh: FreshDrafter
) -> None:
    chain = _drafted(engine)
    shares = [_drafted(engine, fan_out=10, share=number, shares=3) for number in range(3)]
    assert shares[0] == _drafted(engine, fan_out=5), "the likelier half, as it would alone"
    for one, other in combinations(shares, 2):
        assert one & other == chain
    for number, paths in enumerate(shares[1:]):
        heads = [(path, rank) for path in paths if (rank := _rank(fresh, path))]
        assert heads
        assert all((3 + len(path) - 1 + rank) % 2 == number for path, rank in heads)


def test_an_outcome_that_hits_a_branch_keeps_it(engine: Engine) -> None:
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, SPEC, PROMPT)
    session.grant(1, Grant(3 + 5, nodes=60, fan_out=6))
    paths = _paths(_all_passes(session, desk), PROMPT)
    chain = _drafted(engine)
    branch = next(path for path in paths if len(path) == 5 and path not in chain)
    fork = next(length for length in range(5) if branch[: length + 1] not in chain)
    session.outcome(1, 3, list(branch[: fork + 1]))
    desk.check_integrity()
    tree = session.trees[1]
    kept = {tuple(tree.prefix(node)) for node in range(1, tree.end + 1)}
    below = {path for path in paths if path[: fork + 1] == branch[: fork + 1]}
    assert kept == {(*PROMPT, *path) for path in below if len(path) > fork + 1}
    session.grant(1, Grant(3 + 5 + fork + 1, nodes=60, fan_out=6))
    _all_passes(session, desk)
    desk.close_session(session)


def test_it_is_refused_where_outcomes_cannot_be_foreseen(engine: Engine) -> None:
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    coins = SequenceSpec(SamplingParams(), seed=5, prompt_length=3, rule=Rule.REJECTION)
    session.open(1, coins, PROMPT)
    with pytest.raises(ProtocolError, match="fan_out"):
        session.grant(1, Grant(8, nodes=8, fan_out=2))
    with pytest.raises(ProtocolError, match="share"):
        session.grant(1, Grant(8, nodes=8, share=2, shares=2))
    desk.close_session(session)
