"""What the README and pages for newcomers say to call runs as it is printed."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

from cluster.config.load import load_config
from tests.cluster.gateway.serving import running_gateway
from tests.deploy.conftest import Served
from tests.deploy.shell import ROOT
from tests.programs import run_program

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
OF_70B = (ROOT / "docs" / "70b.md").read_text(encoding="utf-8")


def blocks(text: str, language: str, with_text: str) -> list[str]:
    """The blocks in this language that have a text."""
    found = re.findall(rf"(?ms)^( *)```{language}\n(.*?)^\1```$", text)
    return [textwrap.dedent(block) for _, block in found if with_text in block]


async def printed(*command: str, cwd: Path = ROOT) -> str:
    """What a command writes. It must succeed in time."""
    code, out, error = await run_program(*command, cwd=cwd)
    assert code == 0, error
    return out


async def test_the_client_prints_a_text_that_ends_soon(served: Served) -> None:
    (example,) = blocks(README, "python", "from paceline import")
    assert "max_tokens=64" in example
    assert await printed(sys.executable, "-c", example.replace("127.0.0.1:8001", served.address))


async def test_curl_and_openais_client_are_answered(served: Served) -> None:
    (example,) = blocks(README, "python", "from openai import")
    asked = [*blocks(README, "sh", "curl"), *blocks(QUICKSTART, "sh", "curl")]
    assert len(asked) == 2
    async with running_gateway([served.address]) as gateway:
        at = gateway.url.removeprefix("http://")
        assert await printed(sys.executable, "-c", example.replace("127.0.0.1:8000", at))
        for one in asked:
            command = one.replace("curl ", "curl -fsS ").replace("127.0.0.1:8000", at)
            answer = await printed("bash", "-c", command)
            assert '"finish_reason"' in answer, answer


async def test_keys_and_certificates_of_a_70b_are_those_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paceline = tmp_path / "bin" / "paceline"
    paceline.parent.mkdir()
    paceline.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m deploy.cli "$@"\n')
    paceline.chmod(0o755)
    (made,) = blocks(OF_70B, "sh", "paceline keys new")
    out = await printed("bash", "-ec", f"PATH={paceline.parent}:$PATH\n{made}", cwd=tmp_path)
    assert "tls/server.pem" in out
    (layout,) = blocks(OF_70B, "toml", "tensor_parallel")
    Path("paceline.toml").write_text(layout, encoding="utf-8")
    server = load_config(Path("paceline.toml"), {}).server
    for name in (server.api_keys, server.tls_cert, server.tls_key):
        assert name is not None
        assert Path(name).read_text(encoding="utf-8")
