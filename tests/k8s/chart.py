"""Renders the chart with helm, and checks the objects against Kubernetes' schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, cast

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s" / "paceline"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
_HELM = Path(sys.executable).parent / "helm"
_CRDS = Path(__file__).with_name("crds")

KUBERNETES = "1.29"
"""The oldest version that the chart names."""

Object = dict[str, Any]


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm. `make tools` installs it."""
    assert _HELM.exists(), "helm is missing: run `make tools`"
    return subprocess.run(
        (str(_HELM), *map(str, arguments)), capture_output=True, text=True, timeout=60
    )


def render(*arguments: str | Path, release: str = "r") -> list[Object]:
    """The objects of a release."""
    done = helm("template", release, CHART, "--namespace", "serving", *arguments)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@cache
def _schema(kind: str) -> Object | None:
    path = _CRDS / f"{kind}.json"
    return _closed(json.loads(path.read_text())) if path.exists() else None


def _closed(schema: Any) -> Any:
    """The schema with all objects closed, as the server's strict validation has them."""
    if isinstance(schema, list):
        return list(map(_closed, schema))
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    has_fields = isinstance(found.get("properties"), dict) and "type" in found
    if has_fields and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    if str(found.get("pattern", "")).startswith("^(?i)"):
        found["pattern"] = found["pattern"].replace("^(?i)", "(?i)^")  # Go's place for the flag.
    return found


def check(found: Object) -> None:
    """Check an object, its fields' names included."""
    schema = _schema(found["kind"])
    if schema is None:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)
        return
    whole = cast(Object, schema["properties"])
    known = {"apiVersion": {}, "kind": {}, "metadata": {"type": "object"}}
    jsonschema.validate(found, schema | {"properties": whole | known})
