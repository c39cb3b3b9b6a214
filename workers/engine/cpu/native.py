"""A whole step of a Llama-like model in one call, by our own kernels (step_kernels.cpp).

They need a processor with AVX-512, AVX2 or NEON, and a C++ compiler (GCC 11 or newer) when they
are first used, or earlier: `python -m workers.engine.cpu.native` compiles them, as `make install`
does, with `all` for every processor of the kind, not only this one.
Without them, and for other models, forward.py runs the step by torch's operations.

Shapes: T tokens, N input features, M output features, V vocabulary, D head size, G groups of a
row's weights, S weights of a group.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workers.engine.cpu.kv_cache import BLOCK_SIZE, CpuKvCache
from workers.engine.forward import OtherLayoutError, Step, agrees, hugging_face_forward
from workers.engine.load.checkpoint import sliding_window_of
from workers.engine.modules import NativeNorm, ProjectionPart
from workers.engine.options import WeightForm
from workers.engine.slices import Slice, is_tree, positions_of, unrelated_slots

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SOURCE = Path(__file__).with_name("step_kernels.cpp")
_FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
_WIDTHS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "AVX512": (
            *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
            *("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        ),
        "AVX2": ("-mavx2", "-mfma"),
        "NEON": (),
    }
)
"""The compiler's flags by the width of vectors (vectors.h)."""
_COMPILE_SECONDS = 120.0
_LONGEST_CAUSE = 400
_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Those whose angles depend on the position only, not on the length of the text."""
_MULTIPLE = 32
"""What the features of a model must be a multiple of: every panel, and groups of 4 bits."""
_PROBED_LAYERS = 2
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Largest difference allowed on the probe, as a share of the largest logit. Unlike those of the
lean forward, these operations round differently from the model's own.
"""
_UNPACKED_FROM = 16
"""Number of rows from which a drafter unpacks weights of few bits. Below some 9 rows, measured on
a Zen 4 core, that takes longer than it saves.
"""
_log = logging.getLogger(__name__)


def runs_natively(config: PreTrainedConfig, weights: WeightForm) -> bool:
    """Whether this processor has kernels for such a model. If not for lack of them, the log says.

    The names of parts are not looked at: `NativeForward` is compared with the model's own code.
    """
    heads, keys = int(config.num_attention_heads), int(config.num_key_value_heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    widths = (config.hidden_size, config.intermediate_size, head_size)
    return (
        weights != "float16"
        and config.model_type in _MODEL_TYPES
        and config.hidden_act == "silu"
        and sliding_window_of(config) is None
        and (config.rope_parameters or {}).get("rope_type") in _ROPE_TYPES
        and heads % keys == 0
        and all(int(width) % _MULTIPLE == 0 for width in widths)
        and kernels() is not None
    )


class PanelLinear(nn.Module):
    """A linear layer for the kernels: its weight in panels of outputs. Not for float16."""

    def __init__(self, source: nn.Linear, form: WeightForm) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.unpacked_from: int | None = None
        """With 8 or 4 bits: number of rows from which they are multiplied in bfloat16, by weights
        that are unpacked once for many rows. Such rows have other bits. None: never.
        """
        self.form = form
        weight_MN = source.weight.detach()
        missing = -self.out_features % _panel()
        if missing:
            weight_MN = nn.functional.pad(weight_MN, (0, 0, 0, missing))
        self.panels = _PANELS_OF[form](weight_MN)
        self.bias: Tensor | None = None
        if source.bias is not None:
            bias_M = source.bias.detach()
            if form == "bfloat16":
                bias_M = bias_M.to(torch.bfloat16)
            self.bias = nn.functional.pad(bias_M.float(), (0, missing))

    @classmethod
    def kept(
        cls,
        form: WeightForm,
        in_features: int,
        out_features: int,
        *,
        panels: tuple[Sequence[int], torch.dtype],
        fill: Callable[[Tensor], None],
        bias: Tensor | None,
    ) -> PanelLinear:
        """A layer whose panels have been packed before. `panels`: their shape and dtype; `fill`
        reads them.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.form, layer.in_features, layer.out_features = form, in_features, out_features
        layer.unpacked_from, layer.bias = None, bias
        layer.panels = _empty(*panels)
        fill(layer.panels)
        return layer

    def matrix(self) -> _Matrix:
        """The layer as the kernels see it. It must outlive what is returned."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return _Matrix(
            self.panels.data_ptr(),
            bias,
            self.in_features,
            self.out_features,
            _FORMS.index(self.form),
            self.unpacked_from or 0,
        )

    def forward(self, rows_TN: Tensor) -> Tensor:
        """The product, of shape [..., M]. For the model's own code: a step does not use it."""
        narrow = self.form == "bfloat16" and multiplies_halves()
        dtype = torch.bfloat16 if narrow else torch.float32
        rows = rows_TN.reshape(-1, self.in_features).to(dtype).contiguous()
        result = torch.empty(rows.shape[0], self.out_features)
        if rows.shape[0]:
            _kernels().paceline_product(
                ctypes.byref(self.matrix()),
                rows.data_ptr(),
                rows.shape[0],
                result.data_ptr(),
                torch.get_num_threads(),
            )
        return result.to(rows_TN.dtype).view(*rows_TN.shape[:-1], self.out_features)


GROUP_SIZE = 32
"""Number of input features that share a scale and a minimum, as in the formats Q4_0 and Q4_1 of
GGUF. So weights that were read from these formats keep their 4-bit values.
"""


def quantize_channels(weight_MN: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit weights [M, N] and bfloat16 scales [M]; a weight is nearly int8 x scale.

    The scale is first rounded to bfloat16, and weights are divided by the rounded scale. So the
    rounding of the scale costs no accuracy.
    """
    weight_MN = weight_MN.to(torch.float32)
    scale_M = (weight_MN.abs().amax(dim=1) / 127).clamp_min(1e-12).to(torch.bfloat16)
    steps_MN = (weight_MN / scale_M.to(torch.float32)[:, None]).round_().clamp_(-127, 127)
    return steps_MN.to(torch.int8).contiguous(), scale_M


def quantize_groups(weight_MN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit steps [M, N] (uint8), bfloat16 scales [M, G] and minima [M, G], G = N / 32.

    A weight is nearly step x scale + minimum. Weights that have this form already, such as those
    from a 4-bit GGUF file, keep their steps.
    """
    weight_MGS = weight_MN.to(torch.float32).unflatten(1, (-1, GROUP_SIZE))
    minimum_MG1 = weight_MGS.amin(dim=2, keepdim=True).to(torch.bfloat16)
    range_MG1 = weight_MGS.amax(dim=2, keepdim=True) - minimum_MG1.float()
    scale_MG1 = (range_MG1 / 15).clamp_min(1e-12).to(torch.bfloat16)
    steps_MGS = (weight_MGS - minimum_MG1.float()).div_(scale_MG1.float()).round_().clamp_(0, 15)
    steps_MN = steps_MGS.flatten(1).to(torch.uint8)
    return steps_MN, scale_MG1.squeeze(2), minimum_MG1.squeeze(2)


def _float_panels(weight_MN: Tensor, dtype: torch.dtype, paired: int) -> Tensor:
    num_panels, width = weight_MN.shape[0] // _panel(), weight_MN.shape[1]
    panels = _empty((num_panels, width // paired, _panel(), paired), dtype)
    panels.copy_(weight_MN.view(num_panels, _panel(), -1, paired).transpose(1, 2))
    return panels


def _int8_panels(weight_MN: Tensor) -> Tensor:
    steps_MN, scale_M = quantize_channels(weight_MN)
    num_panels = len(scale_M) // _panel()
    scales_PB = scale_M.float().view(torch.uint8).view(num_panels, -1)
    steps_PB = steps_MN.view(num_panels, _panel(), -1).transpose(1, 2).flatten(1).view(torch.uint8)
    return _joined(scales_PB, steps_PB)


def _int4_panels(weight_MN: Tensor) -> Tensor:
    steps_MN, scale_MG, minimum_MG = quantize_groups(weight_MN)
    num_panels, num_groups = len(steps_MN) // _panel(), scale_MG.shape[1]
    pairs_MB = steps_MN[:, ::2] | (steps_MN[:, 1::2] << 4)
    # [panels, groups, eights of a group, outputs, bytes of an eight]
    steps = pairs_MB.view(num_panels, _panel(), num_groups, 4, 4).permute(0, 2, 3, 1, 4)
    groups_PGB = [
        part.view(num_panels, _panel(), num_groups).transpose(1, 2).contiguous().view(torch.uint8)
        for part in (scale_MG, minimum_MG)
    ]
    return _joined(steps.flatten(2), *groups_PGB)


def _joined(*parts: Tensor) -> Tensor:
    shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    panels = _empty(shape, torch.uint8)
    torch.cat(parts, dim=-1, out=panels)
    return panels


_PANELS_OF: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "float32": lambda weight_MN: _float_panels(weight_MN, torch.float32, 1),
        "bfloat16": lambda weight_MN: _float_panels(
            weight_MN, torch.bfloat16, 2 if multiplies_halves() else 1
        ),
        "int8": _int8_panels,
        "int4": _int4_panels,
    }
)
_FORMS = tuple(_PANELS_OF)
"""In the order of step_kernels.cpp."""


class NativeForward:
    """Computes the logits of slices: the whole step in one call."""

    def __init__(self, model: PreTrainedModel, cache: CpuKvCache, max_model_len: int) -> None:
        """Takes the model's tensors as they are. Raises OtherLayoutError without PanelLinears."""
        head = panels_of(model.lm_head).matrix()
        base: Any = getattr(model, model.base_model_prefix)
        self._cache = cache
        self._kept: list[object] = [model]
        self._num_columns = int(head.outputs)
        first = base.layers[0].self_attn
        head_size = int(first.head_dim)
        angles_1P = torch.arange(max_model_len)[None]
        cosines_1PD, sines_1PD = base.rotary_emb(torch.zeros(1, 1, 1), angles_1P)
        half = head_size // 2
        self._layers = layers = (_Layer * len(base.layers))()
        for index, layer in enumerate(base.layers):
            layers[index] = self._layer(layer, index)
        project = panels_of(first.q_proj)
        self._few_bits = project.form in ("int8", "int4")
        num_keys = cache.layers[0].keys_NHBD.shape[1]
        self._model = _Model(
            embedding=self._pointer(base.embed_tokens.weight),
            last_norm=self._norm(base.norm),
            head=head,
            cosines=self._pointer(cosines_1PD[0, :, :half].float()),
            sines=self._pointer(sines_1PD[0, :, :half].float()),
            layers=layers,
            num_layers=len(base.layers),
            features=project.in_features,
            inner=panels_of(base.layers[0].mlp.down_proj).in_features,
            num_queries=project.out_features // head_size - 2 * num_keys,
            num_keys=num_keys,
            head_size=head_size,
            num_slots=cache.layers[0].slots_2HSD.shape[1],
            epsilon=epsilon_of(base.norm),
            scaling=float(first.scaling),
        )

    def __call__(self, slices: Sequence[Slice]) -> Tensor:
        """The float32 logits [T, V] that the slices ask for. Stores their KV."""
        rows = sum(piece.num_logits for piece in slices)
        logits_TV = torch.empty(rows, self._num_columns)
        step, _kept = self._step(slices, logits_TV)
        _kernels().paceline_step(
            ctypes.byref(self._model), ctypes.byref(step), torch.get_num_threads()
        )
        return logits_TV

    def _step(self, slices: Sequence[Slice], logits_TV: Tensor) -> tuple[_Step, list[Any]]:
        """The step as the kernels see it, and what must live as long as it."""
        token_ids, positions, logit_rows = array("i"), array("i"), array("i")
        slots = array("q")
        kept: list[Any] = [token_ids, positions, logit_rows, slots]
        pieces = (_Piece * len(slices))()
        for piece, entry in zip(slices, pieces, strict=True):
            count, first = len(piece.token_ids), len(token_ids)
            token_ids.extend(piece.token_ids)
            positions.extend(positions_of(piece))
            logit_rows.extend(range(first + count - piece.num_logits, first + count))
            slots.extend(
                piece.block_table[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE
                for slot in range(piece.start, piece.start + count)
            )
            blocks = array("i", piece.block_table)
            entry.first_token, entry.num_tokens, entry.start = first, count, piece.start
            entry.blocks = blocks.buffer_info()[0]
            kept.append(blocks)
            if is_tree(piece):
                assert piece.tree_start is not None
                end = piece.tree_start + len(piece.parents)
                hidden = unrelated_slots(piece, end)[:, piece.tree_start :].contiguous()
                entry.hidden, entry.hidden_start = hidden.data_ptr(), piece.tree_start
                entry.hidden_width = hidden.shape[1]
                kept.append(hidden)
        step = _Step(
            token_ids=token_ids.buffer_info()[0],
            positions=positions.buffer_info()[0],
            slots=slots.buffer_info()[0],
            logit_rows=logit_rows.buffer_info()[0],
            pieces=pieces,
            num_tokens=len(token_ids),
            num_logits=len(logit_rows),
            num_pieces=len(slices),
            logits=logits_TV.data_ptr(),
        )
        return step, [*kept, pieces]

    def unpack_for_many_rows(self) -> bool:
        """Multiply many rows faster by weights of few bits, as PanelLinear.unpacked_from does.

        Then a row's bits depend on the number of rows. False: these weights, or this processor,
        have no such way.
        """
        if self._few_bits and multiplies_halves():
            for layer in self._layers:
                for matrix in (layer.project, layer.output, layer.gate_and_up, layer.down):
                    matrix.unpacked_from = _UNPACKED_FROM
            return True
        return False

    def use_layers(self, count: int) -> None:
        """Compute the first `count` layers only."""
        self._model.num_layers = count

    def _layer(self, layer: Any, index: int) -> _Layer:
        attention, feed_forward = layer.self_attn, layer.mlp
        return _Layer(
            input_norm=self._norm(layer.input_layernorm),
            middle_norm=self._norm(layer.post_attention_layernorm),
            query_norm=self._norm(getattr(attention, "q_norm", None)),
            key_norm=self._norm(getattr(attention, "k_norm", None)),
            project=panels_of(attention.q_proj).matrix(),
            output=panels_of(attention.o_proj).matrix(),
            gate_and_up=panels_of(feed_forward.gate_proj).matrix(),
            down=panels_of(feed_forward.down_proj).matrix(),
            slots=self._cache.layers[index].slots_2HSD.data_ptr(),
        )

    def _norm(self, norm: nn.Module | None) -> int | None:
        weight: Any = None if norm is None else norm.weight
        return None if weight is None else self._pointer(weight.detach().float())

    def _pointer(self, tensor: Tensor) -> int:
        """The address of a tensor, which is kept as long as this object."""
        whole = tensor.contiguous()
        self._kept.append(whole)
        return whole.data_ptr()


def native_forward(
    model: PreTrainedModel, cache: CpuKvCache, max_model_len: int, piece: Slice, step: Step
) -> NativeForward | None:
    """The native forward, if the model fits it and it gives the logits of the model's own code.

    Compared on a probe, `piece` and its `step`, with the first layers only: many layers amplify a
    rounding, in bfloat16 up to the size of the logits.
    """
    try:
        native = NativeForward(model, cache, max_model_len)
    except OtherLayoutError:
        return None
    base: Any = getattr(model, model.base_model_prefix)
    layers = base.layers
    try:
        base.layers = layers[:_PROBED_LAYERS]
        expected_TV = hugging_face_forward(model)(step)
        native.use_layers(len(base.layers))
        logits_TV = native([piece])
    finally:
        base.layers = layers
        native.use_layers(len(layers))
    return native if agrees(logits_TV, expected_TV, _TOLERANCE[expected_TV.dtype]) else None


def panels_of(linear: nn.Module) -> PanelLinear:
    """The kernels' layer: the joined one, if the linear is a part of one."""
    layer = linear.shared.joined if isinstance(linear, ProjectionPart) else linear
    if not isinstance(layer, PanelLinear):
        raise OtherLayoutError(type(layer).__name__)
    return layer


def epsilon_of(norm: Any) -> float:
    return float(norm.epsilon if isinstance(norm, NativeNorm) else norm.variance_epsilon)


class _Matrix(ctypes.Structure):
    """As in step_kernels.cpp, like the structures below."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_long),
        ("outputs", ctypes.c_long),
        ("form", ctypes.c_int),
        ("unpacked_from", ctypes.c_long),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "middle_norm")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, _Matrix) for name in ("project", "output", "gate_and_up", "down")),
        ("slots", ctypes.c_void_p),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("embedding", ctypes.c_void_p),
        ("last_norm", ctypes.c_void_p),
        ("head", _Matrix),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_long) for name in ("num_layers", "features", "inner")),
        *((name, ctypes.c_long) for name in ("num_queries", "num_keys", "head_size", "num_slots")),
        ("epsilon", ctypes.c_float),
        ("scaling", ctypes.c_float),
    )


class _Piece(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("first_token", "num_tokens", "start")),
        ("blocks", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("hidden_start", "hidden_width")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "slots", "logit_rows")),
        ("pieces", ctypes.POINTER(_Piece)),
        *((name, ctypes.c_long) for name in ("num_tokens", "num_logits", "num_pieces")),
        ("logits", ctypes.c_void_p),
    )


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot run; then the log says why, once."""
    try:
        library = ctypes.CDLL(str(_compiled(width_of_vectors())))
    except (OSError, subprocess.SubprocessError) as error:
        said = " ".join((getattr(error, "stderr", None) or str(error)).split())[:_LONGEST_CAUSE]
        _log.warning("steps on this CPU are slower, by torch's operations: %s", said)
        return None
    library.paceline_product.argtypes = (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
        *(ctypes.c_void_p, ctypes.c_int),
    )
    library.paceline_step.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    library.paceline_advise.argtypes = (ctypes.c_void_p, ctypes.c_long)
    # Asked before a step starts threads, since they inherit the leave to use AMX.
    multiplies_halves = library.paceline_multiplies_halves(
        torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()
    )
    setattr(library, "multiplies_halves", multiplies_halves)  # noqa: B010
    return library


def _kernels() -> ctypes.CDLL:
    library = kernels()
    assert library is not None, "PanelLinear is made only where the kernels run"
    return library


def multiplies_halves() -> bool:
    """Whether the kernels multiply bfloat16 by bfloat16, by AMX or AVX512-BF16.

    Elsewhere activations are float32 beside weights in bfloat16.
    """
    return bool(_kernels().multiplies_halves)


def _panel() -> int:
    """Outputs of a panel."""
    return int(_kernels().paceline_panel())


def width_of_vectors() -> str:
    """The key of _WIDTHS for this processor, or for ATEN_CPU_CAPABILITY if that is narrower.

    Raises OSError if the kernels are not written for it.
    """
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        return "NEON"
    capability = torch.backends.cpu.get_cpu_capability()
    for width in _WIDTHS:
        if capability.startswith(width) and machine in ("x86_64", "AMD64"):
            return width
    raise OSError(f"our kernels need AVX2 or NEON, which this processor lacks ({capability})")


def _compiled(width: str) -> Path:
    """The library of the source as it is, for a key of _WIDTHS. It is compiled if that is not done.

    It lies beside the source, or where that folder cannot be written, in a temporary folder. Raises
    OSError or SubprocessError.
    """
    flags = (*_FLAGS, *_WIDTHS[width])
    sources = (_SOURCE, *sorted(_SOURCE.parent.glob("*.h")))
    read = b"".join(path.read_bytes() for path in sources) + " ".join(flags).encode()
    name = f"step_kernels-{hashlib.sha256(read).hexdigest()[:16]}.so"
    beside = _SOURCE.with_name(name)
    if beside.exists():
        return beside
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler (c++, g++ or clang++)")
    writable = os.access(_SOURCE.parent, os.W_OK)
    folder = tempfile.mkdtemp(dir=_SOURCE.parent if writable else None, prefix=".kernels-")
    made = Path(folder) / name
    try:
        subprocess.run(
            [compiler, *flags, str(_SOURCE), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
        # Renamed, because another process may look for it or compile it at this moment.
        return made.replace(beside) if writable else made
    finally:
        if writable:
            shutil.rmtree(folder, ignore_errors=True)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor to be filled, in huge pages if the system has them."""
    tensor = torch.empty(shape, dtype=dtype)
    _kernels().paceline_advise(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
    return tensor


if __name__ == "__main__":
    if kernels() is not None and sys.argv[1:] == ["all"]:  # for an image: any processor of the kind
        for width in {"NEON"} if width_of_vectors() == "NEON" else _WIDTHS.keys() - {"NEON"}:
            _compiled(width)
