"""The small server at an address."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from paceline import Retries, client
from paceline.v1 import inference_pb2_grpc
from tests.paceline.scripted import Scripted


@pytest.fixture
def sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of how one attempt ends: clients try no second one."""
    monkeypatch.setattr(client, "DEFAULT_RETRIES", Retries(attempts=0))


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def address(scripted: Scripted) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()
