"""What spans devices: decoding, driver, placement, configuration, simulation and gateway."""

from __future__ import annotations

import workers  # noqa: F401  (what it does before gRPC is imported)
