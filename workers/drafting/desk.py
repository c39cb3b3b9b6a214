"""The open sequences of all streams of a drafter, and passes over them. No I/O, no clock.

Each stream has a DraftingSession of its own; a pass takes every sequence that has room to draft,
of whichever session, so no stream waits for another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.errors import OverloadedError, ProtocolError
from paceline.sampling import SequenceSpec
from workers.drafting.path import DraftPath
from workers.drafting.proposer import DrafterInfo, Proposer


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens, each continuing the one before, under the first `base_length` of a sequence."""

    sequence_id: int
    base_length: int
    base_hash: int
    token_ids: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class SessionNews:
    """What a pass gave for one session. `declined`: sequences that are closed now, and why."""

    session: DraftingSession
    tokens_fed: int
    proposals: list[Proposal] = field(default_factory=list)
    declined: list[tuple[int, str]] = field(default_factory=list)


class DraftingSession:
    """The sequences of one stream; made by DraftingDesk.open_session.

    Methods follow the messages of drafting.proto: those about a sequence that is not open do
    nothing, those that break the contract raise ProtocolError.
    """

    def __init__(self, desk: DraftingDesk) -> None:
        self._desk = desk
        self.vocab_size = desk.info.vocab_size
        self.paths: dict[int, DraftPath] = {}

    def open(self, sequence_id: int, spec: SequenceSpec, token_ids: Sequence[int]) -> str | None:
        """Begin a sequence, replacing an open one. Returns why it is declined, or None."""
        self.close(sequence_id)
        if not 1 <= spec.prompt_length <= len(token_ids):
            raise ProtocolError(
                f"open.spec.prompt_length: expected 1 to {len(token_ids)}, the number of tokens, "
                f"got {spec.prompt_length}"
            )
        _check_vocabulary("open", token_ids, self._desk.info)
        reason = self._desk.reason_to_decline(len(token_ids))
        if reason is not None:
            return reason
        path = DraftPath(spec, token_ids, max_position=self._desk.info.max_position)
        try:
            self._desk.proposer.open(path)
        except OverloadedError as error:
            return f"the drafter's KV memory is full: {error}"
        self.paths[sequence_id] = path
        return None

    def outcome(self, sequence_id: int, position: int, token_ids: Sequence[int]) -> None:
        """Commit tokens; run-ahead that agrees stays."""
        if not token_ids:
            raise ProtocolError("outcome.token_ids: expected at least one token")
        _check_vocabulary("outcome", token_ids, self._desk.info)
        path = self.paths.get(sequence_id)
        if path is not None:
            kept = path.commit(position, token_ids)
            self._desk.proposer.committed(path, kept=kept)

    def grant(self, sequence_id: int, until_position: int, branches: int) -> None:
        """Allow drafting below `until_position`. More branches than one still get a chain."""
        if branches < 1:
            raise ProtocolError(f"grant.branches: expected at least 1, got {branches}")
        path = self.paths.get(sequence_id)
        if path is not None:
            path.grant(until_position)

    def close(self, sequence_id: int) -> None:
        """End a sequence and free what is kept for it."""
        path = self.paths.pop(sequence_id, None)
        if path is not None:
            self._desk.proposer.close(path)


class DraftingDesk:
    """Drafts for the sessions of all streams with one proposer. Not thread-safe."""

    def __init__(self, proposer: Proposer, *, max_sequences: int) -> None:
        self.proposer = proposer
        self.info = proposer.info
        self._max_sequences = max_sequences
        self._sessions: list[DraftingSession] = []

    def open_session(self) -> DraftingSession:
        """A session for a stream."""
        session = DraftingSession(self)
        self._sessions.append(session)
        return session

    def close_session(self, session: DraftingSession) -> None:
        """Forget a stream and everything kept for it."""
        for sequence_id in list(session.paths):
            session.close(sequence_id)
        self._sessions.remove(session)

    @property
    def has_work(self) -> bool:
        """Whether a pass would give something."""
        return any(_ready(path) or path.wants_last for _, _, path in self._all_paths())

    @property
    def num_open(self) -> int:
        """How many sequences are open, those of all streams together."""
        return sum(len(session.paths) for session in self._sessions)

    def reason_to_decline(self, num_tokens: int) -> str | None:
        """Why a sequence of so many tokens is not taken, or None."""
        if num_tokens >= self.info.max_position:
            return f"{num_tokens} tokens leave no room in a context of {self.info.max_position}"
        if self.num_open >= self._max_sequences:
            return f"{self._max_sequences} sequences are open, the most that this drafter takes"
        return None

    def run_pass(self) -> list[SessionNews]:
        """Draft once for every sequence that has room."""
        everyone = list(self._all_paths())
        ready = [path for _, _, path in everyone if _ready(path)]
        result = self.proposer.run_pass(ready)
        drafts = {draft.path: draft for draft in result.drafts}
        declined = dict(result.declined)
        took_part = set(result.took_part)
        news: dict[DraftingSession, SessionNews] = {}
        for session, sequence_id, path in everyone:
            draft = drafts.get(path)
            if path not in took_part and path not in declined and not path.wants_last:
                continue
            mine = news.setdefault(session, SessionNews(session, result.tokens_fed))
            if path in declined:
                mine.declined.append((sequence_id, declined[path]))
                session.close(sequence_id)
            elif draft is not None:
                mine.proposals.append(_propose(sequence_id, path, draft.token_ids, draft.last))
            elif path.wants_last:
                mine.proposals.append(_propose(sequence_id, path, (), last=True))
        return list(news.values())

    def check_integrity(self) -> None:
        """Assert that paths and what the proposer keeps belong together."""
        paths = [path for _, _, path in self._all_paths()]
        for path in paths:
            path.check_integrity()
        self.proposer.check_integrity(paths)

    def _all_paths(self) -> Iterator[tuple[DraftingSession, int, DraftPath]]:
        for session in self._sessions:
            for sequence_id, path in session.paths.items():
                yield session, sequence_id, path


def _ready(path: DraftPath) -> bool:
    return path.room > 0 and not path.told_last


def _propose(sequence_id: int, path: DraftPath, token_ids: Sequence[int], last: bool) -> Proposal:
    base_length, base_hash = len(path.token_ids), path.base_hash()
    path.extend(token_ids)
    ends = last or path.at_end
    if ends:
        path.tell_last()
    return Proposal(sequence_id, base_length, base_hash, tuple(token_ids), ends)


def _check_vocabulary(name: str, token_ids: Sequence[int], info: DrafterInfo) -> None:
    if info.vocab_size and max(token_ids) >= info.vocab_size:
        raise ProtocolError(
            f"{name}.token_ids: expected ids below {info.vocab_size}, got {max(token_ids)}"
        )
