"""Models by their names on the hub, with the real huggingface_hub and a hub of our own.

huggingface_hub reads its variables once, so each case runs in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_tiny_checkpoint
from tests.workers.models.hub_server import Hub, commit_of, serving_hub
from workers.models.hub import is_hub_name

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from pathlib import Path
from paceline.errors import PacelineError
from workers.models.catalog import resolve_model
told = set()
for name in sys.argv[2:]:
    try:
        print(resolve_model(name, home=Path(sys.argv[1]), progress=told.add).folder)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}")
for one in sorted(told, key=lambda one: one.done or 0):
    print(one.stage, one.done, one.total)
"""


def resolve(home: Path, *names: str, **variables: str) -> list[str]:
    """A line for each name: its folder, or the error; then the stages that were told."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"HF_HOME": str(home / "hf"), "no_proxy": "127.0.0.1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(home), *names],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    main = make_tiny_checkpoint(folder / "org" / "tiny" / "main")
    for name in ("modeling_evil.py", "pytorch_model.bin", "weights.pt", "README.md"):
        (main / name).write_text("never fetched")
    (main / "onnx").mkdir()
    (main / "onnx" / "model.safetensors").write_text("another form")
    shutil.copytree(main, folder / "org" / "tiny" / "v2")
    return folder


def test_a_name_is_fetched_once_and_used_without_the_hub(
    repositories: Path, tmp_path: Path
) -> None:
    def served(hub: Hub) -> dict[str, str]:
        return {"HF_ENDPOINT": hub.address}

    with serving_hub(repositories) as hub:
        folder, other, wrong, absent, *stages = resolve(
            tmp_path, "org/tiny", "org/tiny@v2", "org/tiny@v3", "org/absent", **served(hub)
        )
        assert (Path(folder).name, Path(other).name) == (commit_of("main"), commit_of("v2"))
        wanted = repositories / "org" / "tiny" / "main"
        fetched = {path.name for path in Path(folder).rglob("*") if path.is_file()}
        assert fetched >= {"config.json", "tokenizer.json", "model.safetensors"}
        assert all(
            (Path(folder) / one).read_bytes() == (wanted / one).read_bytes() for one in fetched
        )
        assert not [one for one in fetched if Path(one).suffix in (".py", ".bin", ".pt", ".md")]
        assert not (Path(folder) / "onnx").exists()
        assert wrong.startswith("CheckpointError: model 'org/tiny@v3': the repository org/tiny has")
        assert absent.startswith("CheckpointError: model 'org/absent' is neither a folder here nor")
        size = (wanted / "model.safetensors").stat().st_size
        assert stages[0] == "downloading None None"
        assert int(stages[-1].split()[1]) >= size
        num_asked = len(hub.asked)
        assert resolve(tmp_path, "org/tiny", **served(hub)) == [folder]
        assert len(hub.asked) == num_asked
    # Without the hub: what is in the cache is used, anything else is an error that says what to do.
    for variables in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        kept, other = resolve(tmp_path, "org/tiny", "org/other", **variables)[:2]
        assert kept == folder
        assert other.startswith(
            "ModelFetchError: model 'org/other' is not a folder here, and could"
        )
        assert "hf download org/other --local-dir FOLDER" in other


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("org/name", True),
        ("org/Name-1.5b_x@refs/pr/1", True),
        ("org/name@0123abcd", True),
        ("name", False),
        ("./org/name", False),
        ("/org/name", False),
        ("org/name/more", False),
        ("../name", False),
        ("org/..", False),
        ("org/name@", False),
        ("org/name@-x", False),
        ("org/" + "x" * 97, False),
    ],
)
def test_what_a_name_on_the_hub_is(name: str, is_one: bool) -> None:
    assert is_hub_name(name) is is_one
