"""Commands with API keys and TLS: making them, and using a server that has them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography.x509 import SubjectAlternativeName, load_pem_x509_certificate
from typer.testing import CliRunner

from cluster.access.gate import Gate
from cluster.access.keys import KeyFile, digest_of, read_keys
from deploy.cli.app import build_app
from deploy.cli.certs import write_certificates
from paceline.errors import ConfigError, InvalidRequestError
from tests.cluster.access.key_files import keys_in
from tests.cluster.system import System, make_checkpoints, running_system
from tests.deploy.shell import ROOT
from workers.process.certificate import Certificate


def run(*arguments: str) -> list[str]:
    """The lines of stdout. Raises the command's error."""
    done = CliRunner().invoke(build_app({}), arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_a_new_key_is_shown_once_and_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    [key] = run("keys", "new", "--tenant", "acme", "--append", str(path))
    [other] = run(
        *("keys", "new", "--tenant", "acme", "--operator", "--name", "ops", "--priority", "7"),
        *("--concurrency", "3", "--requests-per-minute", "60", "--append", str(path)),
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    entries = read_keys(path)
    assert entries[digest_of(key)].tenant == "acme"
    ops = entries[digest_of(other)]
    assert (ops.name, ops.role, ops.concurrency, ops.requests_per_minute, ops.priority) == (
        *("ops", "operator"),
        *(3, 60, 7),
    )
    shown, line = run("keys", "new", "--tenant", "acme")
    assert json.loads(line)["sha256"] == digest_of(shown).hex()
    with pytest.raises(ConfigError, match="a key named 'ops' already"):
        run("keys", "new", "--tenant", "acme", "--name", "ops", "--append", str(path))
    with pytest.raises(InvalidRequestError, match="priority: expected less than or equal to 100"):
        run("keys", "new", "--tenant", "acme", "--priority", "101")
    assert len(read_keys(path)) == 2


def test_keys_are_listed_and_revoked_by_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    for name in ("one", "two"):
        run("keys", "new", "--tenant", "a", "--name", name, "--append", str(path))
    path.write_text("# ours\n" + path.read_text())
    _, *rows = run("keys", "list", str(path))
    assert [row.split()[:3] for row in rows] == [["one", "a", "user"], ["two", "a", "user"]]
    with pytest.raises(InvalidRequestError, match=r"did you mean two\?"):
        run("keys", "revoke", str(path), "tow")
    run("keys", "revoke", str(path), "one")
    assert [entry.name for entry in read_keys(path).values()] == ["two"]
    assert path.read_text().startswith("# ours\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_certificates_are_made_again_by_the_same_authority(tmp_path: Path) -> None:
    for names in (["--name", "gpu7.example.org"], ["--name", "10.0.0.7"], []):
        told = run("certs", str(tmp_path / "tls"), *names)
        authority = (tmp_path / "tls" / "ca.pem").read_bytes()
    server = load_pem_x509_certificate((tmp_path / "tls" / "server.pem").read_bytes())
    found = server.extensions.get_extension_for_class(SubjectAlternativeName).value
    assert {"gpu7.example.org", "10.0.0.7", "localhost"} <= {str(one.value) for one in found}
    assert f"--ca {tmp_path / 'tls' / 'ca.pem'}" in told[1]
    assert (tmp_path / "tls" / "ca.pem").read_bytes() == authority
    for name in ("ca-key.pem", "server-key.pem"):
        assert stat.S_IMODE((tmp_path / "tls" / name).stat().st_mode) == 0o600
    with pytest.raises(InvalidRequestError, match="name: expected a host name"):
        run("certs", str(tmp_path / "tls"), "--name", "https://a/b")


@pytest_asyncio.fixture
async def secured(tmp_path: Path) -> AsyncIterator[tuple[System, dict[str, str]]]:
    keys = keys_in(tmp_path / "keys", alice={}, boss={"role": "operator"})
    tls = tmp_path / "tls"
    write_certificates(tls, ["127.0.0.1"])
    async with running_system(
        make_checkpoints(tmp_path),
        gate=Gate(KeyFile(tmp_path / "keys")),
        certificate=Certificate(tls / "server.pem", tls / "server-key.pem"),
        access={"key": keys["boss"], "ca": tls / "ca.pem"},
    ) as system:
        yield system, keys


async def test_commands_reach_a_server_with_keys_and_tls(
    secured: tuple[System, dict[str, str]], tmp_path: Path
) -> None:
    system, keys = secured
    variables = {
        "PACELINE_HOME": str(tmp_path / "home"),
        "PACELINE_CA": str(tmp_path / "tls/ca.pem"),
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "sea"}\n')

    async def command(*arguments: str, key: str | None) -> tuple[int, str]:
        environ = os.environ | variables | ({} if key is None else {"PACELINE_API_KEY": keys[key]})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.cli", *arguments, "--server", system.server.address),
            env=environ,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate()
        assert process.returncode is not None
        told = (out + errors).decode()
        assert not any(one in told for one in keys.values())
        return process.returncode, told

    asked = ("--input", str(rows), "--max-tokens", "4")
    results = await asyncio.gather(
        command("status", key="boss"),
        command("status", key="alice"),
        command("status", key=None),
        command("generate", *asked, "--output", str(tmp_path / "out"), key="alice"),
        command("trace", *asked, "--output", str(tmp_path / "trace"), key="boss"),
    )
    assert [code for code, _ in results] == [0, 2, 2, 0, 0], results
    assert "operator's API key; 'alice'" in results[1][1]
    assert "expected an API key" in results[2][1]
    assert json.loads((tmp_path / "out").read_text())["text"]
    variables.pop("PACELINE_CA")
    code, told = await command("status", key="boss")
    assert code == 3
    assert "speaks TLS, and this client plain text" in told
