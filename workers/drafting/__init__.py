"""What proposes: sequences with the trees drafted after them, passes over them, and the gRPC
service of a drafter.
"""

from __future__ import annotations

__all__ = [
    "chances",
    "desk",
    "drafter",
    "expansions",
    "growth",
    "proposal",
    "protocols",
    "service",
    "stopping",
    "tree",
    "wire",
]
