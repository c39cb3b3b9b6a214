"""`target.tensor_parallel` on the command line: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.conftest import Call
from tests.tiny import make_tiny_checkpoint


@pytest.mark.parametrize("command", ["up", "generate"])
def test_more_shards_than_heads_are_refused_with_the_numbers(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    model = make_tiny_checkpoint(tmp_path / "target")
    config = tmp_path / "many.toml"
    config.write_text(
        f'drafters = []\n[target]\nmodel = "{model}"\ntensor_parallel = 7\n'
        "[server]\ngrpc_port = 0\n"
    )
    output = tmp_path / "out.jsonl"
    files = ["--input", _rows(tmp_path), "--output", output]
    called = call(command, *([config] if command == "up" else ["--config", config, *files]))
    assert called.code == 2
    assert "tensor_parallel is 7, but the model has 6 attention heads" in called.stderr
    assert not output.exists()


def _rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "The fox"}\n')
    return path
