"""Keys of a configuration for emulated devices (docs/emulation.md), and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cluster.config_checks import check_profile, refusal
from workers.models import STAND_IN

if TYPE_CHECKING:
    from cluster.config_model import Config, DrafterConfig

MAX_DILATION = 100
"""The longest pass of a profile is then half a minute, in which a worker does nothing else."""

Dilation = Annotated[float, Field(ge=1, le=MAX_DILATION, allow_inf_nan=False)]


def profile_of(role: Literal["target", "drafter"]) -> BeforeValidator:
    """Check that a value is None or the name of a latency profile for the role."""

    def check(value: object) -> object:
        if isinstance(value, str):
            check_profile(value, role)
        return value

    return BeforeValidator(check)


def target_or_emulated(given: Any, usual: str) -> Any:
    """A target that replays has the stand-in checkpoint for a model; a dilated one computes."""
    if isinstance(given, dict) and given.get("dilation") is not None:
        if given.get("emulated") is None:
            raise refusal(
                '"dilation" is of an emulated target; name a latency profile with "emulated", or '
                "remove it"
            )
        return {"model": usual, "resources": "cpu"} | given
    found = model_or_emulated(given, usual)
    if isinstance(found, dict) and found.get("emulated") is not None:
        _refuse_model(found["model"])
        return {"resources": "cpu"} | found
    return found


def model_or_emulated(given: Any, usual: str) -> Any:
    """Fill in the model: the stand-in for an emulated device, else `usual`.

    Only an emulated device may name the stand-in. `check_emulated` decides whether an emulated
    device may name another model, because that depends on the target.
    """
    if not isinstance(given, dict):
        return given
    if given.get("emulated") is not None:
        return {"model": STAND_IN} | given
    if given.get("model") == STAND_IN:
        raise refusal(f'"{STAND_IN}" is no model; name a latency profile with "emulated"')
    return {"model": usual} | given


def check_emulated(config: Config) -> None:
    """Raise a refusal unless target and drafters are emulated alike, and speculation fits."""
    emulated, dilated = config.target.emulated is not None, config.target.dilation is not None
    models = [one for one in config.drafters if one.kind == "model"]
    if any((one.emulated is not None) != emulated for one in models):
        raise refusal(
            "drafters: target and model drafters are all emulated or none is; give every "
            'one the key "emulated", or remove it everywhere'
        )
    if dilated:
        _check_dilated(models)
    elif emulated:
        _check_replayed(config, models)


def _check_dilated(drafters: Sequence[DrafterConfig]) -> None:
    for one in drafters:
        if one.model == STAND_IN:
            raise refusal(
                "drafters: with target.dilation a drafter computes; name the model of each with "
                '"model", such as "demo-draft"'
            )
        if {"acceptance", "hit_rate"} & one.model_fields_set:
            raise refusal(
                "drafters: with target.dilation a drafter guesses as its model does; remove "
                '"acceptance" and "hit_rate"'
            )


def _check_replayed(config: Config, drafters: Sequence[DrafterConfig]) -> None:
    """Workers that replay share a made-up vocabulary, have no logits, and compute nothing."""
    if config.target.resources == "gpu":
        raise refusal(
            'target.resources: a target that replays needs no GPU, got "gpu"; remove the key, or '
            "have the models compute with target.dilation"
        )
    for one in drafters:
        _refuse_model(one.model)
        if "prefix_cache" in one.model_fields_set:
            raise refusal(
                "drafters: an emulated drafter has no KV to share unless target.dilation is set; "
                'remove the key "prefix_cache"'
            )
    chosen = config.speculation
    if chosen.verification != "coupled":
        raise refusal(
            "speculation.verification: emulated workers have no distributions unless "
            f'target.dilation is set; expected "coupled", got "{chosen.verification}"'
        )
    if chosen.stopping != "fixed":
        raise refusal(
            "speculation.stopping: emulated drafters have no logits to stop by unless "
            f'target.dilation is set; expected "fixed", got "{chosen.stopping}"'
        )


def _refuse_model(model: object) -> None:
    if model != STAND_IN:
        raise refusal(
            f"what is emulated replays and has no model, got {model!r}; remove the key "
            '"model" or "emulated", or have the models compute with target.dilation'
        )
