"""Imports gRPC with its own log turned off; import this before anything that imports gRPC.

gRPC's core writes lines of its own to stderr, such as "Got goaway" when a server stops. What they
mean reaches a caller as an error of `paceline.errors`. gRPC reads GRPC_VERBOSITY once, when it is
imported, for the whole process. So nothing changes where the variable is set (GRPC_VERBOSITY=INFO
shows the lines) or where gRPC has been imported already, and the variable is not left behind for
child processes.
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "GRPC_VERBOSITY"

if _VARIABLE not in os.environ and "grpc" not in sys.modules:
    os.environ[_VARIABLE] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_VARIABLE]
