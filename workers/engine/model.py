"""Loads a rank's part of a checkpoint into Hugging Face's own model code.

The model is built without memory (on torch's meta device). Then its linears are read one by one,
and each is converted to the engine's form before the next is read, so that no copy of the whole
model exists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from paceline.errors import CheckpointError
from paceline.text import one_line
from workers.engine import attention
from workers.engine.cpu.linears import activation_dtype, replace_linears_of
from workers.engine.cpu.mixtures import holds_experts, replace_experts_of
from workers.engine.fusing import ProjectionPart, join_projections, replace_norms
from workers.engine.invariance import replace_activations
from workers.engine.load.checkpoint import read_config, whole_shapes
from workers.engine.load.host_memory import check_room
from workers.engine.load.quantization import DequantizedTensors, is_quantized, without_quantization
from workers.engine.load.stored_tensors import StoredTensors
from workers.engine.load.weight_form import BITS_OF_A_WEIGHT, WeightForm
from workers.engine.parallel.cuts import vocabulary_part
from workers.engine.parallel.group import Group
from workers.engine.parallel.modules import SummedOutput, VocabularyEmbedding
from workers.engine.parallel.rank_parts import Progress, RankParts
from workers.engine.parallel.sharding import Place, Sharding


def load_model(
    folder: Path,
    weights: WeightForm,
    group: Group | None = None,
    progress: Progress | None = None,
    *,
    kv_bytes: int = 0,
) -> PreTrainedModel:
    """The rank's part of the model, with paged attention and our own modules.

    `kv_bytes`: the size of its KV, for which there must be room too. Raises CheckpointError; raises
    ConfigError if there are more ranks than heads, or too little memory.
    """
    # Quantized forms are made from the most precise weights.
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
    model, parts, sharding = empty_part(folder, group, dtype)
    parts.tell(progress, activation_dtype(weights))
    _Loading(model, parts, weights, dtype).run(kv_bytes)
    parts.close()
    if group is not None and group.place.degree > 1:
        join_ranks(model, sharding, group)
    replace_activations(model)
    replace_norms(model)
    return model


def empty_part(
    folder: Path,
    group: Group | None,
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
) -> tuple[PreTrainedModel, RankParts, Sharding]:
    """A rank's model without weights, and what fills it on `device` (None: the CPU).

    `dtype`: the dtype to which quantized weights are converted. Raises CheckpointError; raises
    ConfigError if there are more ranks than heads, or too little memory.
    """
    config = read_config(folder)
    stored = StoredTensors(folder)
    if is_quantized(config):
        config, stored = without_quantization(config), DequantizedTensors(folder, dtype)
    shapes = whole_shapes(folder, config, stored)
    place = Place() if group is None else group.place
    sharding = Sharding(config, _base_prefix(config), place)
    model = _empty_model(sharding.local_config())
    parts = RankParts(model, stored, shapes, sharding, device or torch.device("cpu"))
    return model, parts, sharding


def part_config(folder: Path, place: Place) -> PreTrainedConfig:
    """The configuration of a rank's part. Loads no weights.

    Raises CheckpointError if the architecture cannot be cut, ConfigError if there are more ranks
    than heads.
    """
    config = read_config(folder)
    return Sharding(config, _base_prefix(config), place).local_config()


class _Loading:
    """Fills an empty model, linear by linear."""

    def __init__(
        self,
        model: PreTrainedModel,
        parts: RankParts,
        weights: WeightForm,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: the dtype of the weights from which linears are made."""
        self._model = model
        self._parts = parts
        self._weights = weights
        self._dtype = activation_dtype(weights)
        self._linear_dtype = dtype

    def run(self, kv_bytes: int) -> None:
        """Fill the model. Raises CheckpointError; raises ConfigError if memory is too small."""
        weight_bytes = self._parts.num_weights * BITS_OF_A_WEIGHT[self._weights] // 8
        check_room(
            weight_bytes,
            f"this shard's weights as {self._weights} take",
            "take a target.dtype of fewer bytes, a larger host, or more hosts and a shard on each "
            "(target.tensor_parallel)",
        )
        check_room(
            weight_bytes + kv_bytes,
            f"this shard's weights as {self._weights} ({weight_bytes} bytes) and its KV together "
            "take",
            "lower target.kv_memory",
        )
        # Linears and experts are filled with their parents, and must be freed once replaced.
        for module in [one for one in self._model.modules() if not _is_replaced(one)]:
            self._parts.fill(module, self._dtype)
            for experts in filter(holds_experts, list(module.children())):
                self._parts.fill(experts, self._linear_dtype)
                replace_experts_of(module, self._weights)
            linears = [child for child in module.children() if isinstance(child, nn.Linear)]
            for linear in linears:
                self._parts.fill(linear, self._linear_dtype)
            if linears:
                join_projections(module)
                joined = {c.shared for c in module.children() if isinstance(c, ProjectionPart)}
                for holder in (module, *joined):
                    is_head = module is self._model
                    replace_linears_of(holder, self._weights, is_head=is_head)


def _is_replaced(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or holds_experts(module)


def _base_prefix(config: PreTrainedConfig) -> str:
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return str(kind.base_model_prefix)


def _empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without weights, but with the buffers that it computes for itself."""
    attention.register()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention.NAME, dtype=torch.float32
            )
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(f"the model cannot be built: {one_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    model.requires_grad_(False)
    with torch.no_grad():
        for module in model.modules():
            empty = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
            for name, buffer in empty.items():
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
            if empty:
                model._init_weights(module)
    return model


def join_ranks(model: PreTrainedModel, sharding: Sharding, group: Group) -> None:
    """Insert the modules that combine the ranks' results."""
    place = group.place
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if sharding.adds_up(f"{path}.{name}"):
                setattr(parent, name, SummedOutput(child, group))
            elif isinstance(child, nn.Embedding):
                ids = vocabulary_part(
                    int(model.config.vocab_size), degree=place.degree, rank=place.rank
                )
                setattr(parent, name, VocabularyEmbedding(child, ids, group))
