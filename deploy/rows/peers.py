"""The transformers library as the reference of `verify` and a contender in `bench`."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from deploy.rows.comparison import TIE_MARGIN
from paceline.chat import Message


@dataclass(frozen=True, slots=True)
class Departure:
    """Where our greedy text differs from transformers'. A token is None if that text had ended.

    `margin`: transformers' logit of its own token minus its logit of ours, at that prefix; None:
    one of the two is not finite.
    """

    position: int
    ours: int | None
    theirs: int | None
    margin: float | None

    @property
    def tie(self) -> bool:
        """Whether rounding alone explains the difference."""
        return self.margin is not None and self.margin < TIE_MARGIN


@dataclass(frozen=True, slots=True)
class GreedyText:
    """The text that transformers generates, and the processed logits behind each token."""

    token_ids: list[int]
    logits_TV: torch.Tensor


def greedy_config(config: GenerationConfig, max_tokens: int) -> GenerationConfig:
    """The checkpoint's generation settings, without sampling and with a limit."""
    greedy = copy.deepcopy(config)
    greedy.do_sample = False
    greedy.max_new_tokens = max_tokens
    for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
        setattr(greedy, name, None)
    return greedy


class TransformersPeer:
    """A checkpoint's plain transformers model in float32. `threads`: CPU threads; None: all."""

    def __init__(self, folder: Path, *, threads: int | None = None) -> None:
        disable_progress_bar()  # It would overwrite our own lines and bars.
        torch.set_num_threads(threads or os.cpu_count() or 1)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def encode(self, text: str | Sequence[Message]) -> list[int]:
        """Token ids of a prompt: a string as text, messages through the chat template."""
        if isinstance(text, str):
            return list(self._tokenizer(text)["input_ids"])
        messages = [{"role": message.role, "content": message.content} for message in text]
        return list(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )

    def greedy(self, prompt_token_ids: Sequence[int], max_tokens: int) -> GreedyText:
        """How transformers' `generate` continues a prompt, the end token included if it comes."""
        prompt_BT = torch.tensor([list(prompt_token_ids)])
        config = greedy_config(self._model.generation_config, max_tokens)
        config.return_dict_in_generate = True
        config.output_scores = True
        with torch.inference_mode():
            answer = self._model.generate(
                prompt_BT,
                attention_mask=torch.ones_like(prompt_BT),
                generation_config=config,
            )
        token_ids = answer.sequences[0, prompt_BT.shape[1] :].tolist()
        return GreedyText(token_ids, torch.cat(answer.scores))

    def departures(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], max_tokens: int
    ) -> list[Departure]:
        """All positions where our greedy text differs from transformers'.

        After a tie the comparison continues with our token, so that a tie hides nothing. It ends at
        the first departure that is not a tie.
        """
        found: list[Departure] = []
        start = 0
        while start == 0 or start < len(token_ids):
            prefix = [*prompt_token_ids, *token_ids[:start]]
            theirs = self.greedy(prefix, max_tokens - start)
            departure = _first_departure(token_ids[start:], theirs, start)
            if departure is None:
                break
            found.append(departure)
            if not departure.tie:
                break
            start = departure.position + 1
        return found


def _first_departure(ours: Sequence[int], theirs: GreedyText, offset: int) -> Departure | None:
    for index, (our_token, their_token) in enumerate(zip_longest(ours, theirs.token_ids)):
        if our_token == their_token:
            continue
        margin = None
        if our_token is not None and their_token is not None:
            logits_V = theirs.logits_TV[index]
            gap = (logits_V[their_token] - logits_V[our_token]).item()
            margin = gap if abs(gap) != float("inf") else None
        return Departure(offset + index, our_token, their_token, margin)
    return None
