"""A shard of the target: its gRPC service, the sequences of a stream, the verdicts of a step."""

from __future__ import annotations

__all__ = [
    "faults",
    "servicer",
    "shard",
    "step_sequences",
    "verdicts",
]
