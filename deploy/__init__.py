"""What a person runs: commands, Ray jobs and benchmarks."""

from __future__ import annotations

import workers  # noqa: F401  (what it does before gRPC is imported)
