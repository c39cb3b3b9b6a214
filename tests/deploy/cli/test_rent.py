"""`paceline plan` with [plan.rent]: hosts with cards, prices, targets, and the files it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cluster.config.load import load_config
from cluster.config.plan_question import Hosts, hosts_of
from cluster.simulation.candidate_layouts import candidates
from paceline.errors import ConfigError
from tests.deploy.conftest import Call
from tests.k8s.chart import check, render

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "rent.toml"
SMALL = (
    *("--requests", "8", "--prompt-tokens", "20", "--output-tokens", "16", "--seeds", "2"),
    *("--jobs", "1"),
)
EIGHT_B = """
[plan]
concurrency = 4
policies = ["chain", "spread"]
[plan.rent]
target = "llama-3-8b"
drafter = "qwen2.5-0.5b"
layouts = ["2 h100-sxm + 1 l40s for drafters"]
[plan.rent.prices]
h100-sxm = 2.0
l40s = 1.0
"""


def planned(call: Call, tmp_path: Path, text: str, *flags: str) -> dict[str, Any]:
    """The document of a plan, which must be made."""
    config, path = tmp_path / "plan.toml", tmp_path / "plan.json"
    config.write_text(text)
    done = call("plan", "--config", str(config), *SMALL, *flags, "--json", str(path))
    assert done.code == 0, done.stderr
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.mark.release
def test_the_example_is_answered_with_files_that_fit(call: Call, tmp_path: Path) -> None:
    files = {name: tmp_path / f"x.{name}" for name in ("json", "toml", "yaml")}
    begin = sum(os.times()[:4])
    done = call(
        *("plan", "--config", str(EXAMPLE), "--json", str(files["json"])),
        *("--toml", str(files["toml"]), "--values", str(files["yaml"])),
    )
    assert done.code == 0, done.stderr
    # Two minutes on two cores are 240 s of processor time.
    assert sum(os.times()[:4]) - begin < 240
    assert "s left" in done.stderr
    document = json.loads(files["json"].read_text())
    rows = document["rows"]
    assert {row["callers"] for row in rows} == {4, 16}
    assert all(row["same_text"] for row in rows)
    drafted = [row for row in rows if row["drafter"]]
    assert {row["seeds"] for row in drafted} == {2}
    for row in drafted:
        low, high = row["tokens_per_second_range"]
        assert low <= row["tokens_per_second"] <= high
    # 8 x 2.5, 8 x 2.5 + 0.9, and 4 x 3.5 + 0.9 an hour.
    assert {round(row["price_per_hour"], 2) for row in rows} == {20.0, 20.9, 14.9}
    for row in rows:
        cost = row["price_per_hour"] / 3600 / row["tokens_per_second"] * 1e6
        assert row["cost_per_million"] == pytest.approx(cost)
    assert document["skipped"]
    [chosen] = [
        row
        for row in rows
        if (row["name"], row["callers"])
        == (document["chosen"]["name"], document["chosen"]["callers"])
    ]
    met = [row for row in rows if row["callers"] == 16 and row["token_ms"]["p95"] <= 25]
    assert chosen["cost_per_million"] == min(row["cost_per_million"] for row in met)
    assert "To rent for 16 callers" in done.stdout

    written = load_config(files["toml"], {})
    assert written.speculation.policy == chosen["policy"]
    assert written.target.groups == chosen["target_groups"]
    assert f"on {written.target.tensor_parallel} " in chosen["target"]
    # The cheapest has two kinds of cards, so each worker says which one it needs.
    assert (written.target.labels, written.drafters[0].labels) == (
        {"card": "h200"},
        {"card": "l40s"},
    )
    assert sum(one.count for one in written.drafters) == chosen["drafters"]

    objects = render("--values", files["yaml"])
    for one in objects:
        check(one)
    maps = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    [text] = [data["paceline.toml"] for data in maps if "paceline.toml" in data]
    deployed = tmp_path / "deployed.toml"
    deployed.write_text(text)
    assert load_config(deployed, {}).deployment() == written.deployment()
    [service] = [one for one in objects if one["kind"] == "RayService"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert sum(one["replicas"] * _gpus(one) for one in groups) == chosen["gpus"]
    for one, card in zip(groups, ("h200", "l40s"), strict=True):
        assert one["template"]["spec"]["nodeSelector"] == {"paceline/card": card}
        assert card in json.dumps(one["labels"])


def _gpus(group: dict[str, Any]) -> int:
    [container] = group["template"]["spec"]["containers"]
    return int(container["resources"]["limits"]["nvidia.com/gpu"])


def test_hosts_of_one_card_need_no_labels(call: Call, tmp_path: Path) -> None:
    """Without prices, the layout with the most tokens/s per GPU is chosen."""
    config, values = tmp_path / "plan.toml", tmp_path / "values.yaml"
    config.write_text(
        '[plan]\nconcurrency = 2\npolicies = "chain"\n[plan.rent]\n'
        'layouts = "2 x 5 h100-sxm (1 for drafters)"\ntensor_parallel = 4\n'
        '[plan.rent.models."llama-3-70b"]\ncheckpoint = "org/target"\n'
    )
    done = call("plan", *SMALL, "--config", str(config), "--values", str(values))
    assert done.code == 0, done.stderr
    assert "USD" not in done.stdout
    objects = render("--values", values)
    [service] = [one for one in objects if one["kind"] == "RayService"]
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["replicas"], _gpus(group)) == (2, 5)
    assert "nodeSelector" not in group["template"]["spec"]
    [text] = [
        one["data"]["paceline.toml"]
        for one in objects
        if one["kind"] == "ConfigMap" and "paceline.toml" in one["data"]
    ]
    assert "org/target" in text


def test_plain_decoding_has_all_the_gpus(call: Call, tmp_path: Path) -> None:
    rows = planned(call, tmp_path, EIGHT_B)["rows"]
    plain = [row for row in rows if row["policy"] == "off"]
    assert {row["gpus"] for row in rows} == {3}
    # An 8B model also fits on the drafter's card, as one more target group.
    beside = [row for row in plain if row["targets_beside"]]
    assert {row["used_gpus"] for row in beside} == {3}
    assert {name for row in beside for name in row["targets_beside"]} == {"llama-3-8b on l40s"}
    assert {row["target"] for row in plain} == {
        "llama-3-8b on h100-sxm",
        "llama-3-8b on 2 h100-sxm",
    }
    best = max(row["tokens_per_second"] for row in plain)
    for row in rows:
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / best)
        assert row["same_text"]


def test_policies_that_do_not_fit_are_named(call: Call, tmp_path: Path) -> None:
    document = planned(call, tmp_path, EIGHT_B)
    assert {row["policy"] for row in document["rows"]} == {"off", "chain"}
    [skipped] = document["skipped"]
    assert skipped["what"] == "spread"
    assert skipped["why"] == "needs 2 or more drafters, there is 1"


def test_drafters_are_divided_as_a_policy_needs(tmp_path: Path) -> None:
    """Two groups and two drafters: a drafter each, or both for both where a policy needs that."""
    config = tmp_path / "plan.toml"
    config.write_text(
        '[plan]\npolicies = ["chain", "spread", "replicas"]\n[plan.rent]\n'
        'layouts = "2 x 5 h100-sxm (1 for drafters)"\ntensor_parallel = 4\n'
    )
    layouts, skipped = candidates(load_config(config, {}))
    assert not skipped
    found = {one.policy: (one.cells, one.groups_a_cell, one.drafters) for one in layouts}
    del found["off"]
    assert found == {"chain": (2, 1, 1), "spread": (1, 2, 2), "replicas": (1, 2, 2)}
    assert {one.used_gpus for one in layouts if one.drafter} == {10}


def test_a_ratio_leaves_a_policy_out_and_keeps_the_others(call: Call) -> None:
    asked = ("--policies", "chain", "--policies", "replicas", "--ratios", "1:1")
    done = call("plan", *SMALL, *asked)
    assert done.code == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "left out: 70b-4xh100 with 1b-h100, 1:1: replicas needs 2 or more target groups" in shown


def test_a_measured_profile_comes_before_a_derived_one(call: Call, tmp_path: Path) -> None:
    """A card that is measured as ten times slower makes a tenth of the tokens."""
    file = tmp_path / "measured.toml"
    row = "[75.0, 75.0, 75.0, 88.0, 283.0, 1114.0]"
    file.write_text(
        'role = "target"\nabout = "8B"\ngpus = 1\nhosts = 1\nsource = "Measured."\n[pass_ms]\n'
        "batch = [1, 8, 64, 256]\ntokens = [1, 16, 64, 256, 1024, 4096]\n"
        f"table = [{row}, {row}, {row}, {row}]\n"
    )
    text = EIGHT_B.replace("2 h100-sxm + 1 l40s for drafters", "1 h100-sxm")
    given = f'[plan.rent.models."llama-3-8b".measured]\nh100-sxm = "{file}"\n'
    text = text.replace('policies = ["chain", "spread"]', 'policies = "off"')
    [derived] = planned(call, tmp_path, text)["rows"]
    found = planned(call, tmp_path, text + given)
    [measured] = found["rows"]
    assert found["profiles"][0]["source"] == "Measured."
    ratio = derived["tokens_per_second"] / measured["tokens_per_second"]
    assert 8 < ratio < 11


def test_latency_targets_decide_what_is_chosen(call: Call, tmp_path: Path) -> None:
    text = EIGHT_B.replace("concurrency = 4", "concurrency = [1, 16]")
    text = text.replace('policies = ["chain", "spread"]', 'policies = "off"')
    text = text.replace("2 h100-sxm + 1 l40s for drafters", "1 h100-sxm")
    free = planned(call, tmp_path, text)
    assert free["chosen"]["callers"] == 16
    few, many = (
        min(row["token_ms"]["p95"] for row in free["rows"] if row["callers"] == callers)
        for callers in (1, 16)
    )
    assert few < many
    strict = f"[plan.rent]\nmax_token_ms = {(few + many) / 2}"
    assert planned(call, tmp_path, text.replace("[plan.rent]", strict))["chosen"]["callers"] == 1
    never = "[plan.rent]\nmax_token_ms = 0.1"
    config = tmp_path / "plan.toml"
    config.write_text(text.replace("[plan.rent]", never))
    done = call("plan", "--config", str(config), *SMALL, "--toml", str(tmp_path / "x.toml"))
    assert done.code == 2
    assert "nothing here meets the targets" in done.stdout
    assert "no layout meets the targets" in done.stderr
    assert not (tmp_path / "x.toml").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1 l40s for", "1 l40 for", "plan.rent: layouts[0]: there is no card 'l40'"),
        ("2 h100-sxm +", "two h100-sxm +", "plan.rent.layouts[0]: expected hosts such as"),
        ("2 h100-sxm + 1 l40s for", "1 l40s for", "leaves no GPU for the target"),
        ("2 h100-sxm +", "999 x 2 h100-sxm +", "at most 1024 GPUs"),
        ("2 h100-sxm +", "2 h100-sxm (3 for drafters) +", "at most 2 GPUs for drafters, got 3"),
        ("l40s = 1.0", "", "plan.rent: prices: l40s has none"),
        ("l40s = 1.0", "l40s = -1.0", "plan.rent.prices.l40s"),
        ('"llama-3-8b"', '"llama-3-9b"', "plan.rent: target: there is no model 'llama-3-9b'"),
        ("[plan.rent]", "[plan.rent]\nprice = 3", "unknown key plan.rent.price"),
        ("[plan.rent]", "[plan.rent.models.m]\n[plan.rent]", "models.m: has no shape"),
        (
            "[plan.rent]",
            "[plan.rent.models.m.shape]\nhiden_size = 3\n[plan.rent]",
            "did you mean hidden_size",
        ),
        (
            "[plan.rent]",
            '[plan.rent.models."llama-3-8b"]\nconfig = "none.json"\n[plan.rent]',
            "plan.rent.models.llama-3-8b.config: none.json: there is no such file",
        ),
        (
            "[plan.rent]",
            '[plan.rent.models."llama-3-8b".measured]\nl40s = "none.toml"\n[plan.rent]',
            "plan.rent.models.llama-3-8b.measured.l40s: none.toml: there is no such file",
        ),
        ("concurrency = 4", "concurrency = 4\nhosts = 2", "plan: hosts: [plan.rent] says"),
        ("concurrency = 4", "concurrency = 1_000_000", "at most 50,000,000"),
        ('"llama-3-8b"', '"llama-3-70b"', "each of 2 h100-sxm lacks"),
        ("2 h100-sxm + 1 l40s for", "2 h100-sxm + 1 l4 for", "prices: l4 has none"),
    ],
)
def test_a_bad_question_names_its_key(
    call: Call, tmp_path: Path, old: str, new: str, words: str
) -> None:
    config = tmp_path / "plan.toml"
    assert old in EIGHT_B
    text = EIGHT_B.replace(old, new)
    if "each of 2" in words:  # With KV for more than the two cards have.
        text = text.replace("concurrency = 4", "concurrency = 4\nkv_tokens = 100_000")
    config.write_text(text)
    done = call("plan", "--config", str(config))
    assert done.code == 2
    assert words in done.stderr


def test_a_million_callers_are_refused_with_the_limit(call: Call) -> None:
    done = call("plan", "--concurrency", "1000000", "--policies", "off", "--hosts", "1")
    assert done.code == 2
    assert "plan.concurrency" in done.stderr
    assert "at most 50,000,000" in done.stderr


def test_files_of_a_layout_need_hosts_to_rent(call: Call, tmp_path: Path) -> None:
    done = call("plan", *SMALL, "--values", str(tmp_path / "values.yaml"))
    assert done.code == 2
    assert "[plan.rent]" in done.stderr


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("8 h100-sxm", (Hosts(1, 8, "h100-sxm"),)),
        ("8 h100-sxm (4 for drafters)", (Hosts(1, 8, "h100-sxm", 4),)),
        (
            "2 x 4 h100-sxm + 1 l40s for drafters",
            (Hosts(2, 4, "h100-sxm"), Hosts(1, 1, "l40s", 1)),
        ),
        ("2 hosts x 4 a100-80g", (Hosts(2, 4, "a100-80g"),)),
    ],
)
def test_hosts_are_read(text: str, hosts: tuple[Hosts, ...]) -> None:
    assert hosts_of(text) == hosts


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    config = tmp_path / "plan.toml"
    card = "[plan.rent.cards.mine]\nmemory_gb = 32\nbandwidth_gb_s = 1792\ndense_tflops = 209\n"
    text = EIGHT_B.replace("l40s", "mine") + card
    config.write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.rent\.cards\.mine\.link_gb_s"):
        load_config(config, {})
    config.write_text(text + 'link_gb_s = 32\nsource = "its maker"\n')
    rent = load_config(config, {}).plan.rent
    assert rent is not None
    assert rent.known_cards["mine"].memory_gb == 32
