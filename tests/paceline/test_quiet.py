"""When its server goes away, a caller's process writes nothing to stderr."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CALLER = """
import asyncio, sys
from paceline import AsyncClient, Client, PacelineError, Retries

def tell(error):
    print(type(error).__name__, flush=True)

def plainly(address):
    with Client(address, retries=Retries(0)) as client:
        for _ in range(2):
            try:
                for event in client.stream("endless"):
                    print(type(event).__name__, flush=True)
            except PacelineError as error:
                tell(error)

async def with_asyncio(address):
    async def ask():
        try:
            async for event in client.stream("endless"):
                print(type(event).__name__, flush=True)
        except PacelineError as error:
            tell(error)

    async with AsyncClient(address, retries=Retries(0)) as client:
        await asyncio.gather(*[ask() for _ in range(3)])
        await asyncio.gather(*[ask() for _ in range(3)], client.stats(), return_exceptions=True)

async def without_closing(address):
    client = AsyncClient(address, retries=Retries(0))
    try:
        await asyncio.gather(*[client.generate("endless") for _ in range(3)])
    except PacelineError as error:
        tell(error)

kind, address = sys.argv[1:]
if kind == "plainly":
    plainly(address)
else:
    print("asks", flush=True)
    asyncio.run({"with_asyncio": with_asyncio, "without_closing": without_closing}[kind](address))
"""
KINDS = ("plainly", "with_asyncio", "without_closing")


def own_environment(**more: str) -> dict[str, str]:
    """The environment of a caller without gRPC's variables, which this process has set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    return kept | more


def caller(kind: str, address: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CALLER, kind, address],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=own_environment(**environ),
    )  # fmt: skip


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.paceline.stopping_server"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        yield server, server.stdout.readline().strip()
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_in_the_midst_of_a_stream(kind: str, how: signal.Signals) -> None:
    with serving() as (server, address), caller(kind, address) as asking:
        assert asking.stdout is not None
        asking.stdout.readline()  # It is connected, or will be soon.
        server.send_signal(how)
        said, complaint = asking.communicate(timeout=120)
    assert "UnavailableError" in said
    assert (asking.returncode, complaint) == (0, "")


def frame(kind: int, payload: bytes, *, flags: int = 0, stream: int = 0) -> bytes:
    """A frame of HTTP/2. Stream 0 is the whole connection."""
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
    return head + payload


TOO_MANY_PINGS = frame(7, struct.pack(">II", 1, 11) + b"too_many_pings")
INTERNAL_ERROR = frame(7, struct.pack(">II", 1, 2) + b"the server dies")
STREAM_RESET = frame(3, struct.pack(">I", 2), stream=1)


@contextmanager
def leaving_with(last_words: bytes) -> Iterator[str]:
    """A server of HTTP/2 that sends only its last words on a connection."""

    def leave(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(frame(4, b"") + frame(4, b"", flags=1))
            received = b""
            while b"InferenceService" not in received and (more := connection.recv(65536)):
                received += more
            connection.sendall(last_words)

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=leave, args=(connection,), daemon=True).start()

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "last_words",
    [INTERNAL_ERROR, TOO_MANY_PINGS, STREAM_RESET],
    ids=["internal error", "too many pings", "stream reset"],
)
def test_a_server_that_sends_its_clients_away(kind: str, last_words: bytes) -> None:
    """gRPC's core would write a line for each such connection."""
    with leaving_with(last_words) as address, caller(kind, address) as asking:
        said, complaint = asking.communicate(timeout=120)
    assert "UnavailableError" in said
    assert (asking.returncode, complaint) == (0, "")


def test_the_lines_of_grpc_are_there_for_whoever_asks() -> None:
    with (
        leaving_with(INTERNAL_ERROR) as address,
        caller("plainly", address, GRPC_VERBOSITY="INFO") as asking,
    ):
        _, complaint = asking.communicate(timeout=120)
    assert "goaway" in complaint.lower()


AFTER = "import os; print(os.environ.get('GRPC_VERBOSITY'))"


@pytest.mark.parametrize(
    ("program", "environ", "expected"),
    [
        (f"import paceline; {AFTER}", {}, "None"),
        (f"import paceline; {AFTER}", {"GRPC_VERBOSITY": "INFO"}, "INFO"),
        (f"import grpc, paceline; {AFTER}", {}, "None"),
    ],
)
def test_nothing_is_left_behind_for_other_processes(
    program: str, environ: dict[str, str], expected: str
) -> None:
    told = subprocess.run(
        [sys.executable, "-c", program], env=own_environment(**environ), cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == expected
