"""Latency profiles and memory, derived from a model's shape and a card's published figures.

Arithmetic, not a measurement: `pass = (memory^4 + compute^4)^(1/4) + launch + all-reduces`. The
profiles in the folder `profiles` that say "derived" come from this formula.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import ConfigError
from workers.emulated.latency_profiles import DeviceProfile, PassTimes

BATCHES = (1, 8, 64, 256)
TOKENS = (1, 16, 64, 256, 1024, 4096)
GIB = 2**30
USABLE_MEMORY = 0.9
"""The share of a card's memory that an engine takes for weights and KV (docs/gpu.md)."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=1_000_000)]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Card(_Closed):
    """A GPU, by its published figures.

    `memory_gb` (of 1e9 bytes) and `bandwidth_gb_s`: of its own memory. `dense_tflops`: bfloat16,
    without sparsity. `link_gb_s`: to its neighbors on the host, in each direction. `source`: where
    the figures come from.
    """

    memory_gb: _Positive
    bandwidth_gb_s: _Positive
    dense_tflops: _Positive
    link_gb_s: _Positive
    source: Annotated[str, Field(min_length=1)]

    @property
    def usable_bytes(self) -> float:
        """Bytes for weights and KV."""
        return USABLE_MEMORY * self.memory_gb * 1e9


def _card(memory: float, bandwidth: float, tflops: float, link: float, source: str) -> Card:
    return Card(
        memory_gb=memory,
        bandwidth_gb_s=bandwidth,
        dense_tflops=tflops,
        link_gb_s=link,
        source=source,
    )


CARDS: Mapping[str, Card] = {
    "h100-sxm": _card(80, 3350, 989, 450, "NVIDIA H100 datasheet, SXM column; NVLink 900 GB/s"),
    "h200": _card(141, 4800, 989, 450, "NVIDIA H200 datasheet, SXM column; NVLink 900 GB/s"),
    "b200": _card(180, 8000, 2250, 900, "NVIDIA DGX B200 datasheet, an eighth; NVLink 1.8 TB/s"),
    "a100-80g": _card(80, 2039, 312, 300, "NVIDIA A100 datasheet, 80GB SXM; NVLink 600 GB/s"),
    "l40s": _card(48, 864, 362, 32, "NVIDIA L40S datasheet; PCIe 4.0 x16, 64 GB/s"),
    "l4": _card(24, 300, 121, 32, "NVIDIA L4 datasheet, half of its sparse figure; PCIe 4.0 x16"),
}
"""Dense bfloat16; where a datasheet names a rate with sparsity, half of it. A link's datasheet
figure counts both directions; here it is one."""


class Shape(_Closed):
    """The shape of a dense decoder-only model, under the names of its config.json."""

    hidden_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    intermediate_size: _Count
    vocab_size: Annotated[int, Field(ge=1, le=10_000_000)]
    head_dim: _Count | None = None
    tie_word_embeddings: bool = False
    weight_bytes: Annotated[float, Field(gt=0, le=4)] = 2.0
    """Bytes of a weight: 2 is bfloat16. Keys and values have 2."""

    @property
    def num_weights(self) -> int:
        """All weights: layers of gated feed-forwards, norms, and the embeddings."""
        hidden, head = self.hidden_size, self._head_dim
        attention = hidden * head * 2 * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + hidden

    @property
    def bytes_of_weights(self) -> float:
        return self.num_weights * self.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of a token, over all layers."""
        return 2 * 2 * self.num_hidden_layers * self.num_key_value_heads * self._head_dim

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


def _shape(*numbers: int, tied: bool = False, head: int | None = None) -> Shape:
    hidden, layers, heads, kv_heads, inner, vocabulary = numbers
    return Shape(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        head_dim=head,
        tie_word_embeddings=tied,
    )


SHAPES: Mapping[str, Shape] = {
    "llama-3-70b": _shape(8192, 80, 64, 8, 28_672, 128_256),
    "llama-3-8b": _shape(4096, 32, 32, 8, 14_336, 128_256),
    "llama-3.2-1b": _shape(2048, 16, 32, 8, 8192, 128_256, tied=True, head=64),
    "qwen2.5-0.5b": _shape(896, 24, 14, 2, 4864, 151_936, tied=True),
}
"""Shapes that have a name. Others come from a config.json."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What of the published figures a pass reaches: shares, and `launch_ms` of a pass."""

    bandwidth_share: float
    compute_share: float
    launch_ms: float


EFFICIENCY: Mapping[Literal["target", "drafter"], Efficiency] = {
    "target": Efficiency(0.7, 0.6, 0.6),
    "drafter": Efficiency(0.55, 0.4, 1.15),
}
"""A drafter's kernels are short. docs/planning.md compares this with what was measured."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """What an all-reduce among the cards of a target group costs.

    `us`: microseconds for a few bytes. `gb_s`: of the slowest link, in each direction.
    """

    us: float
    gb_s: float

    def ms(self, shape: Shape, cards: int, tokens: int) -> float:
        """Milliseconds of all of a pass's: two a layer, each of a row of hidden states a token."""
        sent = 2 * (cards - 1) / cards * 2 * shape.hidden_size * tokens
        return 2 * shape.num_hidden_layers * (self.us * 1e-3 + sent / self.gb_s * 1e-6)


def derived_profile(
    name: str,
    shape: Shape,
    card: Card,
    efficiency: Efficiency,
    *,
    role: Literal["target", "drafter"],
    card_name: str,
    cards: int = 1,
    hosts: int = 1,
    reduction: Reduction | None = None,
    context: int = 1024,
) -> DeviceProfile:
    """The profile of a model divided among `cards`, which lie on `hosts`.

    `context`: tokens whose keys and values each sequence has. `reduction` is needed for several
    cards.
    """
    bandwidth = efficiency.bandwidth_share * cards * card.bandwidth_gb_s * 1e6  # Bytes a ms.
    flops = efficiency.compute_share * cards * card.dense_tflops * 1e9

    def ms(batch: int, tokens: int) -> float:
        memory = (shape.bytes_of_weights + batch * context * shape.kv_bytes) / bandwidth
        compute = 2 * shape.num_weights * tokens / flops
        reducing = reduction.ms(shape, cards, tokens) if reduction and cards > 1 else 0.0
        return float((memory**4 + compute**4) ** 0.25) + efficiency.launch_ms + reducing

    return DeviceProfile(
        name=name,
        role=role,
        about=f"{shape.num_weights / 1e9:.2f}e9 weights on {cards} {card_name}",
        gpus=cards,
        hosts=hosts,
        source=(
            "Derived, not measured: "
            f"{shape.num_weights / 1e9:.2f}e9 weights of {shape.weight_bytes:g} bytes at "
            f"{efficiency.bandwidth_share:.0%} of {cards} x {card.bandwidth_gb_s:g} GB/s; "
            f"{efficiency.compute_share:.0%} of {cards} x {card.dense_tflops:g} TFLOP/s; "
            f"{efficiency.launch_ms:g} ms to launch"
            + (
                f"; {2 * shape.num_hidden_layers} all-reduces of {reduction.us:g} us and "
                f"{reduction.gb_s:g} GB/s"
                if reduction and cards > 1
                else ""
            )
            + f"; {shape.kv_bytes:,} bytes of KV a token, {context:,} tokens of context a "
            f"sequence. The card: {card.source}"
        ),
        pass_ms=PassTimes(
            batch=BATCHES,
            tokens=TOKENS,
            table=tuple(tuple(ms(batch, tokens) for tokens in TOKENS) for batch in BATCHES),
        ),
    )


@dataclass(frozen=True, slots=True)
class Room:
    """What a card of a group has, and needs at least. Bytes."""

    usable: float
    weights: float
    kv_of_a_token: float
    least_tokens: int

    @property
    def lacks_gib(self) -> float:
        """GiB that are missing on each card; 0 if the model fits."""
        needed = self.weights + self.least_tokens * self.kv_of_a_token
        return max(0.0, needed - self.usable) / GIB

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights."""
        return max(0, int((self.usable - self.weights) / self.kv_of_a_token))


def room_on(card: Card, shape: Shape, *, cards: int, least_tokens: int) -> Room:
    """What each of a group's cards holds. Key-value heads are copied where there are too few."""
    parts = min(cards, shape.num_key_value_heads)
    return Room(
        card.usable_bytes, shape.bytes_of_weights / cards, shape.kv_bytes / parts, least_tokens
    )


def read_shape(path: Path) -> Shape:
    """The shape in a checkpoint's config.json. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file; name a checkpoint's config.json"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: is not a readable JSON file: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(found).__name__}")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if found.get(key):
            raise ConfigError(
                f"{path}: {key} is {found[key]!r}: only dense models can be derived; "
                "measure a profile instead"
            )
    if "quantization_config" in found:
        raise ConfigError(
            f"{path}: the weights are quantized: give the numbers and weight_bytes instead"
        )
    known = {key: found[key] for key in Shape.model_fields if found.get(key) is not None}
    known.setdefault("num_key_value_heads", known.get("num_attention_heads"))
    dtype = found.get("dtype") or found.get("torch_dtype")
    known["weight_bytes"] = 4.0 if dtype == "float32" else 2.0
    try:
        return Shape.model_validate(known)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        raise ConfigError(
            f"{path}: {key}: {wrong['msg']}; a dense decoder-only model has {key}"
        ) from None
