"""Makes the stand-in, a checkpoint for emulated models: a tokenizer, a config, and zero weights.

The driver reads the tokenizer and the defaults of a target's checkpoint, even of an emulated one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

EDITION = 2
"""Increase this if the files change, since a user's cache may have an older edition."""

VOCAB_SIZE = 4096
NUM_RESERVED = 16
"""Token ids below this are special tokens, which an emulated text does not have."""
MAX_MODEL_LEN = 8192
END_TOKEN_ID = 2
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""The prompt of a chat is the contents of its messages, in order."""


def stand_in_in(models: Path) -> Path:
    """The stand-in's folder in `models`, made if absent. Several processes may call it at once."""
    folder = models / f"stand-in-{EDITION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        make_stand_in(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def make_stand_in(folder: Path) -> Path:
    """Write the checkpoint into `folder`. Tokens are numbered words; token 2 ends a sequence."""
    # Here, since those who need only the numbers above do without torch.
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    words = [f"<|{number}|>" for number in range(NUM_RESERVED)]
    words += [f"w{number} " for number in range(NUM_RESERVED, VOCAB_SIZE)]
    vocabulary = {word: number for number, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    raw.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token=words[0],
        eos_token=words[END_TOKEN_ID],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=END_TOKEN_ID,
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = {
        name: torch.zeros(tensor.shape, dtype=torch.float32)
        for name, tensor in model.state_dict().items()
        if name not in (getattr(model, "all_tied_weights_keys", None) or {})
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": END_TOKEN_ID}), encoding="utf-8"
    )
    return folder
