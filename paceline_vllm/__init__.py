"""Paceline's drafters inside an unmodified vLLM (docs/vllm.md).

    vllm serve TARGET --speculative-config '{"method": "custom_class",
        "model": "paceline_vllm.RemoteDrafters", "num_speculative_tokens": 8}'

`remote_drafters` is the class that vLLM calls, `rows` finds its requests again by their tokens,
`drafting_thread` talks to drafters, `settings` reads the environment.
"""

from __future__ import annotations

from paceline_vllm.remote_drafters import RemoteDrafters

__all__ = ["RemoteDrafters"]
