"""The model of the emulated target (emulated.py). It needs torch and vLLM, which loads it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from paceline_vllm.emulated import PROFILE_KEY
from workers.emulated.device_wait import DeviceClock
from workers.emulated.latency_profiles import load_profile
from workers.emulated.replay_text import PrefixReader, ReplayText, spec_of

_HEAD_SIZE = 64
_NEVER = -1e4


class PacelineEmulated(nn.Module):
    """A causal model whose passes take a profile's time and whose text is the emulated one."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._hidden_size = int(vllm_config.model_config.get_hidden_size())
        self._text = ReplayText(self._vocab_size)
        self._times = load_profile(os.environ[PROFILE_KEY], role="target").pass_ms
        self._clock = DeviceClock()
        self._spec = spec_of(0, 0.0, 0)
        self._name = "layers.0.attn"  # vLLM asks for one number in it.
        # For its KV blocks alone: it is never called.
        self.attn = Attention(
            1,
            _HEAD_SIZE,
            1.0,
            num_kv_heads=1,
            cache_config=vllm_config.cache_config,
            prefix=self._name,
        )
        self._block_size = int(vllm_config.cache_config.block_size)
        self._readers: dict[int, PrefixReader] = {}  # What was read up to the token of a KV slot.

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """No embeddings: zeros."""
        return torch.zeros(len(input_ids), self._hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Hidden states whose first number is the id of the next token."""
        begin = self._clock.now()
        hidden = torch.zeros(len(positions), self._hidden_size)
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return hidden  # vLLM measures how much memory a pass takes.
        own = metadata[self._name]
        starts = own.query_start_loc.tolist()
        tokens, places = input_ids.tolist(), positions.tolist()
        batch = len(starts) - 1
        for row in range(batch):
            first, end = starts[row], starts[row + 1]
            if first < end:
                blocks = own.block_table[row].tolist()
                hidden[first:end, 0] = self._read(tokens[first:end], places[first], blocks)
        self._clock.finish(begin, self._times.ms(batch, starts[-1]) / 1000)
        return hidden

    def _read(self, tokens: list[int], position: int, blocks: list[int]) -> torch.Tensor:
        """Read tokens from `position` on. Returns the next token after each."""
        reader = PrefixReader() if not position else self._readers[self._slot(position - 1, blocks)]
        found = []
        for place, token_id in enumerate(tokens, start=position):
            reader = reader.copy().read_one(token_id, place)
            self._readers[self._slot(place, blocks)] = reader
            found.append(self._text.next_token(reader.digest(), self._spec))
        return torch.tensor(found, dtype=torch.float32)

    def _slot(self, position: int, blocks: list[int]) -> int:
        block, offset = divmod(position, self._block_size)
        return blocks[block] * self._block_size + offset

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """One token is certain: logits (rows, vocabulary)."""
        logits = torch.full((len(hidden_states), self._vocab_size), _NEVER)
        return logits.scatter_(1, hidden_states[:, :1].long(), 0.0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Read nothing."""
        return {name for name, _ in self.named_parameters()}
