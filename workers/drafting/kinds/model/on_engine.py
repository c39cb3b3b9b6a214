"""What the proposers with a model share: sequences in the KV of an engine, and how they grow."""

from __future__ import annotations

from collections.abc import Sequence

from workers.drafting.chances import RankChances, coupled_prior, drawn_prior
from workers.drafting.growth import Growth
from workers.drafting.kind import DrafterInfo, DrafterKind
from workers.drafting.stopping import DrafterStopping, Stopper
from workers.drafting.tree import DraftTree
from workers.engine.engine import Engine
from workers.engine.local_cache import LocalCache, LocalSequence
from workers.verification.grammars import Grammars
from workers.verification.rule import rule_named


class OnEngine:
    """The sequences of one proposer, and what it learned of its candidates and when to stop."""

    def __init__(
        self,
        engine: Engine,
        kind: DrafterKind,
        *,
        prefix_cache: bool,
        grammars: Grammars | None,
        vocabulary: tuple[int, bytes] | None = None,
    ) -> None:
        """`prefix_cache`: whether sequences of one tenant share the KV of equal prefixes.

        `grammars`: compiles structures; None: sequences with a structure are declined.
        `vocabulary`: the size and digest of that in which it drafts; None: the model's.
        """
        own = engine.info.vocab_size, engine.info.vocabulary_digest
        vocab_size, vocabulary_digest = own if vocabulary is None else vocabulary
        self.cache = LocalCache(engine.num_blocks, engine.block_size)
        self.info = DrafterInfo(
            kind=kind.name,
            rules=kind.rules,
            model=engine.info.name,
            vocab_size=vocab_size,
            vocabulary_digest=vocabulary_digest,
            max_position=engine.max_model_len,
        )
        self.shares_prefixes = prefix_cache
        self._grammars = grammars
        self._chances = {
            rule: RankChances(coupled_prior if rule_named(rule).shares_noise else drawn_prior)
            for rule in kind.rules
        }
        self._stopping = DrafterStopping()

    def open(
        self, tree: DraftTree, token_ids: Sequence[int] | None = None
    ) -> tuple[LocalSequence, Growth, Stopper]:
        """Open a tree's sequence. Raises OverloadedError, and keeps nothing, if memory is full.

        `token_ids`: those of its text that are final; None: the committed ones.
        """
        token_ids = tree.committed if token_ids is None else token_ids
        if tree.spec.structure is not None and self._grammars is not None:
            tree.follow(self._grammars.follower(tree.spec.structure))
        sequence = self.cache.open(tree, tenant=tree.tenant)
        try:
            if self.shares_prefixes:
                sequence.adopt(token_ids)
            # The sequence takes its own blocks with its first slice: until then, other sequences
            # may store more KV that it can share.
            sequence.check_room(tree.num_committed)
        except BaseException:
            self.cache.close(tree)
            raise
        stopper = Stopper(tree.stopping, self._stopping)
        return sequence, Growth(tree, self._chances[tree.spec.rule], stopper), stopper
