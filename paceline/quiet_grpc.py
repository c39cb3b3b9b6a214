"""gRPC with its own log turned off. Modules of this package import gRPC from here.

gRPC's core writes lines such as "Got goaway" to stderr when a server stops. A caller learns what
they mean from an error of `paceline.errors`. gRPC reads GRPC_VERBOSITY once per process, when it is
imported. Nothing changes if the variable is set (GRPC_VERBOSITY=INFO shows the lines) or if gRPC
has been imported already. Child processes do not inherit the variable.
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "GRPC_VERBOSITY"

if _VARIABLE in os.environ or "grpc" in sys.modules:
    import grpc as grpc
else:
    os.environ[_VARIABLE] = "NONE"
    try:
        import grpc as grpc
    finally:
        del os.environ[_VARIABLE]
