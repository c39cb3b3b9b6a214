"""What no drafter of the configuration can do is refused before a cluster starts for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.conftest import Call

TWO_KINDS = "[[drafters]]\n[[drafters]]\nkind = 'ngram'\n"
REPLAYED = "[target]\nemulated = '8b-h100'\n[[drafters]]\nemulated = '1b-h100'\n"


@pytest.mark.parametrize(
    ("config", "asked", "complaint"),
    [
        ("", "generate --merge", "merge: drafters of at least two kinds"),
        ("", "trace --policy replicas", "policy: the policy 'replicas' needs at least 2 target"),
        ("", "trace --policy spread", "policy: the policy 'spread' needs at least 2"),
        ("", "verify --policy chain,spread", "policy: the policy 'spread' needs at least 2"),
        (
            TWO_KINDS,
            "verify --merge --policy chain,pearl",
            "merge: the policy 'pearl' cannot merge drafters",
        ),
        (REPLAYED, "generate --verification rejection", "candidates of the drafter 'emulated'"),
        (REPLAYED, "generate --drafter model", "no drafter of the kind 'model' is deployed"),
    ],
)
def test_refused_before_anything_starts(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    asked: str,
    complaint: str,
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    path, rows = tmp_path / "c.toml", tmp_path / "rows.jsonl"
    path.write_text(config)
    rows.write_text('{"prompt": "a b"}\n')
    command, *flags = asked.split()
    written = [] if command == "verify" else ["--output", tmp_path / "out"]
    done = call(command, "--config", path, "--input", rows, *written, *flags)
    assert done.code == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "home").exists()
