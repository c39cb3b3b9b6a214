"""A drafter that learns from what the target writes, while it has nothing to draft.

Online Speculative Decoding (Liu et al. 2023) trains the drafter's network while it serves. This
learns less, but needs no gradients through an engine: for each of a tenant's tokens a vector is
added to the rows of the LM head. Logits are linear in the state that the head multiplies, so a few
hundred of them stand for the state. A token's logit gets its vector times these features.

The teacher is the text: every committed token is what the target chose after a row that the drafter
computed. A row is scored before it is learned from. The corrections of a tenant are used as long as
the likeliest token is right more often with them, and forgotten where they do harm: the drafter is
then as it was loaded. Candidates are drawn from the corrected logits, and these are the draft
probabilities that a verdict sees: what is learned changes how much is accepted, never the text.

Shapes: T rows, V vocabulary, M features, C corrected tokens, B rows of a training step, N tokens of
such a row whose logits are known.
"""

from __future__ import annotations

import logging
import math
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from workers.drafting.tree import ROOT, DraftTree, Kept

FEATURES = 256
MOST_TOKENS = 4096
"""Tokens of a tenant that have a correction; with more, those used longest ago lose theirs."""
MOST_TENANTS = 16
"""Tenants whose corrections are kept: the last ones. One takes some 8 MiB."""
MOST_ROWS = 256
"""Rows of logits that wait for a verdict, or for their turn to teach. Older ones are forgotten."""
MOST_EXAMPLES = 2048
"""Rows of a tenant that are repeated among new ones."""
BATCH = 32
"""New rows of a training step; as many old ones are repeated."""
ROWS_AT_ONCE = 4
"""New rows that a slice of time takes in."""
KNOWN = 16
"""Logits of a row that an example keeps: the largest. For others their mean stands."""
RATE = 1.0
GAIN_ROWS, LEAST_ROWS = 128, 64
"""Rows of the moving average of the gain, and those that are scored before corrections are used."""
HARM = 0.05
"""Corrections that have helped are forgotten if the gain falls below minus this share."""
_IMPOSSIBLE = -1e8
"""Logits below this one are of tokens that the drafter does not propose."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Row:
    """What the drafter computed at a node, before corrections. `logits_V` None: forgotten."""

    logits_V: Tensor | None
    features_M: Tensor


@dataclass(frozen=True, slots=True)
class _Example:
    """A row and what followed. `rest`: the logarithm of the sum over tokens not in `ids_N`."""

    features_M: Tensor
    ids_N: Tensor
    logits_N: Tensor
    rest: Tensor
    token_id: int


class _Learner:
    """What was learned from one tenant.

    `fresh`: rows not looked at yet, and what followed them. `_gain`: moving average of how much
    more often the likeliest token is right with corrections than without.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self.fresh: deque[tuple[_Row, int]] = deque(maxlen=MOST_ROWS)
        self._new: list[_Example] = []
        self._old: deque[_Example] = deque(maxlen=MOST_EXAMPLES)
        self._draw = random.Random(0)
        self.forget()

    def forget(self) -> None:
        """Be as before the first row."""
        self.fresh.clear()
        self._new.clear()
        self._old.clear()
        self._gain, self._scored = 0.0, 0
        self.is_used = self._has_helped = False
        self._steps = 0
        self._place_V = torch.full((self._vocab_size,), -1, device=self._device)
        self._ids_C = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._rows_CM = torch.zeros(MOST_TOKENS, FEATURES, device=self._device)
        self._squares_C = torch.zeros(MOST_TOKENS, device=self._device)
        self._used_at_C = torch.zeros(MOST_TOKENS, dtype=torch.int64, device=self._device)

    def correct(self, logits_TV: Tensor, features_TM: Tensor) -> None:
        if count := len(self._ids_C):
            logits_TV.index_add_(1, self._ids_C, features_TM @ self._rows_CM[:count].T)

    @property
    def has_work(self) -> bool:
        return bool(self.fresh) or len(self._new) >= BATCH

    def work(self) -> None:
        """Train a step, or take in a few rows for the next one."""
        if len(self._new) >= BATCH:
            self._train()
        for _ in range(ROWS_AT_ONCE):
            if self.fresh:  # taking one in may forget the others
                self._take_in()

    def _take_in(self) -> None:
        """Score the oldest fresh row, and keep what a training step needs of it."""
        row, token_id = self.fresh.popleft()
        if row.logits_V is None:
            return
        logits_V, row.logits_V = row.logits_V, None
        sum_V = logits_V.logsumexp(0)
        if not bool(sum_V.isfinite() & (logits_V[token_id] > _IMPOSSIBLE)):
            return
        own_V = logits_V.clone()
        self.correct(own_V[None], row.features_M[None])
        self._score(int(own_V.argmax()) == token_id, int(logits_V.argmax()) == token_id)
        known = logits_V.topk(min(KNOWN, len(logits_V)))
        ids_N = torch.cat([known.indices, known.indices.new_tensor([token_id])])
        rest = (1 - (known.values - sum_V).exp().sum()).clamp(min=1e-9).log() + sum_V
        self._new.append(_Example(row.features_M, ids_N, logits_V[ids_N], rest, token_id))

    def _score(self, own: bool, base: bool) -> None:
        self._scored += 1
        weight = max(1 / GAIN_ROWS, 1 / self._scored)
        self._gain += weight * (own - base - self._gain)
        if self._has_helped and self._gain < -HARM:
            _log.info("what was learned of a tenant did harm, so it is forgotten")
            self.forget()
        else:
            self.is_used = self._gain > 0 and self._scored >= LEAST_ROWS
            self._has_helped |= self.is_used

    def _train(self) -> None:
        """One step: the new rows, and as many old ones. The gradient is that of cross-entropy."""
        batch = self._new[:BATCH]
        del self._new[:BATCH]
        repeated = self._draw.sample(self._old, min(BATCH, len(self._old)))
        self._old.extend(batch)
        batch += repeated
        features_BM = torch.stack([one.features_M for one in batch])
        ids_BN = torch.stack([one.ids_N for one in batch])
        rest_B = torch.stack([one.rest for one in batch])
        ids_C, place = ids_BN.unique(return_inverse=True)
        own_C = self._places(ids_C)
        # The logits of tokens that a row did not keep: each has the mean of their probabilities.
        unknown_B = rest_B - math.log(max(1, self._vocab_size - KNOWN))
        logits_BC = unknown_B[:, None].repeat(1, len(ids_C))
        logits_BC.scatter_(1, place, torch.stack([one.logits_N for one in batch]))
        logits_BC += features_BM @ self._rows_CM[own_C].T
        slopes_BC = torch.cat([logits_BC, rest_B[:, None]], dim=1).softmax(-1)[:, :-1]
        # The token that followed is the last of a row's tokens.
        slopes_BC[torch.arange(len(batch), device=self._device), place[:, -1]] -= 1
        slopes_CM = slopes_BC.T @ features_BM
        if not bool(slopes_CM.isfinite().all()):
            _log.warning("a gradient was not finite; what was learned of a tenant is forgotten")
            self.forget()
            return
        # Adagrad, with one rate for each token.
        self._squares_C[own_C] += slopes_CM.square().sum(1)
        rates_C = RATE / self._squares_C[own_C].sqrt().clamp(min=1e-4)
        self._rows_CM[own_C] -= rates_C[:, None] * slopes_CM

    def _places(self, ids_C: Tensor) -> Tensor:
        """The rows of the corrections of these tokens; those without one get one."""
        self._steps += 1
        missing = ids_C[self._place_V[ids_C] < 0]
        count = len(self._ids_C)
        if count + len(missing) > MOST_TOKENS:
            kept = self._used_at_C[:count].topk(MOST_TOKENS // 2).indices
            self._place_V.fill_(-1)
            for one in (self._rows_CM, self._squares_C, self._used_at_C):
                one[: len(kept)] = one[kept]
                one[len(kept) :] = 0
            self._ids_C, count = self._ids_C[kept], len(kept)
            self._place_V[self._ids_C] = torch.arange(count, device=self._device)
            missing = ids_C[self._place_V[ids_C] < 0]
        ends = count, count + len(missing)
        self._place_V[missing] = torch.arange(*ends, device=self._device)
        self._ids_C = torch.cat([self._ids_C, missing])
        places_C = self._place_V[ids_C]
        self._used_at_C[places_C] = self._steps
        return places_C


class OnlineLearning:
    """The corrections of each tenant. `corrected`, `committed` and `close` follow a proposer."""

    def __init__(self) -> None:
        self._learners: OrderedDict[str, _Learner] = OrderedDict()
        self._rows: dict[DraftTree, dict[int, _Row]] = {}
        self._waiting: deque[_Row] = deque()
        self._columns_M: Tensor | None = None
        self._vocab_size = 0

    @torch.no_grad()
    def corrected(self, logits_TV: Tensor, nodes: Sequence[tuple[DraftTree, int]]) -> Tensor:
        """The logits with the corrections of each row's tenant. `nodes`: the node of each row."""
        features_TM = self._features(logits_TV)
        by_learner: dict[str, list[int]] = {}
        for number, (tree, node) in enumerate(nodes):
            row = _Row(logits_TV[number], features_TM[number])
            self._rows.setdefault(tree, {})[node] = row
            self._waiting.append(row)
            learner = self._learners.get(tree.tenant)
            if learner is not None and learner.is_used:
                by_learner.setdefault(tree.tenant, []).append(number)
        while len(self._waiting) > MOST_ROWS:
            self._waiting.popleft().logits_V = None
        if not by_learner:
            return logits_TV
        result_TV = logits_TV.clone()
        for tenant, numbers in by_learner.items():
            rows = torch.tensor(numbers, device=logits_TV.device)
            own_TV = result_TV[rows]
            self._learners[tenant].correct(own_TV, features_TM[rows])
            result_TV[rows] = own_TV
        return result_TV

    def _features(self, logits_TV: Tensor) -> Tensor:
        """The logits of some tokens [T, M], centered, of length 1; 0 if one is not finite."""
        if self._columns_M is None:
            possible = (logits_TV[0] > _IMPOSSIBLE).nonzero()[:, 0].cpu()
            order = torch.randperm(len(possible), generator=torch.Generator().manual_seed(0))
            self._vocab_size = logits_TV.shape[1]
            self._columns_M = possible[order[:FEATURES]].to(logits_TV.device)
        features_TM = logits_TV.index_select(1, self._columns_M)
        features_TM = features_TM - features_TM.mean(1, keepdim=True)
        features_TM = normalize(features_TM).nan_to_num()
        return pad(features_TM, (0, FEATURES - features_TM.shape[1]))

    def committed(self, tree: DraftTree, kept: Kept) -> None:
        """Learn later from the rows of the nodes whose next token was committed."""
        rows = self._rows.get(tree)
        if rows is None or not kept.token_ids:
            return
        taught = zip((ROOT, *kept.path), kept.token_ids, strict=False)
        found = [(rows[node], token_id) for node, token_id in taught if node in rows]
        if found:
            self._learner_of(tree.tenant).fresh.extend(found)
        self._rows[tree] = {}
        if kept.agreed:
            number_of = {old: number for number, old in enumerate((kept.path[-1], *kept.nodes))}
            self._rows[tree] = {new: rows[old] for old, new in number_of.items() if old in rows}

    def _learner_of(self, tenant: str) -> _Learner:
        assert self._columns_M is not None
        if tenant not in self._learners:
            self._learners[tenant] = _Learner(self._vocab_size, self._columns_M.device)
            if len(self._learners) > MOST_TENANTS:
                self._learners.popitem(last=False)
        self._learners.move_to_end(tenant)
        return self._learners[tenant]

    def close(self, tree: DraftTree) -> None:
        self._rows.pop(tree, None)

    @torch.no_grad()
    def learn(self) -> bool:
        """Work for some 2 ms: take in a few rows, or train a step. False: nothing is left to do."""
        for learner in self._learners.values():
            if learner.has_work:
                try:
                    learner.work()
                except Exception:  # Of one tenant: others go on.
                    _log.exception("learning failed; what was learned of a tenant is forgotten")
                    learner.forget()
                return True
        return False
