"""One sequence's candidates and the windows they make, without a scheduler: fast to enumerate."""

from __future__ import annotations

from collections.abc import Callable

from cluster.decoding.events import Proposal
from cluster.decoding.sequence import Sequence
from cluster.decoding.step_answers import gives_up_bonus
from paceline.prefix_hash import hash_prefix
from tests.cluster.decoding.law_drafter import PROMPT
from tests.cluster.decoding.law_world import verdict_of
from tests.workers.verification.enumeration import Coins, TinyModels
from workers.verification.candidates import CandidateTree, DraftProbs


def attach(sequence: Sequence, models: TinyModels, tree: CandidateTree) -> None:
    """Attach the proposal of a drafter with the distributions of `models`, after the prompt."""
    made = Proposal(
        sequence.sequence_id,
        len(PROMPT),
        hash_prefix(PROMPT),
        tree.token_ids,
        False,
        tree.parents,
        () if tree.is_chain else tree.multiplicities,
        models.draft_probs(tree).of_node,
    )
    sequence.tree.attach(made, until_position=99, max_nodes=99)
    sequence.tree.check_integrity()


def verify_window(
    sequence: Sequence,
    models: TinyModels,
    coins: Coins,
    *,
    beside: Callable[[], None] = lambda: None,
) -> bool:
    """Verify a window and commit the verdict. Returns whether there was any candidate.

    Without candidates nothing happens. `beside`: called before the verdict is committed.
    """
    asked, tree = sequence.request, sequence.tree
    window = tree.pin(asked.window, num_paths=sequence.num_paths)
    if not window.token_ids:
        return False
    tokens = tuple(tree.token_ids[len(PROMPT) :])
    beside()
    parents = window.parents or tuple(range(len(window.token_ids)))
    candidates = CandidateTree(window.token_ids, parents, window.multiplicities)
    probs = DraftProbs(window.distributions)
    accepted, token_id = verdict_of(models, asked.spec.rule, tokens, candidates, probs, coins)
    if token_id is None and not gives_up_bonus(sequence, accepted):
        token_id = coins.toss(models.target_V((*tokens, *candidates.tokens_of(accepted))).tolist())
    tree.commit(accepted, token_id)
    tree.check_integrity()
    return True
