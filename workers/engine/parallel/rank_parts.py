"""Fills a model that was built without memory with a rank's part of a checkpoint's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import CheckpointError
from workers.engine.load.stored_tensors import StoredTensors
from workers.engine.parallel.sharding import Sharding

Progress = Callable[[int, int], None]
"""Called with the number of bytes loaded, and with that of the rank's whole share."""


class RankParts:
    """Reads one module's parameters after the other.

    `shapes`: the whole parameters' shapes by name. `num_weights`: the elements in the rank's share.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stored: StoredTensors,
        shapes: Mapping[str, tuple[int, ...]],
        sharding: Sharding,
        device: torch.device,
    ) -> None:
        self._stored = stored
        self._shapes = shapes
        self._sharding = sharding
        self._device = device
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        # Weights of embeddings may be shared with another module.
        self._kept = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self._shared: dict[tuple[int, torch.dtype], nn.Parameter] = {}
        self.num_weights = sum(self._numel(name) for name in self._names.values())
        self._progress: Progress | None = None
        self._done_bytes = self._all_bytes = 0

    def tell(self, progress: Progress | None, dtype: torch.dtype) -> None:
        """Report to `progress` what is read from now on. `dtype`: the dtype of most of it."""
        self._progress = progress
        self._all_bytes = self.num_weights * dtype.itemsize

    def fill(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Read a module's own parameters. Raises CheckpointError."""
        for leaf, empty in list(module.named_parameters(recurse=False)):
            filled = self._shared.get((id(empty), dtype))
            if filled is None:
                tensor = self._read(empty, dtype).to(self._device)
                filled = nn.Parameter(tensor, requires_grad=False)
                if id(empty) in self._kept:
                    self._shared[id(empty), dtype] = filled
            setattr(module, leaf, filled)
        # Vocabulary parts are cut here; everything else is cut by the local configuration.
        if isinstance(module, nn.Linear):
            module.out_features = module.weight.shape[0]
        elif isinstance(module, nn.Embedding):
            module.num_embeddings = module.weight.shape[0]

    def close(self) -> None:
        """Unmap the files."""
        self._stored.close()

    def _numel(self, name: str) -> int:
        """The number of elements in this rank's part of a parameter."""
        whole = self._shapes[name]
        cut = self._sharding.cut(name, whole)
        numel = math.prod(whole)
        return numel if cut is None else numel // whole[cut.dim] * cut.size

    def _read(self, empty: Tensor, dtype: torch.dtype) -> Tensor:
        name = self._names[id(empty)]
        whole = self._shapes[name]
        cut = self._sharding.cut(name, whole)
        tensor = self._stored.read(name, whole, cut, dtype)
        vocabulary = cut is not None and tensor.shape[1:] == empty.shape[1:] and cut.dim == 0
        if tensor.shape != empty.shape and not (vocabulary and _is_vocabulary(name)):
            raise CheckpointError(
                f"tensor {name} {whole} cannot be divided: the model's part has shape "
                f"{tuple(empty.shape)}, the plan gives {tuple(tensor.shape)}; use "
                "tensor_parallel = 1"
            )
        self._done_bytes += tensor.numel() * tensor.element_size()
        if self._progress is not None:
            self._progress(self._done_bytes, self._all_bytes)
        return tensor


def _is_vocabulary(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight", "lm_head.bias"))
