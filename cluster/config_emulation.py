"""Keys of a configuration for emulated devices (docs/emulation.md), and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BeforeValidator

from cluster.config_checks import check_profile, refusal
from workers.models import STAND_IN

if TYPE_CHECKING:
    from cluster.config_model import Config, DrafterConfig


def profile_of(role: Literal["target", "drafter"]) -> BeforeValidator:
    """Check that a value is None or the name of a latency profile for the role."""

    def check(value: object) -> object:
        if isinstance(value, str):
            check_profile(value, role)
        return value

    return BeforeValidator(check)


def target_or_emulated(given: Any, usual: str) -> Any:
    """An emulated target has the stand-in checkpoint for a model, and needs no GPU."""
    found = model_or_emulated(given, usual)
    if isinstance(found, dict) and found.get("emulated") is not None:
        return {"resources": "cpu"} | found
    return found


def model_or_emulated(given: Any, usual: str) -> Any:
    """Fill in the model: the stand-in for an emulated device, else `usual`.

    Only an emulated device may name the stand-in, and it may name no other model.
    """
    if not isinstance(given, dict):
        return given
    if given.get("emulated") is not None:
        if (model := given.get("model", STAND_IN)) != STAND_IN:
            raise refusal(
                f"what is emulated replays and has no model, got {model!r}; remove the key "
                '"model" or "emulated"'
            )
        return given | {"model": STAND_IN}
    if given.get("model") == STAND_IN:
        raise refusal(f'"{STAND_IN}" is no model; name a latency profile with "emulated"')
    return {"model": usual} | given


def check_emulated(config: Config) -> None:
    """Raise a refusal unless target and drafters are emulated alike, and speculation fits."""
    emulated = config.target.emulated is not None
    models = [one for one in config.drafters if one.kind == "model"]
    if any((one.emulated is not None) != emulated for one in models):
        raise refusal(
            "drafters: target and model drafters are all emulated or none is; give every "
            'one the key "emulated", or remove it everywhere'
        )
    if emulated:
        _check_replayed(config, models)


def _check_replayed(config: Config, drafters: Sequence[DrafterConfig]) -> None:
    """Workers that replay share a made-up vocabulary, have no logits, and compute nothing."""
    if config.target.resources == "gpu":
        raise refusal(
            'target.resources: a target that replays needs no GPU, got "gpu"; remove the key'
        )
    for one in drafters:
        if "prefix_cache" in one.model_fields_set:
            raise refusal(
                'drafters: an emulated drafter has no KV to share; remove the key "prefix_cache"'
            )
    chosen = config.speculation
    if chosen.verification != "coupled":
        raise refusal(
            "speculation.verification: emulated workers have no distributions; "
            f'expected "coupled", got "{chosen.verification}"'
        )
    if chosen.stopping != "fixed":
        raise refusal(
            "speculation.stopping: emulated drafters have no logits to stop by; "
            f'expected "fixed", got "{chosen.stopping}"'
        )
