"""The likely verdict on a window, against counting every case."""

from __future__ import annotations

from itertools import product

import pytest

from cluster.decoding.counts import firsts_along
from cluster.decoding.outlook import Shape, chain_outlook, shape_of
from cluster.decoding.windows import RANK_CHANCES, Node, likeliest


def test_a_chain_is_the_closed_form() -> None:
    outlook = chain_outlook(3, (0.8,))
    assert outlook.tokens == pytest.approx((1 - 0.8**4) / 0.2)
    assert outlook.goes_on == pytest.approx(0.8**4)
    assert outlook.is_open == pytest.approx(1 - 0.8**4)
    assert (outlook.candidates, outlook.depth) == (3, 3)


@pytest.mark.parametrize("shape", [Shape(3, (2, 1, 0)), Shape(2, (3, 2)), Shape(1, (0,))])
def test_a_tree_is_the_sum_over_all_that_may_come(shape: Shape) -> None:
    """At each place the first guess is right, or the second, or neither."""
    chances, hit_rate, deepest = (0.7, 0.6, 0.9), 0.4, 6
    tokens = goes_on = is_open = depth = 0.0
    for outcome in product(("first", "second", "neither"), repeat=deepest):
        weight = 1.0
        for place, right in enumerate(outcome):
            first = chances[min(place, 2)]
            weight *= {
                "first": first,
                "second": (1 - first) * hit_rate,
                "neither": (1 - first) * (1 - hit_rate),
            }[right]
        accepted, on_branch = 0, 0
        while True:
            end = on_branch or shape.chain
            has_fork = not on_branch and accepted < shape.chain and shape.branches[accepted] > 0
            if accepted < end and outcome[accepted] == "first":
                accepted += 1
            elif has_fork and outcome[accepted] == "second":
                on_branch = accepted + shape.branches[accepted]
                accepted += 1
            else:
                break
        tokens += weight * (accepted + 1)
        if accepted == end and outcome[accepted] == "first":
            goes_on += weight
            depth += weight * accepted
        elif not has_fork:
            is_open += weight
    outlook = shape.outlook(chances, hit_rate)
    assert outlook.tokens == pytest.approx(tokens)
    assert outlook.goes_on == pytest.approx(goes_on)
    assert outlook.is_open == pytest.approx(is_open)
    assert outlook.depth == pytest.approx(depth / goes_on)


@pytest.mark.parametrize(("depth", "nodes"), [(1, 1), (4, 3), (4, 7), (8, 24), (12, 12), (0, 8)])
def test_a_shape_is_what_a_step_picks(depth: int, nodes: int) -> None:
    """A chain, and beside each of its candidates a second guess with a chain of the same depth."""
    root = Node(0, 0, 0)
    chain = root
    for place in range(depth):
        first, branch = _child(chain), _child(chain)
        for _ in range(depth - place - 1):
            branch = _child(branch)
        chain = first
    picked = likeliest(root, nodes, width=2, rank_chances=RANK_CHANCES)
    shape = shape_of(depth, nodes)
    assert shape.chain + sum(shape.branches) == len(picked)
    assert max((node.length for node in picked), default=0) >= shape.chain


def test_along_a_path_it_is_told_whether_first_candidates_were_right() -> None:
    parents = (0, 0, 1, 1, 2, 4)  # two candidates, under the first two more, and so on
    assert firsts_along(parents, (0, 3, 5)) == (True, False, True)
    assert firsts_along(parents, (1,)) == (False, False), "one beneath it was refused"
    assert firsts_along(parents, ()) == (False,)
    assert firsts_along(parents, (0, 2)) == (True, True), "nothing beneath it"


def _child(parent: Node) -> Node:
    child = Node(1, parent.length + 1, 0, parent)
    parent.children.append(child)
    return child
