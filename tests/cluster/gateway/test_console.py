"""What the console asks the gateway: where tokens come from, the state of drivers, their rounds."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.access.gate import Gate
from cluster.access.keys import KeyFile
from cluster.gateway import console
from paceline.access import Access
from tests.cluster.access.key_files import keys_in
from tests.cluster.gateway.serving import Served, running_gateway
from tests.cluster.system import Checkpoints, System, eventually, running_system

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 24
ASKED: dict[str, Any] = {
    "prompt": "sea",
    "max_tokens": TOKENS,
    "seed": 3,
    "temperature": 0,
    "ignore_eos": True,
}


def events_in(text: str) -> Iterator[dict[str, Any]]:
    for data in re.findall(r"(?m)^data: (.*)$", text):
        if data != "[DONE]":
            yield json.loads(data)


@asynccontextmanager
async def watching(served: Served, **more: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Events of /console/rounds, of which the first has come."""

    async def events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))

    async with served.http.stream("GET", "/console/rounds", **more) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = events(answer)
        assert (await anext(told))["now"] > 0
        yield told


async def rounds_until(events: AsyncIterator[dict[str, Any]], committed: int) -> list[Any]:
    """The rounds of a watcher until so many tokens were committed."""
    rounds: list[Any] = []
    async with asyncio.timeout(30):
        async for event in events:
            rounds += event["rounds"]
            windows = [window for one in rounds if "step" in one for window in one["windows"]]
            if sum(window["committed"] for window in windows) >= committed:
                return rounds
    raise AssertionError("the stream ended")


async def test_a_stream_tells_where_its_tokens_come_from(served: Served, system: System) -> None:
    for policy in ("chain", "lockstep", "off"):
        speculation = {"policy": policy}
        plain = (await served.complete(**ASKED, speculation=speculation)).json()
        asked = ASKED | {"stream": True, "return_token_origins": True, "speculation": speculation}
        events = list(events_in((await served.complete(**asked)).text))
        tokens = [
            token
            for event in events
            for choice in event["choices"]
            for token in choice.get("token_origins", ())
        ]
        assert "".join(token["text"] for token in tokens) == plain["choices"][0]["text"]
        want = await system.client.generate(
            "sea", max_tokens=TOKENS, seed=3, temperature=0.0, ignore_eos=True, policy=policy
        )
        assert tuple(token["token_id"] for token in tokens) == want.token_ids
        origins = {token["origin"] for token in tokens}
        assert origins <= {"draft", "target"}
        assert policy != "off" or origins == {"target"}
        instead = [token for token in tokens if "refused" in token]
        assert policy != "off" or not instead
        assert policy != "lockstep" or instead, "each verdict that refuses has a token of its own"
        for token in instead:
            assert token["origin"] == "target"
            # The text decides: the first of them would have been another one.
            assert token["refused"][0] != token["text"]


async def test_origins_are_told_only_if_they_are_asked_for(served: Served) -> None:
    assert "token_origins" not in (await served.complete(**ASKED, stream=True)).text
    refused = await served.complete(**ASKED, return_token_origins=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_token_origins"


async def test_the_state_has_what_drivers_count(served: Served, system: System) -> None:
    await served.complete(**ASKED)
    await asyncio.sleep(console.STATE_SECONDS)
    told = (await served.http.get("/console/state")).json()
    [driver] = told["drivers"]
    assert driver["address"] == system.server.address
    assert driver["trouble"] is None
    assert driver["stats"]["committed_tokens"] == system.driver.stats().committed_tokens
    assert [one["name"] for one in driver["topology"]["drafters"]] == ["d0"]
    assert "off" in driver["policies"]
    metrics = (await served.http.get("/metrics")).text
    [count] = re.findall(r"(?m)^paceline:time_to_first_token_seconds_count\{.*\} (.*)$", metrics)
    assert told["first_token"]["count"] == float(count) > 0
    assert told["first_token"]["sum"] > 0


async def test_watchers_share_a_trace_which_ends_with_the_last(
    served: Served, system: System
) -> None:
    async with watching(served) as first:
        async with watching(served) as second:
            await asyncio.sleep(0.3)  # Both have begun.
            assert len(system.driver._dispatch.taps) == 1
            # It waits for proposals, so there are candidates however busy this machine is.
            await served.complete(**ASKED, speculation={"policy": "lockstep"})
            heard = [await rounds_until(events, TOKENS) for events in (first, second)]
        assert [one for one in heard[0] if "step" in one] == [
            one for one in heard[1] if "step" in one
        ]
        assert all("begun" in one[0] for one in heard)
        passes = {one["pass"] for one in heard[0] if "pass" in one}
        verified = {
            number
            for one in heard[0]
            for window in one.get("windows", ())
            for number in window["passes"]
        }
        assert verified
        assert verified <= passes
        await served.complete(**ASKED)
        await rounds_until(first, TOKENS)
    await eventually(lambda: not system.driver._dispatch.taps)


async def test_a_watcher_that_does_not_read_misses_the_oldest_rounds() -> None:
    unread = console._Unread()
    for number in range(3 * console.MAX_UNREAD_ROUNDS):
        unread.told.append(str(number))
    assert len(unread.told) == console.MAX_UNREAD_ROUNDS
    assert unread.told[-1] == str(3 * console.MAX_UNREAD_ROUNDS - 1)


async def test_there_are_at_most_so_many_watchers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "MAX_WATCHERS", 1)
    async with watching(served):
        refused = await served.http.get("/console/rounds")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    await eventually(lambda: not served.gateway._watched._rounds)
    nowhere = await served.http.get("/console/rounds", params={"driver": "127.0.0.1:1"})
    assert nowhere.status_code == 503


async def test_a_lost_driver_is_told_and_watched_again(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_AGAIN_SECONDS", 0.05)
    async with (
        running_system(checkpoints) as system,
        running_gateway([system.server.address]) as served,
        watching(served) as events,
    ):
        await rounds_of(events, "begun")
        await system.server.stop()
        await rounds_of(events, "lost")
        [driver] = (await served.http.get("/console/state")).json()["drivers"]
        assert driver["stats"] is None


async def rounds_of(events: AsyncIterator[dict[str, Any]], kind: str) -> None:
    async with asyncio.timeout(30):
        while not any(kind in one for one in (await anext(events))["rounds"]):
            pass


async def test_the_page_needs_no_key_and_the_rest_an_operators(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    keys = keys_in(path, alice={"tenant": "a"}, gateway={"tenant": "o", "role": "operator"})
    own: Access = {"key": keys["gateway"]}
    async with (
        running_system(checkpoints, gate=Gate(KeyFile(path)), access=own) as system,
        running_gateway([system.server.address], gate=Gate(KeyFile(path)), access=own) as served,
    ):
        assert (await served.http.get("/")).status_code == 200
        for what in ("/console/state", "/console/rounds"):
            statuses = [
                (await served.http.get(what, headers=headers)).status_code
                for headers in ({}, {"authorization": f"Bearer {keys['alice']}"})
            ]
            assert statuses == [401, 403], what
        operator = {"authorization": f"Bearer {keys['gateway']}"}
        state = await served.http.get("/console/state", headers=operator)
        assert state.json()["drivers"][0]["stats"] is not None
        async with watching(served, headers=operator) as events:
            await rounds_of(events, "begun")


async def test_the_page_may_run_its_own_script_and_ask_its_own_server_only(served: Served) -> None:
    answer = await served.http.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert len(re.findall("'sha256-[^']{44}'", policy)) == 2
    # Nothing is named that a browser would fetch from elsewhere, or refuse to run.
    hosts = re.findall(r"https?://([^/'\"\s]+)", answer.text)
    assert set(hosts) == {"www.w3.org"}, "the name of SVG's elements"
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", answer.text.partition("<script>")[0])


async def test_a_trace_in_the_page_ends_no_script() -> None:
    rounds = [{"begun": 1.0, "model": "</script><b>"}]
    page = console.trace_page(rounds)
    assert "</script><b>" not in page
    [told] = re.findall(r'(?s)<script type="application/json" id="trace">(.*?)</script>', page)
    assert json.loads(told) == rounds
