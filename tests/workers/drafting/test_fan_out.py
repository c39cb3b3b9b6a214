"""Branches for other outcomes: where they begin, how they grow, and how they are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from paceline.errors import ProtocolError
from paceline.prefix_hash import hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.drafting.mirror import FreshDrafter
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.expansions import Children, Expansion, Expansions
from workers.drafting.fanout import RANKS, Frontier
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.proposal import Proposal
from workers.drafting.tree import DraftTree, Grant, NewNodes
from workers.engine.cpu.engine import CpuEngine
from workers.verification.draws import top_children

PROMPT = [5, 6, 7]
SPEC = SequenceSpec(SamplingParams(temperature=1.0), seed=5, prompt_length=3)


def _chain(reached: Sequence[float], later: Sequence[float]) -> tuple[DraftTree, Expansions]:
    """A chain whose nodes were all fed. `reached`: the chance of each node.

    `later`: the shares of the remaining chance that the candidates after the first get.
    """
    tree = DraftTree(SPEC, PROMPT, max_position=1000)
    tree.set_grant(Grant(900, nodes=900, fan_out=100))
    drawn = Expansions()
    for node, (chance, following) in enumerate(pairwise([*reached, reached[-1]])):
        first = following / chance
        chances = [first, *((1 - first) * share for share in later)]
        tokens = tuple(range(len(chances)))
        children = Children(tokens, (1.0,) * len(tokens))
        drawn.of[node] = Expansion(children, chances, [None] * len(tokens))
        if node + 1 < len(reached):
            tree.extend(NewNodes((0,)))
            drawn.sent(node, 0, node + 1)
    return tree, drawn


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_branches_are_spread_by_weight(exponent: float) -> None:
    """F is proportional to weight^(1/(1+r)), as far as whole numbers and RANKS allow."""
    later = [rank ** -(1 + exponent) for rank in range(1, RANKS + 1)]
    tree, drawn = _chain([0.85**ahead for ahead in range(40)], later)
    taken = Frontier(tree, drawn).take(30)
    counts = Counter(node for node, index in taken if index)
    shares = [(0.85**ahead * 0.15) ** (1 / (1 + exponent)) for ahead in range(39)]
    # The continuous law with one scale for all that have some, but not RANKS of them.
    inside = [node for node, count in counts.items() if 0 < count < RANKS]
    scale = sum(counts[node] for node in inside) / sum(shares[node] for node in inside)
    assert all(abs(counts[node] - scale * shares[node]) < 1 for node in inside)


def test_what_one_pass_leaves_is_for_the_next() -> None:
    at_once, in_parts = (Frontier(*_chain([1.0, 0.9, 0.5], [0.5, 0.2])) for _ in range(2))
    taken = at_once.take(6)
    assert in_parts.take(2) + in_parts.take(4) == taken
    assert taken[0] == (2, 0), "the end of the chain, half of whose outcomes go on"


def test_a_later_candidate_never_goes_before_its_sibling() -> None:
    tree, drawn = _chain([1.0, 0.5], [0.1, 0.8])
    taken = Frontier(tree, drawn).take(7)
    for node in range(2):
        indices = [index for above, index in taken if above == node]
        assert indices == sorted(indices)


def test_candidates_beyond_the_grant_wait_for_a_larger_one() -> None:
    tree, drawn = _chain([1.0, 0.9, 0.8], [0.5, 0.1])
    tree.set_grant(Grant(len(PROMPT) + 2, nodes=900, fan_out=100))
    edge = Frontier(tree, drawn)
    assert {node for node, _ in edge.take(100)} == {0, 1}
    tree.set_grant(Grant(len(PROMPT) + 3, nodes=900, fan_out=100))
    assert edge.take(100) == [(2, 0), (2, 1), (2, 2)]


def _pass(session: DraftingSession, desk: DraftingDesk) -> list[Proposal]:
    return [proposal for news in desk.run_pass() for proposal in news.proposals]


def _all_passes(session: DraftingSession, desk: DraftingDesk) -> list[Proposal]:
    proposals = []
    while desk.has_work:
        proposals += _pass(session, desk)
        desk.check_integrity()
    return proposals


def _paths(proposals: list[Proposal], prompt: list[int]) -> set[tuple[int, ...]]:
    """What a driver holds: the tokens that lead to each candidate. Each must be sent only once."""
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


def _drafted(
    engine: CpuEngine, *, fan_out: int = 0, share: int = 0, shares: int = 0
) -> set[tuple[int, ...]]:
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, SPEC, PROMPT)
    session.grant(1, Grant(3 + 5, nodes=60, fan_out=fan_out, share=share, shares=shares))
    proposals = _all_passes(session, desk)
    assert not any(one.last for one in proposals[:-1])
    desk.close_session(session)
    return _paths(proposals, PROMPT)


def _rank(fresh: FreshDrafter, path: tuple[int, ...]) -> int:
    """The rank of a path's last token among the best candidates there."""
    before = (*PROMPT, *path[:-1])
    return top_children(fresh.logits(before), SPEC, before, 1 + RANKS + 1).index(path[-1])


def test_branches_begin_with_the_next_best_and_go_on(
    engine: CpuEngine, fresh: FreshDrafter
) -> None:
    paths, chain = _drafted(engine, fan_out=6), _drafted(engine)
    assert chain < paths
    assert all(_rank(fresh, path) <= RANKS for path in paths)
    heads = {path for path in paths if _rank(fresh, path)}
    assert any(path[:-1] in heads for path in paths), "a branch goes on"


def test_a_pass_gives_one_more_than_there_are_branches(engine: CpuEngine) -> None:
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, SPEC, PROMPT)
    session.grant(1, Grant(3 + 9, nodes=60, fan_out=6))
    told = []
    while desk.has_work:
        told.append(sum(len(one.token_ids) for one in _pass(session, desk)))
    assert told[0] == 1 + RANKS, "all that is drawn for one position"
    assert set(told[1:8]) == {7}
    assert sum(told) == 60
    desk.close_session(session)


def test_drafters_that_share_the_branches_draw_each_once(
    engine: CpuEngine, fresh: FreshDrafter
) -> None:
    chain = _drafted(engine)
    shares = [_drafted(engine, fan_out=4, share=number, shares=3) for number in range(3)]
    assert shares[0] == _drafted(engine, fan_out=2), "half of the branches, as it would alone"
    assert shares[1] & shares[2] == chain
    for number, paths in enumerate(shares[1:]):
        off = [path for path in paths if path not in chain and {path[:-1]} <= chain | {()}]
        assert off
        assert all((3 + len(path) - 1 + _rank(fresh, path)) % 2 == number for path in off)


def test_an_outcome_that_hits_a_branch_keeps_it(engine: CpuEngine) -> None:
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


def test_it_is_refused_where_outcomes_cannot_be_foreseen(engine: CpuEngine) -> None:
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    coins = SequenceSpec(SamplingParams(), seed=5, prompt_length=3, rule="rejection")
    session.open(1, coins, PROMPT)
    with pytest.raises(ProtocolError, match="fan_out"):
        session.grant(1, Grant(8, nodes=8, fan_out=2))
    with pytest.raises(ProtocolError, match="share"):
        session.grant(1, Grant(8, nodes=8, share=2, shares=2))
    desk.close_session(session)
