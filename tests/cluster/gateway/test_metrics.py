"""What `/metrics` tells is what happened."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from cluster.gateway import app
from cluster.gateway.app import SCRAPE_SECONDS
from cluster.gateway.drivers import ASK_SECONDS
from cluster.gateway.metrics import (
    LEAST_TRIED,
    RECENT_SECONDS,
    AcceptanceDrift,
    DriverMetrics,
    DriverReport,
)
from paceline.generation import SpeculationStats, Stats
from paceline.options import GenerateOptions
from tests.cluster.gateway.scraping import every_scrape_asks, scrape  # noqa: F401  (a fixture)
from tests.cluster.gateway.serving import Served, connection, head, running_gateway
from tests.cluster.system import HOST, System, Wire, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("every_scrape_asks"),
]

ASKED: dict[str, Any] = {"prompt": "sea", "max_tokens": 30, "seed": 5, "ignore_eos": True}


async def test_requests_are_counted_as_they_were_answered(served: Served) -> None:
    before = await scrape(served)
    answers = [
        (await served.complete(**ASKED, n=2)).json(),
        (await served.complete(**ASKED | {"stop": ["e"], "max_tokens": 200})).json(),
    ]
    after = await scrape(served)
    usage = [answer["usage"] for answer in answers]
    reasons = [choice["finish_reason"] for one in answers for choice in one["choices"]]
    told = sum(one["completion_tokens"] for one in usage)
    prompts = usage[0]["prompt_tokens"] * 2 + usage[1]["prompt_tokens"]

    def grown(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown("generation_tokens_total") == told
    assert grown("prompt_tokens_total") == prompts
    for reason in ("stop", "length", "abort", "error"):
        assert grown("request_success_total", finished_reason=reason) == reasons.count(reason)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert grown(f"{name}_count") == 3
    assert grown("request_generation_tokens_sum") == told
    # Chunks after the first: no more than tokens after the first.
    assert 0 < grown("inter_token_latency_seconds_count") <= told - 3
    between = grown("inter_token_latency_seconds_sum")
    whole = grown("e2e_request_latency_seconds_sum")
    assert whole - grown("time_to_first_token_seconds_sum") == pytest.approx(between, abs=0.2)
    assert after.value("http_requests_total", path="/v1/completions", status="200") == 2
    assert after.value("http_requests_open") == 1  # the scrape itself


async def test_what_drivers_count_is_told(served: Served, system: System) -> None:
    for _ in range(3):
        asked = ASKED | {"prompt": "the sea and the land " * 30, "max_tokens": 60}
        await served.complete(**asked, speculation={"policy": "lockstep", "window": 4})
    told, stats = await scrape(served), system.driver.stats()
    drafting = stats.speculation
    assert stats.drafted > stats.accepted > 0
    assert told.value("spec_decode_num_draft_tokens_total") == stats.drafted
    assert told.value("spec_decode_num_accepted_tokens_total") == stats.accepted
    assert told.value("spec_decode_num_drafts_total") == drafting.drafted_at[0]
    for position, count in enumerate(drafting.accepted_at):
        where = {"position": str(position)}
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert told.value(name, **where) == count
    assert told.value("driver_generation_tokens_total") == stats.committed_tokens
    assert told.value("prefix_cache_hits_total") == stats.prefix_hit_tokens > 0
    queried = stats.prefix_hit_tokens + stats.prefilled_tokens
    assert told.value("prefix_cache_queries_total") == queried
    for worker in stats.workers:
        assert told.value("worker_up", worker=worker.name) == 1
        assert told.value("worker_passes_total", worker=worker.name) >= 1
    assert told.value("kv_cache_usage_perc") == 0  # Nothing runs.
    assert 0 < told.value("target_idle_ratio") < 1


async def test_kv_blocks_that_are_held_are_told(served: Served, system: System) -> None:
    asked = ASKED | {"max_tokens": 400, "n": 4, "speculation": "off"}
    answer = asyncio.create_task(served.complete(**asked))
    await eventually(lambda: system.driver.scheduler.num_running > 0)
    await asyncio.sleep(0.05)  # Until it has blocks.
    told = await scrape(served)
    assert told.value("num_requests_running") == 4
    assert 0 < told.value("kv_cache_usage_perc") < 1
    assert (await answer).status_code == 200
    await system.settle()
    stats = system.driver.stats()
    assert stats.kv_blocks_held == 0 < stats.kv_blocks


async def test_a_caller_who_leaves_is_counted_as_such(served: Served) -> None:
    before = await scrape(served)
    body = json.dumps(ASKED | {"max_tokens": 400, "stream": True}).encode()
    async with connection(served) as (reader, writer):
        writer.write(head(len(body)) + body)
        await reader.readuntil(b"data: ")
    after = await scrape(served)
    name = "request_success_total"
    left = {"finished_reason": "abort"}
    assert after.value(name, **left) == before.value(name, **left) + 1
    assert after.value("http_requests_total", status="499") >= 1


async def test_a_defect_and_a_refusal_are_counted_by_status(served: Served) -> None:
    await served.complete(prompt=1.5)
    await served.http.get("/ready")
    told = await scrape(served)
    assert told.value("http_requests_total", path="/v1/completions", status="400") == 1
    assert told.value("http_requests_total", method="GET", path="/ready", status="200") == 1


async def test_no_caller_makes_new_labels(served: Served) -> None:
    for index in range(20):
        await served.http.get(f"/unknown-{index}")
        await served.http.get(f"/v1/models/model-{index}")
        await served.http.request(f"M{index}", "/v1/completions")
        await served.complete(model=f"model-{index}", prompt="sea")
    told = await scrape(served)
    assert "model-" not in told.text
    assert "unknown" not in told.text
    counted = told.value
    assert counted("http_requests_total", path="other", method="other", status="404") == 20
    assert counted("http_requests_total", path="/v1/models/{name}", status="404") == 20
    assert counted("http_requests_total", method="other", status="405") == 20


async def test_scrapes_do_not_load_the_driver(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's uptime tells whether it was asked again."""
    monkeypatch.setattr(app, "SCRAPE_SECONDS", SCRAPE_SECONDS)
    answers = await asyncio.gather(*(served.http.get("/metrics") for _ in range(20)))
    uptimes = {
        line
        for one in answers
        for line in one.text.splitlines()
        if "driver_uptime_seconds{" in line
    }
    assert len(uptimes) == 1
    monkeypatch.setattr(app, "SCRAPE_SECONDS", 0.0)
    assert (await served.http.get("/metrics")).text != answers[0].text


@pytest.mark.timing
async def test_a_driver_that_does_not_answer_is_down(system: System) -> None:
    await system.client.generate("A step.", GenerateOptions(max_tokens=2))
    wire = Wire(system.server.address)
    address = await wire.open()
    try:
        async with running_gateway([address, f"{HOST}:9"]) as served:
            told = await scrape(served)
            assert told.value("driver_up", driver=address) == 1
            assert told.value("driver_up", driver=f"{HOST}:9") == 0
            assert told.value("driver_steps_total", driver=address) > 0
            wire.hold()
            began = time.monotonic()
            told = await scrape(served)
            assert time.monotonic() - began < 2 * ASK_SECONDS + 2
            assert told.value("driver_up", driver=address) == 0
            with pytest.raises(KeyError):
                told.value("driver_steps_total", driver=address)
            wire.release()
            # A call that was given up may still be in the way of the next one.
            for _ in range(5):
                if (told := await scrape(served)).value("driver_up", driver=address):
                    break
            assert told.value("driver_steps_total", driver=address) > 0
    finally:
        wire.release()
        await wire.close()


async def test_a_restarted_driver_begins_anew() -> None:
    metrics = DriverMetrics()
    for steps in (100, 3):
        stats = Stats(1.0, steps, 0, 0, 0, 0, 0, 0, 0.0, ())
        metrics.take([DriverReport("a:1", "m", stats)])
        (told,) = [one for one in metrics.collect() if one.name == "paceline:driver_steps"]
        assert [sample.value for sample in told.samples] == [steps]
        assert told.type == "counter"


def _drifted(acceptances: list[float], *, every: float = 60.0) -> AcceptanceDrift:
    """A driver that tried 100 candidates between two scrapes."""
    drift = AcceptanceDrift()
    tried = accepted = 0
    for index, acceptance in enumerate(acceptances):
        tried += 100
        accepted += round(100 * acceptance)
        drift.add(index * every, tried, accepted)
    return drift


async def test_drift_is_recent_acceptance_minus_that_before() -> None:
    steady = _drifted([0.8] * 60)
    assert steady.recent == pytest.approx(0.8)
    assert steady.drift == pytest.approx(0.0)
    worse = _drifted([0.8] * 60 + [0.5] * 10)
    assert worse.recent == pytest.approx(0.5)
    assert worse.drift == pytest.approx(-0.3)


async def test_drift_is_not_told_without_enough_candidates() -> None:
    assert _drifted([0.8] * 4).recent is None
    early = _drifted([0.8] * (LEAST_TRIED // 100 + 2))
    assert early.recent is not None
    assert early.drift is None  # There is no "before" yet.
    silent = _drifted([0.8] * 30)
    silent.add(29 * 60 + 2 * RECENT_SECONDS, 3000, 2400)
    assert silent.recent is None  # Nothing was asked for ten minutes.


async def test_drift_begins_anew_with_a_restarted_driver() -> None:
    drift = _drifted([0.8] * 60)
    drift.add(3660.0, 50, 5)
    assert drift.recent is None
    assert drift.drift is None


async def test_frequent_scrapes_take_no_more_memory() -> None:
    drift = AcceptanceDrift()
    for index in range(20_000):
        drift.add(index * 1.0, index, index // 2)
    assert len(drift._samples) <= RECENT_SECONDS / 15 + 2
    assert drift.recent == pytest.approx(0.5, abs=0.01)


async def test_a_driver_without_drafters_tells_no_acceptance() -> None:
    metrics = DriverMetrics()
    empty = Stats(1.0, 9, 9, 0, 0, 1, 0, 0, 0.0, (), speculation=SpeculationStats())
    metrics.take([DriverReport("a:1", None, empty)])
    names = {sample.name for metric in metrics.collect() for sample in metric.samples}
    assert "paceline:spec_decode_num_drafts_total" in names
    assert not {"paceline:acceptance_drift", "paceline:target_idle_ratio"} & names
