"""The dashboard's and the alerts' queries ask for metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.cluster.gateway.test_observability_page import everything

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[2] / "deploy" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())
LABELS = everything().labels()
"""Names of labels by the name of a sample."""


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def _queries() -> Iterator[tuple[str, str, str]]:
    """Title, query and legend of each line on the dashboard."""
    for panel in _panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def _rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def _selectors(node: Any) -> Iterator[Any]:
    """The selectors of metrics in a parsed query."""
    if isinstance(node, promql.VectorSelector):
        yield node
    elif isinstance(node, promql.MatrixSelector):
        yield node.vector_selector
    elif isinstance(node, promql.BinaryExpr):
        yield from _selectors(node.lhs)
        yield from _selectors(node.rhs)
    elif isinstance(node, promql.Call):
        for one in node.args:
            yield from _selectors(one)
    elif isinstance(node, promql.AggregateExpr | promql.ParenExpr | promql.UnaryExpr):
        yield from _selectors(node.expr)
    else:
        assert isinstance(node, promql.NumberLiteral), node


def _faults(query: str) -> list[str]:
    """What a query asks for that no metric has."""
    parsed = promql.parse(query.replace("$__rate_interval", "1m"))
    selectors = list(_selectors(parsed))
    faults = [] if selectors else [f"{query}: no metric"]
    kept = re.findall(r"by \(([^)]*)\)", query)
    grouped = {label.strip() for labels in kept for label in labels.split(",")}
    for one in selectors:
        if one.name not in LABELS:
            faults.append(f"{one.name} does not exist")
            continue
        asked = {matcher.name for matcher in one.matchers.matchers} | grouped
        faults += [f"{one.name} has no {label}" for label in asked - LABELS[one.name]]
        is_count = one.name.endswith(("_total", "_bucket", "_count", "_sum"))
        ranged = any(call in query for call in ("rate(", "increase("))
        if is_count != ranged:
            faults.append(f"{one.name}: a counter needs a rate, and only a counter")
    return faults


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("rate(paceline:nothing_total[1m])", "does not exist"),
        ("max by (driver) (paceline:driver_up{model_name='m'})", "has no model_name"),
        ("sum by (tenant) (paceline:num_requests_running)", "has no tenant"),
        ("paceline:driver_steps_total", "needs a rate"),
        ("rate(paceline:num_requests_running[1m])", "needs a rate"),
    ],
)
def test_a_wrong_query_is_found(query: str, fault: str) -> None:
    assert fault in "; ".join(_faults(query))


def test_every_query_of_the_dashboard_asks_for_what_exists() -> None:
    assert [(title, _faults(query)) for title, query, _ in _queries() if _faults(query)] == []


def test_legends_name_labels_that_the_query_keeps() -> None:
    for title, query, legend in _queries():
        wanted = set(re.findall(r"{{(\w+)}}", legend))
        kept = re.search(r"by \(([^)]*)\)", query)
        labels = {label.strip() for label in kept[1].split(",")} if kept else set()
        assert wanted <= labels, title


def test_variables_ask_for_what_exists() -> None:
    asked = [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert len(asked) == 2
    for query in asked:
        found = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", query)
        assert found is not None
        assert found[2] in LABELS[found[1]]


def test_panels_do_not_overlap_and_have_titles_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(titles)) == len(titles)
    assert len(set(ids)) == len(ids)


def test_every_metric_is_on_the_dashboard_or_left_out_on_purpose() -> None:
    """Those left out are in the sums and shares that others show."""
    shown = {
        one.name for _, query, _ in _queries() for one in _selectors(promql.parse(_ready(query)))
    }
    shown = {re.sub("_bucket$", "", name) for name in shown}
    assert everything().kinds().keys() - shown == {
        "paceline:driver_prefill_tokens_total",
        "paceline:driver_requests_total",
        "paceline:driver_uptime_seconds",
        "paceline:worker_down",
        "paceline:worker_suspect",
    }


def _ready(query: str) -> str:
    return query.replace("$__rate_interval", "1m")


def test_every_alert_asks_for_what_exists() -> None:
    assert len(_rules()) == 4
    for rule in _rules():
        assert _faults(rule["expr"]) == [], rule["alert"]
        told = " ".join(rule["annotations"].values())
        kept = re.search(r"by \(([^)]*)\)", rule["expr"])
        labels = {label.strip() for label in kept[1].split(",")} if kept else set()
        assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels, rule["alert"]


def test_acceptance_that_fell_is_alarming_and_noise_is_not() -> None:
    """The alert compares the gauge with a number: the drop that docs/observability.md names."""
    (rule,) = [one for one in _rules() if one["alert"] == "PacelineAcceptanceDrift"]
    parsed = promql.parse(rule["expr"])
    assert isinstance(parsed, promql.BinaryExpr)
    assert str(parsed.op).strip() == "<"
    assert isinstance(parsed.rhs, promql.NumberLiteral)
    assert parsed.rhs.val == -0.1
    assert [one.name for one in _selectors(parsed.lhs)] == ["paceline:acceptance_drift"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_raises_the_alerts() -> None:
    """Debian's package `prometheus` has promtool. Without it, only the tests above run."""
    command = ["promtool", "test", "rules", str(HERE / "alerts_test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
