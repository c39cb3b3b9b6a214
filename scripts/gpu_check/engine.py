"""A step of the GPU engine: its time, and its share of the bandwidth of a copy.

The model has the shape of a real one and random weights: a step's time does not depend on them.
Candidates come from the model's own text, so that all of them are accepted. `70b-rank` is one of
four ranks of a 70 B Llama, without the other ranks: nothing is added over ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from paceline.errors import ConfigError
from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.cuda.engine import CudaEngine, CudaOptions
from workers.engine.cuda.kv_cache import kv_bytes, kv_dtype_of
from workers.engine.cuda.linears import Fp8Linear
from workers.engine.forward import ATTENTION, register_attention
from workers.engine.kv_blocks import blocks_for
from workers.engine.load.checkpoint import CheckpointInfo
from workers.engine.memory import head_size_of, kv_sizes_of
from workers.engine.options import KvDtype
from workers.engine.slices import Slice
from workers.process.kernels import can_run_kernels
from workers.verification.device_choice import Row, choose_tokens
from workers.verification.staging import to_host

BANDWIDTH_SHARES = ((1024, 0.8), (1 << 20, 0.75))
"""Up to a context, the share of a copy's bandwidth that plain decoding of one sequence should
reach.
"""
WINDOW_RATIOS = ((1, 1.1), (16, 1.4))
"""A batch, and the upper bound on a step that verifies 8 candidates, over a plain one."""
PREFILL_SHARE = 0.5
"""Share of the rate of a large product that a prefill should reach."""
_TEXT = 64
"""Tokens whose text is compared between windows."""
_PREFILL = CudaOptions().max_step_tokens
"""Tokens of the prompt whose prefill is measured."""
_LONGEST = 32_768
"""Maximum context of a shape."""
_CHECKED_BATCH = 4
"""Maximum number of sequences whose texts are compared between windows and batches."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a model, or of a rank's part of one. `role`: "target" or "drafter"."""

    role: str
    about: str
    config: PreTrainedConfig


def _llama(
    hidden: int, layers: int, heads: tuple[int, int], head_dim: int, inner: int, vocab: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        max_position_embeddings=_LONGEST,
        tie_word_embeddings=hidden < 4096,
    )


SHAPES: Mapping[str, ModelShape] = {
    "8b": ModelShape(
        "target", "Llama-3-8B shapes", _llama(4096, 32, (32, 8), 128, 14_336, 128_256)
    ),
    "70b-rank": ModelShape(
        "target",
        "one of four ranks of Llama-3-70B",
        _llama(8192, 80, (16, 2), 128, 7168, 32_064),
    ),
    "1b": ModelShape(
        "drafter", "Llama-3.2-1B shapes", _llama(2048, 16, (32, 8), 64, 8192, 128_256)
    ),
    "0.5b": ModelShape(
        "drafter",
        "Qwen2.5-0.5B shapes",
        Qwen2Config(
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=_LONGEST,
            tie_word_embeddings=True,
        ),
    ),
    "tiny": ModelShape("drafter", "a dry run", _llama(64, 2, (4, 2), 16, 96, 300)),
}


@dataclass(frozen=True, slots=True)
class GpuTask:
    """What to measure, and on which device. Tests use a CPU instead of a GPU.

    `product_size`: rows and columns of the matrices whose product gives the device's rate.
    `kv_dtype`: that of keys and values.
    `float8_weights`: those of all layers are float8, with a scale for each output.
    """

    device: torch.device
    config: PreTrainedConfig
    dtype: torch.dtype
    contexts: Sequence[int] = (512,)
    rounds: int = 100
    copy_bytes: int = 1 << 30
    product_size: int = 8192
    batches: Sequence[int] = (1, 4, 16, 64)
    windows: Sequence[int] = (0, 8)
    prefill: int = _PREFILL
    graphs: bool = True
    kv_memory_bytes: int | None = None
    kv_dtype: KvDtype = "auto"
    float8_weights: bool = False

    @property
    def length(self) -> int:
        """Positions that the longest sequence needs."""
        longest = max(self.contexts) + 2 * _TEXT + max(self.windows) + 1
        return min(max(longest, self.prefill), int(self.config.max_position_embeddings))


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One row, named by part, batch and window.

    `step_ms`: of a step on the device. `tokens_per_second`: with the choice of tokens, as if no
    candidate was accepted. `bandwidth_share`: the bytes that a step must read over those that a
    copy moves in the same time.
    """

    part: str
    name: str
    batch: int
    window: int
    dtype: str
    step_ms: float
    bandwidth_share: float
    tokens_per_second: float
    details: Mapping[str, object]

    def json(self) -> dict[str, object]:
        """Every figure by its name."""
        fields = asdict(self)
        details = fields.pop("details")
        return {**fields, **details}


def gpu_for(what: str) -> torch.device:
    """The first GPU. Raises ConfigError if there is none. `what`: what needs it, for the error."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{what} needs a GPU, and this process sees none: check the driver, "
            f"torch's build ({torch.__version__}) and CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", 0)


def measure_gpu(task: GpuTask, tell: Callable[[str], None]) -> Iterator[GpuRow]:
    """A row for each context, batch and window."""
    ceilings = Ceilings(
        copy_bandwidth(task.device, task.copy_bytes),
        product_rate(task.device, task.product_size, task.dtype),
    )
    tell("gpu: making the engine")
    model = random_model(task)
    weights = [linear.weight for linear in _linears(model)]
    num_weights = sum(weight.numel() for weight in weights)
    weight_bytes = sum(weight.nbytes for weight in weights)
    del weights
    engine = CudaEngine(
        model,
        random_info(task),
        CudaOptions(
            kv_memory_bytes=task.kv_memory_bytes,
            max_model_len=task.length,
            max_num_seqs=max(task.batches),
            graphs=task.graphs,
            kv_dtype=task.kv_dtype,
        ),
    )
    del model
    part = "gpu"
    if not task.graphs:
        part += ", no graphs"
    if task.float8_weights:
        part += ", float8 weights"
    if task.kv_dtype != "auto":
        part += f", {task.kv_dtype} KV"
    bench = _Bench(part, engine, task, ceilings, num_weights, weight_bytes)
    for context in task.contexts:
        yield from bench.rows(context, tell)


def ratios(rows: Sequence[GpuRow]) -> Iterator[tuple[str, float, float]]:
    """What has an aim: its name, the ratio, and the aim. See the constants at the top."""
    for part in dict.fromkeys(row.part for row in rows):
        found = {(row.batch, row.window): row for row in rows if row.part == part}
        off = found.get((1, 0))
        if off is not None:
            context, prefill = (
                float(str(off.details[name])) for name in ("context", "prefill_share_of_products")
            )
            aim = next(share for most, share in BANDWIDTH_SHARES if context <= most)
            yield f"{part}: share of bandwidth", off.bandwidth_share, aim
            yield f"{part}: prefill, share of products", prefill, PREFILL_SHARE
        for batch, aim in WINDOW_RATIOS:
            plain, verify = found.get((batch, 0)), found.get((batch, 8))
            if plain is not None and verify is not None:
                name = f"{part}: {batch} x verify 8 / off, at most"
                yield name, verify.step_ms / plain.step_ms, aim


def make_engine(task: GpuTask, options: CudaOptions) -> CudaEngine:
    """An engine of the task's model, with random weights."""
    return CudaEngine(random_model(task), random_info(task), options)


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


def product_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Operations per second of a product of random square matrices."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = []
    for _ in range(5):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(5):
            torch.mm(left, right, out=out)
        _wait(device)
        seconds.append((time.perf_counter() - begin) / 5)
    return 2 * size**3 / statistics.median(seconds)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches: bytes/s of a copy, reads and writes counted; operations/s."""

    bandwidth: float
    products: float


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Seconds of a prompt's prefill in one step, and its share of the device's product rate."""

    tokens: int
    seconds: float
    share: float


class _Bench:
    """Measures the rows of one engine."""

    def __init__(
        self,
        part: str,
        engine: CudaEngine,
        task: GpuTask,
        ceilings: Ceilings,
        num_weights: int,
        weight_bytes: int,
    ) -> None:
        """`num_weights`, `weight_bytes`: of all linears."""
        self._part = part
        self._engine = engine
        self._task = task
        self._ceilings = ceilings
        self._num_weights = num_weights
        self._weight_bytes = weight_bytes
        dtype = kv_dtype_of(task.kv_dtype, task.dtype)
        self._kv_bytes = kv_bytes(**kv_sizes_of(task.config), dtype=dtype)
        self._context = 0
        self._prefill = self._measure_prefill()

    def rows(self, context: int, tell: Callable[[str], None]) -> Iterator[GpuRow]:
        """A row for each batch and window, except batches whose KV does not fit."""
        self._context = context
        sampling = SamplingParams(temperature=1.0)
        self._spec = SequenceSpec(sampling, seed=7, prompt_length=context)
        self._pages = blocks_for(
            context + 2 * _TEXT + 1 + max(self._task.windows), self._engine.block_size
        )
        fitting = [
            one for one in self._task.batches if one * self._pages <= self._engine.num_blocks
        ]
        for batch in [one for one in self._task.batches if one not in fitting]:
            tell(f"gpu: context {context}: the KV of {batch} sequences does not fit, left out")
        if not fitting:
            return
        prompt = torch.randint(
            self._task.config.vocab_size, (context,), generator=torch.Generator().manual_seed(3)
        ).tolist()
        tell(f"gpu: context {context}, prompts of {max(fitting)} sequences")
        for sequence in range(max(fitting)):
            for first in range(0, context, _PREFILL):
                fed = prompt[first : first + _PREFILL]
                self._engine.step([Slice(self._table(sequence), first, fed, 0)])
        token_ids = self._plain_text(prompt)
        checked = dict.fromkeys((1, min(max(fitting), _CHECKED_BATCH)))
        same_text = all(
            self._verifies(token_ids, batch, window)
            for batch in checked
            for window in self._task.windows
            if batch > 1 or window
        )
        for batch in fitting:
            for window in self._task.windows:
                tell(f"gpu: context {context}, batch {batch}, window {window}")
                yield self._row(token_ids, batch, window, same_text)

    def _measure_prefill(self) -> _Prefill:
        """The prefill of one prompt in one step."""
        count = min(self._task.prefill, self._engine.max_model_len)
        table, prompt = range(blocks_for(count, self._engine.block_size)), [7] * count
        measured = []
        for _ in range(4):
            self._engine.step([Slice(table, 0, prompt, 1)])
            measured.append(self._engine.forward_seconds)
        seconds, config = statistics.median(measured[1:]), self._task.config
        head = config.vocab_size * config.hidden_size  # only the last row has logits
        attention = 2 * config.num_attention_heads * head_size_of(config) * count**2
        operations = 2 * (self._num_weights - head) * count + config.num_hidden_layers * attention
        return _Prefill(count, seconds, operations / seconds / self._ceilings.products)

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

    def _verifies(self, token_ids: list[int], batch: int, window: int) -> bool:
        """Whether `batch` sequences accept all candidates of windows taken from `token_ids`."""
        for start in range(self._context, self._context + _TEXT - window, window + 1):
            chosen, _ = self._step(token_ids, start, batch=batch, window=window)
            if chosen != token_ids[start + 1 : start + 2 + window] * batch:
                return False
        return True

    def _row(self, token_ids: list[int], batch: int, window: int, same_text: bool) -> GpuRow:
        device_seconds, host_seconds = [], []
        for number in range(self._task.rounds + 3):
            start = self._context + number % _TEXT
            _, seconds = self._step(token_ids, start, batch=batch, window=window)
            if number >= 3:
                device_seconds.append(self._engine.forward_seconds)
                host_seconds.append(seconds)
        step, whole = statistics.median(device_seconds), statistics.median(host_seconds)
        read = self._weight_bytes + self._kv_bytes * batch * (self._context + _TEXT // 2)
        prefill = self._prefill
        return GpuRow(
            part=f"{self._part}, context {self._context}",
            name=f"verify {window}" if window else "off",
            batch=batch,
            window=window,
            dtype=str(self._task.dtype).removeprefix("torch."),
            step_ms=step * 1000,
            bandwidth_share=read / self._ceilings.bandwidth / step,
            tokens_per_second=batch / whole,
            details={
                "context": self._context,
                "step_with_verdicts_ms": whole * 1000,
                "prefill_tokens_per_second": prefill.tokens / prefill.seconds,
                "prefill_share_of_products": prefill.share,
                "copy_bytes_per_second": self._ceilings.bandwidth,
                "product_operations_per_second": self._ceilings.products,
                "batch_invariant": self._engine.batch_invariant,
                "same_text_in_windows": same_text,
                "device": device_name(self._task.device),
                "kernels": can_run_kernels(self._task.device),
            },
        )


def random_model(task: GpuTask) -> PreTrainedModel:
    """A model with the task's shape and random weights, on the task's device."""
    register_attention()
    with task.device:
        model = AutoModelForCausalLM.from_config(
            task.config, attn_implementation=ATTENTION, dtype=task.dtype
        )
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    model.requires_grad_(False)
    if task.float8_weights:
        _make_float8(model)
    return model


def _make_float8(model: PreTrainedModel) -> None:
    """Round the weights of all layers to float8, by output."""
    base: nn.Module = getattr(model, model.base_model_prefix)
    for parent in list(base.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Fp8Linear.rounded(child))


def random_info(task: GpuTask) -> CheckpointInfo:
    """What an engine must know of the random model's checkpoint."""
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


def _linears(model: PreTrainedModel) -> list[nn.Linear | Fp8Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear | Fp8Linear)]


def device_name(device: torch.device) -> str:
    """The name of the GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
