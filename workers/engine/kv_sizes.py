"""How much a model keeps of each token, and how many blocks fit into a memory."""

from __future__ import annotations

from typing import TypedDict

from transformers import PreTrainedConfig

from paceline.errors import ConfigError
from workers.engine.block_pool import blocks_for


class KvSizes(TypedDict):
    """The KV of a token: `num_heads` keys and values of `head_size` elements in each layer."""

    num_layers: int
    num_heads: int
    head_size: int


def kv_sizes_of(config: PreTrainedConfig) -> KvSizes:
    """The sizes for the whole model, or for a rank's part if `config` is the rank's."""
    return {
        "num_layers": int(config.num_hidden_layers),
        "num_heads": num_kv_heads_of(config),
        "head_size": head_size_of(config),
    }


def head_size_of(config: PreTrainedConfig) -> int:
    """Width of an attention head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def num_kv_heads_of(config: PreTrainedConfig) -> int:
    """Number of key/value heads."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def num_blocks_in(
    kv_memory_bytes: int, *, per_block: int, block_size: int, max_model_len: int
) -> int:
    """The number of KV blocks of `per_block` bytes that the memory holds.

    Raises ConfigError, with the numbers, if they do not suffice for one sequence.
    """
    num_blocks, needed = kv_memory_bytes // per_block, blocks_for(max_model_len, block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"target.kv_memory of {kv_memory_bytes} bytes holds {num_blocks} blocks of {per_block} "
            f"bytes, but one sequence of max_model_len {max_model_len} takes {needed}: "
            f"give at least {needed * per_block} bytes, or lower max_model_len"
        )
    return num_blocks
