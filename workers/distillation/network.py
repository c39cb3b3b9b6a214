"""Llama-like networks in plain torch, which train and which decode many texts at once.

The engines (workers/engine) neither compute gradients nor decode thousands of sequences in a
step. Parameters have Hugging Face's names, so a checkpoint's tensors fit as they are.

Shapes: B sequences, S positions, F features, H query heads, N key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.errors import CheckpointError
from workers.engine.load.checkpoint import sliding_window_of

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class Attention(nn.Module):
    """The projections of an attention, and its norms of queries and keys where a model has them."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        features, self.head_size = config.hidden_size, head_size_of(config)
        queries = config.num_attention_heads * self.head_size
        keys = config.num_key_value_heads * self.head_size
        biased = config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
        self.q_proj = nn.Linear(features, queries, bias=biased)
        self.k_proj = nn.Linear(features, keys, bias=biased)
        self.v_proj = nn.Linear(features, keys, bias=biased)
        self.o_proj = nn.Linear(queries, features, bias=biased and config.model_type != "qwen2")
        if config.model_type == "qwen3":
            self.q_norm = nn.RMSNorm(self.head_size, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_size, config.rms_norm_eps)

    def project(self, rows_BSF: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries [B, H, S, D], keys and values [B, N, S, D], turned to their positions."""

        def heads(rows: Tensor) -> Tensor:
            split: Tensor = rows.unflatten(-1, (-1, self.head_size))
            return split

        queries, keys = heads(self.q_proj(rows_BSF)), heads(self.k_proj(rows_BSF))
        if hasattr(self, "q_norm"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        values = heads(self.v_proj(rows_BSF)).transpose(1, 2)
        return _turned(queries.transpose(1, 2), turn), _turned(keys.transpose(1, 2), turn), values


class FeedForward(nn.Module):
    """A gated feed-forward part."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        features, inner = config.hidden_size, config.intermediate_size
        biased = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(features, inner, bias=biased)
        self.up_proj = nn.Linear(features, inner, bias=biased)
        self.down_proj = nn.Linear(inner, features, bias=biased)

    def forward(self, rows: Tensor) -> Tensor:
        inner: Tensor = functional.silu(self.gate_proj(rows)) * self.up_proj(rows)
        result: Tensor = self.down_proj(inner)
        return result


class Layer(nn.Module):
    """A layer. Its two halves are called alone where keys and values come from a cache."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def project(self, rows_BSF: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """As `Attention.project`, of the layer's input."""
        return self.self_attn.project(self.input_layernorm(rows_BSF), turn)

    def finish(self, rows_BSF: Tensor, mixed_BHSD: Tensor) -> Tensor:
        """The layer's output, from its input and what the attention has mixed."""
        rows_BSF = rows_BSF + self.self_attn.o_proj(mixed_BHSD.transpose(1, 2).flatten(-2))
        result: Tensor = rows_BSF + self.mlp(self.post_attention_layernorm(rows_BSF))
        return result

    def forward(
        self, rows_BSF: Tensor, turn: tuple[Tensor, Tensor], seen_SS: Tensor | None
    ) -> Tensor:
        queries, keys, values = self.project(rows_BSF, turn)
        share = queries.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(share, dim=1) for part in (keys, values))
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen_SS, is_causal=seen_SS is None
        )
        return self.finish(rows_BSF, mixed)


class Network(nn.Module):
    """Embedding, layers and the last norm. `forward` returns what the LM head multiplies.

    The embedding and the LM head belong to the target: they are no parameters, and a student shares
    them. `mask`: the embedding of the mask token of a parallel drafter, which learns.
    """

    embedding_VF: Tensor
    head_VF: Tensor
    inverse_D: Tensor

    def __init__(
        self, config: PreTrainedConfig, embedding_VF: Tensor, head_VF: Tensor, *, masks: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mask = nn.Parameter(embedding_VF.float().mean(0)) if masks else None
        self.register_buffer("embedding_VF", embedding_VF, persistent=False)
        self.register_buffer("head_VF", head_VF, persistent=False)
        rotary = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]
        self._scaling = float(rotary.attention_scaling)
        self.register_buffer("inverse_D", rotary.inv_freq.float(), persistent=False)

    def turn(self, positions_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [S, D] of positions."""
        half = positions_S[:, None].float() * self.inverse_D
        angles = torch.cat([half, half], dim=-1)
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)

    def forward(
        self,
        token_ids_BS: Tensor,
        positions_S: Tensor | None = None,
        seen_SS: Tensor | None = None,
        num_masks: int = 0,
    ) -> Tensor:
        """Normed rows [B, S, F]. The last `num_masks` of the S positions are mask tokens.

        `seen_SS`: whether a row sees another one; None: those before it, and itself.
        """
        rows = functional.embedding(token_ids_BS, self.embedding_VF).to(self.norm.weight.dtype)
        if num_masks:
            assert self.mask is not None
            masks = self.mask.to(rows.dtype).expand(len(rows), num_masks, -1)
            rows = torch.cat([rows, masks], dim=1)
        if positions_S is None:
            positions_S = torch.arange(rows.shape[1], device=rows.device)
        dtype = torch.get_autocast_dtype(rows.device.type)
        dtype = dtype if torch.is_autocast_enabled(rows.device.type) else rows.dtype
        turn = self.turn(positions_S, dtype)
        for layer in self.layers:
            rows = layer(rows, turn, seen_SS)
        normed: Tensor = self.norm(rows)
        return normed


def _turned(heads_BHSD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = turn
    first, second = heads_BHSD.chunk(2, dim=-1)
    return heads_BHSD * cosines + torch.cat([-second, first], dim=-1) * sines


def head_size_of(config: PreTrainedConfig) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def read_network(folder: Path, dtype: torch.dtype) -> Network:
    """The whole model of a checkpoint folder. Raises CheckpointError."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} is not usable: {error}") from error
    if config.model_type not in MODEL_TYPES or getattr(config, "quantization_config", None):
        raise CheckpointError(
            f"{folder}: only plain weights of {', '.join(MODEL_TYPES)} can be distilled, got "
            f"{config.model_type}"
        )
    if sliding_window_of(config) is not None:
        raise CheckpointError(f"{folder}: layers with a sliding window cannot be distilled")
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            tensors |= {name: stored.get_tensor(name).to(dtype) for name in stored.keys()}  # noqa: SIM118
    try:
        embedding = tensors.pop("model.embed_tokens.weight")
        head = tensors.pop("lm_head.weight", embedding)
        network = Network(config, embedding, head, masks=False).to(dtype)
        network.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items()})
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: its tensors do not fit config.json: {error}") from error
    return network


def evenly_spaced(count: int, num_layers: int) -> list[int]:
    """`count` of the layers 0 to num_layers - 1, the first and the last among them."""
    if count == 1:
        return [0]
    return [round(place * (num_layers - 1) / (count - 1)) for place in range(count)]


def student_of(target: Network, layers: Sequence[int], *, masks: bool = False) -> Network:
    """A trainable network of copies of these layers, in float32, that shares the target's rest."""
    config: Any = type(target.config).from_dict(target.config.to_dict())
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [target.config.layer_types[layer] for layer in layers]
    student = Network(config, target.embedding_VF, target.head_VF, masks=masks)
    student.norm.load_state_dict(target.norm.state_dict())
    for own, layer in zip(student.layers, layers, strict=True):
        own.load_state_dict(target.layers[layer].state_dict())
    return student.to(target.embedding_VF.device)
