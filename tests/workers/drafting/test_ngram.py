"""Several guesses as one tree, and n-gram drafts made of them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sampling import SamplingParams, SequenceSpec
from workers.drafting.desk import DraftingDesk
from workers.drafting.kinds.ngram import NgramProposer, merge_branches
from workers.drafting.tree import Grant
from workers.verification.candidates import CandidateTree

SPEC = SequenceSpec(SamplingParams(), seed=0, prompt_length=1, end_token_ids=(99,))


def paths_of(tree: CandidateTree) -> set[tuple[int, ...]]:
    """The token ids from the root to each leaf."""
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*paths[parent], token_id))
    return {path for node, path in enumerate(paths) if not tree.children(node)}


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_merged_tree_holds_the_guesses_and_no_more(seed: int) -> None:
    random = Random(seed)
    guesses = [
        [random.randrange(3) for _ in range(random.randrange(1, 6))]
        for _ in range(random.randrange(7))
    ]
    branches = random.randrange(1, 5)
    token_ids, parents = merge_branches(guesses, branches=branches, max_nodes=1000)
    tree = CandidateTree(tuple(token_ids), tuple(parents))
    tree.check(vocab_size=3, max_nodes=1000)
    chosen: list[list[int]] = []
    for guess in guesses:
        new = not any(guess == other[: len(guess)] for other in chosen)
        if new and len(chosen) < branches:
            chosen.append(guess)
    begun_by_others = [
        guess for guess in chosen if any(guess == other[: len(guess)] != other for other in chosen)
    ]
    leaves = {tuple(guess) for guess in chosen if guess not in begun_by_others}
    assert paths_of(tree) == (leaves or {()})
    # A smaller budget keeps the beginning of the same list.
    budget = random.randrange(len(token_ids) + 1)
    assert merge_branches(guesses, branches=branches, max_nodes=budget) == (
        token_ids[:budget],
        parents[:budget],
    )


def test_what_followed_earlier_places_are_further_branches() -> None:
    session = (desk := DraftingDesk(NgramProposer(), max_sequences=1)).open_session()
    #                  2 3 -> 7 5    2 3 -> 7 6    3 -> 8 4         at last: 2 3
    session.open(1, SPEC, [1, 2, 3, 7, 5, 2, 3, 7, 6, 9, 3, 8, 4, 2, 3])
    session.grant(1, Grant(17, branches=3, nodes=20))
    (news,) = desk.run_pass()
    (proposal,) = news.proposals
    tree = CandidateTree(proposal.token_ids, proposal.parents)
    # The longest suffix first and the newest; then the shorter one's.
    assert paths_of(tree) == {(7, 6), (7, 5), (8, 4)}
    assert proposal.token_ids[0] == 7
    assert proposal.last
    assert not desk.has_work
    # What stays after an outcome is not told again; what is new hangs on the old.
    session.outcome(1, 15, [7])
    session.grant(1, Grant(19, branches=3, nodes=20))
    (news,) = desk.run_pass()
    (proposal,) = news.proposals
    desk.check_integrity()
    kept = {tree.tokens[node] for tree in session.trees.values() for node in tree.children(0)}
    assert kept == {6, 5}
    assert proposal.base_length >= 16


def test_branches_keep_to_the_grant_and_to_end_tokens() -> None:
    session = (desk := DraftingDesk(NgramProposer(), max_sequences=1)).open_session()
    session.open(1, SPEC, [2, 3, 7, 99, 2, 3, 8, 5, 6, 2, 3])
    session.grant(1, Grant(20, branches=2, nodes=7))
    (news,) = desk.run_pass()
    (proposal,) = news.proposals
    assert len(proposal.token_ids) == 7
    tree = CandidateTree(proposal.token_ids, proposal.parents)
    assert (7, 99) in paths_of(tree)
    session.outcome(1, 11, [7])
    session.grant(1, Grant(13, branches=2, nodes=7))
    desk.run_pass()
    desk.check_integrity()
    # Nothing known: it says so, and once.
    session.open(2, SPEC, [5])
    session.close(1)
    session.open(2, SPEC, [5])
    session.grant(2, Grant(5, branches=2, nodes=5))
    (news,) = desk.run_pass()
    assert (news.proposals[0].token_ids, news.proposals[0].last) == ((), True)
    assert not desk.has_work


@pytest.mark.parametrize("text", [[1, 2, 3, 4, 2, 3], [1, 2, 99, 3, 2]])
def test_a_chain_is_told_once_where_branches_are_granted_too(text: list[int]) -> None:
    """It has none to begin, and was asked for them in pass after pass."""
    session = (desk := DraftingDesk(NgramProposer(), max_sequences=1)).open_session()
    session.open(0, SPEC, text)
    session.grant(0, Grant(until_position=len(text) + 2, fan_out=4))
    (proposal,) = desk.run_pass()[0].proposals
    assert proposal.token_ids
    assert proposal.last
    assert not desk.has_work
    session.grant(0, Grant(until_position=len(text) + 4, fan_out=4))
    assert desk.has_work
    desk.run_pass()
    assert not desk.has_work
