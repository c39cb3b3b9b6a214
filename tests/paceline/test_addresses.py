"""The address that a caller gives, and the errors if no server answers there."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from paceline import AsyncClient, Client, InvalidRequestError, UnavailableError
from paceline.address import Address, parse_address
from paceline.v1 import inference_pb2_grpc
from tests.paceline.scripted import Scripted

Peer = Callable[[socket.socket], None]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8001", Address("127.0.0.1", 8001)),
        ("a-host.example:65535", Address("a-host.example", 65535)),
        ("[::1]:1", Address("::1", 1)),
    ],
)
def test_what_is_an_address(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://127.0.0.1:8001", "got the URL 'http://127.0.0.1:8001'; give '127.0.0.1:8001'"),
        ("grpc://[::1]:8001/v1?x", "; give '[::1]:8001' alone"),
        ("https://user:secret@here:443/", "; give 'here:443' alone"),
        ("dns:///here:1", "; give 'here:1' alone"),
        ("http://here", "; give the host and the port alone"),
        ("here", "got 'here', which has no port"),
        ("[::1]", "which has no port"),
        ("", "which has no port"),
        ("here:", "a port is a number from 1 to 65535"),
        ("here:grpc", "a port is a number from 1 to 65535"),
        ("here:0", "a port is a number from 1 to 65535"),
        ("here:99999", "a port is a number from 1 to 65535"),
        ("here:²", "a port is a number from 1 to 65535"),
        ("unix:/tmp/socket", "a port is a number from 1 to 65535"),
        ("::1", "write an IPv6 host in brackets"),
        ("fe80::1:8001", "write an IPv6 host in brackets"),
        (":8001", "'' is not a host name"),
        ("a host:8001", "'a host' is not a host name"),
        ("[here]:8001", "'[here]' is not a host name"),
        (None, "got None"),
        (8001, "got 8001"),
    ],
)
async def test_what_is_none_is_refused_at_once(text: str, said: str) -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(InvalidRequestError, match=r"^address: expected HOST:PORT") as caught:
            client(text)
        assert said in str(caught.value)


async def causes(address: str, connect_timeout: float = 60.0) -> list[str]:
    """The errors of both clients for a server that cannot be reached."""
    said = []
    with Client(address, connect_timeout=connect_timeout) as client:
        with pytest.raises(UnavailableError) as caught:
            await asyncio.to_thread(client.connect)
        said.append(str(caught.value))
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(client.generate, "Say")
    async with AsyncClient(address, connect_timeout=connect_timeout) as client_async:
        with pytest.raises(UnavailableError) as caught:
            await client_async.connect()
        said.append(str(caught.value))
        with pytest.raises(UnavailableError):
            await client_async.generate("Say")
    assert all(one.startswith(f"no server could be reached at {address}: ") for one in said)
    return [one.partition(": ")[2] for one in said]


async def test_an_unknown_host() -> None:
    for said in await causes("no.such.host.invalid:8001"):
        assert said.startswith("the host name 'no.such.host.invalid' cannot be looked up: ")
        assert "refused" not in said
        assert "within" not in said


async def test_a_name_that_no_host_can_have() -> None:
    for said in await causes(f"{'x' * 70}.invalid:8001"):
        assert said.endswith("is not a host name")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_nobody_listens(host: str) -> None:
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as taken:
        taken.bind((host.strip("[]"), 0))  # bound, but nobody listens
        port = taken.getsockname()[1]
        for said in await causes(f"{host}:{port}"):
            assert said == "nothing listens there (connection refused); is the server up?"


async def test_nobody_answers() -> None:
    """The kernel accepts the connection, but no process answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        for said in await causes(address, connect_timeout=0.5):
            assert said.startswith("no answer within 0.5 s; check the address")
        assert time.monotonic() - begin >= 4 * 0.5, "it said that it had waited"


@contextmanager
def peer(answer: Peer) -> Iterator[str]:
    """A server that handles each connection with `answer`, then ends it."""

    def handle(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection)

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def hang_up(connection: socket.socket) -> None:
    pass


def speak_http1(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def speak_ssh(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    connection.recv(1000)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (hang_up, "the server there does not speak gRPC: it closed the connection"),
        (speak_http1, "an HTTP/1 server listens there; give the gRPC port"),
        (speak_ssh, "the server there does not speak gRPC: it answered b'SSH-2.0-OpenSSH_9.2"),
    ],
)
async def test_something_else_listens(answer: Peer, said: str) -> None:
    with peer(answer) as address:
        for one in await causes(address):
            assert one.startswith(said)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("certificate")
    key, chain = folder / "key.pem", folder / "chain.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", chain,
         "-days", "1", "-subj", "/CN=localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, chain


TLS = (
    "the server there speaks TLS, and this client plain text; give it the certificate of the "
    "server's authority (ca=FILE, or --ca FILE for a command)"
)


async def test_a_grpc_server_with_tls(certificate: tuple[Path, Path]) -> None:
    key, chain = (path.read_bytes() for path in certificate)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    server.start()
    try:
        assert await causes(f"127.0.0.1:{port}") == [TLS] * 2
    finally:
        server.stop(None).wait()


async def test_a_web_server_with_tls(certificate: tuple[Path, Path]) -> None:
    key, chain = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert await causes(f"127.0.0.1:{server.server_address[1]}") == [TLS] * 2
        server.shutdown()


async def test_a_server_that_is_slow_to_answer_is_waited_for(address: str) -> None:
    """The first connections get no answer. The client must still wait until the time is up."""
    host, port = address.split(":")
    num_silent = 2
    begun: list[socket.socket] = []

    def relay(connection: socket.socket) -> None:
        begun.append(connection)
        if len(begun) <= num_silent:
            while connection.recv(1000):
                pass
            return
        with socket.create_connection((host, int(port))) as other:
            threading.Thread(target=pipe, args=(other, connection), daemon=True).start()
            pipe(connection, other)

    with peer(relay) as relayed:
        async with AsyncClient(relayed, connect_timeout=120) as client:
            assert (await client.generate("hello")).text == "hé!"
        assert len(begun) > num_silent
        begun.clear()
        with Client(relayed, connect_timeout=120) as client_sync:
            completion = await asyncio.to_thread(client_sync.generate, "hello")
        assert completion.text == "hé!"
        assert len(begun) > num_silent


def pipe(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while received := source.recv(65536):
            sink.sendall(received)
        sink.shutdown(socket.SHUT_WR)


@pytest.mark.usefixtures("sent_once")
async def test_a_server_that_has_gone_is_told_as_that() -> None:
    """The error is not "the server answered UNAVAILABLE: failed to connect"."""
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Scripted(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with Client(address) as client:
        async with AsyncClient(address) as client_async:
            await asyncio.to_thread(client.generate, "hello")
            await client_async.generate("hello")
            server.stop(None).wait()
            for _ in range(2):
                with pytest.raises(UnavailableError) as caught:
                    await asyncio.to_thread(client.generate, "hello")
                with pytest.raises(UnavailableError) as caught_async:
                    await client_async.generate("hello")
                assert "answered" not in str(caught.value) + str(caught_async.value)
            assert "nothing listens there (connection refused)" in str(caught.value)
            assert "nothing listens there (connection refused)" in str(caught_async.value)


async def test_a_closed_client_says_so(address: str) -> None:
    client = Client(address)
    client.close()
    client.close()
    client_async = AsyncClient(address)
    await client_async.close()
    with pytest.raises(UnavailableError, match="this client was closed"):
        client.generate("hello")
    with pytest.raises(UnavailableError, match="this client was closed"):
        await client_async.generate("hello")


def test_a_day_is_not_too_long() -> None:
    """A Python lock refuses a few hundred years."""
    Client("127.0.0.1:1", connect_timeout=datetime.timedelta(days=1).total_seconds()).close()
