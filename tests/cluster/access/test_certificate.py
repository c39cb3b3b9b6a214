"""TLS of a driver and of a gateway: certificates that change, and what wrong ones are told."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import httpx2
import pytest
import pytest_asyncio

from cluster.gateway.app import Gateway
from cluster.gateway.drivers import DriverPool
from cluster.gateway.server import listen, serving
from deploy.cli.certs import write_certificates
from paceline import AsyncClient, Client
from paceline.access import Access
from paceline.errors import ConfigError, InvalidRequestError, UnavailableError
from tests.cluster.access.key_files import Clock
from tests.cluster.system import (
    HOST,
    System,
    make_checkpoints,
    running_system,
    start_target,
)
from workers.process import certificate as certificates
from workers.process.certificate import LOOK_SECONDS, Certificate

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = ("127.0.0.1", "localhost")


def made(folder: Path, *names: str, days: float = 30) -> Certificate:
    write_certificates(folder, names or NAMES, days=days)
    return Certificate(folder / "server.pem", folder / "server-key.pem")


@dataclass
class Secured:
    system: System
    folder: Path

    @property
    def address(self) -> str:
        return self.system.server.address

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    certificate = made(folder / "own")
    async with running_system(
        make_checkpoints(folder), certificate=certificate, access={"ca": folder / "own" / "ca.pem"}
    ) as system:
        yield Secured(system, folder / "own")


def serial(address: str, ca: str) -> int:
    """The serial number of the certificate that a new connection gets."""
    from cryptography import x509

    host, _, port = address.rpartition(":")
    pem = ssl.get_server_certificate((host, int(port)), ca_certs=ca)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


async def test_both_clients_speak_tls(secured: Secured) -> None:
    async with AsyncClient(secured.address, ca=secured.ca) as client:
        text = (await client.generate("sea", max_tokens=4, seed=1)).text

    def blocking() -> str:
        port = secured.address.rpartition(":")[2]
        with Client(f"localhost:{port}", ca=secured.ca) as client:
            return client.generate("sea", max_tokens=4, seed=1).text

    assert await asyncio.to_thread(blocking) == text


async def refusal(address: str, **access: Unpack[Access]) -> str:
    """What both clients say."""
    told = []
    async with AsyncClient(address, connect_timeout=5, **access) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.describe()
        told.append(str(caught.value))
    with Client(address, connect_timeout=5, **access) as blocking:
        with pytest.raises(UnavailableError) as caught:
            await asyncio.to_thread(blocking.describe)
        told.append(str(caught.value))
    assert told[0] == told[1]
    return told[0]


async def test_what_does_not_fit_is_told_apart(secured: Secured, tmp_path: Path) -> None:
    assert "speaks TLS, and this client plain text" in await refusal(secured.address)
    made(tmp_path / "other")
    told = await refusal(secured.address, ca=tmp_path / "other" / "ca.pem")
    assert "certificate is not accepted: unable to get local issuer certificate" in told
    told = await refusal(secured.address, tls=True)
    assert "certificate is not accepted" in told


async def test_a_server_in_plain_text_is_told(tmp_path: Path) -> None:
    made(tmp_path)
    checkpoints = make_checkpoints(tmp_path)
    async with running_system(checkpoints) as system:
        told = await refusal(system.server.address, ca=tmp_path / "ca.pem")
    assert "speaks plain text; leave out" in told


@pytest.mark.parametrize(
    ("names", "days", "expected"),
    [
        (("elsewhere.example",), 30, "IP address mismatch"),
        (NAMES, 1e-9, "certificate has expired"),
    ],
)
async def test_a_certificate_for_others_or_of_the_past_is_refused(
    tmp_path: Path, names: tuple[str, ...], days: float, expected: str
) -> None:
    # The authority is made first, so that it is valid.
    made(tmp_path / "tls")
    certificate = made(tmp_path / "tls", *names, days=days)
    from cluster.driver.driver import DriverOptions
    from cluster.driver.service import serve_driver

    folder = make_checkpoints(tmp_path).target
    # Not `running_system`, whose client could not connect.
    target = await start_target(folder)
    options = DriverOptions(folder=folder, target_addresses=(target.address,))
    _, server = await serve_driver(options, host=HOST, certificate=certificate)
    try:
        told = await refusal(server.address, ca=tmp_path / "tls" / "ca.pem")
    finally:
        await server.stop()
        await target.stop()
    assert f"certificate is not accepted: {expected}" in told


@pytest.mark.parametrize("kind", ["absent", "empty", "text", "key"])
async def test_a_file_that_is_no_authority_is_refused_at_once(
    secured: Secured, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "ca.pem"
    if kind == "key":
        path = secured.folder / "ca-key.pem"
    elif kind != "absent":
        path.write_text("" if kind == "empty" else "no certificate")
    with pytest.raises(InvalidRequestError, match=r"^ca: "):
        AsyncClient(secured.address, ca=path)


async def test_a_new_certificate_needs_no_restart(
    secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway with TLS before a driver with TLS: a stream goes on while both change theirs."""
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("cluster.gateway.server.LOOK_SECONDS", 0.01)
    folder = secured.folder
    front = Certificate(folder / "server.pem", folder / "server-key.pem")
    gateway = Gateway(DriverPool([secured.address], access={"ca": secured.ca}))
    listener = listen(HOST, 0)
    port = listener.getsockname()[1]
    context = ssl.create_default_context(cafile=secured.ca)
    asked = {"prompt": "sea", "max_tokens": 300, "seed": 1, "ignore_eos": True}
    async with (
        serving(gateway, listener, certificate=front),
        httpx2.AsyncClient(
            base_url=f"https://localhost:{port}", verify=context, timeout=60
        ) as http,
    ):
        expected = (await http.post("/v1/completions", json=asked)).json()["choices"]
        running = asyncio.create_task(http.post("/v1/completions", json=asked))
        before = await asyncio.to_thread(serial, secured.address, secured.ca)
        # A key that does not fit: both go on with what they had.
        kept = folder / "kept.pem"
        shutil.copy(folder / "server.pem", kept)
        write_certificates(tmp_path / "other", NAMES)
        shutil.copy(tmp_path / "other" / "server.pem", folder / "server.pem")
        for address in (secured.address, f"{HOST}:{port}"):
            assert await asyncio.to_thread(serial, address, secured.ca) == before
        kept.replace(folder / "server.pem")
        write_certificates(folder, NAMES)
        async with asyncio.timeout(30):
            for address in (secured.address, f"{HOST}:{port}"):
                while await asyncio.to_thread(serial, address, secured.ca) == before:
                    await asyncio.sleep(0.05)
        assert (await running).json()["choices"] == expected
        async with AsyncClient(secured.address, ca=secured.ca) as client:
            await client.generate("sea", max_tokens=2)


async def test_plain_http_on_a_tls_port_ends_and_others_are_served(secured: Secured) -> None:
    gateway = Gateway(DriverPool([secured.address], access={"ca": secured.ca}))
    listener = listen(HOST, 0)
    port = listener.getsockname()[1]
    front = Certificate(secured.folder / "server.pem", secured.folder / "server-key.pem")
    context = ssl.create_default_context(cafile=secured.ca)
    async with serving(gateway, listener, certificate=front):
        async with httpx2.AsyncClient() as plain:
            for _ in range(20):
                with pytest.raises(httpx2.TransportError):
                    await plain.get(f"http://{HOST}:{port}/health")
        async with httpx2.AsyncClient(verify=context) as http:
            assert (await http.get(f"https://{HOST}:{port}/health")).status_code == 200


async def test_files_that_are_no_pair_are_refused_with_the_reason(tmp_path: Path) -> None:
    made(tmp_path / "one")
    made(tmp_path / "other")
    one, other = tmp_path / "one", tmp_path / "other"
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        Certificate(one / "server.pem", other / "server-key.pem")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Certificate(one / "server.pem", tmp_path / "absent")
    (one / "server-key.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match="no certificate with its private key"):
        Certificate(one / "server.pem", one / "server-key.pem")
    os.system(
        f"openssl ec -in {other}/server-key.pem -aes128 -passout pass:secret "
        f"-out {other}/locked.pem 2>/dev/null"
    )
    with pytest.raises(ConfigError, match="is encrypted"):
        Certificate(other / "server.pem", other / "locked.pem")


async def test_broken_files_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(tmp_path)
    clock = Clock()
    certificate = Certificate(tmp_path / "server.pem", tmp_path / "server-key.pem", clock=clock)
    context = certificate.for_http()
    (tmp_path / "server.pem").write_text("nonsense")
    for _ in range(10):
        clock.now += LOOK_SECONDS
        certificate.renew(context)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert context.cert_store_stats() is not None
