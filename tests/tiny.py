"""Tiny checkpoints, made in the test: random weights and a BPE tokenizer trained on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Architecture = Literal["llama", "qwen2", "qwen3"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CORPUS = (
    "The quick brown fox jumps over the lazy dog while the rain falls on the plain.",
    "def add(left: int, right: int) -> int:\n    return left + right\n",
    "A train leaves the station at 9 o'clock and travels 60 km an hour; how far is it at noon?",
    "Write a short poem about the sea, the wind and an old lighthouse keeper.",
    "Übung macht den Meister, und Geduld bringt Rosen. Ça va très bien, merci !",
    "user: hello\nassistant: hello, how can I help you today?\n",
)


def make_tiny_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = 384,
    max_position_embeddings: int = 512,
    architecture: Architecture = "llama",
    tie_word_embeddings: bool = True,
    temperature: float | None = None,
    num_layers: int = 2,
    **sizes: Any,
) -> Path:
    """Save a random model of some 50,000 weights with tokenizer and chat template into `folder`.

    Token 0 (`<|endoftext|>`) and 2 (`<|im_end|>`) end a sequence. `temperature`, if given, goes
    into generation_config.json together with `do_sample`. The same arguments give the same files.
    `vocab_size` must be at least 259 (bytes and special tokens); the tokenizer may be smaller.
    `sizes` are more fields of the configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tiny_tokenizer(vocab_size)
    tokenizer.save_pretrained(folder)
    model = _make_model(
        architecture,
        seed=seed,
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        **sizes,
    )
    model.generation_config = GenerationConfig(
        do_sample=temperature is not None,
        temperature=temperature,
        bos_token_id=1,
        eos_token_id=[2, 0],
        pad_token_id=2,
    )
    model.save_pretrained(folder)
    return folder


def make_tiny_tokenizer(vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, any text goes through it."""
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size must be at least 259, got {vocab_size}")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _make_model(architecture: Architecture, *, seed: int, **sizes: Any) -> PreTrainedModel:
    kinds: dict[Architecture, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_type, model_type = kinds[architecture]
    fields = {
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        # Larger than usual, so that the logits of a random model have clear winners.
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    config = config_type(**fields | sizes)
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = model_type(config)
    finally:
        torch.random.set_rng_state(state)
    return model.to(torch.float32).eval()
