"""What runs on one device. No Ray."""

from __future__ import annotations

from workers.process.settings import apply_grpc_settings

apply_grpc_settings()  # before anything on this floor, or above it, imports gRPC
