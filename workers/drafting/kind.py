"""The interface of a drafter kind: a package that adds a kind needs only this module.

A kind is one file (docs/extending.md). It has a Proposer, which grows the trees of open sequences,
and it registers a DrafterKind, which says how the proposer is loaded and what it needs. The files
of `workers/drafting/kinds` are examples; `ngram.py` is the shortest.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline.errors import ConfigError
from workers.drafting.tree import ROOT, DraftTree, Grant, Kept, NewNodes
from workers.engine.options import Device, UseKernels, WeightForm
from workers.process.plugin_registry import Registry
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
    "Learns",
    "NewNodes",
    "Pass",
    "Proposer",
    "TakesNoTime",
    "TopTokens",
]

_log = logging.getLogger(__name__)

ANY_POSITION = (1 << 32) - 1
"""The `max_position` of a drafter that has no maximum context."""

_TAKEN_NAMES = ("any", "driver", "emulated", "target")
"""Words that have another meaning where the configuration or statistics name a kind."""


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What a drafter loads, and on which device and cores it computes.

    `folder`, `weights`, `kv_memory_bytes`, `prefix_cache`, `device` and `kernels` are for kinds
    with a checkpoint. `kv_memory_bytes` None: open_engine chooses it. `prefix_cache`: whether
    sequences of one tenant share the KV of equal prefixes. `kernels`: whether a GPU runs our own
    kernels. `max_sequences` counts those of all streams together. `cores` None: the system chooses
    the cores. `cache`: see CpuEngine. `labels`: where it is (drafting.proto,
    DescribeDrafterResponse). `of_kind`: the kind's own options, an instance of
    DrafterKind.options; None: its defaults (DrafterKind.with_defaults).
    """

    kind: str
    folder: Path | None = None
    weights: WeightForm = "int8"
    threads: int = 1
    kv_memory_bytes: int | None = 256 * 1024 * 1024
    max_sequences: int = 64
    cores: tuple[int, ...] | None = None
    device: Device = "cpu"
    kernels: UseKernels = False
    prefix_cache: bool = True
    cache: Path | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
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

    `load` makes the proposer in the drafter's process; import there what is slow to import. It runs
    on the event loop of the process, so run long work in a thread.

    `candidates`: how the kind makes its candidates, which decides which rules they fit; None: it
    draws them as the rule asks. `default_model`: the checkpoint that it loads if the configuration
    names none, in the form of `drafters.model`. A kind with a checkpoint gets cores or a GPU of its
    own; a kind without one (None) shares the driver's cores.

    `check` is called for a kind with a checkpoint, on the host where the command runs, before any
    process starts. It raises ConfigError or CheckpointError for options that `load` would refuse,
    such as too little memory for KV. `options`: a dataclass; its fields are the keys of the table
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
        return self.candidates or rule_named(rule).drawn_as or CandidateKind.SHARED_NOISE

    def with_defaults(self, options: DrafterOptions) -> DrafterOptions:
        """These options, with the kind's own defaults if they have none of its own."""
        return options if options.of_kind is not None else replace(options, of_kind=self.options())

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


@dataclass(slots=True)
class TopTokens:
    """The target's likeliest next tokens after a token that it was fed, the likeliest first.

    `previous_id`: the token before `token_id`; None if `token_id` is the first of its sequence.
    """

    token_id: int
    top_ids: tuple[int, ...]
    previous_id: int | None = None


@dataclass(slots=True)
class Draft:
    """What a pass adds to a tree.

    `last`: nothing follows before the next outcome, whatever the driver grants; `new` may be empty.
    `grant_used`: nothing follows until the driver grants more. (The desk itself notices when the
    grant's nodes are used up, or when a chain reaches an end token.) `stopping_state`: see
    drafting.proto, Proposal.
    """

    tree: DraftTree
    new: NewNodes
    last: bool = False
    grant_used: bool = False
    stopping_state: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Pass:
    """The result of one pass.

    `declined`: trees that the drafter cannot continue, and why. `took_part`: every tree that the
    pass worked on, including those whose prefill continues. `tokens_fed`: the number of tokens that
    a model was fed. `prefilled`: whether some of these tokens were prefill. `fed`: the tokens of
    each tree that was fed more than one. `short`: trees for which the drafter has no memory, and
    what it lacks: each is declined, or goes on once another gave memory back.
    """

    drafts: list[Draft] = field(default_factory=list)
    declined: list[tuple[DraftTree, str]] = field(default_factory=list)
    took_part: list[DraftTree] = field(default_factory=list)
    tokens_fed: int = 0
    prefilled: bool = False
    fed: dict[DraftTree, int] = field(default_factory=dict)
    short: list[tuple[DraftTree, str]] = field(default_factory=list)

    def fail(self, tree: DraftTree, error: Exception) -> None:
        """Decline a tree because drafting for it raised an error; the others continue."""
        self.declined.append((tree, reason_of_failure(error)))


def reason_of_failure(error: Exception) -> str:
    """Log an error that concerns one sequence. Returns why the sequence is declined."""
    _log.error("drafting for a sequence failed; it is declined", exc_info=error)
    return f"drafting for it failed: {error!r}"


class Proposer(Protocol):
    """Grows the trees of open sequences. It reads the trees, and its caller changes them."""

    @property
    def info(self) -> DrafterInfo:
        """The drafter's properties."""

    def open(self, tree: DraftTree) -> None:
        """Set up the proposer's state of a tree.

        If memory is full, this raises OverloadedError and keeps nothing. A tree for which memory
        runs out later is declined in that pass.
        """

    def settle(self, tree: DraftTree, count: int) -> None:
        """Process the next `count` committed tokens of a long text; `open` saw only its beginning.

        The caller calls this before it calls the tree's own `settle` (DraftTree.settle).
        """

    def close(self, tree: DraftTree) -> None:
        """Free everything kept for a tree."""

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        """Apply an outcome to the state of a tree; `kept` says which of its nodes are left.

        `top_tokens`: the target's likeliest tokens since the last call, if the drafter wants them.
        """

    def at_hand(self, tree: DraftTree) -> NewNodes:
        """Nodes for a ready tree that need no pass, because an earlier pass has drawn them.

        The caller adds them, and asks again until there are none: before a pass, which may feed
        them, and after it. An empty result does not end the draft.
        """

    def promise(self, tree: DraftTree) -> float:
        """The probability that a pass now drafts a token of this tree that will be committed."""

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        """Draft for `trees` within their grants. All of them are open and ready.

        Note an error that concerns one tree by Pass.fail, and raise one that concerns all. A draft
        adds at most `tree.nodes_left` nodes, and none to a parent whose `tree.room` is 0. If
        nothing can be added to a ready tree, return a draft that says so (`last` or `grant_used`):
        otherwise the tree stays ready and is passed again and again. `pass_ms`: the present
        duration of a pass in milliseconds, 0 if unknown.
        """

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        """Assert that the proposer's state matches `trees`, all open ones."""


@runtime_checkable
class Learns(Protocol):
    """What a proposer has beside if it works while nothing is to be drafted."""

    def learn(self) -> bool:
        """Work for at most some milliseconds: a message that comes meanwhile waits for the end.

        Returns whether there is more to do.
        """


class TakesNoTime:
    """Base class of kinds whose passes take almost no time, so that none is avoided or prepared."""

    def settle(self, tree: DraftTree, count: int) -> None:
        """Do nothing: by default a kind keeps no state of a text."""

    def at_hand(self, tree: DraftTree) -> NewNodes:
        """No nodes."""
        return NewNodes()

    def promise(self, tree: DraftTree) -> float:
        """1: a pass is always worth its time."""
        return 1.0

    def draft(self, tree: DraftTree) -> Draft:
        """Draft for one tree, as `run_pass` does for all."""
        raise NotImplementedError("a kind defines `draft` or `run_pass`")

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        """Draft for each tree by itself. A kind that does otherwise has no `draft`."""
        result = Pass(took_part=list(trees))
        for tree in trees:
            try:
                result.drafts.append(self.draft(tree))
            except Exception as error:  # Of one sequence: others go on.
                result.fail(tree, error)
        return result
