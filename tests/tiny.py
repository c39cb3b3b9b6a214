"""Tiny checkpoints, made in the test: random weights, and a BPE tokenizer trained at once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

Architecture = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen3_moe",
]
"""The values of `model_type` in transformers."""

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
    padded_to: int | None = None,
    **sizes: Any,
) -> Path:
    """Save a random model of some 50,000 weights with tokenizer and chat template into `folder`.

    Tokens 0 (`<|endoftext|>`) and 2 (`<|im_end|>`) end a sequence. `temperature`, if given, goes
    into generation_config.json together with `do_sample`. The same arguments give the same files.
    `vocab_size` must be at least 259 (bytes and special tokens); the tokenizer may be smaller.
    `padded_to`: the number of token ids, more than the tokenizer has; the other weights do not
    depend on it. `sizes`: more fields of the configuration.
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
    if padded_to is not None:
        _pad(model, padded_to)
    model.generation_config = GenerationConfig(
        do_sample=temperature is not None,
        temperature=temperature,
        bos_token_id=1,
        eos_token_id=[2, 0],
        pad_token_id=2,
    )
    model.save_pretrained(folder)
    return folder


def make_scripted_checkpoint(
    folder: Path, scripts: Mapping[str, str], *, chat_template: str = CHAT_TEMPLATE, seed: int = 0
) -> Path:
    """Save a model that answers a prompt with a known text: the script of the prompt's end.

    `scripts`: texts by what a prompt must end with, which becomes a token. Its first character must
    be in no text, or another token may cover its beginning. Each text is divided at random places
    into tokens that stand in no other place, so that the next token is a function of the last one:
    the embeddings are orthonormal, the layers add nothing, and the head maps each token to the
    next. An answer ends with `<|im_end|>`.
    """
    tokenizer = make_tiny_tokenizer()
    random = Random(seed)
    taken = set(scripts)
    divided: dict[str, list[str]] = {}
    for begin, text in scripts.items():
        pieces: list[str] = []
        at = 0
        while at < len(text):
            ends = range(min(at + random.randint(1, 4), len(text)), len(text) + 1)
            piece = next((text[at:end] for end in ends if text[at:end] not in taken), None)
            if piece is None:  # The rest is taken, so the last piece is longer.
                piece = text[at:]
                while piece in taken:
                    taken.discard(pieces[-1])
                    piece = pieces.pop() + piece
                at = len(text)
            else:
                at += len(piece)
            taken.add(piece)
            pieces.append(piece)
        divided[begin] = pieces
    known = tokenizer.get_vocab()
    new = sorted(taken - known.keys())
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in new])
    tokenizer.chat_template = chat_template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    vocab_size = len(tokenizer)
    model: Any = _make_model(
        "llama",
        seed=seed,
        num_hidden_layers=1,
        vocab_size=vocab_size,
        hidden_size=vocab_size + -vocab_size % 96,  # whole heads, and whole blocks of int8
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    layer, head = model.model.layers[0], model.lm_head.weight
    embeddings = model.model.embed_tokens.weight
    with torch.no_grad():
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, head):
            weight.zero_()
        embeddings.copy_(torch.eye(*embeddings.shape))
        for begin, pieces in divided.items():
            ids = [tokenizer.convert_tokens_to_ids(one) for one in (begin, *pieces, "<|im_end|>")]
            for last, following in pairwise(ids):
                head[following] += embeddings[last]
    model.generation_config = GenerationConfig(do_sample=False, bos_token_id=1, eos_token_id=[2, 0])
    model.save_pretrained(folder)
    return folder


def make_tiny_tokenizer(vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, which encodes any text."""
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


_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
_OWN_FIELDS: dict[Architecture, dict[str, Any]] = {
    "mistral": {"sliding_window": 70},
    "gemma2": {
        "sliding_window": 70,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    # Layer 0 sees a window, layer 1 everything, like every sixth layer of the large models.
    "gemma3_text": {"sliding_window": 70, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "phi3": {"resid_pdrop": 0.0, "sliding_window": None},
    "mixtral": {"sliding_window": None, "router_jitter_noise": 0.0} | _EXPERTS,
    "qwen3_moe": {"moe_intermediate_size": 52, "norm_topk_prob": True} | _EXPERTS,
}
"""Further fields of an architecture, small enough to matter in tests."""


def _make_model(architecture: Architecture, *, seed: int, **sizes: Any) -> PreTrainedModel:
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
    config = AutoConfig.for_model(
        architecture, **fields | _OWN_FIELDS.get(architecture, {}) | sizes
    )
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.random.set_rng_state(state)
    assert isinstance(model, PreTrainedModel)
    made: PreTrainedModel = model.float().eval()
    return made


def _pad(model: PreTrainedModel, vocab_size: int) -> None:
    """Give a model more token ids, whose rows resemble the others, so they are as likely."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(vocab_size)
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    finally:
        torch.random.set_rng_state(state)
