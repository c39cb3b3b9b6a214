"""Checkpoint folders: what is read from them, and how broken ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError, ConfigError
from tests.tiny import make_tiny_checkpoint
from workers.engine.cpu.engine import CpuEngine
from workers.engine.load.checkpoint import describe_checkpoint, inspect_checkpoint
from workers.engine.slices import Slice

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("whole") / "tiny")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_what_is_read(whole: Path) -> None:
    info = inspect_checkpoint(whole)
    assert (info.name, info.vocab_size, info.max_model_len) == ("tiny", 384, 512)
    assert info.end_token_ids == (2, 0)
    assert info.dtype == "float32"
    assert info.default_sampling.greedy
    assert len(info.vocabulary_digest) == 32


@pytest.mark.parametrize("left_out", [(), ("eos_token_id",), ("dtype", "model_type")])
def test_a_description_is_that_of_an_inspection(folder: Path, left_out: tuple[str, ...]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert {"dtype", "eos_token_id", "model_type"} <= set(config)
    if "model_type" in left_out:
        path.write_text(json.dumps({key: config[key] for key in config if key not in left_out}))
        with pytest.raises(CheckpointError, match=r"config\.json is not usable"):
            describe_checkpoint(folder)
        return
    path.write_text(json.dumps({key: config[key] for key in config if key not in left_out}))
    assert describe_checkpoint(folder) == inspect_checkpoint(folder)


@pytest.mark.parametrize("value", ["many", None, [1]])
def test_a_description_refuses_numbers_that_are_none(folder: Path, value: object) -> None:
    edit_json(folder / "config.json", vocab_size=value)
    with pytest.raises(CheckpointError):
        describe_checkpoint(folder)


def test_sampling_defaults_are_the_checkpoints(folder: Path) -> None:
    generation = folder / "generation_config.json"
    edit_json(generation, do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    sampling = inspect_checkpoint(folder).default_sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 0)
    assert sampling.repetition_penalty == 1.1
    generation.unlink()
    assert inspect_checkpoint(folder).default_sampling.greedy
    assert inspect_checkpoint(folder).end_token_ids == (2,)


def test_vocabulary_digest_tells_tokenizers_apart(whole: Path, tmp_path: Path) -> None:
    same = make_tiny_checkpoint(tmp_path / "same", seed=5)
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    digest = inspect_checkpoint(whole).vocabulary_digest
    assert inspect_checkpoint(same).vocabulary_digest == digest
    assert inspect_checkpoint(other).vocabulary_digest != digest


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def cut_weights(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def pickle_only(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def drop_tensor(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]

    edit_tensors(folder, change)


def bend_tensor(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(47)

    edit_tensors(folder, change)


def index_of_missing_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (remove("config.json"), ["config.json", "missing"]),
        (write("config.json", "{"), ["config.json", "JSON"]),
        (write("config.json", "[]"), ["config.json", "object"]),
        (config(model_type="no-such-model"), ["config.json", "no-such-model"]),
        (config(num_attention_heads=7), ["config.json", "not a multiple", "(48)", "(7)"]),
        (config(auto_map={"AutoModel": "code.Model"}), ["auto_map", "never"]),
        (
            config(model_type="qwen2", layer_types=["full_attention", "chunked_attention"]),
            ["chunked_attention", "not supported"],
        ),
        (config(quantization_config={"quant_method": "gptq"}), ["quantized (gptq)", "bfloat16"]),
        (remove(WEIGHTS), ["no weights", WEIGHTS]),
        (cut_weights, [WEIGHTS, "fetch it again"]),
        (write(WEIGHTS, "not tensors at all"), [WEIGHTS, "fetch it again"]),
        (pickle_only, ["pytorch_model.bin", "safetensors"]),
        (drop_tensor, ["model.norm.weight", WEIGHTS, "missing"]),
        (bend_tensor, ["model.norm.weight", WEIGHTS, "(47,)", "(48,)"]),
        (index_of_missing_file, ["model-00001-of-00002.safetensors", "missing"]),
        (remove("tokenizer.json"), ["tokenizer.json"]),
        (write("tokenizer.json", "{}"), ["tokenizer.json", "not a usable"]),
        (config(vocab_size=300), ["(384, 48)", "(300, 48)"]),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(
    folder: Path, breakage: Callable[[Path], None], words: list[str]
) -> None:
    breakage(folder)
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert str(folder) in message or message.startswith("tensor")


def shard(folder: Path, *, index: dict[str, int], hold: Callable[[str], tuple[int, ...]]) -> None:
    """Cut the weights into two files, numbered 0 and 1.

    `hold`: the files that have a tensor. `index`: the file that the index names for a tensor; 0 for
    tensors that are not in it.
    """
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, file in enumerate(files):
        held = {name: tensor for name, tensor in tensors.items() if number in hold(name)}
        save_file(held, folder / file, metadata={"format": "pt"})
    weight_map = {name: files[index.get(name, 0)] for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


NORM = "model.norm.weight"


def in_the_other(name: str) -> tuple[int, ...]:
    return (1,) if name == NORM else (0,)


def test_an_index_and_its_files_that_disagree(folder: Path) -> None:
    shard(folder, index={}, hold=in_the_other)
    with pytest.raises(CheckpointError, match=rf"{NORM} \(48,\) is missing in .*00001.*{INDEX}"):
        inspect_checkpoint(folder)


def test_a_tensor_in_two_files_is_that_of_the_file_in_the_index(folder: Path, whole: Path) -> None:
    shard(folder, index={NORM: 0}, hold=lambda name: (0, 1) if name == NORM else (0,))
    second = folder / "model-00002-of-00002.safetensors"
    save_file({NORM: torch.full((47,), 3.0)}, second, metadata={"format": "pt"})
    assert inspect_checkpoint(folder).vocab_size == 384
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.layers.0.mlp.up_proj.weight"]  # it is in a file nevertheless
    (folder / INDEX).write_text(json.dumps(index))
    engines = [CpuEngine(one, threads=1, kv_memory_bytes=1 << 20) for one in (whole, folder)]
    rows = [engine.step([Slice([0], 0, [5, 6, 7], 3)]) for engine in engines]
    assert torch.equal(*rows)


def test_a_tensor_that_neither_index_nor_files_have(folder: Path) -> None:
    drop_tensor(folder)
    shard(folder, index={}, hold=lambda name: (0,))
    with pytest.raises(CheckpointError, match=rf"{NORM} \(48,\) is missing in .*{INDEX}"):
        inspect_checkpoint(folder)


def test_numbers_of_a_kind_that_nothing_tells_of(folder: Path) -> None:
    """Float8 weights with scales that config.json does not mention would be wrong silently."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=r"up_proj.* holds F8_E4M3, expected one of .*BF16"):
        inspect_checkpoint(folder)


def test_trainings_of_one_model_are_told_apart(whole: Path, tmp_path: Path) -> None:
    same, other = (make_tiny_checkpoint(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    assert inspect_checkpoint(same).digest == inspect_checkpoint(whole).digest
    assert inspect_checkpoint(other).digest != inspect_checkpoint(whole).digest


def test_a_long_cause_is_cut(folder: Path) -> None:
    edit_json(folder / "config.json", hidden_size="x" * 5000)
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder)
    _, _, cause = str(caught.value).partition("is not usable: ")
    assert "'hidden_size' expected int" in cause
    assert len(cause) == 300
    assert cause.endswith("...")


def test_an_absent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint folder at .*nowhere"):
        inspect_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("length", [0, 513])
def test_a_length_that_the_model_does_not_have_is_refused(whole: Path, length: int) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be from 1 to the checkpoint's 512"):
        CpuEngine(whole, threads=1, kv_memory_bytes=1 << 22, max_model_len=length)


def test_too_little_kv_memory_is_refused_with_the_amount_needed(whole: Path) -> None:
    with pytest.raises(ConfigError, match="give at least 131072 bytes"):
        CpuEngine(whole, threads=1, kv_memory_bytes=1 << 16)
    assert CpuEngine(whole, threads=1, kv_memory_bytes=131072).num_blocks == 4
