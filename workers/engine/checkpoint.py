"""Looking at a checkpoint folder before anything is loaded, and refusing it in plain words.

Only safetensors and a fast tokenizer are accepted; no code and no pickle from a checkpoint is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from paceline.errors import CheckpointError
from paceline.sampling import SamplingParams

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LONGEST_CAUSE = 300  # Characters of somebody else's message.


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What the rest of the system must know of a checkpoint."""

    name: str
    """The folder's name."""
    vocab_size: int
    """Length of a row of logits."""
    vocabulary_digest: bytes
    """SHA-256 over the tokenizer's (token, id) pairs: a drafter's must equal its target's."""
    max_model_len: int
    """Positions that the model was made for, prompt and output together."""
    end_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    """From generation_config.json: greedy unless it sets do_sample."""
    dtype: str
    """In which the weights are stored, such as "float32"."""


def inspect_checkpoint(folder: Path) -> CheckpointInfo:
    """Check the folder's files, without reading weights. Raises CheckpointError."""
    config = read_config(folder)
    _check_attention(folder, config)
    _check_tensors(folder, config, find_weight_files(folder))
    generation = _read_json(folder / "generation_config.json", required=False)
    end_tokens = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    if end_tokens is None:
        end_tokens = []
    vocab_size = int(config.vocab_size)
    return CheckpointInfo(
        name=folder.name,
        vocab_size=vocab_size,
        vocabulary_digest=_digest_vocabulary(folder, vocab_size),
        max_model_len=int(config.max_position_embeddings),
        end_token_ids=tuple(end_tokens) if isinstance(end_tokens, list) else (int(end_tokens),),
        default_sampling=_default_sampling(generation),
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
    )


def read_config(folder: Path) -> PreTrainedConfig:
    """The checkpoint's configuration. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(
            f"no checkpoint folder at {folder}: give a folder with config.json, safetensors and "
            "tokenizer.json, or a name that `paceline models list` shows"
        )
    raw = _read_json(folder / "config.json", required=True)
    if "auto_map" in raw:
        raise CheckpointError(
            f"{folder / 'config.json'} wants code from the checkpoint to be run (auto_map), which "
            "Paceline never does: use a checkpoint of an architecture that transformers has"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(f"{folder / 'config.json'} is not usable: {_line(error)}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def find_weight_files(folder: Path) -> dict[str, Path]:
    """The file of each stored tensor, by the tensor's name. Raises CheckpointError."""
    if (folder / _INDEX).is_file():
        weight_map = _read_json(folder / _INDEX, required=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{folder / _INDEX} has no weight_map: fetch the checkpoint again"
            )
        return {str(name): folder / str(file) for name, file in weight_map.items()}
    path = folder / _WEIGHTS
    if not path.is_file():
        pickles = sorted(found.name for glob in _PICKLES for found in folder.glob(glob))
        if pickles:
            raise CheckpointError(
                f"{folder} has its weights only in pickle files ({', '.join(pickles)}), which can "
                "run code when read: convert them to safetensors"
            )
        raise CheckpointError(f"{folder} has no weights: expected {_WEIGHTS} or {_INDEX}")
    return dict.fromkeys(_read_shapes(path), path)


def _check_attention(folder: Path, config: PreTrainedConfig) -> None:
    """Refuse what our attention does not compute."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and not kinds:
        kinds = {"sliding_attention"} if window < config.max_position_embeddings else kinds
    if kinds:
        raise CheckpointError(
            f"{folder / 'config.json'}: layers of kind {', '.join(sorted(kinds))} are not "
            "supported yet: use a checkpoint with full attention in every layer"
        )


def _check_tensors(
    folder: Path, config: PreTrainedConfig, weight_files: Mapping[str, Path]
) -> None:
    """Compare names and shapes in the files with those of the model."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(weight_files.values())):
        shapes.update(_read_shapes(path))
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(
            f"{folder / 'config.json'}: not a causal language model that can be built: "
            f"{_line(error)}"
        ) from error
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    for name, tensor in model.state_dict().items():
        if name not in shapes:
            if name in tied:
                continue
            where = weight_files.get(name, folder / _WEIGHTS)
            raise CheckpointError(
                f"tensor {name} {tuple(tensor.shape)} is missing in {where}: the checkpoint is "
                "incomplete or of another architecture than its config.json says"
            )
        if shapes[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"tensor {name} in {weight_files.get(name, folder)} has shape {shapes[name]}, but "
                f"config.json asks for {tuple(tensor.shape)}"
            )


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, though {_INDEX} names it: fetch it again")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({_line(error)}): fetch it again"
        ) from error


def _digest_vocabulary(folder: Path, vocab_size: int) -> bytes:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json: save the fast tokenizer beside the weights"
        )
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} is not a usable tokenizer: {_line(error)}") from error
    highest = max(vocabulary.values(), default=-1)
    if highest >= vocab_size:
        raise CheckpointError(
            f"{path} has token id {highest}, but config.json gives a vocabulary of {vocab_size}"
        )
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items()):
        encoded = token.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded + token_id.to_bytes(4, "little"))
    return digest.digest()


def _default_sampling(generation: Mapping[str, Any]) -> SamplingParams:
    penalty = float(generation.get("repetition_penalty") or 1.0)
    if not generation.get("do_sample"):
        return SamplingParams(temperature=0.0, repetition_penalty=penalty)

    def value(name: str, default: float) -> float:
        given = generation.get(name)
        return default if given is None else float(given)

    return SamplingParams(
        temperature=value("temperature", 1.0),
        top_k=int(value("top_k", 0)),
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        repetition_penalty=penalty,
    )


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path} is missing: this is no checkpoint folder")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content


def _line(error: Exception) -> str:
    """An error's message as one line; what makes it very long is left out."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LONGEST_CAUSE else f"{words[: _LONGEST_CAUSE - 3]}..."
