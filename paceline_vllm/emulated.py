"""An EMULATED target inside the real vLLM, for `paceline bench vllm`; and a drafter in turns.

vLLM's scheduler, batches, KV blocks and sampler are its own. The model makes no use of weights: a
forward pass takes the time of a latency profile, and the next token is that of the emulated text
(workers/emulated/replay_text.py), which our emulated drafters guess at a set rate. What a sequence
has read is kept by KV slot, so a wrong block or a wrong rollback would continue with another text.

vLLM finds the model by a plugin (`vllm.general_plugins`), under the name of ARCHITECTURE.
"""

from __future__ import annotations

import os
import time
from typing import Any

ARCHITECTURE = "PacelineEmulated"
PROFILE_KEY, DRAFT_MS_KEY = "PACELINE_EMULATED_TARGET", "PACELINE_EMULATED_DRAFT_MS"
ACCEPTANCE_KEY = "PACELINE_EMULATED_ACCEPTANCE"


def register() -> None:
    """Tell vLLM of the model. It is imported only where a configuration names it."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"paceline_vllm.emulated_model:{ARCHITECTURE}")


class DraftsInTurns:
    """An EMULATED draft model on the target's own devices, as vLLM's `draft_model` runs one.

    It takes its turn after each step: DRAFT_MS_KEY milliseconds for each candidate. A candidate is
    right at the rate ACCEPTANCE_KEY.
    """

    def __init__(self, vllm_config: Any) -> None:
        from workers.emulated.device_wait import DeviceClock
        from workers.emulated.replay_text import Guess, PrefixReader, ReplayText, spec_of

        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._seconds = self._most * float(os.environ[DRAFT_MS_KEY]) / 1000
        self._text = ReplayText(int(vllm_config.model_config.get_vocab_size()))
        self._guess = Guess(float(os.environ[ACCEPTANCE_KEY]), 0.0)
        self._spec, self._new_reader = spec_of(0, 0.0, 0), PrefixReader
        self._clock = DeviceClock()
        # By row: how many tokens were read, the last of them, and a reader of them.
        self._read: dict[int, tuple[int, int, Any]] = {}

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def propose(
        self, sampled: list[list[int]], lengths: Any, table: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Candidates for each row that decodes, after the time of a pass for each candidate."""
        begin = time.perf_counter()
        found = [
            self._candidates(row, int(lengths[row]), table[row]) if new else []
            for row, new in enumerate(sampled)
        ]
        if any(found):
            self._clock.finish(begin, self._seconds)
        return found

    def _candidates(self, row: int, length: int, tokens: Any) -> list[int]:
        count, last, reader = self._read.get(row, (0, -1, None))
        if reader is None or count > length or int(tokens[count - 1]) != last:
            count, reader = 0, self._new_reader()
        reader = reader.read(tokens[count:length].tolist(), count)
        self._read[row] = length, int(tokens[length - 1]), reader
        ahead, drafted = reader.copy(), []
        for place in range(self._most):
            token_id = self._text.first_guess(ahead.digest(), self._spec, self._guess)
            drafted.append(token_id)
            ahead.read_one(token_id, length + place)
        return drafted
