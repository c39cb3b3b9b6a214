"""Mutual TLS among driver, workers and gateway: who is let in, and certificates that change."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.driver.connections import open_channel
from cluster.driver.driver import DriverOptions
from cluster.driver.service import serve_driver
from cluster.gateway.drivers import DriverPool
from deploy.cli import certs
from deploy.cli.certs import write_certificates
from paceline.channel import client_options
from paceline.errors import ConfigError, UnavailableError
from paceline.options import GenerateOptions
from paceline.v1 import target_pb2, target_pb2_grpc
from tests.cluster.system import (
    HOST,
    Checkpoints,
    eventually,
    make_checkpoints,
    running_system,
    start_drafter,
    start_target,
)
from workers.process import certificate as certificates
from workers.process import mutual_tls
from workers.process.mutual_tls import CA_FILE, CHAIN_FILE, KEY_FILE, NAME, WorkerTls

pytestmark = pytest.mark.asyncio
ASKED = GenerateOptions(max_tokens=48, seed=3, ignore_eos=True)


def made(folder: Path, *, days: float = 30, name: str = NAME) -> Path:
    """A worker's folder. An authority that is in `folder` already stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certs, "NAME", name)
        write_certificates(folder, ["localhost"], days=days)
    return folder / "workers"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "tls")


async def describe(address: str, tls: WorkerTls | None) -> str:
    """The model of the target at an address, as the driver's links ask for it."""
    async with open_channel(address, tls) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        return (await stub.DescribeTarget(target_pb2.DescribeTargetRequest(), timeout=10)).model


async def refusal(address: str, tls: WorkerTls | None) -> str:
    with pytest.raises(UnavailableError) as caught:
        await describe(address, tls)
    return str(caught.value)


def unchecked(folder: Path) -> WorkerTls:
    """As of a process that started while its files were good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates.Certificate, "_check_peers", lambda self: None)
        return WorkerTls(folder)


async def test_the_text_is_the_same_with_and_without(
    checkpoints: Checkpoints, folder: Path
) -> None:
    drafters = {"model": checkpoints.drafter, "ngram": None}
    async with running_system(checkpoints, drafters=drafters) as system:
        expected = await system.client.generate("the sea", ASKED)
    async with running_system(checkpoints, drafters=drafters, tls=folder) as system:
        assert system.connected() >= {"model", "ngram", "shard-0"}
        got = await system.client.generate("the sea", ASKED)
        assert got.text == expected.text
        # The gateway reaches the driver at its inner port, which is not for others.
        assert system.server.inner_address is not None
        drivers = [system.server.inner_address]
        async with DriverPool(drivers, tls=WorkerTls(folder)) as pool:
            (model,) = pool.models()
            events = [event async for event in pool.stream(model, "the sea", ASKED)]
            assert events
        async with DriverPool(drivers) as pool:
            assert "speaks TLS" in pool.troubles()[0]


@asynccontextmanager
async def a_target(checkpoints: Checkpoints, folder: Path) -> AsyncIterator[str]:
    server = await start_target(checkpoints.target, tls=WorkerTls(folder))
    try:
        yield server.address
    finally:
        await server.stop()


async def test_strangers_are_refused_and_told_why(
    checkpoints: Checkpoints,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mutual_tls, "SETTLE_SECONDS", 0.2)
    expired = tmp_path / "expired"
    expired.mkdir()
    for file in ("ca.pem", "ca-key.pem"):
        (expired / file).write_bytes((folder.parent / file).read_bytes())
    made(expired, days=1e-9)
    mixed = made(tmp_path / "mixed")  # Trusts the others, and is signed by its own authority.
    (mixed / CA_FILE).write_bytes((folder / CA_FILE).read_bytes())
    async with a_target(checkpoints, folder) as address:
        assert await describe(address, WorkerTls(folder))
        told = {
            "plain": await refusal(address, None),
            "authority": await refusal(address, WorkerTls(made(tmp_path / "other"))),
            "signed by another": await refusal(address, unchecked(mixed)),
            "expired": await refusal(address, unchecked(expired / "workers")),
        }
        await eventually(lambda: "ended without a call" in caplog.text, 10)
    assert "speaks TLS, and this process plain text; set workers.tls" in told["plain"]
    assert "unable to get local issuer" in told["authority"]
    assert "refuses this one's certificate" in told["signed by another"]
    assert "would be refused by a peer that has" in told["signed by another"]
    assert "refuses this one's certificate" in told["expired"]
    assert "tls.crt" in told["expired"]
    assert "certificate has expired" in told["expired"]
    assert all(address in text for text in told.values())
    assert f"from {HOST} ended without a call" in caplog.text


async def test_a_worker_in_plain_text_or_with_an_old_certificate_is_not_used(
    checkpoints: Checkpoints, folder: Path, tmp_path: Path
) -> None:
    server = await start_target(checkpoints.target)
    assert "speaks plain text; set workers.tls" in await refusal(server.address, WorkerTls(folder))
    await server.stop()
    old = tmp_path / "old"
    old.mkdir()
    for file in ("ca.pem", "ca-key.pem"):
        (old / file).write_bytes((folder.parent / file).read_bytes())
    tls = unchecked(made(old, days=1e-9))
    server = await start_target(checkpoints.target, tls=tls)
    told = await refusal(server.address, WorkerTls(folder))
    assert "its certificate is not accepted: certificate has expired" in told
    await server.stop()


async def test_a_certificate_of_the_authority_for_another_name_is_no_worker(
    checkpoints: Checkpoints, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = unchecked(made(folder.parent, name="web.example"))
    made(folder.parent)  # The server's own is in order.
    async with a_target(checkpoints, folder) as address:
        for _ in range(50):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await describe(address, stranger)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "is for web.example; a worker's is for worker.paceline" in str(
            caught.value.details()
        )
        refused = [one for one in caplog.records if "refused a call" in one.getMessage()]
        assert len(refused) == 1
        assert f"ipv4:{HOST}:" in refused[0].getMessage()


async def test_a_driver_tells_why_it_has_no_target(
    checkpoints: Checkpoints, folder: Path, tmp_path: Path
) -> None:
    async with a_target(checkpoints, folder) as address:
        options = DriverOptions(
            folder=checkpoints.target, target_addresses=(address,), connect_seconds=1.0
        )
        for tls, expected in (
            (None, "speaks TLS, and this process plain text"),
            (WorkerTls(made(tmp_path / "other")), "certificate is not accepted"),
        ):
            with pytest.raises(UnavailableError, match=expected):
                await serve_driver(replace(options, tls=tls), host=HOST)


async def test_new_files_are_used_without_a_restart(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a new authority: a running answer goes on, and later connections use the new files."""
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.0)
    long = replace(ASKED, max_tokens=400)
    async with running_system(checkpoints, drafters={"d0": None}, tls=folder) as system:
        expected = (await system.client.generate("the sea", long)).text
        inner = system.server.inner_address
        assert inner is not None
        async with DriverPool([inner], tls=WorkerTls(folder)) as pool:
            (model,) = pool.models()

            async def answer() -> int:
                return len([event async for event in pool.stream(model, "the sea", long)])

            running = asyncio.create_task(system.client.generate("the sea", long))
            through_gateway = asyncio.create_task(answer())
            await eventually(lambda: system.driver.scheduler.num_running == 2)
            old_files = {one.name: one.read_bytes() for one in folder.iterdir()}
            (folder.parent / "ca.pem").unlink()
            made(folder.parent)
            for address in (system.target.address, inner, system.drafters["d0"].address):
                assert await serves(address, WorkerTls(folder))
            assert (await running).text == expected
            assert await through_gateway > 1
            # Another connection of each link, with the new files.
            port = int(system.drafters["d0"].address.rpartition(":")[2])
            await system.drafters["d0"].stop()
            await eventually(lambda: "d0" not in system.connected())
            again = await start_drafter(None, port=port, tls=WorkerTls(folder))
            await eventually(lambda: "d0" in system.connected())
            assert await answer() > 1
            assert (await system.client.generate("the sea", long)).text == expected
            await again.stop()
        # What was signed before is now a stranger's.
        kept = folder.parent / "kept"
        kept.mkdir()
        for name, content in old_files.items():
            (kept / name).write_bytes(content)
        assert "not accepted" in await refusal(system.target.address, WorkerTls(kept))


async def serves(address: str, tls: WorkerTls) -> bool:
    channel = tls.channel(address, client_options())
    try:
        told = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=10
        )
        return bool(told.status == health_pb2.HealthCheckResponse.SERVING)
    finally:
        await channel.close(None)


def swap(mounted: Path, folder: Path) -> None:
    """Have the folder's files be those of another one, all at once."""
    (mounted / "..new").symlink_to(folder)
    (mounted / "..new").rename(mounted / "..data")


async def test_a_long_lived_channel_moves_to_new_files(
    checkpoints: Checkpoints, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are replaced as a kubelet does for a secret: by another target of a link."""
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.0)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    swap(mounted, folder)
    for name in (CHAIN_FILE, KEY_FILE, CA_FILE):
        (mounted / name).symlink_to(Path("..data") / name)
    async with a_target(checkpoints, mounted) as address:
        channel: Any = WorkerTls(mounted).lasting_channel(address, client_options())
        health = health_pb2_grpc.HealthStub(channel)
        watching = health.Watch(health_pb2.HealthCheckRequest())
        first = await watching.read()
        assert first.status == health_pb2.HealthCheckResponse.SERVING
        swap(mounted, made(tmp_path / "next"))
        await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert len(channel._num_calls) == 2  # The stream keeps the old connection.
        watching.cancel()
        await eventually(lambda: len(channel._num_calls) == 1)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        await channel.close()


def break_pair(folder: Path) -> None:
    made(folder.parent / "other")
    (folder / KEY_FILE).write_bytes((folder.parent / "other" / "workers" / KEY_FILE).read_bytes())


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (lambda folder: (folder / KEY_FILE).unlink(), "tls.key cannot be read: No such"),
    "no authority": (
        lambda folder: (folder / CA_FILE).write_text("x"),
        "ca.crt has no certificate",
    ),
    "no pair": (break_pair, "tls.crt and .*tls.key are no certificate with its private key"),
    "expired": (lambda folder: made(folder.parent, days=1e-9), "tls.crt .*has expired"),
    "another name": (lambda folder: made(folder.parent, name="x.y"), "tls.crt .*worker.paceline"),
    "another authority": (
        lambda folder: (folder / CA_FILE).write_bytes(
            (made(folder.parent / "other") / CA_FILE).read_bytes()
        ),
        "tls.crt would be refused by a peer that has .*ca.crt: unable to get local issuer",
    ),
}


@pytest.mark.parametrize("case", WRONG)
async def test_wrong_files_are_refused_by_name(folder: Path, case: str) -> None:
    spoil, expected = WRONG[case]
    spoil(folder)
    with pytest.raises(ConfigError, match=f"^workers.tls: .*{expected}"):
        WorkerTls(folder)


@pytest.mark.long
async def test_a_process_with_wrong_files_ends_before_it_loads(
    checkpoints: Checkpoints, folder: Path
) -> None:
    made(folder.parent, days=1e-9)
    command = [sys.executable, "-m", "workers.target.shard", str(checkpoints.target)]
    done = await asyncio.to_thread(
        subprocess.run, [*command, "--tls", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: workers\.tls: .*has expired\n", done.stderr)


@pytest.mark.long
async def test_a_thousand_bad_connections_are_few_lines(
    checkpoints: Checkpoints, folder: Path, tmp_path: Path
) -> None:
    """A process of its own, so that what gRPC's core writes is counted too."""
    command = [sys.executable, "-m", "workers.target.shard", str(checkpoints.target)]
    process = await asyncio.create_subprocess_exec(
        *(*command, "--tls", str(folder)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
    where = (HOST, int(address.rpartition(":")[2]))
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    signed = made(tmp_path / "other")
    stranger.load_cert_chain(signed / CHAIN_FILE, signed / KEY_FILE)

    def connect() -> None:
        for number in range(1000):
            with suppress(OSError), socket.create_connection(where, 5) as connection:
                if number % 2:
                    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                    connection.recv(1)
                else:
                    with stranger.wrap_socket(connection) as secured:
                        secured.recv(1)

    try:
        await asyncio.to_thread(connect)
        assert await describe(address, WorkerTls(folder))
        lines = [await asyncio.wait_for(process.stderr.readline(), 20)]
    finally:
        process.terminate()
        lines += (await process.communicate())[1].splitlines()
    text = b"\n".join(lines).decode()
    assert len(lines) <= 2, text
    refused = re.search(r"(\d+) connections from 127\.0\.0\.1 ended without a call", text)
    assert refused is not None, text
    assert 1 < int(refused[1]) <= 1000


async def test_broken_files_change_nothing_and_are_logged_once(
    checkpoints: Checkpoints,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)
    tls = WorkerTls(folder)
    async with a_target(checkpoints, folder) as address:
        (folder / CHAIN_FILE).write_text("half")
        for _ in range(5):
            assert await describe(address, tls)
    said = [one for one in caplog.records if "still in use" in one.getMessage()]
    assert len(said) == 2, caplog.text  # The server's and the client's.
