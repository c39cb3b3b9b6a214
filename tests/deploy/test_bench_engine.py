"""`paceline bench engine`: its parts on a tiny model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import Config, DrafterConfig, TargetConfig
from deploy.bench import engine_steps
from deploy.bench.core_waits import CoreWaits
from deploy.bench.driver_load import DriverLoad
from deploy.bench.engine import PARTS, USUAL_PARTS, run_engine
from deploy.bench.engine_delay import delay_in_steps
from deploy.bench.engine_driver import measure_load, measure_one
from deploy.bench.engine_load import Request, random_tokens, seeded_requests
from deploy.bench.engine_memory import model_bytes
from deploy.bench.engine_peer import PeerProcess
from deploy.bench.engine_rows import (
    BATCHES,
    WINDOWS,
    EngineTask,
    peer_dtype,
    with_speedups,
)
from deploy.bench.engine_serving import deployments, measure_own
from deploy.bench.shard_process import running_target
from deploy.peers import TransformersPeer
from paceline.client import Client
from paceline.errors import UnavailableError
from tests.deploy.benches import run_bench
from tests.deploy.conftest import Call, Served
from tests.tiny import make_tiny_checkpoint
from workers.engine.block_pool import blocks_for
from workers.engine.kv_cache import BLOCK_SIZE
from workers.models import ModelFiles, resolve_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture
def task(checkpoint: Path, tmp_path: Path) -> EngineTask:
    config = Config(target=TargetConfig(model=str(checkpoint)), drafters=())
    return EngineTask(config, tmp_path, tmp_path, quick=True, tell=lambda line: None)


@pytest.fixture(scope="module")
def peer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerProcess]:
    log = tmp_path_factory.mktemp("peer") / "log"
    with PeerProcess(checkpoint, dtype="float32", threads=1, log=log) as process:
        yield process


def test_what_a_step_reads_is_counted(checkpoint: Path) -> None:
    sizes = model_bytes(checkpoint, "float32")
    layer = 48 * (6 + 2 + 2) * 8 + 6 * 8 * 48 + 3 * 48 * 112
    head = 384 * 48
    assert sizes.read_a_step == 4 * (2 * layer + head)
    assert sizes.kv_a_token == 2 * 2 * 2 * 8 * 4
    assert sizes.of_step([10, 20]) == sizes.read_a_step + 30 * sizes.kv_a_token
    norms = 5 * 48
    assert sizes.weights == 4 * (2 * layer + head + norms)  # the embedding is the LM head
    assert model_bytes(checkpoint, "int8").read_a_step == sizes.read_a_step // 4


def test_parts_are_those_that_the_command_takes(call: Call) -> None:
    assert set(USUAL_PARTS) <= set(PARTS)
    done = call("bench", "engine", "--part", "nothing")
    assert done.code == 2
    assert "part" in done.stderr


def test_batches_are_those_that_some_part_measures(call: Call, task: EngineTask) -> None:
    done = call("bench", "engine", "--batch", "5")
    assert done.code == 2
    assert "batch: expected 1, 4, 16, 64, 1000, got 5" in done.stderr
    assert task.batches_of(BATCHES) == list(BATCHES)
    assert replace(task, batches=[16, 64]).batches_of(BATCHES) == [16]


def test_the_peer_computes_in_what_we_compute_in(task: EngineTask) -> None:
    assert peer_dtype(task.target_files().weights) == "float32"
    target = task.config.target.model_copy(update={"dtype": "bfloat16"})
    fewer = replace(task, config=task.config.model_copy(update={"target": target}))
    assert peer_dtype(fewer.target_files().weights) == "bfloat16"


def test_deployments_are_plain(checkpoint: Path) -> None:
    model = TargetConfig(model=str(checkpoint))
    configs = deployments(Config(target=model, drafters=(DrafterConfig(kind="ngram"),)))
    assert {name: one.target.threads for name, one in configs.items()} == {
        "off": 2,
        "off, 1 thread": 1,
    }
    assert all(one.drafters == () for one in configs.values())


def test_steps_are_measured_at_every_batch_and_window(task: EngineTask) -> None:
    rows = with_speedups(list(PARTS["steps"](task)))
    ours = [row for row in rows if row.engine == "paceline"]
    assert {(row.batch, row.window, row.degree, row.threads) for row in ours} == {
        (batch, window, degree, threads)
        for batch in BATCHES
        for window in WINDOWS
        for degree, threads in engine_steps.SETTINGS
    }
    assert {row.batch for row in rows if row.engine == "transformers"} == set(BATCHES)
    for row in rows:
        assert row.step_ms is not None
        assert row.step_ms > 0
        assert row.bandwidth_share is not None
        assert row.bandwidth_share > 0
        assert row.speedup is not None
        rate = row.details["prefill_tokens_per_second"]
        assert isinstance(rate, float)
        assert rate > 0
    assert all(row.details["memory_ratio"] for row in ours)
    assert [row.speedup for row in rows if row.name == "off"] == [1.0] * len(BATCHES)


def test_ranks_have_room_for_heads_that_do_not_divide(tmp_path: Path) -> None:
    """Nine heads that share three: the rank of five of them holds five keys and values, not two."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    folder = make_tiny_checkpoint(tmp_path / "model", hidden_size=72, **heads)
    setting = engine_steps.shard_setting(ModelFiles(folder, "float32"), degree=2, threads=1)
    with running_target(setting, log_folder=tmp_path) as stream:
        num_blocks = stream.description.num_blocks
    longest = engine_steps.CONTEXT + 1 + max(WINDOWS)
    assert num_blocks >= max(BATCHES) * blocks_for(longest, BLOCK_SIZE)


def test_a_shard_that_does_not_start_says_why(task: EngineTask, tmp_path: Path) -> None:
    files = resolve_model(task.config.target.model, home=task.home)
    setting = engine_steps.shard_setting(files, degree=1, threads=1)
    missing = replace(setting, folder=tmp_path / "missing")
    with (
        pytest.raises(UnavailableError, match="missing"),
        running_target(missing, log_folder=tmp_path),
    ):
        pass


def test_serving_gives_every_request_its_length_and_plain_text(served: Served) -> None:
    lengths = {"prompt_tokens": (20, 60), "output_tokens": (4, 9)}
    requests = seeded_requests(5, vocab_size=300, seed=1, **lengths)
    with Client(served.address) as client:
        one = measure_own(client, requests, 1)
        four = measure_own(client, requests, 4)
    wanted = [request.output_tokens for request in requests]
    assert [len(ids) for ids in one.token_ids] == wanted
    assert one.token_ids == four.token_ids
    assert one.steps > four.steps > 0
    assert one.seconds > 0


def test_static_batching_pads_to_the_left_and_goes_beyond_the_end(
    peer: PeerProcess, checkpoint: Path
) -> None:
    reference = TransformersPeer(checkpoint, threads=1)
    prompts = [random_tokens(length, vocab_size=300, seed=length) for length in (7, 19)]
    answer = peer.static(prompts, max_tokens=12, threads=1)
    assert [len(ids) for ids in answer.token_ids] == [12, 12]
    assert answer.seconds > 0
    for prompt, ids in zip(prompts, answer.token_ids, strict=True):
        alone = reference.greedy(prompt, 12).token_ids
        assert list(ids[: len(alone)]) == alone


def test_continuous_batching_makes_the_wanted_tokens(peer: PeerProcess) -> None:
    requests = [
        Request(tuple(random_tokens(9, vocab_size=300, seed=seed)), 3 + seed) for seed in range(3)
    ]
    answer = peer.continuous(requests, batch=2, threads=1, limit_seconds=60)
    assert answer.error is None
    assert (answer.finished, answer.tokens) == (3, 12)
    stopped = peer.continuous(requests, batch=2, threads=1, limit_seconds=0)
    assert stopped.finished == 0


@pytest.mark.ray
@pytest.mark.long
def test_serving_measures_every_row(tmp_path: Path) -> None:
    roomy = make_tiny_checkpoint(tmp_path / "roomy", max_position_embeddings=1024)
    config = tmp_path / "tiny.toml"
    config.write_text(f'drafters = []\n[target]\nmodel = "{roomy}"\n')
    rows, said = run_bench("engine", config, tmp_path, "--part", "serving", "--quick")
    assert {(row["name"], row["batch"]) for row in rows} == {
        *(("off", 1), ("off, 1 thread", 1), ("hf", 1)),
        *(("off", 16), ("off, 1 thread", 16), ("hf", 16), ("hf-continuous", 16)),
    }
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert "off / hf" in said


def test_the_prefix_part_compares_texts_and_counts_what_was_there(task: EngineTask) -> None:
    off, cached = PARTS["prefix"](task)
    assert (off.name, cached.name) == ("off", "prefix cache")
    assert off.speedup == 1
    assert cached.details["same_text"] is True
    assert off.details["prefix_hit_tokens"] == 0
    # All but the first prompt find three blocks of 128 tokens computed.
    assert cached.details["prefix_hit_tokens"] == 7 * 3 * 128


def test_the_delay_is_counted_in_usual_steps() -> None:
    assert delay_in_steps([0.02, 0.01, 0.01], [0.01, 0.025]) == pytest.approx(1.5)


def test_a_part_that_fails_leaves_the_rows_of_the_others(task: EngineTask, tmp_path: Path) -> None:
    """Part steps cannot write its log; part delay has a row for each batch.

    Of a model with room for texts that are long enough to go on when the prompt comes.
    """
    roomy = make_tiny_checkpoint(tmp_path / "roomy", max_position_embeddings=2048)
    config = Config(target=TargetConfig(model=str(roomy)), drafters=())
    saved: list[tuple[int, list[str]]] = []
    result = run_engine(
        replace(task, config=config, log_folder=tmp_path / "missing", batches=[4]),
        ("steps", "delay"),
        save=lambda result: saved.append((len(result.rows), list(result.failed))),
    )
    assert list(result.failed) == ["steps"]
    assert "missing" in result.failed["steps"]
    (row,) = result.rows
    assert (row.part, row.name, row.batch) == ("delay", "off", 4)
    assert saved == [(0, ["steps"]), (1, ["steps"])]
    details = row.details
    assert isinstance(details["prompt_tokens"], int)
    assert details["prompt_tokens"] > 100
    assert isinstance(details["delay_steps"], float)
    assert details["delay_steps_by_prompt"] == [details["delay_steps"]]
    less_waits = details["delay_steps_less_waits"]
    assert isinstance(less_waits, float) == CoreWaits(os.getpid(), 1).are_known
    assert not isinstance(less_waits, float) or less_waits <= details["delay_steps"]
    assert isinstance(details["steps_without"], int)
    assert details["steps_without"] >= 4


def test_a_failed_part_is_told_and_is_no_success(
    call: Call, checkpoint: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    config, found = tmp_path / "broken.toml", tmp_path / "found.json"
    config.write_text(f'drafters = []\n[target]\nmodel = "{broken}"\n')
    arguments = ("--part", "steps", "--batch", "1", "--quick", "--json", str(found))
    done = call("bench", "engine", "--config", str(config), *arguments)
    assert done.code == 1
    assert "part steps failed" in done.stderr
    document = json.loads(found.read_text())
    assert document["rows"] == []
    assert list(document["failed"]) == ["steps"]


@pytest.mark.parametrize("policy", ["off", "chain"])
def test_the_drivers_time_is_measured_by_the_length_of_prompts(
    task: EngineTask, policy: str
) -> None:
    """Texts that need several pieces at the drafter; the target's first token ends the prefill."""
    row = measure_load(task, DriverLoad(policy, 3, 5000))
    assert (row.batch, row.details["prompt_tokens"], row.details["emulated"]) == (3, 5000, True)
    assert 0 < row.details["driver_ms_least"] <= row.details["driver_ms_p50"] < 1000


def test_the_drivers_time_is_measured_with_so_many_sequences_at_once(task: EngineTask) -> None:
    row = measure_one(task, "off", 3)
    assert (row.part, row.name, row.batch) == ("driver", "off", 3)
    assert row.details["aim_ms"] == pytest.approx(1.15)
    assert isinstance(row.details["driver_ms_p50"], float)
    assert 0 < row.details["driver_ms_p50"] < 1000
