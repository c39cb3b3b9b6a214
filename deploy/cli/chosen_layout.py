"""The layout that `paceline plan` chose, as a configuration and as values of the Helm chart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cluster.config.model import Config
from cluster.config.plan_question import ModelConfig, RentConfig
from cluster.simulation.layout import Layout
from cluster.simulation.trial import PlannedLayout
from paceline.errors import ConfigError, InvalidRequestError
from workers.emulated.derived import GIB

CHECKPOINTS = "/var/lib/paceline/models"
"""Where a checkpoint is written to be if the question does not name it."""
_CPUS_OF_A_GPU = 8
_NODE_LABEL = "paceline/card"
"""The label by which pods find nodes with a card, if a layout has several kinds."""
_LABEL = "card"
"""The label by which workers find Ray nodes with a card, likewise."""


def check_choosable(flag: str, config: Config) -> None:
    """Raise InvalidRequestError if the question names no hosts to choose from."""
    if config.plan.rent is None:
        raise InvalidRequestError(
            flag, "needs hosts to rent, with their cards: give the table [plan.rent]"
        )


def toml_of(config: Config, chosen: PlannedLayout) -> str:
    """The configuration of the chosen layout. Raises ConfigError if none can have it."""
    tables = _tables(config, chosen)
    lines = [*_heading(config, chosen), ""]
    if not tables["drafters"]:
        lines += ["drafters = []", ""]
    for name in ("target", "drafters", "speculation"):
        for table in tables[name] if name == "drafters" else [tables[name]]:
            lines.append(f"[[{name}]]" if name == "drafters" else f"[{name}]")
            # A JSON text is a TOML text, and so are whole numbers.
            for key, value in table.items():
                inner = value if isinstance(value, dict) else {"": value}
                lines += [
                    f"{key}{inner_key and f'.{inner_key}'} = {json.dumps(one)}"
                    for inner_key, one in inner.items()
                ]
            lines.append("")
    return "\n".join(lines)


def values_of(config: Config, chosen: PlannedLayout) -> str:
    """Values of the chart k8s/paceline for the chosen layout. Raises ConfigError likewise."""
    import yaml

    layout = chosen.layout
    rental, rent = layout.rental, config.plan.rent
    assert rental is not None
    assert rent is not None
    cards = {one.card for one in rental.hosts}
    workers = []
    for number, one in enumerate(rental.hosts):
        if one.gpus > 16:
            raise ConfigError(
                f"plan.rent.layouts: {rental.name}: the chart has pods of at most 16 GPUs, "
                f"got {one.gpus} of a host"
            )
        role = "drafters" if one.drafters == one.gpus else "target"
        memory = f"{math.ceil(one.gpus * rent.known_cards[one.card].memory_gb * 1e9 / GIB)}Gi"
        amounts = {"cpu": str(_CPUS_OF_A_GPU * one.gpus), "memory": memory}
        worker: dict[str, object] = {
            "name": f"{role}-{number}",
            "replicas": one.count,
            "minReplicas": one.count,
            "maxReplicas": one.count,
            "gpus": one.gpus,
            "resources": {"limits": amounts, "requests": dict(amounts)},
            "tolerations": [
                {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
            ],
        }
        if len(cards) > 1:
            worker |= {"labels": {_LABEL: one.card}, "nodeSelector": {_NODE_LABEL: one.card}}
        workers.append(worker)
    values = {
        "config": _tables(config, chosen),
        "workers": workers,
        "models": {"storage": "hostPath", "hostPath": CHECKPOINTS.rpartition("/")[0]},
        "sharedMemory": "16Gi",
    }
    notes = [
        f"# Assumed, adapt them: {_CPUS_OF_A_GPU} CPUs a GPU, as much memory as the GPUs have, and "
        "checkpoints on each",
        f"# host below {CHECKPOINTS}.",
    ]
    if len(cards) > 1:
        notes += [f"# Label the nodes of each card: kubectl label node NODE {_NODE_LABEL}=CARD"]
    text = yaml.safe_dump(values, sort_keys=False)
    return "\n".join([*_heading(config, chosen), *notes, text])


def _heading(config: Config, chosen: PlannedLayout) -> list[str]:
    load = "random arrivals" if chosen.callers is None else f"{chosen.callers} callers"
    lines = [
        f"# Chosen by `paceline plan` for {load}, from simulated figures:",
        f"# {chosen.layout.name}",
    ]
    if {"target", "drafter"} & _unnamed(config, chosen.layout):
        lines.append("# Put the checkpoints where the keys `model` say, or change them.")
    rental = chosen.layout.rental
    if rental is not None and len({one.card for one in rental.hosts}) > 1:
        lines.append(f"# Ray nodes need the label {_LABEL}, which says their kind of card.")
    return lines


def _unnamed(config: Config, layout: Layout) -> set[str]:
    """The roles whose checkpoint the question does not name."""
    rent = config.plan.rent
    assert rent is not None
    roles = {"target": rent.target, "drafter": rent.drafter if layout.drafter else None}
    return {role for role, name in roles.items() if name and _model(rent, name).checkpoint is None}


def _model(rent: RentConfig, name: str) -> ModelConfig:
    return rent.models.get(name, ModelConfig())


def _labels(layout: Layout, *, drafters: bool) -> dict[str, object]:
    """The label of the workers' card, if the layout has several kinds of cards."""
    assert layout.rental is not None
    hosts = layout.rental.hosts
    if len({one.card for one in hosts}) == 1:
        return {}
    card = next(one.card for one in hosts if one.drafters) if drafters else layout.card
    return {"labels": {_LABEL: card}}


def _tables(config: Config, chosen: PlannedLayout) -> dict[str, Any]:
    """The tables of the configuration, checked."""
    layout, rent = chosen.layout, config.plan.rent
    assert rent is not None
    target: Mapping[str, object] = {
        "model": _model(rent, rent.target).checkpoint or f"{CHECKPOINTS}/{rent.target}",
        "tensor_parallel": layout.target.gpus,
        "groups": layout.groups,
        "resources": "gpu",
        "max_num_seqs": layout.max_num_seqs,
        **_labels(layout, drafters=False),
    }
    drafters: list[Mapping[str, object]] = []
    if layout.drafter is not None:
        checkpoint = _model(rent, rent.drafter).checkpoint
        drafters.append(
            {
                "kind": "model",
                "model": checkpoint or f"{CHECKPOINTS}/{rent.drafter}",
                "count": layout.cells * layout.drafters,
                **_labels(layout, drafters=True),
            }
        )
    tables = {
        "target": target,
        "drafters": drafters,
        "speculation": {
            "policy": layout.policy,
            "window": layout.window,
            "branches": layout.branches,
        },
    }
    try:
        Config.model_validate(tables)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        raise ConfigError(
            f"the chosen layout, {layout.name}, does not fit one configuration: {key}: "
            f"{wrong['msg']}"
        ) from None
    return tables
