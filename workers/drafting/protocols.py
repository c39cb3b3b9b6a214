"""All that a package with a drafter kind of its own imports (docs/extending.md).

A kind is one file. It has a Proposer, which grows the trees of open sequences, and it registers a
DrafterKind, which says how the proposer is loaded and what it needs. The files of
`workers/drafting/kinds` are examples; `ngram.py` is the shortest.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import ConfigError
from workers.drafting.tree import ROOT, DraftTree, Grant, Kept, NewNodes
from workers.engine.device import Device
from workers.engine.load.weight_form import WeightForm
from workers.process.registry import Registry
from workers.verification.rule import RULES, CandidateKind, rule_named

__all__ = [
    "ANY_POSITION",
    "DRAFTERS",
    "ROOT",
    "CandidateKind",
    "Draft",
    "DraftTree",
    "DrafterInfo",
    "DrafterKind",
    "DrafterOptions",
    "Grant",
    "Kept",
    "NewNodes",
    "Pass",
    "Proposer",
    "TakesNoTime",
    "TopTokens",
]

_log = logging.getLogger(__name__)

ANY_POSITION = (1 << 32) - 1
"""The `max_position` of a drafter whose memory does not depend on positions."""

_TAKEN_NAMES = ("any", "driver", "emulated", "target")
"""Words of the configuration and of statistics that stand where a kind's name stands too."""


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What a drafter loads, and where it computes.

    `folder`, `weights`, `kv_memory_bytes`, `prefix_cache`, `device` and `kernels` are for kinds
    with a checkpoint. `kv_memory_bytes` None: as much as open_engine takes. `prefix_cache`: whether
    sequences of one tenant share the KV of equal prefixes. `kernels`: whether a GPU runs our own
    kernels. `max_sequences` counts those of all streams together. `cores` None: the system chooses
    the cores. `of_kind`: the kind's own options, an instance of DrafterKind.options; None: its
    defaults, which serve_drafter fills in.
    """

    kind: str
    folder: Path | None = None
    weights: WeightForm = "int8"
    threads: int = 1
    kv_memory_bytes: int | None = 256 * 1024 * 1024
    max_sequences: int = 64
    cores: tuple[int, ...] | None = None
    device: Device = "cpu"
    kernels: bool = False
    prefix_cache: bool = True
    of_kind: Any = None


@dataclass(frozen=True, slots=True)
class NoOptions:
    """A kind without options of its own."""


def _check_nothing(options: DrafterOptions) -> None:
    """Accept all options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterKind:
    """A kind of drafter. Reading the registry imports its file, which must not import torch.

    `name`: as in the configuration, in requests and on the wire. `help`: one line for people.
    `paper`: where it was published.

    `load` makes the proposer in the drafter's process; libraries that are slow to import are
    imported there. It runs on the event loop of the process, so long work belongs in a thread.

    `candidates`: how it makes its candidates, which decides which rules they fit; None: it draws
    them as the rule asks. `default_model`: the checkpoint that it loads if the configuration names
    none, as `drafters.model` would name it. A kind with a checkpoint gets cores or a GPU of its
    own; one without (None) shares the driver's cores.

    `check` is called on the host of the command, before any process starts, for a kind with a
    checkpoint. It raises ConfigError or CheckpointError for options that `load` would refuse, such
    as too little memory for KV. `options`: a dataclass, whose fields are the keys of the table
    `drafters.options`.
    """

    name: str
    help: str
    load: Callable[[DrafterOptions], Awaitable[Proposer]]
    candidates: CandidateKind | None
    paper: str | None = None
    default_model: str | None = None
    check: Callable[[DrafterOptions], None] = _check_nothing
    options: type[Any] = NoOptions

    def __post_init__(self) -> None:
        if self.name in _TAKEN_NAMES:
            raise ConfigError(
                f"drafter kind {self.name!r}: the name has another meaning; rename it"
            )

    def candidates_for(self, rule: str) -> CandidateKind:
        """How it makes its candidates for a rule."""
        return self.candidates or rule_named(rule).drawn_as or CandidateKind.SHARED_NOISE

    @property
    def rules(self) -> frozenset[str]:
        """The names of the rules that its candidates fit."""
        return frozenset(
            name
            for name, rule in RULES.all().items()
            if self.candidates_for(name) in rule.exact_for
        )


def _load_own() -> None:
    from workers.drafting import kinds

    for module in pkgutil.iter_modules(kinds.__path__):
        import_module(f"workers.drafting.kinds.{module.name}")


DRAFTERS: Registry[DrafterKind] = Registry(
    "drafter kind", group="paceline.drafters", load_own=_load_own
)
"""The kinds. A kind's file adds it: `DRAFTERS.add(DrafterKind(...))`."""


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter's properties (drafting.proto, DescribeDrafterResponse).

    The defaults are those of a drafter without a model: it copies token ids, of any vocabulary.
    """

    kind: str
    rules: frozenset[str]
    model: str = ""
    vocab_size: int = 0
    vocabulary_digest: bytes = b""
    max_position: int = ANY_POSITION
    wants_top_tokens: bool = False


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The target's likeliest next tokens after a token that it was fed, the likeliest first.

    `previous_id`: the token before that one; None if it was the first.
    """

    token_id: int
    top_ids: tuple[int, ...]
    previous_id: int | None = None


@dataclass(slots=True)
class Draft:
    """What a pass adds to a tree.

    `last`: nothing follows before the next outcome, whatever is granted; `new` may be empty.
    `grant_used`: nothing follows unless more is granted. (The desk itself notices when the grant's
    nodes are used up, or when a chain reaches an end token.) `stopping_state`: see drafting.proto,
    Proposal.
    """

    tree: DraftTree
    new: NewNodes
    last: bool = False
    grant_used: bool = False
    stopping_state: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Pass:
    """The result of one pass.

    `declined`: trees that could not be kept, and why. `took_part`: every tree that the pass worked
    for, including those whose prefill continues. `tokens_fed`: the number of tokens that a model
    was fed. `prefilled`: whether some of them were prefill.
    """

    drafts: list[Draft] = field(default_factory=list)
    declined: list[tuple[DraftTree, str]] = field(default_factory=list)
    took_part: list[DraftTree] = field(default_factory=list)
    tokens_fed: int = 0
    prefilled: bool = False

    def fail(self, tree: DraftTree, error: Exception) -> None:
        """Decline a tree because drafting for it raised an error; the others continue."""
        self.declined.append((tree, reason_of_failure(error)))


def reason_of_failure(error: Exception) -> str:
    """Log an error that concerns one sequence. Returns why the sequence is declined."""
    _log.error("drafting for a sequence failed; it is declined", exc_info=error)
    return f"drafting for it failed: {error!r}"


class Proposer(Protocol):
    """Grows open trees. It reads the trees; the caller changes them."""

    @property
    def info(self) -> DrafterInfo:
        """The drafter's properties."""

    def open(self, tree: DraftTree) -> None:
        """Begin to keep what a tree needs. If memory is full, raises OverloadedError and keeps
        nothing.

        A tree for which memory runs out later is declined in that pass.
        """

    def settle(self, tree: DraftTree, count: int) -> None:
        """Process the next `count` tokens of a long text (NodeTree.settle), beyond those at `open`.

        The caller calls this before it calls the tree's own `settle`.
        """

    def close(self, tree: DraftTree) -> None:
        """Free everything kept for a tree."""

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        """Follow an outcome of a tree; `kept` says what is left of its nodes.

        `top_tokens`: what the target told since the last call, for a drafter that wants it.
        """

    def at_hand(self, tree: DraftTree) -> NewNodes:
        """Nodes for a ready tree that need no pass, because their logits are there already.

        The caller adds them before the next pass, which may feed them. An empty result does not end
        the draft.
        """

    def promise(self, tree: DraftTree) -> float:
        """The probability that a pass now drafts a token of this tree that will be committed."""

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        """Draft for `trees`, all of which are open and ready, within their grants.

        An error that concerns one tree is noted (Pass.fail); an error that concerns all is raised.
        A draft adds at most `tree.nodes_left` nodes, and none to a parent whose `tree.room` is 0. A
        ready tree to which nothing can be added must get a draft that says so (`last` or
        `grant_used`), else it stays ready and is asked again without end. `pass_ms`: the present
        duration of a pass in milliseconds, 0 if unknown.
        """

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        """Assert that what is kept matches `trees`, which are all the open ones."""


class TakesNoTime:
    """Base of kinds whose passes take so little time that none is worth avoiding or preparing."""

    def settle(self, tree: DraftTree, count: int) -> None:
        """Do nothing: no state is kept of a text."""

    def at_hand(self, tree: DraftTree) -> NewNodes:
        """No nodes."""
        return NewNodes()

    def promise(self, tree: DraftTree) -> float:
        """1: a pass is always worth its time."""
        return 1.0
