"""What the target's checkpoint cannot have is refused on the command line, with the numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.config.load import load_config
from cluster.config.model import Config
from deploy.session.cluster import check_workers
from paceline.errors import CheckpointError, ConfigError, VocabularyMismatchError
from tests.deploy.conftest import Call
from tests.processor import NEEDS_BFLOAT16
from tests.tiny import make_tiny_checkpoint
from workers.engine.open import open_engine
from workers.models.catalog import ModelFiles

REFUSED = {
    "tensor_parallel = 7": "tensor_parallel is 7, but the model has 6 attention heads",
    "max_model_len = 600": "target.max_model_len must be from 1 to the checkpoint's 512, got 600",
    "kv_memory = 40000": "target.kv_memory of 40000 bytes holds 1 blocks of 32768 bytes, but one "
    "sequence of max_model_len 512 takes 4: give at least 131072 bytes, or lower max_model_len",
    'resources = "gpu"\ndtype = "int8"': "target.dtype int8 is for CPUs; on a GPU use",
    'resources = "gpu"': "1 shard of the target must have 1 GPU, but only 0 are free",
}


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize("command", ["up", "generate"])
def test_refused_before_anything_starts(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, key: str
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    model = make_tiny_checkpoint(tmp_path / "target")
    config = tmp_path / "many.toml"
    config.write_text(
        f'drafters = []\n[target]\nmodel = "{model}"\n{key}\n'
        "[server]\ngrpc_port = 0\nhttp = false\n"
    )
    output = tmp_path / "out.jsonl"
    files = ["--input", _rows(tmp_path), "--output", output]
    called = call(command, *([config] if command == "up" else ["--config", config, *files]))
    assert called.code == (3 if key == 'resources = "gpu"' else 2)
    assert REFUSED[key] in called.stderr
    assert "Ray: starting" not in called.stderr
    assert not output.exists()


@pytest.mark.parametrize("key", ['[target]\nresources = "gpu"', '[[drafters]]\ngpu = "L40S"'])
def test_gpus_that_are_not_there_are_told_before_anything_is_fetched(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    config = tmp_path / "demo.toml"
    config.write_text(f"{key}\n[server]\ngrpc_port = 0\nhttp = false\n")
    called = call("up", config)
    assert called.code == 3
    assert re.search(r"must have (a|1) GPU.* (0 GPUs|0 are free)", called.stderr)
    assert "downloading" not in called.stderr
    assert "Ray: starting" not in called.stderr


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        # 4 blocks of 128 positions; bfloat16 holds as much in half the memory.
        ("kv_memory = 131072", None),
        pytest.param("kv_memory = 65536\ndtype = 'bfloat16'", None, marks=NEEDS_BFLOAT16),
        pytest.param(
            "kv_memory = 65535\ndtype = 'bfloat16'",
            "holds 3 blocks of 16384 bytes",
            marks=NEEDS_BFLOAT16,
        ),
        ("kv_memory = 65536\nmax_model_len = 256", None),
        # A page of a GPU has 256 positions, and float32 is the checkpoint's own.
        ("kv_memory = 131071\nresources = 'gpu'", "holds 1 blocks of 65536 bytes"),
        # It is not yet known whether the running Ray cluster has GPUs.
        ("kv_memory = 1\nresources = 'auto'", None),
    ],
)
def test_kv_memory_is_counted_as_the_engine_does(
    tmp_path: Path, target: str, complaint: str | None
) -> None:
    config = _config(tmp_path, target)
    files = {config.target.model: ModelFiles(Path(config.target.model), "float32")}
    ray_runs = "resources" in target
    if complaint is None:
        check_workers(config, files, ray_runs=ray_runs)
        if not ray_runs:
            _load(config)
        return
    with pytest.raises(ConfigError, match=complaint):
        check_workers(config, files, ray_runs=ray_runs)
    if not ray_runs:
        with pytest.raises(ConfigError, match=complaint):
            _load(config)


def test_a_drafter_that_the_memory_does_not_hold_is_named(tmp_path: Path) -> None:
    long = make_tiny_checkpoint(tmp_path / "long", max_position_embeddings=4096)
    config = _config(tmp_path, "kv_memory = 131072", f'[[drafters]]\nmodel = "{long}"')
    files = {name: ModelFiles(Path(name), "float32") for name in (config.target.model, str(long))}
    with pytest.raises(ConfigError, match=r"^drafter '.*long': target.kv_memory of 131072 bytes"):
        check_workers(config, files, ray_runs=False)


def test_a_drafter_of_another_vocabulary_needs_the_targets_tokenizer(tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)

    def check(options: str) -> None:
        config = _config(tmp_path, "", f'[[drafters]]\nmodel = "{other}"\noptions = {options}')
        names = (config.target.model, str(other))
        files = {name: ModelFiles(Path(name), "float32") for name in names}
        check_workers(config, files, ray_runs=False)

    own = tmp_path / "target"
    with pytest.raises(VocabularyMismatchError, match=rf'translate, with .* "{own}"'):
        check("{}")
    with pytest.raises(VocabularyMismatchError, match=r"options\.tokenizer \(.*other\) does not"):
        check(f'{{ tokenizer = "{other}" }}')
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        check(f'{{ tokenizer = "{tmp_path}" }}')
    with pytest.raises(ConfigError, match="an absolute path"):
        check('{ tokenizer = "target" }')
    check(f'{{ tokenizer = "{own}" }}')


def _config(folder: Path, target: str, drafters: str = "drafters = []") -> Config:
    model = make_tiny_checkpoint(folder / "target")
    path = folder / "config.toml"
    head, tail = (drafters, "") if drafters.startswith("drafters") else ("", drafters)
    path.write_text(f'{head}\n[target]\nmodel = "{model}"\n{target}\n{tail}\n')
    return load_config(path, {})


def _load(config: Config) -> None:
    """Load the configuration's target as a worker does."""
    target = config.target
    assert target.kv_memory != "auto"
    open_engine(
        Path(target.model),
        weights="float32",
        threads=1,
        kv_memory_bytes=target.kv_memory,
        max_model_len=None if target.max_model_len == "auto" else target.max_model_len,
        device="cpu",
        dtype=target.dtype,
    )


def _rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "The fox"}\n')
    return path
