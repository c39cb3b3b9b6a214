"""The engine on a GPU: a model or a rank's part of one, its KV pages, and its steps.

The host never waits for the device during a step: inputs are copied from pinned memory, and logits
stay on the device, where verification/device_choice.py chooses tokens. In tests a CPU takes the
place of the GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import ConfigError
from workers.engine.cuda.attention import can_use_kernel
from workers.engine.cuda.graphs import Graphs, recorder_for, shapes_to_capture
from workers.engine.cuda.kv_cache import (
    FLOAT8,
    PAGE_SIZE,
    CudaKvCache,
    kv_dtype_of,
    page_bytes,
)
from workers.engine.cuda.linears import FIXED_ROWS, Fp8Linear, adapt_model
from workers.engine.cuda.step import (
    DeviceStep,
    Heads,
    Layout,
    exact_shape,
    lay_out,
    read_inputs,
)
from workers.engine.engine import Engine
from workers.engine.forward import LayerOperations, choose_forward, probe_slice
from workers.engine.kv_blocks import blocks_for
from workers.engine.load.checkpoint import CheckpointInfo, choose_length
from workers.engine.memory import MAX_GPU_SHARE, MemoryProfile, kv_sizes_of, num_blocks_on_gpu
from workers.engine.options import KvDtype
from workers.engine.parallel.group import RankGroup
from workers.engine.self_test import rows_are_invariant, trees_are_invariant
from workers.engine.slices import KvMoves, Slice, check_tree, moved_slots
from workers.process.kernels import can_run_kernels, check_kernels, give_up_kernels
from workers.verification.staging import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Options of the engine on a GPU.

    `kv_memory_bytes` None: the memory that a profile run leaves free, but at most that for
    `kv_tokens` tokens, if this is given. `max_model_len` may lower the checkpoint's own.
    `batch_invariant`: whether a row's bits must not depend on other rows. `max_step_tokens`,
    `max_num_seqs`: the largest step for which memory is kept. `graphs`: whether decoding steps are
    captured. `kv_dtype`: the dtype of stored keys and values.
    """

    kv_memory_bytes: int | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    batch_invariant: bool = True
    max_step_tokens: int = 2048
    max_num_seqs: int = 64
    graphs: bool = True
    kv_dtype: KvDtype = "auto"


class CudaEngine(Engine):
    """A loaded model with its KV memory."""

    block_size = PAGE_SIZE

    def __init__(
        self,
        model: PreTrainedModel,
        info: CheckpointInfo,
        options: CudaOptions | None = None,
        *,
        group: RankGroup | None = None,
        kv_scales_L2H: Tensor | None = None,
    ) -> None:
        """Adapt the model, which is on its device already, and allocate its KV.

        With a `group` the model is this rank's part (load_on_gpu). Raises ConfigError if
        memory does not suffice, if the checkpoint does not support max_model_len, or if the GPU
        does not support the dtype of the KV. `kv_scales_L2H`: the scales of float8 KV, by layer,
        keys before values, by head; None: 1.
        """
        options = options or CudaOptions()
        self.info = info
        self.group = group
        self.device = model.device
        self.max_model_len = choose_length(options.max_model_len, info.max_model_len)
        self._options = options
        self._table_pages = -(-self.max_model_len // PAGE_SIZE) + 1
        config = model.config
        self._sizes = kv_sizes_of(config)
        self._heads = Heads(int(config.num_attention_heads), self._sizes["num_heads"])
        self._dtype = model.dtype
        self._kv_dtype = kv_dtype_of(options.kv_dtype, model.dtype)
        own, kv = (str(one).removeprefix("torch.") for one in (self._dtype, self._kv_dtype))
        self.dtype = own if own == kv else f"{own} with {kv} KV"
        self._kv_scales_L2H = None if kv_scales_L2H is None else kv_scales_L2H.to(self.device)
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = 0.0
        self._began = 0.0
        self._graphs: Graphs | None = None
        try:
            with nullcontext() if group is None else group.alone():
                self._prepare(model)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise ConfigError(
                f"out of GPU memory while the engine was made ready: {free} of {total} bytes are "
                f"free; lower kv_memory or max_model_len, or raise tensor_parallel ({error})"
            ) from error

    @torch.inference_mode()
    def _prepare(self, model: PreTrainedModel) -> None:
        options = self._options
        check_kernels(self.device, lambda: self._fault_of_kernels(model))
        self._check_kv()
        adapt_model(model, batch_invariant=options.batch_invariant)
        self._model = model
        self._cache = self._allocate(-(-options.max_step_tokens // PAGE_SIZE))
        self._choose_forward()
        profile = self._profile() if self.device.type == "cuda" else None
        num_blocks = num_blocks_on_gpu(
            options.kv_memory_bytes,
            profile,
            per_block=page_bytes(**self._sizes, dtype=self._kv_dtype),
            max_model_len=self.max_model_len,
        )
        if options.kv_memory_bytes is None and options.kv_tokens is not None:
            wanted = max(options.kv_tokens, self.max_model_len)
            num_blocks = min(num_blocks, blocks_for(wanted, PAGE_SIZE))
        del self._cache
        self._cache = self._allocate(num_blocks)
        self.num_blocks = num_blocks
        self.wants_invariance, self.batch_invariant = options.batch_invariant, None
        if self.group is None:
            self._capture()
            self.batch_invariant = options.batch_invariant and rows_are_invariant(self)
            if self.batch_invariant:
                self._test_trees()

    def _choose_forward(self) -> None:
        """Choose the forward pass by a probe. Overwrites the first block."""
        layout = self._lay_out([probe_slice(int(self.info.vocab_size))])
        array = to_device(layout.array, self.device)
        step = self._device_step(array, layout, len(layout.logit_rows))
        self._forward = choose_forward(self._model, step, self._operations())

    def _fault_of_kernels(self, model: PreTrainedModel) -> str | None:
        from workers.engine.cuda.kernel_check import ModelSizes, find_fault  # needs Triton

        size = self._sizes["head_size"]
        sizes = ModelSizes(
            self._heads.num_queries,
            self._heads.num_keys,
            size,
            int(model.config.hidden_size),
            int(self.info.vocab_size),
            self._dtype,
            self._kv_dtype,
            can_use_kernel(self.device, self._dtype, size),
            any(isinstance(module, Fp8Linear) for module in model.modules()),
        )
        return find_fault(self.device, sizes)

    def _check_kv(self) -> None:
        """Say what float8 KV means for the text, or refuse it."""
        if self._kv_dtype != FLOAT8:
            return
        if self.device.type == "cuda" and not can_run_kernels(self.device):
            raise ConfigError(
                f'kv_cache_dtype = "fp8" needs our GPU kernels, which do not run on {self.device}: '
                "they are turned off (target.kernels), or the log says why (float8 needs compute "
                'capability 8.9); use the value "auto"'
            )
        _log.warning(
            "float8 KV, with %s, keeps the text of this model with rounded keys and values, not "
            'that of the same model with kv_cache_dtype = "auto" (docs/rules.md)',
            "scale 1" if self._kv_scales_L2H is None else "the checkpoint's scales",
        )

    def _operations(self) -> LayerOperations:
        """Our kernels where they can run, else torch's operations."""
        if not can_run_kernels(self.device):
            return LayerOperations()
        from workers.engine.cuda.layer_kernels import KernelOperations  # needs Triton

        return KernelOperations()

    def _allocate(self, num_blocks: int) -> CudaKvCache:
        return CudaKvCache(
            **self._sizes,
            num_blocks=num_blocks,
            dtype=self._kv_dtype,
            device=self.device,
            scales_L2H=self._kv_scales_L2H,
        )

    def _profile(self) -> MemoryProfile:
        """Measure the memory of the largest step, with the largest number of logits."""
        torch.cuda.empty_cache()
        count = min(self._options.max_step_tokens, self.max_model_len)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        blocks = range(-(-count // PAGE_SIZE))
        num_logits = min(count, self._options.max_num_seqs * 9)
        self._eager(self._lay_out([Slice(blocks, 0, [0] * count, num_logits)]))
        torch.cuda.synchronize(self.device)
        activations = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        own = page_bytes(**self._sizes, dtype=self._kv_dtype) * (self._cache.num_blocks + 1)
        return MemoryProfile(total=total, free=free + own, activations=activations)

    @torch.inference_mode()
    def _after_meeting(self) -> None:
        """Run our kernels on all ranks or on none: mixed, ranks would compute different bits."""
        assert self.group is not None
        group = self.group
        runs = can_run_kernels(self.device)
        without = [rank for rank, (one,) in enumerate(group.exchange([int(runs)])) if not one]
        if without and runs:
            ranks = ", ".join(map(str, without))
            give_up_kernels(self.device, f"they do not run on rank {ranks}, whose log says why")
            with group.alone():
                self._choose_forward()

    def _test_trees(self) -> None:
        trees_are_invariant(self)

    def _capture(self) -> None:
        """Capture steps, unless the device or the model's code cannot be captured."""
        size, most = self._sizes["head_size"], self._options.max_step_tokens
        if not self._options.graphs or not can_use_kernel(
            self.device, self._dtype, size, self._kv_dtype
        ):
            return
        recorder = recorder_for(self.device)
        if recorder is None:
            return
        shapes = shapes_to_capture(
            max_num_seqs=self._options.max_num_seqs,
            max_step_tokens=min(most, self.max_model_len),
            fixed_rows=FIXED_ROWS if self._options.batch_invariant else 1,
        )
        graphs = Graphs(
            recorder,
            table_pages=self._table_pages,
            scratch_block=self._cache.scratch_block,
            device=self.device,
        )
        try:
            for number, shape in enumerate(shapes):
                if not self._have_room():
                    _log.warning(
                        "GPU memory suffices for %d of %d CUDA graphs; steps of more than %d "
                        "tokens run without one: lower kv_memory or max_num_seqs",
                        number,
                        len(shapes),
                        shapes[number - 1].num_tokens,
                    )
                    break
                graphs.capture(self._run, shape)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _log.warning("steps run without CUDA graphs, the model cannot be captured: %s", error)
            return
        self._graphs = graphs

    def _have_room(self) -> bool:
        if self.device.type != "cuda":
            return True
        free, total = torch.cuda.mem_get_info(self.device)
        return free > total * (1 - MAX_GPU_SHARE) / 2

    @property
    def forward_seconds(self) -> float:
        if self._events is not None:
            begin, end = self._events
            end.synchronize()
            self._seconds = begin.elapsed_time(end) / 1000
            self._events = None
        return self._seconds

    @property
    def forward_end(self) -> float:
        """When the last step ended, by time.perf_counter, if the device was idle before it."""
        return self._began + self.forward_seconds

    @torch.inference_mode()
    def step_part(self, slices: Sequence[Slice]) -> Tensor:
        for piece in slices:
            check_tree(piece)
        graphs = self._graphs
        captured = None if graphs is None else graphs.lay_out(slices)
        layout = captured or self._lay_out(slices)
        begin = self._mark()
        self._began = time.perf_counter()
        if graphs is None or captured is None:
            logits_TV = self._eager(layout)
        else:
            logits_TV = graphs.replay(layout).clone()
        self._seconds = time.perf_counter() - self._began
        end = self._mark()
        self._events = None if begin is None or end is None else (begin, end)
        return logits_TV

    @torch.inference_mode()
    def move_kv(self, moves: Sequence[KvMoves]) -> None:
        """Copy KV from slot to slot: one copy of indices and two launches for all sequences."""
        sources, targets = to_device(moved_slots(moves, PAGE_SIZE), self.device)
        self._cache.copy_slots(sources, targets)

    def _eager(self, layout: Layout) -> Tensor:
        array = to_device(layout.array, self.device)
        return self._compute(array, layout, len(layout.logit_rows)).to(torch.float32)

    def _lay_out(self, slices: Sequence[Slice]) -> Layout:
        return lay_out(
            slices,
            exact_shape(slices),
            table_pages=self._table_pages,
            scratch_block=self._cache.scratch_block,
        )

    def _run(self, array: Tensor, layout: Layout) -> Tensor:
        """The logits of as many rows as the shape has. Graphs capture this function."""
        return self._compute(array, layout, layout.shape.num_rows)

    def _compute(self, array: Tensor, layout: Layout, num_logits: int) -> Tensor:
        """The logits of the first rows that the array requests, in the model's dtype."""
        return self._forward(self._device_step(array, layout, num_logits))

    def _device_step(self, array: Tensor, layout: Layout, num_logits: int) -> DeviceStep:
        inputs = read_inputs(array, layout, table_pages=self._table_pages)
        return DeviceStep(inputs, inputs.logit_rows[:num_logits], self._cache, self._heads)

    def _mark(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
