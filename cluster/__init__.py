"""The floor of what spans devices: decoding, driver, placement, configuration, simulation, gateway."""

from __future__ import annotations

import workers  # noqa: F401  (what it does before gRPC is imported)
