"""The engine on a CPU: a model or a rank's part of one, its KV blocks, and its steps."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.engine.cpu.attention import CpuStep
from workers.engine.cpu.kept_model import Keeper, KeptModel
from workers.engine.cpu.kv_cache import BLOCK_SIZE, CpuKvCache, block_bytes
from workers.engine.cpu.linears import MIN_ROWS, activation_dtype
from workers.engine.cpu.native import NativeForward, native_forward
from workers.engine.cpu.step_plan import make_plan
from workers.engine.engine import Engine
from workers.engine.forward import choose_forward, probe_slice
from workers.engine.kv_blocks import blocks_for
from workers.engine.load.checkpoint import (
    choose_length,
    draft_tokens_of,
    inspect_checkpoint,
    sliding_window_of,
)
from workers.engine.load.model import check_weights_room, load_on_cpu, part_config
from workers.engine.memory import check_room, kv_sizes_of, num_blocks_in
from workers.engine.options import WeightForm
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.sharding import Progress
from workers.engine.parallel.weight_cuts import Place
from workers.engine.self_test import rows_are_invariant
from workers.engine.slices import KvMoves, Slice, blocks_begun, check_tree, moved_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNLIKELY = -1e9
"""The logit of a token that a drafter does not propose: finite, and with probability 0."""


class CpuEngine(Engine):
    """A loaded checkpoint with its KV memory. One per process: it sets torch's thread count."""

    block_size = BLOCK_SIZE

    def __init__(
        self,
        folder: Path,
        *,
        weights: WeightForm = "float32",
        threads: int,
        most_threads: int | None = None,
        kv_memory_bytes: int,
        max_model_len: int | None = None,
        drafts: bool = False,
        group: RankGroup | None = None,
        progress: Progress | None = None,
        cache: Path | None = None,
    ) -> None:
        """Load the checkpoint, or with a `group` this rank's part of it, and test it.

        `max_model_len` may lower the checkpoint's own. A step uses `threads` CPU threads, in our
        own kernels `most_threads` if that is more (their threads do not wait for one whose core was
        taken), or fewer while other processes use the cores; a rank always uses all threads.
        `drafts`: a row's bits may depend on the number of rows, where that makes prompts faster,
        and of DRAFT_TOKENS alone there are logits; those of other tokens are UNLIKELY.
        `cache`: the folder for models as our kernels read them (kept_model.py), which makes the
        next start faster; None: nothing is kept.
        Raises CheckpointError, or ConfigError if memory does not suffice.
        """
        torch.set_num_threads(threads)
        self._threads: ThreadChoice | None = None
        self.group = group
        drafted = draft_tokens_of(folder) if drafts else None
        keeper = None
        if cache is not None and group is None:
            keeper = Keeper(cache, folder, weights, head_rows=drafted)
        kept = None if keeper is None else keeper.find()
        self.info = inspect_checkpoint(folder) if kept is None else kept.info
        self._drafted_C = None if drafted is None else torch.tensor(drafted)
        self.max_model_len = choose_length(max_model_len, self.info.max_model_len)
        self._weights = weights
        self.dtype = weights
        place = Place() if group is None else group.place
        sizes = kv_sizes_of(part_config(folder, place) if kept is None else kept.config)
        per_block = block_bytes(**sizes, dtype=activation_dtype(weights))
        self.num_blocks = num_blocks_in(
            kv_memory_bytes,
            per_block=per_block,
            block_size=BLOCK_SIZE,
            max_model_len=self.max_model_len,
        )
        kv_bytes = self.num_blocks * per_block
        self._min_tokens = MIN_ROWS[weights]
        if kept is None or not self._adopt_kept(kept, progress, per_block):
            model = load_on_cpu(
                folder, weights, group, progress, kv_bytes=kv_bytes, head_rows=drafted
            )
            with nullcontext() if group is None else group.alone():
                self._adopt(model, per_block)
            if keeper is not None and self._native is not None:
                keeper.keep(model, self.info, self._probe_logits(self._native))
        if self._native is not None:
            threads = max(threads, most_threads or threads)
            torch.set_num_threads(threads)
        self.wants_invariance, self.batch_invariant = True, None
        if group is None:
            self.batch_invariant = rows_are_invariant(self)
        # Ranks wait for each other, so the time of a rank's step says little about its own threads.
        if threads > 1 and self.batch_invariant:
            self._threads = ThreadChoice(threads)
        if drafts and self._native is not None and self._native.unpack_for_many_rows():
            self.wants_invariance = self.batch_invariant = False

    def _adopt_kept(self, kept: KeptModel, progress: Progress | None, per_block: int) -> bool:
        """Take a kept model, if it computes what it did when it was written."""
        check_weights_room(kept.num_bytes, self._weights, self.num_blocks * per_block)
        model = kept.load(self._weights, progress)
        self._allocate(model, per_block)
        with torch.inference_mode():
            native = NativeForward(model, self._cache, self.max_model_len)
        self._native: NativeForward | None = native
        return kept.has_logits(self._probe_logits(native))

    def _probe_logits(self, native: NativeForward) -> Tensor:
        with torch.inference_mode():
            return native([probe_slice(self.info.vocab_size)])[-1]

    def _adopt(self, model: PreTrainedModel, per_block: int) -> None:
        """Take a loaded model, and allocate its KV. `per_block`: the bytes of a block."""
        self._allocate(model, per_block)
        probe = probe_slice(self.info.vocab_size)
        with torch.inference_mode():
            step = self._plan([probe])
            self._forward = choose_forward(model, step)
            self._native = native_forward(model, self._cache, self.max_model_len, probe, step)

    def _allocate(self, model: PreTrainedModel, per_block: int) -> None:
        config = model.config
        self._window = sliding_window_of(config)
        self._num_query_heads = int(config.num_attention_heads)
        sizes = kv_sizes_of(config)
        self._num_kv_heads = sizes["num_heads"]
        least = blocks_for(self.max_model_len, BLOCK_SIZE) * per_block
        # This was checked before the weights were loaded; other processes may have taken memory.
        check_room(
            self.num_blocks * per_block,
            "beside the weights, target.kv_memory asks for",
            f"give less, at least {least} for one sequence of max_model_len",
        )
        self._cache = CpuKvCache(**sizes, num_blocks=self.num_blocks, dtype=model.dtype)
        self._began = self._ended = 0.0

    @property
    def forward_seconds(self) -> float:
        return self._ended - self._began

    @property
    def forward_end(self) -> float:
        return self._ended

    def step_part(self, slices: Sequence[Slice]) -> Tensor:
        for piece in slices:
            check_tree(piece)
        if self._native is None and (begun := blocks_begun(slices, BLOCK_SIZE)):
            self._cache.clear(begun)
        rows = sum(len(piece.token_ids) for piece in slices)
        threads = None if self._threads is None else self._threads.choose(rows)
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        forward = self._plan_and_forward if self._native is None else self._native
        self._began = time.perf_counter()
        logits_TV = forward(slices)
        if self._drafted_C is not None:
            logits_TC, shape = logits_TV, (len(logits_TV), self.info.vocab_size)
            logits_TV = torch.full(shape, UNLIKELY)
            logits_TV.index_copy_(1, self._drafted_C, logits_TC)
        self._ended = time.perf_counter()
        if self._threads is not None and threads is not None:
            self._threads.record(rows, threads, self.forward_seconds)
        return logits_TV

    @torch.inference_mode()
    def _plan_and_forward(self, slices: Sequence[Slice]) -> Tensor:
        return self._forward(self._plan(slices)).float()

    def _plan(self, slices: Sequence[Slice]) -> CpuStep:
        plan = make_plan(
            slices,
            num_query_heads=self._num_query_heads,
            num_kv_heads=self._num_kv_heads,
            min_tokens=self._min_tokens,
            window=self._window,
        )
        return CpuStep(plan, self._cache.layers)

    @torch.inference_mode()
    def move_kv(self, moves: Sequence[KvMoves]) -> None:
        sources, targets = torch.from_numpy(moved_slots(moves, BLOCK_SIZE))
        self._cache.copy_slots(sources, targets)


MORE_SHARE = 0.04
"""Maximum share of time for trials of more threads: other processes take cores only for a while."""
FEWER_SHARE = 0.005
"""Maximum share of time for trials of fewer threads."""
DISTURBED = 1.25
"""Minimum slowness at which fewer threads are tried: a trial delays the tokens of all sequences."""

_RECENT = 3
"""The number of steps whose median slowness counts, since one slow step says nothing."""
_DRIFT = 1.005
"""Factor by which the quickest known time of a kind grows per step, since contexts get longer."""


class ThreadChoice:
    """Chooses the number of threads with the least expected time.

    The threads of a step synchronize some two hundred times. If another process takes one of their
    cores, each synchronization waits milliseconds for the operating system: a step of 18 ms took
    1,190 beside one busy process, and 36 with one thread. A row's bits are the same with any number
    of threads.

    Steps whose numbers of rows have the same power of two are of one kind. The slowness of a step
    is its time as a multiple of the quickest of its kind and number of threads. The expected time
    is that quickest time, times the recent slowness with that number of threads. If a number of
    threads was not tried with a kind, its quickest time is scaled from the kind that was last tried
    with all numbers.
    """

    def __init__(self, most: int) -> None:
        """`most`: the largest number, at least 1. Also tried: most - 1, most / 2, and 1."""
        self._counts = sorted({most, max(most - 1, 1), max(most // 2, 1), 1}, reverse=True)
        self._now = most
        self._quickest: dict[int, dict[int, float]] = defaultdict(dict)
        self._reference: dict[int, float] = {}
        self._slowness = {count: deque([1.0], _RECENT) for count in self._counts}
        self._since_tried = dict.fromkeys(self._counts, 0.0)

    def choose(self, rows: int) -> int:
        """The number of threads for a step of `rows` rows: the best one, or another as a trial."""
        times = self._quickest_times(self._quickest[rows.bit_length()])
        if not times:
            return self._now
        expected = {count: time * median(self._slowness[count]) for count, time in times.items()}
        self._now = min(expected, key=lambda count: expected[count])
        for count in self._counts:
            if count not in times:
                return count
            # A step may be slow because of the tokens that it feeds. It would then be as slow with
            # another number of threads.
            loss = max(
                times[count] * self._slowness[count][-1] - expected[self._now],
                times[count] - times[self._now],
            )
            if count != self._now and loss <= self._share(count) * self._since_tried[count]:
                return count
        return self._now

    def record(self, rows: int, threads: int, seconds: float) -> None:
        """Note that a step of `rows` rows took `seconds` with `threads` threads."""
        quickest = self._quickest[rows.bit_length()]
        quickest[threads] = min(seconds, quickest.get(threads, seconds) * _DRIFT)
        if len(quickest) == len(self._counts):
            self._reference = quickest
        self._slowness[threads].append(seconds / quickest[threads])
        for count in self._counts:
            self._since_tried[count] += seconds
        self._since_tried[threads] = 0.0

    def _share(self, count: int) -> float:
        """The maximum share of time for trials of `count` threads."""
        if count > self._now:
            return MORE_SHARE
        return FEWER_SHARE if self._slowness[self._now][-1] >= DISTURBED else 0.0

    def _quickest_times(self, own: dict[int, float]) -> dict[int, float]:
        """The quickest times of a kind of steps; numbers that were not tried are estimated.

        The estimate assumes that fewer threads are slower at least in proportion. Wide steps are
        bound by arithmetic, but the estimate may come from narrow steps, which are bound by memory.
        """
        if not own or not self._reference:
            return own
        known = max(own)
        scale = own[known] / self._reference[known]
        return {
            count: own.get(count, max(time * scale, own[known] * known / count))
            for count, time in self._reference.items()
        }
