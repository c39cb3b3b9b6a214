"""The candidates of a slice as received, checked against the sequence's rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.errors import ProtocolError
from paceline.rules import MAX_PROPOSED
from paceline.v1 import target_pb2
from workers.drafting.draft_probs_wire import distributions_from_wire
from workers.verification.candidates import CandidateTree, DraftProbs, check_proposal
from workers.verification.rule import rule_named


@dataclass(slots=True)
class Candidates:
    """What a rule verifies.

    `placed_as_tree`: the KV positions are not those of a chain, so the engine needs the parents,
    and an accepted path must be moved.
    """

    tree: CandidateTree
    draft_probs: DraftProbs | None = None
    placed_as_tree: bool = False


_NONE = Candidates(CandidateTree((), ()))


def read_candidates(
    message: target_pb2.Slice, token_ids: Sequence[int], rule: str, *, vocab_size: int
) -> Candidates:
    """The candidates of a slice. `token_ids` are its last `window` ones, each below `vocab_size`.

    Raises ProtocolError naming the field that is wrong.
    """
    if rule_named(rule).shares_noise and not message.parents and not message.multiplicities:
        return Candidates(CandidateTree.chain(token_ids)) if token_ids else _NONE
    parents, multiplicities = message.parents, tuple(message.multiplicities)
    for name, values in (("parents", parents), ("multiplicities", multiplicities)):
        if values and len(values) != len(token_ids):
            raise ProtocolError(
                f"{name}: expected none or one per candidate, {len(token_ids)}, got {len(values)}"
            )
    in_order = tuple(range(len(token_ids)))
    with _naming("parents"):
        tree = CandidateTree(tuple(token_ids), tuple(parents) or in_order, multiplicities)
    draft_probs = None
    if rule_named(rule).needs_draft_probs:
        with _naming("distributions"):
            draft_probs = distributions_from_wire(message.distributions)
    try:
        check_proposal(rule, tree, draft_probs, vocab_size=vocab_size, max_nodes=MAX_PROPOSED)
    except ProtocolError as error:
        name = _wrong_field(rule, tree, vocab_size)
        raise ProtocolError(f"{name}: {error}") from None
    return Candidates(tree, draft_probs, placed_as_tree=tree.parents != in_order)


def _wrong_field(rule: str, tree: CandidateTree, vocab_size: int) -> str:
    """The field that check_proposal found wrong. It knows no wire, and checks in this order.

    It is found by leaving fields out one by one: if the check then passes, that field was wrong.
    """

    def passes(tree: CandidateTree) -> bool:
        equal_siblings = rule_named(rule).equal_siblings
        try:
            tree.check(vocab_size=vocab_size, max_nodes=MAX_PROPOSED, equal_siblings=equal_siblings)
        except ProtocolError:
            return False
        return True

    if len(tree) > MAX_PROPOSED:
        return "window"
    once_each = CandidateTree(tree.token_ids, tree.parents)
    if not passes(once_each) or (rule_named(rule).chain_only and not once_each.is_chain):
        return "parents"
    if not passes(tree) or (not rule_named(rule).counts_paths and tree != once_each):
        return "multiplicities"
    return "distributions"


@contextmanager
def _naming(field: str) -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"{field}: {error}") from None
