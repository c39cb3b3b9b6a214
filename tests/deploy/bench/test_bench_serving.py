"""`paceline bench serving`: its client, its figures, and a short run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from deploy.bench.serving import ask_http, at_once, figures
from paceline.errors import UnavailableError
from tests.cluster.gateway.serving import running_gateway
from tests.cluster.system import HOST, make_checkpoints, running_system
from tests.deploy.shell import Shell


async def test_its_client_counts_tokens_and_times(tmp_path: Path) -> None:
    body = {"prompt": "sea", "max_tokens": 40, "ignore_eos": True, "seed": 5}
    async with (
        running_system(make_checkpoints(tmp_path)) as system,
        running_gateway([system.server.address]) as served,
    ):
        address = f"{HOST}:{served.port}"
        for path, more in (
            ("/v1/completions", body),
            (
                "/v1/chat/completions",
                {**body, "messages": [{"role": "user", "content": "sea"}], "prompt": None},
            ),
        ):
            timed = await ask_http(address, more, path)
            assert timed.tokens == 40
            assert 0 < timed.first < timed.last
            assert timed.per_token == (timed.last - timed.first) / 39
        asks = [lambda: ask_http(address, body, "/v1/completions")] * 5
        assert len(await at_once(asks, 2)) == 5
        with pytest.raises(UnavailableError, match="400"):
            await ask_http(address, {"prompt": "sea", "n": 0}, "/v1/completions")
    await asyncio.sleep(0)


def test_figures_are_differences_and_shares() -> None:
    rows = [
        {"part": "overhead", "name": "grpc", "first_ms": 20.0, "token_ms": 18.0},
        {"part": "overhead", "name": "http", "first_ms": 23.0, "token_ms": 18.5},
    ]
    assert figures(rows) == {
        "overhead: first token, ms added": 3.0,
        "overhead: a token, ms added": 0.5,
    }


@pytest.mark.ray
@pytest.mark.release
def test_a_short_run_writes_its_rows(shell: Shell) -> None:
    written = shell.home / "serving.json"
    shell.home.mkdir()
    parts = ("--part", "overhead")
    done = shell.run("bench", "serving", *parts, "--quick", "--json", str(written))
    assert done.returncode == 0, done.stderr
    document = json.loads(written.read_text())
    assert [row["name"] for row in document["rows"]] == ["grpc", "http"]
    assert "first token, ms added" in done.stdout
    shell.assert_nothing_is_left()
