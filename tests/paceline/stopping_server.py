"""A process that serves `Scripted` until it is ended. SIGTERM stops it in good order."""

from __future__ import annotations

import asyncio
import signal
import sys

import grpc

from paceline.channel import CALLERS, server_options
from paceline.v1 import inference_pb2_grpc
from tests.paceline.scripted import Scripted


async def main() -> None:
    """Print the address, then serve."""
    server = grpc.aio.server(options=server_options(CALLERS))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Scripted(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await ended.wait()
    await server.stop(0.1)


if __name__ == "__main__":
    asyncio.run(main())
