"""What every worker process has: a gRPC server, a log, cores and threads, a clock."""

from __future__ import annotations

__all__ = [
    "atomic_files",
    "certificate",
    "handshake",
    "kernels",
    "lines",
    "logs",
    "mutual_tls",
    "plugin_registry",
    "server",
    "settings",
    "standalone",
    "threads",
    "tracing",
]
