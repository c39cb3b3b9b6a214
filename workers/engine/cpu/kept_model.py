"""Keeps a model as our kernels read it, in a file of the cache folder, for the next start.

The first start reads the checkpoint, packs its linears, and compares our kernels with the model's
own code. Later starts read the packed tensors alone, and import none of that code. The file is a
safetensors file, one for each checkpoint folder and form of weights. It is not used if anything has
changed that went into it: the checkpoint, the kernels, or the code that packs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CheckpointError
from workers.engine.cpu.linears import activation_dtype
from workers.engine.cpu.native import (
    PanelLinear,
    epsilon_of,
    kernels,
    multiplies_halves,
    panels_of,
)
from workers.engine.forward import agrees
from workers.engine.load.checkpoint import CheckpointInfo, describe_checkpoint
from workers.engine.load.stored_files import Stored, StoredFiles, read_header
from workers.engine.load.tensor_files import DTYPES, Rows, TensorReader
from workers.engine.modules import NativeNorm
from workers.engine.options import WeightForm
from workers.engine.parallel.sharding import Progress
from workers.process.atomic_files import replaced

_log = logging.getLogger(__name__)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PACKING = ("kept_model.py", "native.py", "linears.py", "../modules.py")
"""The files whose code says what is in a file."""
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("q_norm", "k_norm")
_CONFIG = (
    *("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "hidden_size",
)
_LOGITS = "logits"
_TOLERANCE = 1e-5
"""Largest difference on the probe, as a share of the largest logit: other processors may round
otherwise. The bits are equal on one processor."""


class KeptModel:
    """A packed model in a file, which fits the checkpoint. `load` reads its tensors.

    `config`: the numbers of the model's configuration that an engine asks for. `num_bytes`: what
    its tensors take in memory.
    """

    def __init__(self, path: Path, info: CheckpointInfo, facts: Mapping[str, Any]) -> None:
        self.info: Final = info
        self.config: Final[Any] = SimpleNamespace(**facts["config"])
        self._path, self._facts = path, facts
        self._stored = read_header(path)
        self.num_bytes: Final = sum(map(_bytes_of, self._stored.values()))
        self._logits_V: Tensor | None = None

    def load(self, weights: WeightForm, progress: Progress | None) -> Any:
        """The model, with the attributes of transformers' that NativeForward reads.

        Raises CheckpointError if the file ends early.
        """
        reader, done = TensorReader(torch.device("cpu")), 0

        def fill(name: str, target: Tensor) -> None:
            nonlocal done
            stored = self._stored[name]
            reader.read_into(Rows(stored, 0, stored.shape[0]), target)
            done += _bytes_of(stored)
            if progress is not None:
                progress(done, self.num_bytes)

        def read(name: str) -> Tensor:
            stored = self._stored[name]
            tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
            fill(name, tensor)
            return tensor

        def linear(name: str) -> PanelLinear:
            stored, form = self._stored[f"{name}.panels"], self._facts["linears"][name]
            bias = read(f"{name}.bias") if f"{name}.bias" in self._stored else None
            shape = stored.shape, DTYPES[stored.dtype]
            return PanelLinear.kept(**form, panels=shape, fill=_filler(fill, name), bias=bias)

        def norm(name: str) -> NativeNorm | None:
            return NativeNorm(read(name), self._facts["norms"][name]) if self._has(name) else None

        try:
            layers = [
                SimpleNamespace(
                    self_attn=SimpleNamespace(
                        head_dim=self._facts["head_dim"],
                        scaling=self._facts["scaling"],
                        q_proj=linear(f"{index}.project"),
                        o_proj=linear(f"{index}.output"),
                        **{name: norm(f"{index}.{name}") for name in _HEAD_NORMS},
                    ),
                    mlp=SimpleNamespace(
                        gate_proj=linear(f"{index}.gate_and_up"), down_proj=linear(f"{index}.down")
                    ),
                    **{name: norm(f"{index}.{name}") for name in _NORMS},
                )
                for index in range(self.config.num_hidden_layers)
            ]
            base = SimpleNamespace(
                embed_tokens=SimpleNamespace(weight=read("embedding")),
                norm=norm("norm"),
                rotary_emb=_rotary(read("frequencies"), self._facts["rotary_scaling"]),
                layers=layers,
            )
            self._logits_V = read(_LOGITS)
            head = linear("head")
        finally:
            reader.close()
        return SimpleNamespace(
            base_model_prefix="model",
            model=base,
            lm_head=head,
            config=self.config,
            dtype=activation_dtype(weights),
        )

    def has_logits(self, logits_V: Tensor) -> bool:
        """Whether the probe's last row of logits is what it was when the file was written.

        If not, the log says so.
        """
        assert self._logits_V is not None, "load has read them"
        if agrees(logits_V, self._logits_V, _TOLERANCE):
            return True
        _log.warning(
            "%s gives other logits than when it was written; it is written anew", self._path
        )
        return False

    def _has(self, name: str) -> bool:
        return name in self._stored


class Keeper:
    """Finds and writes the kept model of a checkpoint folder and a form of weights."""

    def __init__(
        self,
        cache: Path,
        folder: Path,
        weights: WeightForm,
        *,
        head_rows: Sequence[int] | None = None,
    ) -> None:
        """`cache`: the folder for kept models; it need not exist. `head_rows`: those of the LM head
        that the model has; None: all.
        """
        self._folder, self._weights, self._head_rows = folder, weights, head_rows
        place = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]
        cut = "" if head_rows is None else "-drafts"
        self._path = cache / f"{folder.name}-{weights}-{place}{cut}.safetensors"

    def find(self) -> KeptModel | None:
        """The kept model; None: there is none that fits, which the log says if there is another.

        Raises CheckpointError if the checkpoint's folder is not usable.
        """
        if not self._path.is_file() or kernels() is None:
            return None
        info = describe_checkpoint(self._folder)
        try:
            with safe_open(self._path, "numpy") as file:
                metadata = file.metadata() or {}
            if metadata.get("key") != self._key(info):
                _log.info(
                    "%s is of another checkpoint or of other kernels: it is written anew",
                    self._path,
                )
                return None
            return KeptModel(self._path, info, json.loads(metadata["facts"]))
        except (
            SafetensorError,
            CheckpointError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:
            _log.warning("%s is not usable (%s): it is written anew", self._path, error)
            return None

    def keep(self, model: Any, info: CheckpointInfo, logits_V: Tensor) -> None:
        """Write a model that NativeForward runs. If that fails, the log says why.

        `logits_V`: the probe's last row.
        """
        tensors, facts = _described(model)
        tensors[_LOGITS] = logits_V
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            needed = sum(one.numel() * one.itemsize for one in tensors.values())
            free = free_bytes(self._path.parent)
            if free < 2 * needed:
                raise OSError(f"{free} bytes are free, and it has {needed}")
            _write(self._path, tensors, {"key": self._key(info), "facts": json.dumps(facts)})
        except OSError as error:
            _log.warning(
                "the packed model cannot be kept at %s (%s): each start packs it again",
                self._path,
                error.strerror or error,
            )

    def _key(self, info: CheckpointInfo) -> str:
        """What a file is made from: the checkpoint's files, the form, the kernels, the code."""
        paths = sorted(set(StoredFiles(self._folder).files.values()))
        library = kernels()
        assert library is not None
        parts = [
            info.digest.hex(),
            *(f"{path.name} {path.stat().st_mtime_ns}" for path in paths),
            *(self._weights, Path(library._name).name, _hash_of_code()),
            f"{self._head_rows}",
            f"{multiplies_halves()}",  # bfloat16 has other panels there
            importlib.metadata.version("torch"),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def free_bytes(folder: Path) -> int:
    """Bytes of its file system that may be written."""
    return shutil.disk_usage(folder).free


@functools.cache
def _hash_of_code() -> str:
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in _PACKING)).hexdigest()


def _described(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model by the names of a file, and what else `KeptModel.load` needs."""
    base = getattr(model, model.base_model_prefix)
    first, config = base.layers[0].self_attn, model.config
    tensors: dict[str, Tensor] = {
        "embedding": base.embed_tokens.weight.detach(),
        "frequencies": base.rotary_emb.inv_freq,
    }
    linears: dict[str, Any] = {}
    norms: dict[str, float] = {}

    def add_linear(name: str, module: Any) -> None:
        layer = panels_of(module)
        tensors[f"{name}.panels"] = layer.panels
        if layer.bias is not None:
            tensors[f"{name}.bias"] = layer.bias
        linears[name] = {
            "form": layer.form,
            "in_features": layer.in_features,
            "out_features": layer.out_features,
        }

    def add_norm(name: str, module: Any) -> None:
        tensors[name], norms[name] = module.weight.detach(), epsilon_of(module)

    add_linear("head", model.lm_head)
    add_norm("norm", base.norm)
    for index, layer in enumerate(base.layers):
        attention, feed_forward = layer.self_attn, layer.mlp
        add_linear(f"{index}.project", attention.q_proj)
        add_linear(f"{index}.output", attention.o_proj)
        add_linear(f"{index}.gate_and_up", feed_forward.gate_proj)
        add_linear(f"{index}.down", feed_forward.down_proj)
        for owner, names in ((layer, _NORMS), (attention, _HEAD_NORMS)):
            for name in names:
                if (module := getattr(owner, name, None)) is not None:
                    add_norm(f"{index}.{name}", module)
    facts = {
        "config": {name: int(getattr(config, name)) for name in _CONFIG}
        | {"head_dim": int(first.head_dim), "sliding_window": None},
        "head_dim": int(first.head_dim),
        "scaling": float(first.scaling),
        "rotary_scaling": float(base.rotary_emb.attention_scaling),
        "linears": linears,
        "norms": norms,
    }
    return tensors, facts


def _rotary(frequencies: Tensor, scaling: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """As the model's own rotary embedding, with the same bits."""

    def rotate(_: Tensor, positions_1P: Tensor) -> tuple[Tensor, Tensor]:
        angles_1PD = positions_1P[:, :, None].float() * frequencies.float()
        angles_1PD = torch.cat((angles_1PD, angles_1PD), dim=-1)
        return angles_1PD.cos() * scaling, angles_1PD.sin() * scaling

    return rotate


def _filler(fill: Callable[[str, Tensor], None], name: str) -> Callable[[Tensor], None]:
    return lambda panels: fill(f"{name}.panels", panels)


def _bytes_of(stored: Stored) -> int:
    return math.prod(stored.shape) * DTYPES[stored.dtype].itemsize


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, tensor by tensor: the library's way copies all of them first.

    Another process finds either the old file or the whole new one. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path, mode=0o600) as made, made.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            file.write(array)
