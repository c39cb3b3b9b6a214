"""A vLLM engine that decodes what lines of JSON ask for: `python -m paceline_vllm.engine_lines`.

Its argument is a JSON object, the keywords of `vllm.LLM`. A task has `prompts`, lists of token ids
that are decoded together, and `max_tokens`, which each gets. The answer has their `token_ids`, and
the `seconds` that it took.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from workers.process.lines import answer_lines


def _engine() -> Callable[[Mapping[str, Any]], Mapping[str, object]]:
    from vllm import LLM, SamplingParams

    engine = LLM(**json.loads(sys.argv[1]))

    def decode(task: Mapping[str, Any]) -> Mapping[str, object]:
        params = SamplingParams(temperature=0, max_tokens=task["max_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": one} for one in task["prompts"]]
        begin = time.perf_counter()
        answers = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        token_ids = [list(one.outputs[0].token_ids) for one in answers]
        return {"token_ids": token_ids, "seconds": seconds}

    return decode


if __name__ == "__main__":
    answer_lines(_engine)
