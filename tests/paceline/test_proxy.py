"""The environment's HTTP proxy: our own connections never use it, a caller's may."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.channel import caller_options, client_options

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240.0
_ASK = """
import sys
from paceline import Client
with Client(sys.argv[1]) as client:
    done = client.generate("The sea", max_tokens=8, ignore_eos=True, temperature=0.0)
    print(len(done.token_ids), *(worker.connected for worker in client.stats().workers))
"""


def behind(proxy: str) -> dict[str, str]:
    """The environment of a process whose proxy is at "host:port", without exceptions."""
    own = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    names = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY")
    return own | dict.fromkeys(names, f"http://{proxy}")


def test_a_proxy_that_is_down_harms_no_deployment_and_no_caller_on_its_host(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but nobody listens
        environment = behind(f"127.0.0.1:{nobody.getsockname()[1]}")
        with subprocess.Popen(
            [sys.executable, "-m", "tests.deploy.serve_tiny", str(tmp_path)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            assert server.stderr is not None
            address = server.stdout.readline().strip()
            assert address, server.stderr.read()
            for name in (address, address.replace("127.0.0.1", "localhost")):
                asked = subprocess.run(
                    [sys.executable, "-c", _ASK, name],
                    cwd=ROOT,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE,
                )
                assert asked.stdout.split() == ["8", "True", "True"], asked.stderr
            server.stdin.close()


def test_a_caller_of_another_host_goes_through_the_proxy(tmp_path: Path) -> None:
    """The proxy is asked for the server, whose address is unused (TEST-NET-1 of RFC 5737)."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(PATIENCE)
        with subprocess.Popen(
            [sys.executable, "-c", _ASK, "192.0.2.1:8001"],
            cwd=ROOT,
            env=behind(f"127.0.0.1:{proxy.getsockname()[1]}"),
            stderr=subprocess.DEVNULL,
        ) as caller:
            connection, _ = proxy.accept()
            with connection:
                connection.settimeout(PATIENCE)
                assert connection.recv(4096).startswith(b"CONNECT 192.0.2.1:8001 ")
            caller.kill()


@pytest.mark.parametrize(
    ("address", "uses"),
    [
        ("127.0.0.1:8001", False),
        ("127.8.9.1:8001", False),
        ("[::1]:8001", False),
        ("localhost:8001", False),
        ("10.0.0.7:8001", True),
        ("serving.example:8001", True),
    ],
)
def test_only_another_host_is_reached_by_a_proxy(address: str, uses: bool) -> None:
    assert ("grpc.enable_http_proxy", int(uses)) in caller_options(address)
    assert ("grpc.enable_http_proxy", 0) in client_options()
