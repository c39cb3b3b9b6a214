from __future__ import annotations

from workers.grpc_threads import read_in_place

read_in_place()  # before anything on this floor, or above it, imports gRPC
