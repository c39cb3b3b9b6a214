"""docs/clients.md: its Node client and grpcurl, against a real server."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from paceline import GenerateOptions
from paceline.v1 import inference_pb2
from tests.cluster.system import Wire, make_checkpoints, running_system
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
PROMPT = "The quick brown fox"
pytestmark = pytest.mark.long


@pytest_asyncio.fixture
async def wire(tmp_path: Path) -> AsyncIterator[tuple[Wire, str, str]]:
    """A relay, its address, and the answer to the page's request."""
    checkpoints = make_checkpoints(tmp_path)
    drafters = {"d0": checkpoints.drafter}
    async with running_system(checkpoints, drafters=drafters, target_rtt_ms=20) as system:
        options = GenerateOptions(temperature=0.7, max_tokens=64, seed=7)
        expected = await system.client.generate(PROMPT, options)
        assert len(expected.token_ids) == 64
        wire = Wire(system.server.address)
        try:
            yield wire, await wire.open(), expected.text
        finally:
            await wire.close()


def _program(name: str) -> str:
    """Its path. One that pip installed comes first."""
    own = shutil.which(name, path=sysconfig.get_path("scripts"))
    found = own or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


async def test_the_node_client_survives_a_broken_connection(
    wire: tuple[Wire, str, str], tmp_path: Path
) -> None:
    relay, address, expected = wire
    node, npm = _program("node"), _program("npm")
    [install] = re.findall(r"^    npm install (.*)$", PAGE, re.M)
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "package.json").write_text("{}")
    code, _, error = await run_program(
        npm, "install", "--no-audit", "--no-fund", *install.split(), cwd=folder
    )
    if code:
        pytest.skip(f"npm could not install {install}: {error[-500:]}")
    [client] = re.findall(r"```js\n(.*?)```", PAGE, re.S)
    (folder / "client.mjs").write_text(client)
    (folder / "proto").symlink_to(ROOT / "proto")
    process = await asyncio.create_subprocess_exec(
        node, "client.mjs", address, PROMPT,
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    begin = await process.stdout.read(1)
    connections = relay.num_accepted
    relay.reset()
    rest, told = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, told) == (0, b"")
    assert (begin + rest).decode() == f"{expected}\nFINISH_REASON_LENGTH\n"
    assert relay.num_accepted > connections


async def test_grpcurl_needs_no_files(wire: tuple[Wire, str, str]) -> None:
    _, address, _ = wire
    grpcurl = _program("grpcurl")
    code, services, error = await run_program(grpcurl, "-plaintext", address, "list")
    assert code == 0, error
    assert "paceline.v1.InferenceService" in services.split()
    fields = {"prompt": PROMPT, "max_tokens": 8, "seed": 7}
    method = "paceline.v1.InferenceService/Generate"
    command = (grpcurl, "-plaintext", "-d", json.dumps(fields), address, method)
    code, out, error = await run_program(*command)
    assert code == 0, error
    answers = []
    decoder, at = json.JSONDecoder(), 0
    while out[at:].strip():
        at += len(out[at:]) - len(out[at:].lstrip())
        answer, at = decoder.raw_decode(out, at)
        answers.append(answer)
    assert "started" in answers[0], out
    assert sum(len(one["chunk"]["token_ids"]) for one in answers[1:-1]) == 8
    assert answers[-1]["finished"]["reason"] == inference_pb2.FinishReason.Name(
        inference_pb2.FINISH_REASON_LENGTH
    )
    # An error names the field.
    command = (*command[:3], json.dumps(fields | {"window": 0}), *command[4:])
    code, _, error = await run_program(*command)
    assert code != 0
    assert "InvalidArgument" in error
    assert "window: expected 1 to 64 candidates" in error
