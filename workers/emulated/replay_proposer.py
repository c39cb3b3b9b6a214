"""An emulated model drafter: it guesses at a set rate, in the time of its latency profile.

Its trees grow like a model's (workers/drafting/growth.py), several tokens a pass if its profile
says so. The replay text supplies what a model would draw from its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.errors import InvalidRequestError
from paceline.options import Stopping
from workers.drafting.chances import RankChances, coupled_prior
from workers.drafting.draft_stopping import DrafterStopping, Stopper
from workers.drafting.expansions import Children
from workers.drafting.growth import Growth
from workers.drafting.kind import DrafterInfo, Pass, TopTokens
from workers.drafting.kinds.model import SHORT
from workers.drafting.kinds.parallel import rows_each
from workers.drafting.rows_ahead import RowsAhead
from workers.drafting.tree import ROOT, DraftTree, Kept, NewNodes
from workers.emulated.latency_profiles import EMULATED, DeviceProfile
from workers.emulated.replay_text import Guess, PrefixReader, ReplayText

EMULATED_KIND = "emulated"
"""The kind of an emulated drafter, as it describes itself. It is not registered: the configuration
makes a kind with a model emulated by the key `emulated`.
"""
EMULATED_RULES = frozenset({"coupled"})

_GAP = 1.0
"""The gap of every guess: this drafter cannot tell how sure it is."""


class PassClock(Protocol):
    """Decides when a device's passes end (device_wait.py; virtual in cluster/simulation)."""

    def now(self) -> float:
        """The present time in seconds."""

    def finish(self, begin: float, seconds: float) -> float:
        """End a pass that began at `begin` and takes `seconds`. Returns its end."""


@dataclass(slots=True)
class _Held:
    growth: Growth
    reader: PrefixReader
    num_read: int
    num_unfed: int
    """The number of committed tokens and nodes that no pass has fed yet."""
    readers: dict[int, PrefixReader] = field(default_factory=dict)
    ahead: RowsAhead[Sequence[Guess]] = field(default_factory=RowsAhead)

    def read_committed(self, tree: DraftTree) -> PrefixReader:
        """A reader of all committed tokens. It reads those that are new since the last call."""
        if self.num_read < tree.num_committed:
            self.reader.read(tree.committed[self.num_read :], self.num_read)
            self.num_read = tree.num_committed
        return self.reader

    def forget_readers(self, tree: DraftTree) -> None:
        """Drop the readers of nodes that are gone, if there are two readers or more per node."""
        if len(self.readers) > 2 * tree.num_nodes:
            there = (tree.base(node)[1] for node in range(1, tree.num_nodes + 1))
            self.readers = {one: self.readers[one] for one in there if one in self.readers}


class ReplayProposer:
    """Guesses for the coupled rule, as chains and trees. The only stopping rule is `fixed`."""

    def __init__(
        self,
        max_position: int,
        profile: DeviceProfile,
        text: ReplayText,
        guess: Guess,
        clock: PassClock,
        *,
        vocabulary_digest: bytes = b"",
    ) -> None:
        """`max_position`: no token is drafted at or beyond it."""
        self._max_position = max_position
        self._vocabulary_digest = vocabulary_digest
        self._profile = profile
        self._text = text
        # One for each token that a pass drafts after a node: its rows.
        self._guesses = [
            replace(guess, kept=guess.kept * profile.kept**place)
            for place in range(profile.tokens_a_pass)
        ]
        self._clock = clock
        self._chances = RankChances(coupled_prior)
        self._stopping = DrafterStopping()
        self._held: dict[DraftTree, _Held] = {}

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo(
            kind=EMULATED_KIND,
            rules=EMULATED_RULES,
            model=f"{EMULATED}{self._profile.name}",
            vocab_size=self._text.vocab_size,
            vocabulary_digest=self._vocabulary_digest,
            max_position=self._max_position,
        )

    def open(self, tree: DraftTree) -> None:
        if tree.stopping is not Stopping.FIXED:
            raise InvalidRequestError(
                "stopping",
                "an emulated drafter has no logits to stop by: expected the rule fixed, got "
                f"{tree.stopping.value}",
            )
        if tree.vocab_size is not None and tree.vocab_size < self._text.vocab_size:
            raise InvalidRequestError(
                "target_vocab_size",
                f"an emulated drafter guesses among all its {self._text.vocab_size} token ids, but "
                f"the target has only {tree.vocab_size}",
            )
        growth = Growth(tree, self._chances, Stopper(tree.stopping, self._stopping))
        self._held[tree] = _Held(growth, PrefixReader(), 0, tree.num_committed)

    def settle(self, tree: DraftTree, count: int) -> None:
        """Do nothing: a pass reads the tokens when it drafts after them."""

    def close(self, tree: DraftTree) -> None:
        del self._held[tree]

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        held = self._held[tree]
        held.forget_readers(tree)
        held.growth.committed(kept)
        held.ahead.clear()
        held.num_unfed += len(kept.token_ids) - len(kept.path)

    def at_hand(self, tree: DraftTree) -> NewNodes:
        held = self._held[tree]
        new = held.growth.at_hand()
        if new.token_ids or held.ahead.is_empty:
            return new
        nodes = held.ahead.known(tree, held.growth.to_feed(pass_ms=0.0))
        return self._draw(tree, held, nodes) if nodes else new

    def promise(self, tree: DraftTree) -> float:
        return self._held[tree].growth.promise()

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        begin = self._clock.now()
        result = Pass(took_part=list(trees))
        batch = 0
        for tree in trees:
            held = self._held[tree]
            growth = held.growth
            try:
                nodes = growth.to_feed(pass_ms=pass_ms)
                if nodes and held.num_unfed > SHORT:
                    if result.prefilled:
                        result.took_part.remove(tree)
                        continue  # As a model's, it reads one text a pass.
                    result.prefilled = True
                if nodes:
                    batch += 1
                    result.fed[tree] = self._feed(tree, held, nodes)
                    result.tokens_fed += result.fed[tree]
                new = self._draw(tree, held, nodes)
            except Exception as error:  # Of one sequence: others go on.
                result.fail(tree, error)
                continue
            if (draft := growth.draft_of(nodes, new)) is not None:
                result.drafts.append(draft)
        if batch:
            seconds = self._profile.pass_ms.ms(batch, result.tokens_fed) / 1000
            self._clock.finish(begin, seconds)
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._held) == set(trees), "a sequence was leaked or lost"
        for held in self._held.values():
            held.growth.check_integrity()

    def _feed(self, tree: DraftTree, held: _Held, nodes: Sequence[int]) -> int:
        """Give nodes their rows. Returns the number of tokens that a model would be fed."""
        guesses = self._guesses
        unfed, held.num_unfed = max(held.num_unfed, len(nodes)), 0
        if len(guesses) == 1:
            for node in nodes:
                held.ahead.give(node, guesses)
            return unfed
        fed = unfed
        each = rows_each(len(guesses), len(nodes), tree.grant)
        for node in nodes:
            rows = guesses[: min(each, tree.room(node))]
            held.ahead.give(node, rows)
            fed += len(rows) - 1
        # As a parallel model, it keeps KV of the text alone and feeds the nodes above again.
        above = {one for node in nodes for one in tree.path_to(node)}
        return fed + len(above.difference(nodes))

    def _draw(self, tree: DraftTree, held: _Held, nodes: Sequence[int]) -> NewNodes:
        """Draw the candidates under nodes that have a row. Returns those to add."""
        growth, text = held.growth, self._text
        if nodes and growth.needs_token_alone:
            guess = held.ahead.take(nodes[0])
            digest = self._leaf_reader(tree, held, nodes[0]).digest()
            return growth.lengthen(nodes[0], text.first_guess(digest, tree.spec, guess))
        count = growth.width
        for node in nodes:
            digest = self._reader(tree, held, node).digest()
            guesses = text.guesses(digest, tree.spec, held.ahead.take(node), count)
            growth.expand_drawn(node, Children(guesses, (_GAP,) * count))
        return growth.harvest(nodes, pass_ms=0.0)

    def _leaf_reader(self, tree: DraftTree, held: _Held, leaf: int) -> PrefixReader:
        """A reader of all tokens up to a chain's end, made by extending its parent's reader."""
        if leaf == ROOT:
            return self._reader(tree, held, leaf)
        reader = held.readers.pop(tree.prefix_hash(tree.parents[leaf]), None)
        if reader is None:
            return self._reader(tree, held, leaf)
        length, prefix_hash = tree.base(leaf)
        held.readers[prefix_hash] = reader
        return reader.read_one(tree.tokens[leaf], length - 1)

    def _reader(self, tree: DraftTree, held: _Held, node: int) -> PrefixReader:
        """A reader of all tokens up to a node, kept by prefix hash while the node exists."""
        if node == ROOT:
            return held.read_committed(tree)
        length, prefix_hash = tree.base(node)
        reader = held.readers.get(prefix_hash)
        if reader is None:
            above = self._reader(tree, held, tree.parents[node])
            reader = above.copy().read_one(tree.tokens[node], length - 1)
            held.readers[prefix_hash] = reader
        return reader
