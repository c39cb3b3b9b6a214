"""The available memory of a host or a GPU, and the number of KV blocks that fit into it.

The checks raise ConfigError, with the numbers, before memory runs out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import psutil

from paceline.errors import ConfigError
from workers.engine.cuda.kv_cache import PAGE_SIZE
from workers.engine.kv_blocks import blocks_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_GPU_SHARE = 0.9
"""The largest share of a GPU's memory that may be used in total."""
_CGROUP = Path("/sys/fs/cgroup")


class KvSizes(TypedDict):
    """The KV of one token: in each layer `num_heads` keys and values of `head_size` elements."""

    num_layers: int
    num_heads: int
    head_size: int


def kv_sizes_of(config: PreTrainedConfig) -> KvSizes:
    """The sizes for the model of `config`: the whole model, or a rank's part of it."""
    return {
        "num_layers": int(config.num_hidden_layers),
        "num_heads": num_kv_heads_of(config),
        "head_size": head_size_of(config),
    }


def head_size_of(config: PreTrainedConfig) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def num_kv_heads_of(config: PreTrainedConfig) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def num_blocks_in(
    kv_memory_bytes: int, *, per_block: int, block_size: int, max_model_len: int
) -> int:
    """The number of KV blocks of `per_block` bytes that `kv_memory_bytes` hold.

    Raises ConfigError, with the numbers, if they are too few for one sequence.
    """
    num_blocks, needed = kv_memory_bytes // per_block, blocks_for(max_model_len, block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"target.kv_memory of {kv_memory_bytes} bytes holds {num_blocks} blocks of {per_block} "
            f"bytes, but one sequence of max_model_len {max_model_len} takes {needed}: "
            f"give at least {needed * per_block} bytes, or lower max_model_len"
        )
    return num_blocks


def check_room(needed: int, what: str, remedy: str) -> None:
    """Raise ConfigError, with the numbers, if the host has fewer than `needed` bytes left."""
    available = available_bytes()
    if needed > available:
        raise ConfigError(
            f"out of memory: {what} {needed} bytes, but this host has {available} bytes left: "
            f"{remedy}"
        )


def available_bytes() -> int:
    """Bytes that may still be allocated, within the host's memory and our container's limit.

    Other processes may allocate memory at the same time.
    """
    on_host: int = psutil.virtual_memory().available
    in_container = _container_bytes_left()
    return on_host if in_container is None else min(on_host, in_container)


def _container_bytes_left() -> int | None:
    """Bytes left in our container, file caches included: they can be reclaimed. None: no limit."""
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None
    files = re.search(r"^inactive_file (\d+)", _read(_CGROUP / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(files[1]) if files else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of a GPU after the weights were loaded and the largest step was run once.

    `free`: without any memory of that step. `activations`: the peak that the step used.
    """

    total: int
    free: int
    activations: int

    @property
    def kv(self) -> int:
        """Bytes for KV. Activations count twice, since CUDA graphs keep memory of their own."""
        taken = self.total - self.free
        return max(0, int(self.total * MAX_GPU_SHARE) - taken - 2 * self.activations)


def num_blocks_on_gpu(
    given: int | None, profile: MemoryProfile | None, *, per_block: int, max_model_len: int
) -> int:
    """The number of KV blocks that `given` bytes hold; None: the bytes that the profile leaves.

    Raises ConfigError, with the numbers, if these bytes are not free, or too few for one sequence.
    """
    needed = blocks_for(max_model_len, PAGE_SIZE) * per_block
    if given is None:
        assert profile is not None, "without a profile the size must be given"
        if profile.kv < needed:
            raise ConfigError(
                f"out of GPU memory: of {profile.total} bytes {profile.total - profile.free} are "
                f"taken (weights, and whatever else runs there), a step takes up to "
                f"{profile.activations}, and {MAX_GPU_SHARE:.0%} may be used: that leaves "
                f"{profile.kv} for KV, but one sequence of max_model_len {max_model_len} takes "
                f"{needed}: lower max_model_len, raise tensor_parallel, or take a larger GPU"
            )
        return profile.kv // per_block
    num_blocks = num_blocks_in(
        given, per_block=per_block, block_size=PAGE_SIZE, max_model_len=max_model_len
    )
    if profile is not None and given > profile.free - 2 * profile.activations:
        raise ConfigError(
            f"kv_memory of {given} bytes does not fit: of the GPU's {profile.total} bytes "
            f"{profile.free} are free beside the weights, and a step takes up to "
            f'{2 * profile.activations}: give less, or "auto"'
        )
    return num_blocks
