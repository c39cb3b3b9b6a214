"""`paceline bench engine --device cuda`: step time of the GPU engine, and share of bandwidth.

The model has the shape of a real one and random weights: a step's time does not depend on them.
Candidates come from the model's own text, so that all of them are accepted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from deploy.bench.engine import BATCHES, OFF, WINDOWS, EngineRow
from paceline.errors import ConfigError
from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.cuda.engine import CudaEngine, CudaOptions
from workers.engine.cuda.kv_cache import kv_bytes
from workers.engine.forward import ATTENTION, register_attention
from workers.engine.kv_blocks import blocks_for
from workers.engine.load.checkpoint import CheckpointInfo
from workers.engine.memory import kv_sizes_of
from workers.engine.slices import Slice
from workers.process.kernels import can_run_kernels
from workers.verification.device_choice import Row, choose_tokens
from workers.verification.staging import to_host

_TEXT = 64
"""Tokens whose text is compared between windows."""
_PREFILL = CudaOptions().max_step_tokens
"""Tokens of the prompt whose prefill is measured."""


@dataclass(frozen=True, slots=True)
class GpuTask:
    """What to measure, and on which device. Tests use a CPU instead of a GPU."""

    device: torch.device
    config: LlamaConfig
    dtype: torch.dtype
    context: int
    rounds: int
    copy_bytes: int
    batches: Sequence[int] = BATCHES
    windows: Sequence[int] = WINDOWS
    kv_memory_bytes: int | None = None


def llama_8b_config(max_model_len: int) -> LlamaConfig:
    """The shape of an 8 B Llama."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=False,
    )


def gpu_for(what: str) -> torch.device:
    """The first GPU. Raises ConfigError if there is none. `what`: what needs it, for the error."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{what} needs a GPU, and this process sees none: check the driver, "
            f"torch's build ({torch.__version__}) and CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", 0)


def llama_8b(*, quick: bool) -> GpuTask:
    """A model of the shape of an 8 B Llama. Raises ConfigError without a GPU."""
    return GpuTask(
        gpu_for("bench engine --device cuda"),
        llama_8b_config(4096),
        torch.bfloat16,
        context=512,
        rounds=20 if quick else 100,
        copy_bytes=1 << 30,
    )


def measure_gpu(task: GpuTask, tell: Callable[[str], None]) -> list[EngineRow]:
    """A row for each batch and window, with and without batch invariance."""
    bandwidth = copy_bandwidth(task.device, task.copy_bytes)
    rows: list[EngineRow] = []
    for batch_invariant in (True, False):
        tell(f"gpu: making the engine, batch_invariant {batch_invariant}")
        options = CudaOptions(
            kv_memory_bytes=task.kv_memory_bytes,
            batch_invariant=batch_invariant,
            max_num_seqs=max(task.batches),
        )
        model = _random_model(task)
        step_bytes = _linear_bytes(model)
        engine = CudaEngine(model, _info(task), options)
        part = "gpu" if batch_invariant else "gpu, not invariant"
        bench = _Bench(part, engine, task, bandwidth, step_bytes)
        del model
        rows += bench.rows(tell)
        del bench, engine
        gc.collect()  # The next engine needs this one's memory.
        if task.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def make_engine(task: GpuTask, options: CudaOptions) -> CudaEngine:
    """An engine of the task's model, with random weights."""
    return CudaEngine(_random_model(task), _info(task), options)


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a plain copy on the device, reads and writes counted."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(7):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        _wait(device)
        seconds.append((time.perf_counter() - begin) / 10)
    return 2 * num_bytes / min(seconds)


class _Bench:
    """Measures the rows of one engine."""

    def __init__(
        self,
        part: str,
        engine: CudaEngine,
        task: GpuTask,
        bandwidth: float,
        linear_bytes: int,
    ) -> None:
        self._part = part
        self._engine = engine
        self._task = task
        self._bandwidth = bandwidth
        self._linear_bytes = linear_bytes
        self._kv_bytes = kv_bytes(**kv_sizes_of(task.config), dtype=task.dtype)
        sampling = SamplingParams(temperature=1.0)
        self._spec = SequenceSpec(sampling, seed=7, prompt_length=task.context)
        self._pages = blocks_for(task.context + _TEXT + 1 + max(task.windows), engine.block_size)

    def rows(self, tell: Callable[[str], None]) -> list[EngineRow]:
        prefill = self._prefill_rate()
        prompt = torch.randint(
            self._task.config.vocab_size,
            (self._task.context,),
            generator=torch.Generator().manual_seed(3),
        ).tolist()
        for sequence in range(max(self._task.batches)):
            self._engine.step([Slice(self._table(sequence), 0, prompt, 0)])
        token_ids = self._plain_text(prompt)
        same_text = all(self._verifies(token_ids, w) for w in self._task.windows if w)
        rows = []
        for batch in self._task.batches:
            for window in self._task.windows:
                tell(f"gpu: batch {batch}, window {window}")
                rows.append(self._row(token_ids, batch, window, same_text, prefill))
        return rows

    def _prefill_rate(self) -> float:
        """Tokens/s of one prompt in one step."""
        count = min(_PREFILL, self._engine.max_model_len)
        table, prompt = range(blocks_for(count, self._engine.block_size)), [7] * count
        seconds = []
        for _ in range(4):
            self._engine.step([Slice(table, 0, prompt, 1)])
            seconds.append(self._engine.forward_seconds)
        return count / statistics.median(seconds[1:])

    def _table(self, sequence: int) -> range:
        return range(sequence * self._pages, (sequence + 1) * self._pages)

    def _step(
        self, token_ids: list[int], start: int, *, batch: int, window: int
    ) -> tuple[list[int], float]:
        """Run one step. Returns the tokens of all rows, and the seconds that the host measured.

        Token `start` and the `window` after it are fed to each of the first `batch` sequences.
        """
        begin = time.perf_counter()
        fed = token_ids[start : start + 1 + window]
        slices = [Slice(self._table(i), start, fed, 1 + window) for i in range(batch)]
        logits_TV = self._engine.step(slices)
        rows = [
            Row(self._spec, token_ids[: start + 1 + depth])
            for _ in range(batch)
            for depth in range(1 + window)
        ]
        chosen, _ = to_host(*choose_tokens(logits_TV, rows))
        return chosen.tolist(), time.perf_counter() - begin

    def _plain_text(self, prompt: list[int]) -> list[int]:
        """The prompt and its continuation by plain decoding."""
        token_ids = list(prompt)
        for _ in range(_TEXT + max(self._task.windows)):
            chosen, _ = self._step(token_ids, len(token_ids) - 1, batch=1, window=0)
            token_ids += chosen
        return token_ids

    def _verifies(self, token_ids: list[int], window: int) -> bool:
        """Whether all candidates are accepted in windows taken from `token_ids`."""
        for start in range(self._task.context, self._task.context + _TEXT - window, window + 1):
            chosen, _ = self._step(token_ids, start, batch=1, window=window)
            if chosen != token_ids[start + 1 : start + 2 + window]:
                return False
        return True

    def _row(
        self, token_ids: list[int], batch: int, window: int, same_text: bool, prefill: float
    ) -> EngineRow:
        device_seconds, host_seconds = [], []
        for number in range(self._task.rounds + 3):
            start = self._task.context + number % _TEXT
            _, seconds = self._step(token_ids, start, batch=batch, window=window)
            if number >= 3:
                device_seconds.append(self._engine.forward_seconds)
                host_seconds.append(seconds)
        step, whole = statistics.median(device_seconds), statistics.median(host_seconds)
        read = self._linear_bytes + self._kv_bytes * batch * (self._task.context + _TEXT // 2)
        return EngineRow(
            part=self._part,
            name=f"verify {window}" if window else OFF,
            engine="paceline",
            batch=batch,
            window=window,
            degree=1,
            dtype=str(self._task.dtype).removeprefix("torch."),
            threads=1,
            step_ms=step * 1000,
            bandwidth_share=read / self._bandwidth / step,
            tokens_per_second=batch / whole,
            details={
                "step_with_verdicts_ms": whole * 1000,
                "prefill_tokens_per_second": prefill,
                "copy_bytes_per_second": self._bandwidth,
                "batch_invariant": self._engine.batch_invariant,
                "same_text_in_windows": same_text,
                "device": _device_name(self._task.device),
                "kernels": can_run_kernels(self._task.device),
            },
        )


def _random_model(task: GpuTask) -> PreTrainedModel:
    register_attention()
    with task.device:
        model = AutoModelForCausalLM.from_config(
            task.config, attn_implementation=ATTENTION, dtype=task.dtype
        )
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    model.requires_grad_(False)
    return model


def _info(task: GpuTask) -> CheckpointInfo:
    return CheckpointInfo(
        name="random",
        vocab_size=task.config.vocab_size,
        vocabulary_digest=b"",
        max_model_len=task.config.max_position_embeddings,
        end_token_ids=(),
        default_sampling=SamplingParams(),
        dtype=str(task.dtype).removeprefix("torch."),
        digest=b"",
    )


def _linear_bytes(model: PreTrainedModel) -> int:
    """Bytes that every step reads: the weights of all linears."""
    linears = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return sum(weight.numel() * weight.element_size() for weight in linears)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
