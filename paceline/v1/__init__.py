"""Wire types and service stubs of package paceline.v1, generated from proto/ by `make proto`."""

from __future__ import annotations

import paceline.quiet_grpc  # noqa: F401  # The stubs import gRPC.
