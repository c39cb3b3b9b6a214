"""deploy.jobs.serve_app: the gateway on Ray Serve, used by OpenAI's client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import ray

from paceline import Client
from paceline.options import GenerateOptions, OptionFields
from tests.cluster.gateway.scraping import Scrape
from tests.deploy.conftest import Served, becomes_true
from tests.deploy.shell import ROOT
from tests.tiny import make_tiny_checkpoint

RUN = """
import sys, ray
from ray import serve
from deploy.jobs import serve_app
address, port, name, replicas, *variables = sys.argv[1:]
variables = dict(variable.split("=", 1) for variable in variables)
ray.init(address=address, namespace="serving", runtime_env={"env_vars": variables})
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
target = getattr(serve_app, name)
target._bound_deployment._deployment_config.num_replicas = int(replicas)
serve.run_many([serve.RunTarget(target)], wait_for_applications_running=name == "app")
print("serving", flush=True)
for _ in sys.stdin:
    print(serve.status().applications["default"].status.value, flush=True)
serve.shutdown()
"""
ASKED: OptionFields = {"max_tokens": 120, "seed": 5}


REFUSED = """
from deploy.jobs.serve_app import gateway_of
from paceline.errors import PacelineError
for drivers in ("", " , ", "nowhere"):
    try:
        gateway_of({"PACELINE_DRIVERS": drivers})
    except PacelineError as error:
        print(error)
for name, value in {
    "PACELINE_TOOL_FORMAT": "xml",
    "PACELINE_REASONING_FORMAT": "thought",
    "PACELINE_LOG_FORMAT": "xml",
    "PACELINE_OTLP_ENDPOINT": "collector",
}.items():
    try:
        gateway_of({"PACELINE_DRIVERS": "127.0.0.1:9", name: value})
    except PacelineError as error:
        print(error)
"""

pytestmark = [pytest.mark.ray, pytest.mark.long]


def test_an_environment_that_is_wrong_is_refused() -> None:
    # In another process, since importing Serve warns.
    ended = subprocess.run(
        [sys.executable, "-c", REFUSED], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120
    )
    lines = ended.stdout.splitlines()
    assert [line.partition(": expected ")[0] for line in lines] == ["PACELINE_DRIVERS"] * 3 + [
        "PACELINE_TOOL_FORMAT",
        "PACELINE_REASONING_FORMAT",
        "PACELINE_LOG_FORMAT",
        "otlp_endpoint",
    ]


@dataclass(frozen=True)
class App:
    """A Serve application, and the process that runs it."""

    url: str
    process: subprocess.Popen[str]

    def status(self) -> str:
        """As KubeRay asks for it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def serving(ray_address: str, name: str, *, replicas: int = 1, **variables: str) -> Iterator[App]:
    """Serves an application of the module while the block runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    given = (f"{key}={value}" for key, value in variables.items())
    with subprocess.Popen(
        [sys.executable, "-c", RUN, ray_address, port, name, str(replicas), *given],
        cwd=ROOT,
        env=os.environ | {"RAY_SERVE_ENABLE_HA_PROXY": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert any(line == "serving\n" for line in process.stdout)
            yield App(f"http://127.0.0.1:{port}", process)
        finally:
            process.stdin.close()
            process.wait(timeout=120)


def test_openais_client_works_unchanged(ray_address: str, served: Served) -> None:
    named: dict[str, Any] = {
        "PACELINE_DRIVERS": served.address,
        "PACELINE_SERVED_MODEL_NAME": "sea",
    }
    with serving(ray_address, "app", **named) as app:
        _check(app.url, served.address)


def _gateways() -> list[str]:
    """The names of the actors that are replicas of gateways."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in actors if "#gateway#" in one["name"]]


def test_two_replicas_count_as_one_gateway(ray_address: str, served: Served) -> None:
    """Any scrape tells all tokens, and one that is killed takes none with it."""
    told = [0.0]

    def scraped() -> float:
        text = httpx2.get(f"{app.url}/metrics", timeout=60).text
        told.append(Scrape(text).value("generation_tokens_total"))
        return told[-1]

    def ask(requests: int) -> None:
        for _ in range(requests):
            asked = {"prompt": "sea", "max_tokens": 5, "ignore_eos": True}
            httpx2.post(f"{app.url}/v1/completions", json=asked, timeout=60).raise_for_status()

    with serving(ray_address, "app", replicas=2, PACELINE_DRIVERS=served.address) as app:
        ask(12)
        assert becomes_true(lambda: {scraped() for _ in range(14)} == {60.0}, 30)
        before = set(_gateways())
        assert len(before) == 2
        killed, _ = sorted(before)
        ray.kill(ray.get_actor(killed, namespace="serve"), no_restart=True)
        assert becomes_true(lambda: len(set(_gateways()) - {killed}) == 2, 60)
        ask(12)
        assert becomes_true(lambda: {scraped() for _ in range(14)} == {120.0}, 30)
        assert told == sorted(told)


@pytest.mark.release
def test_a_whole_application_starts_its_deployment(ray_address: str, tmp_path: Path) -> None:
    """And ends it, when the application ends."""
    model = make_tiny_checkpoint(tmp_path / "model")
    config = tmp_path / "paceline.toml"
    config.write_text(f"""
        [target]
        model = "{model}"
        threads = 1
        kv_memory = "64MiB"
        [[drafters]]
        model = "{model}"
        threads = 1
        [server]
        grpc_port = 0
    """)
    before = ray.available_resources().get("CPU")
    named: dict[str, Any] = {"PACELINE_CONFIG": str(config), "PACELINE_SERVED_MODEL_NAME": "sea"}
    with (
        serving(ray_address, "whole", **named) as app,
        httpx2.Client(base_url=app.url, timeout=60) as http,
    ):
        refused = http.get("/ready")
        assert refused.status_code == 503
        assert "the deployment" in refused.json()["error"]["message"]
        # Serve, and KubeRay, must not call it running before.
        assert app.status() == "DEPLOYING"
        assert becomes_true(lambda: http.get("/ready").status_code == 200, 120)
        assert becomes_true(lambda: app.status() == "RUNNING", 60)
        asked = {"model": "sea", "prompt": "sea", "max_tokens": 8, "ignore_eos": True, "seed": 5}
        answer = http.post("/v1/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == 8
    assert becomes_true(lambda: ray.available_resources().get("CPU") == before, 60)


def _check(url: str, address: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as asking:
        assert [model.id for model in asking.models.list()] == ["sea"]
        ours = {"ignore_eos": True}
        options: dict[str, Any] = {"model": "sea", "prompt": "sea", "extra_body": ours, **ASKED}
        whole = asking.completions.create(**options)
        with Client(address) as client:
            told = client.generate("sea", GenerateOptions(**ASKED), ignore_eos=True).text
        assert whole.choices[0].text == told
        stream = asking.completions.create(**options, stream=True)
        chunks = [chunk.choices[0].text for chunk in stream]
        assert "".join(chunks) == told
        assert len(chunks) > 5
        with pytest.raises(openai.NotFoundError):
            asking.completions.create(**options | {"model": "other"})
        chat = asking.chat.completions.create(
            model="sea", messages=[{"role": "user", "content": "sea"}], max_tokens=4
        )
        assert chat.choices[0].finish_reason == "length"
    with httpx2.Client(base_url=url, timeout=60) as http:
        assert http.get("/ready").json()["models"] == ["sea"]
        # Closing the connection cancels at the driver.
        body = {"prompt": "sea", "stream": True, "ignore_eos": True, "max_tokens": 200}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            first = next(line for line in answer.iter_lines() if line)
            assert json.loads(first.removeprefix("data: "))["object"] == "text_completion"
    with Client(address) as client:
        assert becomes_true(lambda: client.stats().sequences_running == 0, 30)
