"""Fair shares of a drafter among the drivers that use it. No I/O, no clock.

Time is shared by start-time fair queuing (Goyal et al. 1996). Each share has a count of the
milliseconds that were spent for it. A pass belongs to the share with the lowest count, its owner.
Sequences of other shares ride along if they make the pass hardly longer, as on a GPU. A share that
was idle begins at the present count, less a small credit. So a share that needs less than its part
waits for one pass at most, and one that needs more gets what the others leave.

Places and memory are lent: a share may use all that is idle, and loses it, the newest sequence
first, once a share with less needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from workers.drafting.tree import DraftTree

RIDE = 0.1
"""The part by which riders may make a pass longer than its owner alone would."""
EFFICIENCY = 0.8
"""If another share drafts for much fewer sequences, a pass is cut short as long as it keeps this
part of its tokens per millisecond: the other share's draft may have to wait for the pass to end."""
CREDIT_MS = 100.0
"""The most milliseconds that an idle share saves for its next drafts. Without credit, a share that
drafts now and then would have to stop for others in the middle of a draft."""
FIRST_WEIGHT = 128
"""The most tokens that a sequence's first pass is expected to feed: its prompt, a chunk of it."""
_SHORT = 16
"""The most tokens of a prompt that counts as read at once."""
_CLEARLY = 0.9
"""The part of a lender's memory that the share which takes some of it may have afterwards."""
_NEWEST = 0.05
"""Weight of the newest pass in the moving means of passes."""
_MOVING = 0.1
"""The standard deviation of the passes' tokens, as a part of their mean, from which on the price of
a token can be told."""


class PassCost:
    """Learns the milliseconds of a pass: a fixed part, and a part for each token."""

    def __init__(self) -> None:
        self._count = 0
        self._tokens = self._ms = self._variance = self._covariance = 0.0
        self.per_token: float | None = None
        """Milliseconds for each token; None: not known yet."""

    def note(self, tokens: int, ms: float) -> None:
        """A pass that fed `tokens` took `ms`."""
        self._count += 1
        weight = max(_NEWEST, 1 / self._count)
        more, longer = tokens - self._tokens, ms - self._ms
        self._tokens += weight * more
        self._ms += weight * longer
        self._variance = (1 - weight) * (self._variance + weight * more * more)
        self._covariance = (1 - weight) * (self._covariance + weight * more * longer)
        if self._variance > (_MOVING * self._tokens) ** 2:
            steepest = self._ms / self._tokens
            self.per_token = min(max(0.0, self._covariance / self._variance), steepest)

    @property
    def _base(self) -> float:
        return max(0.0, self._ms - (self.per_token or 0.0) * self._tokens)

    def ms(self, tokens: int) -> float:
        """The expected milliseconds of a pass."""
        return self._base + (self.per_token or 0.0) * tokens

    def worthwhile(self, tokens: int) -> int:
        """The fewest of `tokens` that a pass must feed to keep its EFFICIENCY."""
        if not self.per_token:
            return tokens
        rate = EFFICIENCY * tokens / max(self.ms(tokens), 1e-9)
        return min(tokens, int(rate * self._base / (1 - rate * self.per_token)) + 1)


@dataclass(eq=False, slots=True)
class Share:
    """One party's part of a drafter. `spent`: milliseconds spent for it, as fair queuing counts.

    `queue`: its open sequences, the one whose turn is next first. `passes`, `milliseconds`,
    `tokens`: of passes that it took part in, the time spent for it, and what it was fed.
    `declined`: sequences that it lost to other shares. `whose`: the party's name, or else the
    driver's.
    """

    name: str = ""
    whose: str = ""
    spent: float = 0.0
    turn: int = 0
    queue: dict[DraftTree, None] = field(default_factory=dict)
    milliseconds: float = 0.0
    tokens: int = 0
    declined: int = 0

    @property
    def memory(self) -> int:
        """Tokens that its sequences hold, committed and drafted."""
        return sum(tree.num_committed + tree.num_nodes for tree in self.queue)


@dataclass(frozen=True, slots=True)
class ShareUse:
    """What a party uses of a drafter, since its first stream that is still open.

    `sequences`: open now. `seconds`: of the drafter's time. `tokens`: that the model was fed.
    `taken_back`: sequences that it lost to other parties.
    """

    whose: str
    sequences: int
    seconds: float
    tokens: int
    taken_back: int


class Shares:
    """Whose turn it is, and who lends to whom."""

    def __init__(self) -> None:
        self.all: list[Share] = []
        self.cost = PassCost()
        self._now = 0.0
        self._turns = 0
        self._weights: dict[DraftTree, int] = {}  # tokens that its next pass feeds, probably
        self._prefilling: set[DraftTree] = set()
        self._owner: Share | None = None
        self._fed: dict[Share, int] = {}

    def join(self, name: str, whose: str = "") -> Share:
        share = Share(name, whose or name, spent=self._now)
        self.all.append(share)
        return share

    def leave(self, share: Share) -> None:
        """Forget a share, which has no sequences any more."""
        assert not share.queue, "a share that leaves has open sequences"
        self.all.remove(share)
        self._fed.pop(share, None)
        if self._owner is share:
            self._owner = None

    def opened(self, share: Share, tree: DraftTree) -> None:
        share.queue[tree] = None
        self._weights[tree] = min(tree.num_committed, FIRST_WEIGHT)
        if tree.num_committed > _SHORT:
            self._prefilling.add(tree)

    def closed(self, share: Share, tree: DraftTree) -> None:
        del share.queue[tree]
        del self._weights[tree]
        self._prefilling.discard(tree)

    @property
    def uses(self) -> list[ShareUse]:
        """What each share uses, the one that used the most time first."""
        found = [
            ShareUse(one.whose, len(one.queue), one.milliseconds / 1000, one.tokens, one.declined)
            for one in self.all
        ]
        return sorted(found, key=lambda one: -one.seconds)

    @property
    def num_used(self) -> int:
        return sum([bool(share.queue) for share in self.all])

    @property
    def contended(self) -> bool:
        return self.num_used > 1

    def begin(self, waiting: Collection[Share]) -> Share:
        """Begin a pass: its owner is the share, of those that wait, whose turn it is."""
        for share in waiting:
            share.spent = max(share.spent, self._now - CREDIT_MS)
        owner = self._owner = min(waiting, key=_by_spent)
        self._turns += 1
        # Credit does not turn the clock back, or else it would add up over shares.
        owner.turn, self._now = self._turns, max(self._now, owner.spent)
        self._fed = {owner: 0}
        return owner

    def choose(self, ready: Mapping[Share, Collection[DraftTree]]) -> list[DraftTree]:
        """The sequences that take part in the next pass, the owner's first.

        `ready`: the sequences of each share that are ready; at least one.
        """
        owner = self.begin(ready)
        if not self.contended:
            return list(ready[owner])
        waiting = self._in_turn(owner, ready[owner])
        most = self._weight(ready[owner])
        others = [share for share in self.all if share.queue and share is not owner]
        if any(2 * self._weight(ready.get(share, ())) < most for share in others):
            most = self.cost.worthwhile(most)
        chosen: list[DraftTree] = []
        tokens = 0
        for tree in waiting:
            if chosen and tokens + self._weights[tree] > most:
                break
            chosen.append(tree)
            tokens += self._weights[tree]
        if self.cost.per_token is None:
            return chosen
        limit = (1 + RIDE) * self.cost.ms(tokens)
        for share in sorted(ready, key=_by_spent):
            for tree in self._in_turn(share, ready[share]) if share is not owner else ():
                if self.cost.ms(tokens + self._weights[tree]) > limit:
                    break
                chosen.append(tree)
                tokens += self._weights[tree]
        return chosen

    def _weight(self, trees: Iterable[DraftTree]) -> int:
        return sum([self._weights[tree] for tree in trees])

    def _in_turn(self, share: Share, ready: Collection[DraftTree]) -> list[DraftTree]:
        """The ready sequences of a share in turn, of those with a prompt to read only the first."""
        wanted, reads = set(ready), False
        found = []
        for tree in share.queue:
            if tree in wanted and not (reads and tree in self._prefilling):
                found.append(tree)
                reads = reads or tree in self._prefilling
        return found

    def passed(
        self,
        took_part: Iterable[tuple[Share, DraftTree]],
        fed: Mapping[DraftTree, int],
        drafted: Collection[DraftTree],
    ) -> None:
        """A pass was made for these open sequences.

        `fed`: tokens of those that were fed more than one. `drafted`: those that have drafts now;
        the others go on to read their prompts.
        """
        for share, tree in took_part:
            weight = self._weights[tree] = fed.get(tree, 1)
            self._fed[share] = self._fed.get(share, 0) + weight
            if tree in drafted:
                self._prefilling.discard(tree)
                del share.queue[tree]
                share.queue[tree] = None

    def pass_took(self, ms: float) -> None:
        """The last pass took `ms`. Riders pay for their tokens, and their owner pays the rest."""
        fed, self._fed = self._fed, {}
        tokens = sum(fed.values())
        price = 0.0
        if tokens:
            self.cost.note(tokens, ms)
            price = min(self.cost.per_token or 0.0, ms / tokens)
        for share, own in fed.items():
            share.tokens += own
            paid = price * own
            if share is self._owner:
                paid = ms - price * (tokens - own)
            self.spend(share, paid)

    def spend(self, share: Share, ms: float) -> None:
        share.spent += ms
        share.milliseconds += ms

    def lender_of_a_place(self, share: Share) -> Share | None:
        """Who must give a place to `share`: who has two more sequences at least, and the most."""
        lender = max(self.all, key=lambda one: len(one.queue))
        return lender if len(lender.queue) > len(share.queue) + 1 else None

    def lender_of_memory(self, share: Share, tokens: int) -> Share | None:
        """Who must give memory to `share` for `tokens` more: who has clearly more, and the most.

        So no share can take memory from another one and be made to give it back.
        """
        held = {one: one.memory for one in self.all}
        lender = max(held, key=lambda one: held[one])
        return lender if _CLEARLY * held[lender] > held[share] + tokens else None

    def check_integrity(self) -> None:
        """Assert that what is kept for each sequence matches the queues."""
        trees = [tree for share in self.all for tree in share.queue]
        assert len(set(trees)) == len(trees), "a sequence of two shares"
        assert set(self._weights) == set(trees)
        assert self._prefilling <= set(trees)


def _by_spent(share: Share) -> tuple[float, int]:
    return share.spent, share.turn
