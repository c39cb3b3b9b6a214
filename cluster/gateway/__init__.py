"""The front door: OpenAI's HTTP interface and gRPC over one or several drivers, which it calls as
any gRPC caller does. It holds no model and decides nothing about decoding.
"""

from __future__ import annotations

__all__ = [
    "anthropic_messages",
    "app",
    "console",
    "counts",
    "drivers",
    "errors",
    "grpc_front",
    "metrics",
    "openai_answers",
    "openai_responses",
    "requests",
    "server",
]
