"""Turns a GGUF file into a checkpoint folder: float32 safetensors, tokenizer, generation_config.

It runs as a program of its own (`python -m workers.models.gguf_conversion SOURCE.gguf FOLDER`), so
that its memory, several times the checkpoint's size, is freed when it ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# GGUF's names of pre-tokenizers that separate digits before the byte-level split. transformers
# rebuilds every "gpt2" tokenizer with the byte-level split only.
_SPLITS_DIGITS = {"smollm", "starcoder", "refact", "command-r", "exaone", "codeshell"}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def _gguf_field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _save_tokenizer(source: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    reader = GGUFReader(source)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if _gguf_field(reader, "tokenizer.ggml.pre") in _SPLITS_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokens = _gguf_field(reader, "tokenizer.ggml.tokens")
    kinds = _gguf_field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.model_max_length = _gguf_field(reader, "llama.context_length") or int(1e9)
    tokenizer.save_pretrained(folder)


def _save_model(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    # transformers marks a model that it read from GGUF as quantized, and refuses to save it,
    # although the weights are plain float32. A second model with the same config has no such mark.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    # End tokens only, and no sampling values: the checkpoint's default is then greedy.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.save_pretrained(folder)


def convert(source: Path, folder: Path) -> None:
    """Write the checkpoint of `source` into `folder`, which must exist."""
    _save_tokenizer(source, folder)
    _save_model(source, folder)


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source, folder = sys.argv[1:]
    convert(Path(source), Path(folder))


if __name__ == "__main__":
    main()
