"""The target's answers to prompts, for thousands of texts in each step.

A text is a row of fixed length. It begins with a prompt; the target goes on until it ends its
answer or has written the row's limit of tokens, and then the next prompt follows. So every position
of every row trains. A prompt that asks is the head of a user's turn: the target invents the
question itself, at temperature 1, and then answers it.

Shapes: B rows, S positions, N prompts, P tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from workers.distillation.network import Layer, Network, head_size_of

LEAST_ANSWER, MOST_ANSWER = 64, 224
"""Limits of an answer's tokens: greedy texts of small models repeat themselves after some hundred.
"""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts as tokens. The first one closes a question that the target asked itself.

    `asks_N`: whether the target writes the question.
    """

    token_ids_NP: Tensor
    lengths_N: Tensor
    asks_N: Tensor

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], asks: Sequence[bool], device: torch.device
    ) -> Prompts:
        """From lists of token ids; a prompt that occurs twice is chosen twice as often."""
        padded = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        where = torch.from_numpy(padded).to(device)
        return cls(where, lengths, torch.tensor(asks, device=device))


@torch.no_grad()
def sample_rows(
    target: Network,
    prompts: Prompts,
    temperatures_B: Tensor,
    num_positions: int,
    end_token_ids: Sequence[int],
    generator: torch.Generator,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Token ids [B, S], and whether the target wrote them (and no prompt did)."""
    device, num_rows = temperatures_B.device, len(temperatures_B)
    config, dtype = target.config, target.embedding_VF.dtype
    keys, head_size = config.num_key_value_heads, head_size_of(config)
    shape = (2, num_rows, keys, num_positions, head_size)
    caches = [torch.empty(shape, dtype=dtype, device=device) for _ in target.layers]
    ends = torch.tensor(list(end_token_ids), device=device)
    head_VF = target.head_VF.float()  # logits in bfloat16 would have ties

    def drawn(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator, device=device)

    limits = drawn(LEAST_ANSWER, MOST_ANSWER)
    prompt, place, written = drawn(1, len(prompts.lengths_N)), torch.ones_like(limits), 0 * limits
    tokens = prompts.token_ids_NP[prompt, 0]
    all_tokens, all_own = [tokens], [torch.zeros_like(tokens, dtype=torch.bool)]
    for position in range(num_positions - 1):
        logits = _step(target, caches, tokens, position).float() @ head_VF.T
        temperatures = torch.where(prompts.asks_N[prompt], 1.0, temperatures_B)
        # Gumbel noise from uniform numbers: torch's exponential ones take seven times as long.
        noise = torch.empty_like(logits).uniform_(generator=generator).clamp_(min=1e-30)
        noise = noise.log_().neg_().log_()
        chosen = logits.addcmul_(noise, temperatures[:, None], value=-1).argmax(-1)
        is_own = place >= prompts.lengths_N[prompt]
        given = prompts.token_ids_NP[prompt, place.clamp(max=prompts.token_ids_NP.shape[1] - 1)]
        tokens = torch.where(is_own, chosen, given)
        all_tokens.append(tokens)
        all_own.append(is_own)
        place, written = place + 1, written + is_own
        ended = torch.isin(tokens, ends) & is_own
        over = ended | (written >= limits)
        asked = prompts.asks_N[prompt]
        following = torch.where(asked, 0, drawn(1, len(prompts.lengths_N)))
        prompt = torch.where(over, following, prompt)
        # What closes a question begins with the end of the turn, which may be there already.
        place = torch.where(over, (asked & ended).long(), place)
        written = torch.where(over, 0, written)
    stacked = torch.stack(all_tokens, 1), torch.stack(all_own, 1)
    return stacked[0].int().cpu().numpy(), stacked[1].cpu().numpy()


def _step(target: Network, caches: list[Tensor], tokens_B: Tensor, position: int) -> Tensor:
    """The rows [B, F] that the LM head multiplies, after one more token of each text."""
    rows = functional.embedding(tokens_B, target.embedding_VF)[:, None]
    turn = target.turn(torch.tensor([position], device=rows.device), rows.dtype)
    for layer, cache in zip(target.layers, caches, strict=True):
        assert isinstance(layer, Layer)
        queries, keys, values = layer.project(rows, turn)
        cache[0, :, :, position], cache[1, :, :, position] = keys[:, :, 0], values[:, :, 0]
        stored_keys, stored_values = cache[:, :, :, : position + 1]
        # Query heads that share a key head take the places of positions.
        grouped = queries.reshape(len(rows), keys.shape[1], -1, keys.shape[-1])
        mixed = functional.scaled_dot_product_attention(grouped, stored_keys, stored_values)
        rows = layer.finish(rows, mixed.reshape(queries.shape))
    normed: Tensor = target.norm(rows[:, 0])
    return normed
