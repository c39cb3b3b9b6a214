"""What the README says to call runs as it is printed: Python over gRPC and HTTP, and curl."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from tests.cluster.gateway.serving import running_gateway
from tests.deploy.conftest import Served
from tests.deploy.shell import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


def blocks(text: str, language: str, with_text: str) -> list[str]:
    """The blocks in this language that have a text."""
    return [
        one for one in re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text) if with_text in one
    ]


async def printed(*command: str, cwd: Path = ROOT) -> str:
    """What a command writes. It must succeed in time."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, error = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, error.decode()
    return out.decode()


async def test_the_client_prints_a_text_that_ends_soon(served: Served) -> None:
    (example,) = blocks(README, "python", "from paceline import")
    assert "max_tokens=64" in example
    assert await printed(sys.executable, "-c", example.replace("127.0.0.1:8001", served.address))


async def test_curl_and_openais_client_are_answered(served: Served) -> None:
    (example,) = blocks(README, "python", "from openai import")
    asked = [*blocks(README, "sh", "curl"), *blocks(QUICKSTART, "sh", "curl")]
    assert len(asked) == 2
    async with running_gateway([served.address]) as gateway:
        at = gateway.url.removeprefix("http://").removesuffix("/v1")
        assert await printed(sys.executable, "-c", example.replace("127.0.0.1:8000", at))
        for one in asked:
            command = one.replace("curl ", "curl -fsS ").replace("127.0.0.1:8000", at)
            answer = await printed("bash", "-c", command)
            assert '"finish_reason"' in answer, answer
