"""A gateway with API keys in front of a driver that has them too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from cluster.access.gate import LOG_SECONDS, Gate
from cluster.access.keys import KeyFile, new_key
from paceline.access import Access
from tests.cluster.access.key_files import keys_in
from tests.cluster.gateway.serving import Served, connection, head, running_gateway
from tests.cluster.system import Checkpoints, System, eventually, running_system

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED: dict[str, Any] = {"prompt": "sea", "max_tokens": 4, "seed": 3, "ignore_eos": True}


@dataclass
class Guarded:
    system: System
    served: Served
    keys: dict[str, str]
    path: Path

    async def complete(self, name: str, **fields: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {self.keys[name]}"}
        return await self.served.http.post("/v1/completions", json=ASKED | fields, headers=headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guarded]:
    path = tmp_path_factory.mktemp("access") / "keys"
    keys = keys_in(
        path,
        alice={"tenant": "a"},
        bob={"tenant": "b", "concurrency": 2},
        slow={"tenant": "s", "requests_per_minute": 2},
        gateway={"tenant": "o", "role": "operator"},
    )
    own: Access = {"key": keys["gateway"]}
    async with (
        running_system(
            checkpoints, drafters={"d0": checkpoints.drafter}, gate=Gate(KeyFile(path)), access=own
        ) as system,
        running_gateway([system.server.address], gate=Gate(KeyFile(path)), access=own) as served,
    ):
        yield Guarded(system, served, keys, path)


async def test_open_paths_need_no_key_and_all_others_do(guarded: Guarded) -> None:
    http = guarded.served.http
    for path in ("/health", "/ready", "/version", "/docs", "/openapi.json"):
        assert (await http.get(path)).status_code == 200
    wrong: list[dict[str, str]] = [
        {},
        {"authorization": f"Bearer {new_key()}"},
        {"authorization": "Basic eDp5"},
    ]
    for headers in wrong:
        for path in ("/v1/models", "/v1/models/target", "/metrics", "/no/such/path", "/health/"):
            answer = await http.get(path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert (await http.post(path, json=ASKED, headers=headers)).status_code == 401
    alice = {"authorization": f"Bearer {guarded.keys['alice']}"}
    assert (await http.get("/v1/models", headers=alice)).json()["data"][0]["id"] == "target"
    assert (await http.get("/no/such/path", headers=alice)).status_code == 404
    metrics = await http.get("/metrics", headers=alice)
    assert (metrics.status_code, metrics.json()["error"]["code"]) == (403, "permission_denied")


async def test_openais_client_gets_its_own_errors(guarded: Guarded) -> None:
    url = f"{guarded.served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=guarded.keys["alice"]) as client:
        answer = await client.completions.create(model="target", prompt="sea", max_tokens=4)
        assert answer.choices[0].finish_reason in ("length", "stop")
    async with openai.AsyncOpenAI(base_url=url, api_key=new_key()) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with openai.AsyncOpenAI(
        base_url=url, api_key=guarded.keys["slow"], max_retries=0
    ) as client:
        for _ in range(2):
            await client.completions.create(model="target", prompt="sea", max_tokens=4)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="target", prompt="sea", max_tokens=4)
    assert 20 < int(caught.value.response.headers["retry-after"]) <= 30
    assert caught.value.code == "rate_limit_exceeded"


async def test_the_caller_is_known_to_the_driver(guarded: Guarded) -> None:
    """The driver gets the caller's key, and so its tenant. Tenants share no prefixes."""
    scheduler = guarded.system.driver.scheduler
    prompt = list(range(3, 200))
    hits = []
    for name in ("alice", "bob", "alice"):
        before = scheduler.prefix_hit_tokens
        assert (await guarded.complete(name, prompt=prompt)).status_code == 200
        hits.append(scheduler.prefix_hit_tokens - before)
    assert hits[0] == hits[1] == 0
    assert hits[2] > 0


async def test_a_choice_counts_as_a_request(guarded: Guarded) -> None:
    assert (await guarded.complete("bob", n=2)).status_code == 200
    refused = await guarded.complete("bob", n=3)
    assert refused.status_code == 403
    assert "counts as 3 requests" in refused.json()["error"]["message"]


async def test_a_key_that_floods_costs_the_others_nothing(guarded: Guarded) -> None:
    expected = (await guarded.complete("alice")).json()["choices"]
    flood = [asyncio.create_task(guarded.complete("bob", max_tokens=300)) for _ in range(200)]
    for _ in range(5):
        assert (await guarded.complete("alice")).json()["choices"] == expected
    statuses = [answer.status_code for answer in await asyncio.gather(*flood)]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) < 20, "as many as two at a time could do meanwhile"
    await eventually(lambda: guarded.served.gateway.num_open == 0)
    assert (await guarded.complete("bob", n=2)).status_code == 200


async def test_no_byte_of_a_body_is_awaited_from_strangers(guarded: Guarded) -> None:
    async with connection(guarded.served) as (reader, writer):
        writer.write(head(10_000_000))
        status = await asyncio.wait_for(reader.readline(), 10)
    assert b" 401 " in status


async def test_hostile_headers_are_refused_and_no_key_is_logged(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    key, began = guarded.keys["alice"].encode(), time.monotonic()
    for header in (
        b"authorization: Bearer " + b"x" * 20_000,
        b"authorization: Bearer k\xc3\xa9y",
        b"authorization: Bearer \xff\xfe",
        b"authorization: Bearer " + key + b"\r\nauthorization: Bearer " + key,
        b"authorization:",
        b"authorization: " + key,
    ):
        async with connection(guarded.served) as (reader, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + header + b"\r\n\r\n")
            status = await asyncio.wait_for(reader.readline(), 10)
        assert b" 401 " in status, header[:40]
    wrong = [new_key() for _ in range(1000)]
    for key_ in wrong:
        answer = await guarded.served.http.get(
            "/v1/models", headers={"authorization": f"Bearer {key_}"}
        )
        assert answer.status_code == 401
    assert (await guarded.complete("alice")).status_code == 200
    ours = [record for record in caplog.records if record.name.startswith("cluster.access")]
    assert len(ours) <= 2 + (time.monotonic() - began) / LOG_SECONDS
    assert not any(one in caplog.text for one in (*wrong, *guarded.keys.values()))


async def test_a_gateway_that_the_driver_does_not_know_says_so(guarded: Guarded) -> None:
    async with running_gateway([guarded.system.server.address]) as served:
        told = await served.http.get("/ready")
    assert told.status_code == 503
    assert "API key" in told.json()["error"]["message"]
