"""The sequences of one Step stream at a target shard: their tokens, KV blocks and candidates.

There is no I/O and there are no tensors here. A session checks each step, and turns it into slices
for the engine and tasks for verification. A step that breaks the contract of target.proto raises
ProtocolError naming the field; the session cannot be used after that, since its stream ends. A spec
that is refused is the fault of its sequence only.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.errors import InvalidRequestError, ProtocolError
from paceline.limits import MAX_PROPOSED
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2, types_pb2
from paceline.wire.sequences import spec_from_wire
from workers.drafting.wire import distributions_from_wire
from workers.engine.kv_blocks import blocks_for
from workers.engine.slices import KvMoves, Slice
from workers.verification.candidates import (
    CandidateTree,
    DraftProbs,
    WrongProposalError,
    check_proposal,
)
from workers.verification.grammars import Grammars
from workers.verification.prefix import CountedText
from workers.verification.rule import RULES, rule_named

_NO_SPEC = SequenceSpec(SamplingParams(), seed=0, prompt_length=0)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The numbers against which a step is checked."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int


@dataclass(slots=True)
class Candidates:
    """The candidates of a slice, which a rule verifies.

    `placed_as_tree`: the candidates' KV slots are not those of a chain, so the engine needs the
    parents, and the KV of an accepted path must be moved.
    """

    tree: CandidateTree
    draft_probs: DraftProbs | None = None
    placed_as_tree: bool = False


@dataclass(slots=True)
class _Sequence:
    spec: SequenceSpec
    text: CountedText
    block_table: array[int]
    """An array: a GPU's step copies it as a whole, and the garbage collector skips its items."""
    fault: str | None = None
    """Why its spec was refused. The sequence is fed like others, since others may share its prefix.
    Its verdicts report this reason.
    """
    tree: TreeSlots | None = None
    """The positions of the last slice's candidates, unless they are a chain."""


@dataclass(slots=True)
class VerdictTask:
    """A slice whose logits are needed.

    `prefix` is every token before the first candidate, as a view that is valid until the next step
    begins. `names_path`: the verdict says which candidates were accepted, not only their number.
    `fed`: the tokens whose likeliest next tokens were requested; verification puts these into
    `top_tokens`. `logprobs_of`: the tokens whose log probabilities were requested, entry i after
    the i-th of `num_fed` tokens; verification puts these into `prompt_logprobs`.
    """

    sequence_id: int
    spec: SequenceSpec
    prefix: Sequence[int]
    candidates: Candidates
    names_path: bool
    has_verdict: bool
    fed: Sequence[int]
    top_tokens: list[types_pb2.TopTokens] = field(default_factory=list)
    logprobs_of: Sequence[int] = ()
    num_fed: int = 0
    prompt_logprobs: list[types_pb2.TokenLogprobs] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """The number of rows of logits: one per token fed if `fed` or `logprobs_of` needs them,
        else one per candidate and one for the token before.
        """
        if self.logprobs_of:
            return self.num_fed
        return len(self.fed) or 1 + len(self.candidates.tree)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs_of) or (self.has_verdict and self.spec.logprobs is not None)

    def fed_after(self) -> list[int | None]:
        """The token before each of `fed`; in a tree, its parent. None for a sequence's first."""
        tree = self.candidates.tree
        first = len(self.prefix) - (len(self.fed) - len(tree))
        before = self.prefix[first - 1 : -1] if first else (None, *self.prefix[:-1])
        path = (self.prefix[-1], *tree.token_ids)
        return [*before, *(path[parent] for parent in tree.parents)]


@dataclass(slots=True)
class StepWork:
    """The work of a step: first for the engine, then for verification.

    `kv_moves` are done first. The rows of logits (`num_rows` for each task) are in the order of the
    tasks.
    """

    kv_moves: list[KvMoves] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    tasks: list[VerdictTask] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    """By sequence id: why a sequence that asked for a verdict can have none."""


class TargetSession:
    """The sequences of one stream. Not thread-safe."""

    def __init__(self, limits: EngineLimits, grammars: Grammars | None = None) -> None:
        """`grammars`: compiles structures; None: tokens are not chosen here."""
        self._limits = limits
        self._grammars = grammars
        self._sequences: dict[int, _Sequence] = {}
        self._holders: Counter[int] = Counter()
        self._last_step = 0

    def begin_step(self, request: target_pb2.StepRequest) -> StepWork:
        """Apply closes and opens, check the slices and return the work. Raises ProtocolError."""
        expected = self._last_step + 1
        if request.step != expected:
            raise ProtocolError(f"step: expected {expected}, got {request.step}")
        self._last_step = expected
        for sequence_id in request.close:
            self._close(sequence_id)
        for opened in request.open:
            self._open(opened)
        work = StepWork()
        seen: set[int] = set()
        for index, message in enumerate(request.slices):
            try:
                self._apply_slice(message, seen, work)
            except ProtocolError as error:
                raise ProtocolError(f"slices[{index}].{error}") from None
        return work

    def check_integrity(self) -> None:
        """Assert that each block is counted as often as it occurs in block tables."""
        tables = Counter(block for one in self._sequences.values() for block in one.block_table)
        assert tables == +self._holders, "holders of KV blocks and block tables differ"

    def _close(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            raise ProtocolError(f"close: sequence {sequence_id} is not open")
        self._holders.subtract(sequence.block_table)

    def _open(self, opened: target_pb2.TargetSequence) -> None:
        name = f"open: sequence {opened.sequence_id}"
        if opened.sequence_id in self._sequences:
            raise ProtocolError(f"{name} is open already")
        spec, fault = _NO_SPEC, None
        try:
            asked = spec_from_wire(opened.spec, vocab_size=self._limits.vocab_size)
            RULES.get(asked.rule, field="rule")
            spec = asked
        except InvalidRequestError as error:
            fault = f"the target refuses its parameters: {error}"
        follower = self._grammars.follower(spec.structure) if self._grammars is not None else None
        text = CountedText(opened.token_ids, prompt_length=spec.prompt_length, follower=follower)
        sequence = _Sequence(spec, text, array("q", opened.shared_blocks), fault)
        num_positions = len(sequence.block_table) * self._limits.block_size
        if len(text.token_ids) != num_positions:
            raise ProtocolError(
                f"{name}: token_ids: expected {num_positions}, as many as the shared blocks have "
                f"positions, got {len(text.token_ids)}"
            )
        if max(text.token_ids, default=0) >= self._limits.vocab_size:
            raise ProtocolError(
                f"{name}: token_ids: expected ids below {self._limits.vocab_size}, "
                f"got {max(text.token_ids)}"
            )
        if max(sequence.block_table, default=0) >= self._limits.num_blocks:
            raise ProtocolError(
                f"{name}: shared_blocks: expected ids below {self._limits.num_blocks}, "
                f"got {max(sequence.block_table)}"
            )
        self._holders.update(sequence.block_table)
        self._sequences[opened.sequence_id] = sequence

    def _apply_slice(self, message: target_pb2.Slice, seen: set[int], work: StepWork) -> None:
        sequence_id = message.sequence_id
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise ProtocolError(f"sequence_id: sequence {sequence_id} is not open")
        if sequence_id in seen:
            raise ProtocolError(f"sequence_id: sequence {sequence_id} has a slice in this step")
        seen.add(sequence_id)
        start, window = message.start, message.window
        fed = list(message.token_ids)
        if sequence.tree is not None or message.kv_moves:
            _settle_tree(sequence, message, work)
        self._check_tokens(sequence, start, fed)
        _check_window(window, len(fed), message.verdict)
        if message.logprobs_of:
            self._check_logprobs_of(sequence, message.logprobs_of, len(fed) - window)
        if message.new_blocks:
            self._append_blocks(sequence, message.new_blocks)
        end = start + len(fed)
        capacity = len(sequence.block_table) * self._limits.block_size
        if end > capacity:
            raise ProtocolError(
                f"new_blocks: {end} tokens need blocks for as many positions, "
                f"the block table has {capacity}"
            )
        self._check_writable(sequence, start, end)
        first = end - window
        candidates = read_candidates(
            message, fed[first - start :], sequence.spec.rule, vocab_size=self._limits.vocab_size
        )
        self._check_length(first + candidates.tree.height)
        sequence.text.truncate_to(start)
        sequence.text.extend(fed)
        if sequence.fault is not None and message.verdict:
            work.faults[sequence_id] = sequence.fault
        task = _task_of(message, sequence, fed, candidates, first)
        if task is not None:
            work.tasks.append(task)
        num_logits = 0 if task is None else task.num_rows
        work.slices.append(_piece_of(sequence, start, fed, candidates, first, num_logits))

    def _check_tokens(self, sequence: _Sequence, start: int, fed: Sequence[int]) -> None:
        if not fed:
            raise ProtocolError("token_ids: expected at least one token")
        if max(fed) >= self._limits.vocab_size:
            raise ProtocolError(
                f"token_ids: expected ids below {self._limits.vocab_size}, got {max(fed)}"
            )
        num_held = len(sequence.text.token_ids)
        if start > num_held:
            raise ProtocolError(
                f"start: expected at most {num_held}, the number of tokens that the "
                f"sequence holds here, got {start}"
            )

    def _check_logprobs_of(
        self, sequence: _Sequence, token_ids: Sequence[int], num_committed: int
    ) -> None:
        if len(token_ids) > num_committed:
            raise ProtocolError(
                f"logprobs_of: expected at most {num_committed}, as many as token_ids before the "
                f"window, got {len(token_ids)}"
            )
        if max(token_ids) >= self._limits.vocab_size:
            raise ProtocolError(
                f"logprobs_of: expected ids below {self._limits.vocab_size}, got {max(token_ids)}"
            )
        if sequence.fault is None and sequence.spec.prompt_logprobs is None:
            raise ProtocolError("logprobs_of: expected none, since the spec asks for none")

    def _check_writable(self, sequence: _Sequence, start: int, end: int) -> None:
        size = self._limits.block_size
        for block in sequence.block_table[start // size : blocks_for(end, size)]:
            if self._holders[block] > 1:
                raise ProtocolError(
                    f"start: expected a position in a block of the sequence's own, got {start}, "
                    f"where block {block} is held by {self._holders[block]} sequences"
                )

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self._limits.max_model_len:
            raise ProtocolError(
                f"token_ids: {num_tokens} tokens exceed max_model_len, {self._limits.max_model_len}"
            )

    def _append_blocks(self, sequence: _Sequence, new_blocks: Iterable[int]) -> None:
        for block in new_blocks:
            if block >= self._limits.num_blocks:
                raise ProtocolError(
                    f"new_blocks: expected ids below {self._limits.num_blocks}, got {block}"
                )
            if self._holders[block]:
                raise ProtocolError(f"new_blocks: block {block} is in a block table already")
            self._holders[block] = 1
            sequence.block_table.append(block)


def _task_of(
    message: target_pb2.Slice,
    sequence: _Sequence,
    fed: Sequence[int],
    candidates: Candidates,
    first: int,
) -> VerdictTask | None:
    """The task of a slice, or None if it has none. `first`: position of its first candidate."""
    wants_rows = message.verdict or message.top_tokens or message.logprobs_of
    if sequence.fault is not None or not wants_rows:
        return None
    return VerdictTask(
        message.sequence_id,
        sequence.spec,
        sequence.text.prefix(first),
        candidates,
        names_path=bool(message.parents),
        has_verdict=message.verdict,
        fed=fed if message.top_tokens else (),
        logprobs_of=tuple(message.logprobs_of),
        num_fed=len(fed),
    )


def _piece_of(
    sequence: _Sequence,
    start: int,
    fed: Sequence[int],
    candidates: Candidates,
    first: int,
    num_logits: int,
) -> Slice:
    """The slice for the engine. If its candidates are placed as a tree, sets `sequence.tree`."""
    if not candidates.placed_as_tree:
        return Slice(sequence.block_table, start, fed, num_logits)
    parents = candidates.tree.parents
    sequence.tree = TreeSlots(first, parents)
    return Slice(sequence.block_table, start, fed, num_logits, tree_start=first, parents=parents)


def _settle_tree(sequence: _Sequence, message: target_pb2.Slice, work: StepWork) -> None:
    """Apply the moves of a slice. Of the last tree, only one path may remain below its start."""
    tree, text = sequence.tree, sequence.text
    sequence.tree = None
    moves = [(move.from_position, move.to_position) for move in message.kv_moves]
    if tree is None:
        raise ProtocolError(
            f"kv_moves: expected none, since the last slice held no tree, got {moves}"
        )
    try:
        for source, target in moves:
            tree.move(source, target)
            text.put(target, text.token_ids[source])
        tree.check_path(min(message.start, len(text.token_ids)))
    except ProtocolError as error:
        raise ProtocolError(f"kv_moves: {error}") from None
    if moves:
        work.kv_moves.append((sequence.block_table, moves))


def _check_window(window: int, num_fed: int, verdict: bool) -> None:
    if not verdict and window:
        raise ProtocolError(f"window: expected 0 if no verdict is requested, got {window}")
    if window >= num_fed:
        raise ProtocolError(
            f"window: expected less than the {num_fed} token_ids, the first of which is "
            f"committed, got {window}"
        )


_NONE = Candidates(CandidateTree((), ()))


def read_candidates(
    message: target_pb2.Slice, token_ids: Sequence[int], rule: str, *, vocab_size: int
) -> Candidates:
    """The candidates of a slice. `token_ids` are its last `window` ones, each below `vocab_size`.

    Raises ProtocolError naming the field that is wrong.
    """
    facts = rule_named(rule)
    if facts.shares_noise and not message.parents and not message.multiplicities:
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
    if facts.needs_draft_probs:
        with _naming("distributions"):
            draft_probs = distributions_from_wire(message.distributions)
    try:
        check_proposal(rule, tree, draft_probs, vocab_size=vocab_size, max_nodes=MAX_PROPOSED)
    except ProtocolError as error:
        wrong = error.field if isinstance(error, WrongProposalError) else "distributions"
        raise ProtocolError(f"{wrong}: {error}") from None
    return Candidates(tree, draft_probs, placed_as_tree=tree.parents != in_order)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"{field}: {error}") from None


class TreeSlots:
    """The candidate of a tree that each KV slot holds, until one path is chosen.

    Slots `first` to `first` + len(parents) - 1 hold the candidates 0, 1, ... Rotary embeddings use
    the position that a candidate's depth gives it. Moves bring the accepted path to the slots of
    its own positions. The tokens that then count as committed must be that path: otherwise the
    sequence would continue over KV of other tokens. `parents` as in target.proto: 0 for a child of
    the token at `first` - 1, i + 1 for a child of candidate i.
    """

    def __init__(self, first: int, parents: Sequence[int]) -> None:
        self.first = first
        self._parents = parents
        self._candidates = list(range(len(parents)))

    def move(self, source: int, target: int) -> None:
        """Note a copy from one position to another. Raises ProtocolError outside the tree."""
        last = self.first + len(self._candidates) - 1
        for position in (source, target):
            if not self.first <= position <= last:
                raise ProtocolError(
                    f"expected positions {self.first} to {last}, which hold the candidates of the "
                    f"last slice, got {source} to {target}"
                )
        self._candidates[target - self.first] = self._candidates[source - self.first]

    def check_path(self, end: int) -> None:
        """Raise ProtocolError unless the positions below `end` hold a path from the root on."""
        above = 0
        for offset, candidate in enumerate(self._candidates[: max(0, end - self.first)]):
            if self._parents[candidate] != above:
                raise ProtocolError(
                    f"expected a child of {_name(above)} at position {self.first + offset}, below "
                    f"start, got {_name(candidate + 1)}: move the accepted path to its own "
                    "positions first"
                )
            above = candidate + 1


def _name(node: int) -> str:
    return f"candidate {node - 1}" if node else "the last committed token"
