"""How much of a GPU's memory may hold KV: what a profile run shows to be free."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from workers.engine.block_pool import blocks_for
from workers.engine.cuda.kv_cache import PAGE_SIZE
from workers.engine.kv_sizes import num_blocks_in

USED_SHARE = 0.9
"""The largest share of the device's memory that we use in total."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of a device after the weights were loaded and the largest step was run once.

    `free`: without any memory of that step. `activations`: the peak that the step used.
    """

    total: int
    free: int
    activations: int

    @property
    def kv(self) -> int:
        """Bytes for KV. Activations count twice, since CUDA graphs keep memory of their own."""
        taken = self.total - self.free
        return max(0, int(self.total * USED_SHARE) - taken - 2 * self.activations)


def choose_num_blocks(
    given: int | None, profile: MemoryProfile | None, *, per_block: int, max_model_len: int
) -> int:
    """The number of blocks in `given` bytes, or if None in what the profile leaves.

    Raises ConfigError, with the numbers, if they do not hold one sequence or are not available.
    """
    needed = blocks_for(max_model_len, PAGE_SIZE) * per_block
    if given is None:
        assert profile is not None, "without a profile the size must be given"
        if profile.kv < needed:
            raise ConfigError(
                f"out of GPU memory: of {profile.total} bytes {profile.total - profile.free} are "
                f"taken (weights, and whatever else runs there), a step takes up to "
                f"{profile.activations}, and {USED_SHARE:.0%} may be used: that leaves "
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
