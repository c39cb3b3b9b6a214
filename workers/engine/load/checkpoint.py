"""Checks a checkpoint folder before anything is loaded; its errors say what is wrong with it.

Only safetensors and a fast tokenizer are accepted: no code from a checkpoint runs, no pickle is
read. torch and transformers, which take seconds to import, are imported where they are needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, ConfigError
from paceline.sampling import SamplingParams
from paceline.text import one_line
from workers.engine.load.stored_files import StoredFiles
from workers.engine.load.vocabulary import digest_vocabulary, read_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from workers.engine.load.stored_tensors import StoredTensors

_ASKED = {"model_type", "vocab_size", "max_position_embeddings", "eos_token_id"}

DRAFT_TOKENS = "draft_tokens.json"
"""The file of a drafter's checkpoint that lists the ids of the tokens that it proposes, without
repetition (FR-Spec, Zhao et al. 2025). On a CPU a drafter computes the logits of these tokens only.
"""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The facts about a checkpoint that other modules and processes need."""

    name: str
    """The folder's name."""
    vocab_size: int
    """The number of logits in a row."""
    vocabulary_digest: bytes
    """SHA-256 over the tokenizer's (token, id) pairs. A drafter's must equal its target's."""
    max_model_len: int
    """The number of positions that the model was made for, prompt and output together."""
    end_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    """From generation_config.json: greedy unless it sets do_sample."""
    dtype: str
    """The dtype of the stored weights, such as "float32"."""
    digest: bytes
    """SHA-256 over config.json, the names and shapes of all tensors, and the sizes and samples of
    their files. All ranks and all groups must have the same.
    """


def inspect_checkpoint(folder: Path) -> CheckpointInfo:
    """Check the folder's files, without reading weights. Raises CheckpointError."""
    config, stored = read_config(folder), open_tensors(folder)
    _check_attention(folder, config)
    for name, shape in whole_shapes(folder, config, stored).items():
        stored.check(name, shape)
    return _described(folder, config, stored)


def open_tensors(folder: Path, device: torch.device | None = None) -> StoredTensors:
    """The checkpoint's tensors, which are read to `device` (None: the CPU).

    Raises CheckpointError.
    """
    import torch

    from workers.engine.load.quantization import packing_of
    from workers.engine.load.stored_tensors import StoredTensors

    packing = packing_of(folder, _read_json(folder / "config.json", required=True))
    return StoredTensors(folder, packing, device or torch.device("cpu"))


def describe_checkpoint(folder: Path) -> CheckpointInfo:
    """As `inspect_checkpoint`, for callers that do not compute with the model.

    It imports no model code, and torch only if config.json leaves out what it asks for. So it does
    not check whether the tensors fit the architecture. Raises CheckpointError.
    """
    return _described(folder, _plain_config(folder) or read_config(folder), StoredFiles(folder))


def _plain_config(folder: Path) -> SimpleNamespace | None:
    """What a config.json of plain weights says itself; None if it leaves out some of it."""
    if not (folder / "config.json").is_file():
        return None
    raw = _read_json(folder / "config.json", required=True)
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    if dtype is None or "auto_map" in raw or "quantization_config" in raw or not set(raw) >= _ASKED:
        return None
    if not all(type(raw[key]) is int for key in ("vocab_size", "max_position_embeddings")):
        return None
    return SimpleNamespace(dtype=dtype, **{key: raw[key] for key in _ASKED})


def _described(
    folder: Path, config: PreTrainedConfig | SimpleNamespace, stored: StoredFiles | StoredTensors
) -> CheckpointInfo:
    generation = _read_json(folder / "generation_config.json", required=False)
    vocab_size = int(config.vocab_size)
    return CheckpointInfo(
        name=folder.name,
        vocab_size=vocab_size,
        vocabulary_digest=_digest_vocabulary(folder, vocab_size),
        max_model_len=int(config.max_position_embeddings),
        end_token_ids=_end_tokens(generation, getattr(config, "eos_token_id", None)),
        default_sampling=_default_sampling(generation),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        digest=hashlib.sha256(
            (folder / "config.json").read_bytes() + stored.summary().encode()
        ).digest(),
    )


def _end_tokens(generation: Mapping[str, Any], stated: Any) -> tuple[int, ...]:
    found = generation.get("eos_token_id", stated)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def end_tokens_of(folder: Path) -> tuple[int, ...]:
    """The end tokens that a folder's files name, weights or none. Raises CheckpointError."""
    config, generation = (
        _read_json(folder / name, required=False)
        for name in ("config.json", "generation_config.json")
    )
    return _end_tokens(generation, config.get("eos_token_id"))


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of the checkpoint's model with plain weights. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(
            f"no checkpoint folder at {folder}: give a folder with config.json, safetensors and "
            "tokenizer.json, or a name that `paceline models list` shows"
        )
    raw = _read_json(folder / "config.json", required=True)
    from workers.engine.load.quantization import KEY, packing_of

    packing_of(folder, raw)
    if "auto_map" in raw:
        raise CheckpointError(
            f"{folder / 'config.json'} asks to run code from the checkpoint (auto_map), which "
            "Paceline never does: use a checkpoint of an architecture that transformers has"
        )
    from transformers import AutoConfig, PreTrainedConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(
            f"{folder / 'config.json'} is not usable: {one_line(error)}"
        ) from error
    assert isinstance(config, PreTrainedConfig)
    if hasattr(config, KEY):
        delattr(config, KEY)
    return config


def draft_tokens_of(folder: Path) -> list[int] | None:
    """The ids in DRAFT_TOKENS; None if there is no such file. Raises CheckpointError."""
    path = folder / DRAFT_TOKENS
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {one_line(error)}") from error
    if not isinstance(found, list) or not all(type(one) is int for one in found) or not found:
        raise CheckpointError(f"{path}: expected a list of token ids")
    vocab_size = int(_read_json(folder / "config.json", required=True)["vocab_size"])
    if len(set(found)) < len(found) or min(found) < 0 or max(found) >= vocab_size:
        raise CheckpointError(
            f"{path}: expected ids from 0 to {vocab_size - 1} without repetition, got "
            f"{len(found)} ids from {min(found)} to {max(found)}"
        )
    return found


def choose_length(asked: int | None, own: int) -> int:
    """Maximum number of tokens of a sequence: `asked`, or the checkpoint's `own` number if None.

    Raises ConfigError if `asked` is above `own`.
    """
    if asked is None:
        return own
    if not 0 < asked <= own:
        raise ConfigError(
            f"target.max_model_len must be from 1 to the checkpoint's {own}, got {asked}"
        )
    return asked


def sliding_window_of(config: PreTrainedConfig) -> int | None:
    """The number of positions that a token of a sliding-window layer sees, its own included.

    None if there is no such layer, or if no sequence of the model can outgrow the window.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is None or not getattr(config, "use_sliding_window", True):
        return None
    if "sliding_attention" not in kinds or window >= config.max_position_embeddings:
        return None
    return int(window)


def _check_attention(folder: Path, config: PreTrainedConfig) -> None:
    """Refuse layers that our attention cannot compute (forward.py refuses what is left)."""
    if getattr(config, "vision_config", None) is not None:
        raise CheckpointError(
            f"{folder / 'config.json'}: {config.model_type} reads images, which is not supported: "
            "expected a language model alone"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise CheckpointError(
            f"{folder / 'config.json'}: {config.model_type} has multi-head latent attention "
            "(kv_lora_rank), which is not supported: expected keys and values per head"
        )
    known = {"full_attention", "sliding_attention"}
    kinds = set(getattr(config, "layer_types", None) or ()) - known
    if kinds:
        raise CheckpointError(
            f"{folder / 'config.json'}: layers of kind {', '.join(sorted(kinds))} are not "
            f"supported: expected {' or '.join(sorted(known))} in every layer"
        )


def whole_shapes(
    folder: Path, config: PreTrainedConfig, stored: StoredTensors
) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the model, without those tied to another one."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(
            f"{folder / 'config.json'}: not a causal language model that can be built: "
            f"{one_line(error)}"
        ) from error
    sinks = [name for name, _ in model.named_parameters() if name.endswith(".sinks")]
    if sinks:
        raise CheckpointError(
            f"{folder / 'config.json'}: {config.model_type} has attention sinks ({sinks[0]}), "
            "which are not supported: expected attention to keys alone"
        )
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    return {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in tied or stored.has(name)
    }


def _digest_vocabulary(folder: Path, vocab_size: int) -> bytes:
    vocabulary = read_tokenizer(folder).get_vocab(with_added_tokens=True)
    highest = max(vocabulary.values(), default=-1)
    if highest >= vocab_size:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'} has token id {highest}, but config.json gives a "
            f"vocabulary of {vocab_size}"
        )
    return digest_vocabulary(vocabulary)


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
            raise CheckpointError(f"{path} is missing: this is not a checkpoint folder")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content
