"""What the target's checkpoint cannot have is refused on the command line, with the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.conftest import Call
from tests.tiny import make_tiny_checkpoint

REFUSED = {
    "tensor_parallel = 7": "tensor_parallel is 7, but the model has 6 attention heads",
    "max_model_len = 600": "target.max_model_len must be from 1 to the checkpoint's 512, got 600",
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
        f'drafters = []\n[target]\nmodel = "{model}"\n{key}\n[server]\ngrpc_port = 0\n'
    )
    output = tmp_path / "out.jsonl"
    files = ["--input", _rows(tmp_path), "--output", output]
    called = call(command, *([config] if command == "up" else ["--config", config, *files]))
    assert called.code == 2
    assert REFUSED[key] in called.stderr
    assert not output.exists()


def _rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "The fox"}\n')
    return path
