"""`paceline bench engine`: its rows and report, and its parts on a tiny model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.model import Config, DrafterConfig, TargetConfig
from deploy.bench import engine_steps
from deploy.bench.engine import (
    BATCHES,
    PARTS,
    WINDOWS,
    engine_document,
    goals,
    measure_own,
    own_name,
    peer_dtype,
    random_tokens,
    run_engine,
    seeded_requests,
    serving_deployments,
    show_engine,
    target_files,
    wanted_batches,
    with_speedups,
)
from deploy.bench.engine_steps import (
    copy_bandwidth,
    model_bytes,
    peak_memory,
    running_target,
    runtime_memory,
)
from deploy.bench.harness import Asked, Document, Row, batches_of
from deploy.bench.transformers_peer import TransformersProcess
from deploy.rows.peers import TransformersPeer
from paceline.client import Client
from paceline.errors import UnavailableError
from tests.deploy.bench.benches import asked_of, run_bench, shown_by
from tests.deploy.conftest import Call, Served
from tests.tiny import make_tiny_checkpoint
from workers.engine.cpu.kv_cache import BLOCK_SIZE
from workers.engine.kv_blocks import blocks_for
from workers.models.catalog import ModelFiles, resolve_model

EVERY_ROW = {
    *("name", "speedup", "engine", "batch", "window", "degree", "dtype", "threads"),
    *("step_ms", "bandwidth_share", "tokens_per_second"),
}


def served_row(name: str, batch: int, speed: float) -> Row:
    engine = "transformers" if name.startswith("hf") else "paceline"
    return {
        **{"part": "serving", "name": name, "engine": engine, "batch": batch, "window": 0},
        **{"degree": 1, "dtype": "float32", "threads": 2, "step_ms": 10.0},
        **{"bandwidth_share": None, "tokens_per_second": speed, "speedup": None},
    }


RUN = [
    served_row("off", 1, 50.0) | {"part": "steps", "bandwidth_share": 0.5},
    served_row("off", 1, 40.0),
    served_row("hf", 1, 20.0),
    served_row("off", 16, 200.0),
    served_row("off, 1 thread", 16, 150.0),
    served_row("hf", 16, 50.0),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture
def asked(checkpoint: Path, tmp_path: Path) -> Asked:
    config = Config(target=TargetConfig(model=str(checkpoint)), drafters=())
    return asked_of(tmp_path, config, quick=True)


@pytest.fixture(scope="module")
def peer(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TransformersProcess]:
    log = tmp_path_factory.mktemp("peer") / "log"
    with TransformersProcess(checkpoint, threads=1, log=log) as process:
        yield process


def test_the_load_is_seeded_and_covers_its_range() -> None:
    requests = seeded_requests(2000, vocab_size=300, seed=7)
    assert requests == seeded_requests(2000, vocab_size=300, seed=7)
    assert requests != seeded_requests(2000, vocab_size=300, seed=8)
    prompts = {len(request.prompt_token_ids) for request in requests}
    outputs = {request.output_tokens for request in requests}
    assert (min(prompts), max(prompts)) == (20, 600)
    assert (min(outputs), max(outputs)) == (16, 256)
    assert len({request.prompt_token_ids[:20] for request in requests}) == 2000
    assert [len(group) for group in batches_of(requests[:9], 4)] == [4, 4, 1]


def test_a_copy_has_a_bandwidth() -> None:
    assert copy_bandwidth(1, num_bytes=1 << 20) > 0


def test_memory_of_a_process_is_its_peak() -> None:
    before = peak_memory(os.getpid())
    held = b"1" * (64 << 20)
    assert peak_memory(os.getpid()) >= before
    assert peak_memory(os.getpid()) > len(held)
    assert runtime_memory() > 50 << 20


def test_speedups_are_against_plain_decoding_of_the_same_part_and_batch() -> None:
    rows = with_speedups(RUN)
    assert [row["speedup"] for row in rows] == [1, 1, 0.5, 1, 0.75, 0.25]
    assert with_speedups(RUN[2:3])[0]["speedup"] is None
    found = {goal.name: (goal.ratio, goal.aim) for goal in goals(rows)}
    assert found == {
        "batch 1: off / hf": (2.0, 2.0),
        "batch 16: off / hf": (4.0, 3.0),
        "batch 16: off, 1 thread / hf": (3.0, 3.0),
    }
    assert list(goals(RUN[:1])) == []


def test_rows_of_ours_are_named_apart() -> None:
    names = {
        own_name(window=window, degree=degree, threads=threads)
        for window in WINDOWS
        for degree, threads in ((1, 2), (1, 1), (2, 1))
    }
    assert len(names) == 9
    assert own_name(window=0, degree=1, threads=2) == "off"


def test_the_report_is_narrow_and_has_every_row() -> None:
    report = engine_document(with_speedups(RUN), {"serving": "UnavailableError: no"})
    lines = shown_by(show_engine, report).splitlines()
    assert "batch 16: off / hf = 4.00 (aim 3)" in lines
    assert any("off, 1 thread" in line for line in lines)
    assert report["failed"] == {"serving": "UnavailableError: no"}
    assert report["emulated"] is False
    assert all(row.keys() >= EVERY_ROW for row in report["rows"])


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
    assert set(PARTS) == {"steps", "serving"}
    done = call("bench", "engine", "--part", "nothing")
    assert done.code == 2
    assert "part" in done.stderr


def test_batches_are_those_that_some_part_measures(call: Call, asked: Asked) -> None:
    done = call("bench", "engine", "--batch", "5")
    assert done.code == 2
    assert "batch: expected 1, 4, 16, got 5" in done.stderr
    assert wanted_batches(asked, BATCHES) == list(BATCHES)
    assert wanted_batches(replace(asked, batch=[16]), BATCHES) == [16]


def test_the_peer_computes_in_what_we_compute_in(asked: Asked) -> None:
    assert peer_dtype(target_files(asked).weights) == "float32"
    target = asked.config.target.model_copy(update={"dtype": "bfloat16"})
    fewer = replace(asked, config=asked.config.model_copy(update={"target": target}))
    assert peer_dtype(target_files(fewer).weights) == "bfloat16"


def test_deployments_are_plain(checkpoint: Path) -> None:
    model = TargetConfig(model=str(checkpoint))
    configs = serving_deployments(Config(target=model, drafters=(DrafterConfig(kind="ngram"),)))
    assert {name: one.target.threads for name, one in configs.items()} == {
        "off": 2,
        "off, 1 thread": 1,
    }
    assert all(one.drafters == () for one in configs.values())


@pytest.mark.release
def test_steps_are_measured_at_every_batch_and_window(asked: Asked) -> None:
    rows = with_speedups(list(PARTS["steps"](asked)))
    ours = [row for row in rows if row["engine"] == "paceline"]
    assert {(row["batch"], row["window"], row["degree"], row["threads"]) for row in ours} == {
        (batch, window, degree, threads)
        for batch in BATCHES
        for window in WINDOWS
        for degree, threads in engine_steps.SETTINGS
    }
    assert {row["batch"] for row in rows if row["engine"] == "transformers"} == set(BATCHES)
    for row in rows:
        # A peer's step is the difference of two times, which a busy host can make negative.
        assert min(row["step_ms"], row["bandwidth_share"]) > 0 or row["engine"] != "paceline"
        assert row["speedup"] is not None
        assert row["prefill_tokens_per_second"] > 0
    assert all(row["memory_ratio"] for row in ours)
    assert [row["speedup"] for row in rows if row["name"] == "off"] == [1.0] * len(BATCHES)


def test_ranks_have_room_for_heads_that_do_not_divide(tmp_path: Path) -> None:
    """Nine heads share three: the rank with five of them holds five keys and values, not two."""
    folder = make_tiny_checkpoint(
        tmp_path / "model",
        hidden_size=72,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=8,
    )
    setting = engine_steps.shard_setting(ModelFiles(folder, "float32"), degree=2, threads=1)
    with running_target(setting, log_folder=tmp_path) as stream:
        num_blocks = stream.description.num_blocks
        stream.step(())
    longest = engine_steps.CONTEXT + 1 + max(WINDOWS)
    assert num_blocks >= max(BATCHES) * blocks_for(longest, BLOCK_SIZE)


def test_a_shard_that_does_not_start_says_why(asked: Asked, tmp_path: Path) -> None:
    files = resolve_model(asked.config.target.model, home=asked.home)
    setting = engine_steps.shard_setting(files, degree=1, threads=1)
    missing = replace(setting, files=replace(files, folder=tmp_path / "missing"))
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
    peer: TransformersProcess, checkpoint: Path
) -> None:
    reference = TransformersPeer(checkpoint, threads=1)
    prompts = [random_tokens(length, vocab_size=300, seed=length) for length in (7, 19)]
    answer = peer.generate(prompts, max_tokens=12, threads=1, ignore_eos=True)
    assert [len(ids) for ids in answer.token_ids] == [12, 12]
    assert answer.seconds > 0
    for prompt, ids in zip(prompts, answer.token_ids, strict=True):
        alone = reference.greedy(prompt, 12).token_ids
        assert list(ids[: len(alone)]) == alone


@pytest.mark.ray
@pytest.mark.release
def test_serving_measures_every_row(tmp_path: Path) -> None:
    roomy = make_tiny_checkpoint(tmp_path / "roomy", max_position_embeddings=1024)
    config = tmp_path / "tiny.toml"
    config.write_text(f'drafters = []\n[target]\nmodel = "{roomy}"\n')
    rows, said = run_bench("engine", config, tmp_path, "--part", "serving", "--quick")
    assert {(row["name"], row["batch"]) for row in rows} == {
        *(("off", 1), ("off, 1 thread", 1), ("hf", 1)),
        *(("off", 16), ("off, 1 thread", 16), ("hf", 16)),
    }
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert "off / hf" in said


def test_a_part_that_fails_leaves_the_rows_of_the_others(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(asked: Asked) -> Iterator[Row]:
        yield RUN[0]
        raise UnavailableError("a worker ended")

    monkeypatch.setitem(PARTS, "steps", fails)
    monkeypatch.setitem(PARTS, "serving", lambda asked: RUN[1:3])
    saved: list[Document] = []
    report = run_engine(replace(asked, save=saved.append))
    assert report["failed"] == {"steps": "UnavailableError: a worker ended"}
    assert {(row["part"], row["name"]) for row in report["rows"]} == {
        *(("steps", "off"), ("serving", "off"), ("serving", "hf"))
    }
    assert (len(saved[-1]["rows"]), list(saved[-1]["failed"])) == (3, ["steps"])


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
