"""Drafters that share their target's embedding and LM head: what they learned, and whole folders.

A learned folder has only the tensors that are not the target's own (`learned-N.safetensors`), and
`distilled.json`. `assemble` makes a checkpoint folder of it, for which it needs the target's.

Keys of `distilled.json`: `files`, number of files of tensors (above 1 in older folders); `target`,
digest of the target's embedding; `layers`, those of the target that the student began with; `head`,
the ids that it proposes; `mask_token`, the id whose embedding is the learned mask, or null; and
what is for people: recipe, progress, acceptance.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError
from workers.engine.load.checkpoint import DRAFT_TOKENS
from workers.process.atomic_files import replaced_folder

DESCRIPTION = "distilled.json"
"""The file of a learned drafter that says what was learned and how."""
MASK = "mask"
"""The name of the learned embedding of a mask token."""
EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SCALE = ":scale"
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
)


def write_learned(
    folder: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any]
) -> None:
    """Write matrices with 8 bits and a scale for each row, and other tensors in float16.

    What was there before stays until the new files are whole. Raises OSError.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        weight = tensor.detach().float().cpu()
        if weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
            stored[name] = (weight / scale).round().to(torch.int8)
            stored[name + _SCALE] = scale
        else:
            stored[name] = weight.to(torch.float16).contiguous()
    with replaced_folder(folder) as made:
        _save(stored, made / "learned-1.safetensors")
        (made / DESCRIPTION).write_text(json.dumps({**description, "files": 1}) + "\n")


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:  # a full disk, among others
        raise OSError(str(error)) from error


def read_learned(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors in float32, and the description. Raises CheckpointError."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        stored: dict[str, Tensor] = {}
        for number in range(1, description["files"] + 1):
            stored |= load_file(folder / f"learned-{number}.safetensors")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} is no whole folder of a learned drafter: {error}"
        ) from error
    tensors = {
        name: tensor.float() * stored.get(name + _SCALE, 1.0)
        for name, tensor in stored.items()
        if not name.endswith(_SCALE)
    }
    return tensors, description


def embedding_digest(embedding_VF: Tensor) -> str:
    """The digest by which a learned drafter knows its target: SHA-256 of the embedding's values."""
    values = embedding_VF.detach().to("cpu", torch.float32).contiguous().numpy()
    return hashlib.sha256(values.data).hexdigest()


def shared_tensors(target: Path) -> dict[str, Tensor]:
    """The target's embedding and, if it is not the same, LM head. Raises CheckpointError."""
    found: dict[str, Tensor] = {}
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            names = set(stored.keys()) & {EMBEDDING, _HEAD}
            found |= {name: stored.get_tensor(name) for name in names}
    if EMBEDDING not in found:
        raise CheckpointError(f"{target} has no {EMBEDDING}: expected the checkpoint of a target")
    return found


def assemble(target: Path, learned: Path, into: Path) -> None:
    """Write the checkpoint of a learned drafter, in float16, into an empty folder.

    Raises CheckpointError if the drafter is another target's, OSError if the disk is full.
    """
    tensors, description = read_learned(learned)
    shared = shared_tensors(target)
    digest = embedding_digest(shared[EMBEDDING])
    if digest != description["target"]:
        raise CheckpointError(
            f"the drafter in {learned} was distilled from another target than {target}: its "
            f"embedding has digest {description['target'][:12]}, that of the target {digest[:12]}; "
            "distill one from this target (`paceline distill`)"
        )
    mask = tensors.pop(MASK, None)
    if mask is not None:
        shared[EMBEDDING][description["mask_token"]] = mask.to(shared[EMBEDDING].dtype)
    tensors = {f"model.{name}": tensor for name, tensor in tensors.items()} | shared
    halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in tensors.items()}
    config = json.loads((target / "config.json").read_text())
    layers = description["layers"]
    config |= {"num_hidden_layers": len(layers), "dtype": "float16"}
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer] for layer in layers]
    if mask is not None:
        config["pard_token"] = description["mask_token"]

    for name in _COPIED:
        if (target / name).is_file():
            shutil.copyfile(target / name, into / name)
    _save(halves, into / "model.safetensors")
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(description["head"]) < int(config["vocab_size"]):
        (into / DRAFT_TOKENS).write_text(json.dumps(description["head"]) + "\n")
