"""The operations between a layer's matrix products: `python -m scripts.check_kernels layers`.

The words of its lines:

- `round rows`, `rotate and store float8`: numbers become float8, with the bits of torch's.
- `norm and round rows`, `gate and round rows`: in one kernel, with the bits and times of two.
- `norm`, `gate`, `rotate and store`: kernels and torch's operations are compared, entry by entry.
  Sums, and rotated heads without norms, must be equal. A row must have the same bits alone and
  among other rows.
- `llama`, `qwen3`: whole models of a few layers, with attention by kernels too. Kernels and torch
  are both compared with the model's own code: the largest difference, divided by the largest logit.
  Then a captured step of one sequence: the number of kernels that it launches, and the median times
  of some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from scripts.check_kernels.cases import (
    Case,
    by_torch,
    difference,
    measures_times,
    profiled,
    times,
    verdict,
)
from workers.engine.cuda.float8_kernels import round_rows
from workers.engine.cuda.graphs import shapes_to_capture
from workers.engine.cuda.kv_cache import FLOAT8, PAGE_SIZE, CudaKvCache, rounded
from workers.engine.cuda.layer_kernels import (
    HeadNorms,
    KernelOperations,
    add_and_norm,
    gate,
    rotate_and_store,
)
from workers.engine.cuda.linears import (
    FIXED_ROWS,
    RoundedRows,
    Rounding,
    adapt_model,
    to_fp8,
)
from workers.engine.cuda.step import DeviceStep, Heads, exact_shape, lay_out, read_inputs
from workers.engine.forward import (
    ATTENTION,
    AttentionLayer,
    LayerOperations,
    LeanForward,
    Step,
    hugging_face_forward,
    register_attention,
)
from workers.engine.load.stored_tensors import FP8_BLOCK
from workers.engine.modules import NativeNorm
from workers.engine.slices import Slice

_BLOCKS, _VOCAB = 12, 1024
_EPSILON = 1e-6
_PROBE = 0.03
"""Largest difference, as a share of the largest logit: the limit of the engine's own probe."""
Forwards = dict[str, Callable[[Step], Tensor]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model, and of its input."""

    dtypes: tuple[torch.dtype, ...]
    """The first one is the model's dtype."""
    num_rows: int
    hidden: int
    other_hidden: tuple[int, ...]
    feed_forward: int
    num_queries: int
    num_keys: int
    head_size: int
    num_layers: int
    prefix: int


LARGE = Sizes(
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    num_rows=64,
    hidden=4096,
    other_hidden=(5120, 8192, 16384, 904),
    feed_forward=14336,
    num_queries=32,
    num_keys=8,
    head_size=128,
    num_layers=4,
    prefix=200,
)
SMALL = Sizes(
    dtypes=(torch.float32, torch.float16),
    num_rows=4,
    hidden=64,
    other_hidden=(904,),
    feed_forward=96,
    num_queries=4,
    num_keys=2,
    head_size=16,
    num_layers=2,
    prefix=12,
)


def make_cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    """The cases of this check. `small`: with tiny sizes, and no times."""
    torch.manual_seed(0)
    check = LayerCheck(device, SMALL if small else LARGE)
    for size in (check.sizes.hidden, *check.sizes.other_hidden):
        yield Case(f"norm of {size}", lambda size=size: check.norm(size))
    yield Case("gate", check.gate)
    for block in (None, FP8_BLOCK):
        name = f"round rows{'' if block is None else ' by blocks'}"
        yield Case(name, lambda block=block: check.rounding(block))
    for what, size in (("norm", check.sizes.hidden), ("gate", check.sizes.feed_forward)):
        for way, rounding in check.roundings(size).items():
            yield Case(
                f"{what} and round rows {way}",
                lambda given=(what, rounding): check.rounding_at_once(*given),
            )
    yield Case("rotate and store float8", check.storing_float8)
    for dtype in check.sizes.dtypes:
        for normed in (False, True):
            name = f"rotate and store {str(dtype)[6:]}{' normed' if normed else ''}"
            yield Case(name, lambda given=(dtype, normed): check.rotation(*given))
    yield Case("llama", lambda: check.model(LlamaConfig))
    yield Case("qwen3", lambda: check.model(Qwen3Config))


class LayerCheck:
    """The cases, for some sizes on some device."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.sizes = sizes
        self._device = device

    def norm(self, size: int) -> str:
        hidden, delta = (self._random(self.sizes.num_rows, size) for _ in range(2))
        norm = NativeNorm(self._random(size), _EPSILON)
        kernels, torchs = (one().add_and_norm(norm) for one in (KernelOperations, LayerOperations))
        mine, theirs = hidden.clone(), hidden.clone()
        normed = difference(kernels(mine, delta), torchs(theirs, delta))
        words = [
            verdict(torch.equal(mine, theirs), "sums equal"),
            f"norms {normed}",
            f"without a sum {difference(kernels(mine, None), torchs(theirs, None))}",
            _rows_alone(lambda rows: kernels(rows.clone(), rows), hidden),
        ]
        for name, added in (("with a sum", delta), ("without", None)):
            timed = times(
                kernels=lambda _, added=added: kernels(mine, added),
                torch=lambda _, added=added: torchs(mine, added),
            )
            words.append(f"{name} {timed}")
        return "; ".join(words)

    def gate(self) -> str:
        both = self._random(self.sizes.num_rows, 2 * self.sizes.feed_forward) * 3
        kernels, torchs = (
            one().gate(torch.nn.SiLU()) for one in (KernelOperations, LayerOperations)
        )
        same = difference(kernels(both), torchs(both.clone()))
        timed = times(kernels=lambda _: kernels(both), torch=lambda _: torchs(both))
        return f"{same}; {_rows_alone(kernels, both)}; {timed}"

    def rounding(self, block: int | None) -> str:
        """Rows of a product in float8: the bits of torch's operations."""
        rows = self._random(self.sizes.num_rows, block or self.sizes.feed_forward)
        if block is not None:
            rows = rows.repeat(1, max(1, self.sizes.feed_forward // block))
        rounding = Rounding(block)
        same = _same_rows(round_rows(rows, rounding), to_fp8(rows, rounding))
        return self._rounded(
            same,
            kernels=lambda _: round_rows(rows, rounding),
            torch=lambda _: to_fp8(rows, rounding),
        )

    def roundings(self, size: int) -> dict[str, Rounding]:
        """The ways to round rows of `size` features, by a word."""
        given = torch.tensor(0.02, device=self._device)
        ways = {"each": Rounding(), "statically": Rounding(None, given)}
        return ways if size % FP8_BLOCK else {**ways, "by blocks": Rounding(FP8_BLOCK)}

    def rounding_at_once(self, what: str, rounding: Rounding) -> str:
        """Rows of a product that the norm or the gate rounds, and in a kernel of its own."""
        sizes = self.sizes
        hidden, weight = self._random(sizes.num_rows, sizes.hidden), self._random(sizes.hidden)
        both = self._random(sizes.num_rows, 2 * sizes.feed_forward) * 3

        def made(by: Rounding | None) -> Tensor | RoundedRows:
            if what == "norm":
                return add_and_norm(hidden, None, weight, _EPSILON, by)
            return gate(both, by)

        def apart(_: int = 0) -> RoundedRows:
            plain = made(None)
            assert isinstance(plain, Tensor)
            return round_rows(plain, rounding)

        at_once = made(rounding)
        assert isinstance(at_once, RoundedRows)
        same = _same_rows(at_once, apart())
        return f"{verdict(same, 'equal')}; {times(one=lambda _: made(rounding), two=apart)}"

    def _rounded(self, same: bool, **ways: Callable[[int], object]) -> str:
        """The verdict on numbers in float8, and the times of both ways to get them."""
        if self._device.type == "cpu":  # The interpreter cuts bits off where a device rounds.
            return f"{'equal' if same else 'not equal'} (not judged in a dry run)"
        return f"{verdict(same, 'equal')}; {times(**ways)}"

    def storing_float8(self) -> str:
        """Keys and values in float8 pages: the bits of torch's conversion, without a rotation."""
        sizes = self.sizes
        heads = self._random(
            sizes.num_rows, sizes.num_queries + 2 * sizes.num_keys, sizes.head_size
        )
        cos, sin = (torch.full_like(heads[:, 0], value) for value in (1.0, 0.0))
        layer = CudaKvCache(
            num_layers=1,
            num_heads=sizes.num_keys,
            head_size=sizes.head_size,
            num_blocks=1,
            dtype=FLOAT8,
            device=self._device,
        ).layers[0]
        slots = torch.arange(sizes.num_rows, device=self._device)
        keys, values = heads.split((sizes.num_queries, sizes.num_keys, sizes.num_keys), dim=1)[1:]

        def kernels(_: int = 0) -> Tensor:
            return rotate_and_store(heads, cos, sin, slots, layer.keys_SHD, layer.values_SHD)

        kernels()
        found = [one[slots].float() for one in (layer.keys_SHD, layer.values_SHD)]
        wanted = [rounded(one, FLOAT8).float() for one in (keys, values)]
        same = all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        return self._rounded(
            same, kernels=kernels, torch=lambda _: layer.store(slots, keys, values)
        )

    def rotation(self, dtype: torch.dtype, normed: bool) -> str:
        sizes = self.sizes
        num_rows, head_size = sizes.num_rows, sizes.head_size
        weights = [self._random(head_size, dtype=dtype) for _ in range(2)] if normed else []
        head_norms = tuple(NativeNorm(weight, _EPSILON) for weight in weights)
        norms = HeadNorms(*weights, _EPSILON, _EPSILON) if normed else None
        layer = AttentionLayer(0, sizes.num_queries, sizes.num_keys, head_size, 1.0, head_norms)
        rows = self._random(num_rows, layer.num_heads, head_size, dtype=dtype)
        angles = self._random(num_rows, head_size // 2, dtype=torch.float32) * 10
        cos, sin = (torch.cat([one, one], 1).to(dtype) for one in (angles.cos(), angles.sin()))
        slots = torch.randperm(4 * num_rows, device=self._device)[:num_rows]
        stored = torch.zeros(
            2, 2, 4 * num_rows, sizes.num_keys, head_size, dtype=dtype, device=self._device
        )
        keys, values = stored[:, 0], stored[:, 1]
        plain = LayerOperations()
        step = _Storing(slots, keys[1], values[1], layer)
        attend, factors = plain.attend(layer), plain.rotation(cos, sin, layer)

        def kernels(heads: Tensor) -> Tensor:
            return rotate_and_store(heads, cos, sin, slots, keys[0], values[0], norms)

        def torchs(heads: Tensor) -> Tensor:
            return attend(heads.view(num_rows, -1), factors, step)

        queries = difference(kernels(rows).flatten(1), torchs(rows.clone()))
        same = [queries, difference(keys[0], keys[1]), difference(values[0], values[1])]
        words = "queries {}; keys {}; values {}".format(*same)
        judged = same[2:] if normed else same
        timed = times(kernels=lambda _: kernels(rows), torch=lambda _: torchs(rows))
        return f"{verdict(set(judged) == {'equal'}, 'equal')}; {words}; {timed}"

    def model(self, kind: type[PreTrainedConfig]) -> str:
        forwards, steps = self._forwards(kind), _Steps(self._device, self.sizes)
        slices, logits, keys = steps.last_tokens(), {}, {}
        for name, forward in forwards.items():
            with _way(name):
                forward(steps.step(steps.prompts(), padded=False))
                logits[name] = forward(steps.step(slices)).clone()
            keys[name] = steps.cache.layers[0].keys_SHD[: 2 * PAGE_SIZE].clone()
        own, words = logits["own"].double(), []
        for name in ("kernels", "torch"):
            apart = float((logits[name].double() - own).abs().max() / own.abs().max())
            words.append(f"{name} {apart:.1e} from its own, {verdict(apart <= _PROBE, 'near')}")
        words.append(f"apart: {difference(logits['kernels'], logits['torch'])}")
        words.append(f"first keys: {difference(keys['kernels'], keys['torch'])}")
        kernels, single = forwards["kernels"], steps.step(slices[:1])
        alone = torch.cat([kernels(steps.step([piece], padded=False)) for piece in slices])
        if self._device.type != "cpu":
            # On a CPU, the order of sums in a product depends on the number of rows.
            words.append(verdict(torch.equal(alone, logits["kernels"]), "rows alone equal"))

        def run(name: str) -> Tensor:
            with _way(name):
                return forwards[name](single)

        timed = times(kernels=lambda _: run("kernels"), torch=lambda _: run("torch"))
        words.append(f"{self.sizes.num_layers} layers, one sequence: {timed}")
        if measures_times():
            eager = kernels(single).clone()
            captured, shown = profiled(lambda: run("kernels"))
            words.append(verdict(torch.equal(captured, eager), "captured equals eager"))
            words += [f"kernels: {shown}", f"torch: {profiled(lambda: run('torch'))[1]}"]
        return "; ".join(words)

    def _forwards(self, kind: type[PreTrainedConfig]) -> Forwards:
        """All ways to run a model of random weights: its own code, torch's operations, kernels."""
        sizes = self.sizes
        config = kind(
            vocab_size=_VOCAB,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.feed_forward,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_queries,
            num_key_value_heads=sizes.num_keys,
            head_dim=sizes.head_size,
            max_position_embeddings=2048,
        )
        register_attention()
        with self._device:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=sizes.dtypes[0]
            )
        model.requires_grad_(False)
        model.train(False)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
        adapt_model(model, batch_invariant=True)
        return {
            "own": hugging_face_forward(model),
            "torch": LeanForward(model, LayerOperations()),
            "kernels": LeanForward(model, KernelOperations()),
        }

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self._device).to(dtype or self.sizes.dtypes[0])


class _Storing:
    """Takes the place of a step: stores keys and values, and returns queries as the attention."""

    def __init__(self, slots: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer) -> None:
        self._slots, self._keys, self._values, self._layer = slots, keys, values, layer

    def attend(self, heads_TAD: Tensor, layer: int, scaling: float) -> Tensor:
        queries, rotated = self._layer.num_queries, self._layer.num_rotated
        self._keys.index_copy_(0, self._slots, heads_TAD[:, queries:rotated])
        self._values.index_copy_(0, self._slots, heads_TAD[:, rotated:])
        return heads_TAD[:, :queries].flatten(0, 1)


class _Steps:
    """Steps of four sequences over pages: their prompts, then one token of each."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self._device, self._sizes = device, sizes
        self._token_ids = torch.randint(_VOCAB, (sizes.prefix + 4,), device="cpu").tolist()
        self.cache = CudaKvCache(
            num_layers=sizes.num_layers,
            num_heads=sizes.num_keys,
            head_size=sizes.head_size,
            num_blocks=_BLOCKS,
            dtype=sizes.dtypes[0],
            device=device,
        )

    def prompts(self) -> list[Slice]:
        prefix, ids = self._sizes.prefix, self._token_ids
        return [Slice([2 * s, 2 * s + 1], 0, ids[s : s + prefix], 0) for s in range(4)]

    def last_tokens(self) -> list[Slice]:
        prefix, ids = self._sizes.prefix, self._token_ids
        return [Slice([2 * s, 2 * s + 1], prefix, [ids[s + prefix]], 1) for s in range(4)]

    def step(self, slices: list[Slice], *, padded: bool = True) -> DeviceStep:
        """The step, padded as for a graph if `padded`; never padded in a dry run."""
        shape = exact_shape(slices)
        if padded and self._device.type == "cuda":
            shapes = shapes_to_capture(max_num_seqs=64, max_step_tokens=64, fixed_rows=FIXED_ROWS)
            shape = next(one for one in shapes if one.holds(shape))
        layout = lay_out(slices, shape, table_pages=4, scratch_block=_BLOCKS)
        array = torch.from_numpy(layout.array).to(self._device)
        rows = torch.tensor(layout.logit_rows, dtype=torch.int64, device=self._device)
        heads = Heads(self._sizes.num_queries, self._sizes.num_keys)
        return DeviceStep(read_inputs(array, layout, table_pages=4), rows, self.cache, heads)


def _way(name: str) -> AbstractContextManager[None]:
    return nullcontext() if name == "kernels" else by_torch()


def _same_rows(found: RoundedRows, expected: RoundedRows) -> bool:
    # torch compares no float8.
    return all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


def _rows_alone(run: Callable[[Tensor], Tensor], rows: Tensor) -> str:
    """Whether rows have the same bits alone, among others, and in another order."""
    whole = run(rows)
    same = all(torch.equal(run(rows[:count]), whole[:count]) for count in (1, 2, 3))
    return verdict(same and torch.equal(run(rows.flip(0)).flip(0), whole), "rows alone equal")
