"""`paceline plan`: the question, the ranking, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config.load import Flag, load_config
from paceline.errors import ConfigError
from tests.deploy.conftest import Call
from tests.deploy.shell import shown_by

SMALL = ("--requests", "12", "--prompt-tokens", "20", "--output-tokens", "24")


def test_layouts_are_ranked_and_a_dear_one_is_shown_as_such(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = ("--concurrency", "1", "--ratios", "1:1", "--ratios", "1:4", "--policies", "chain")
    done = call("plan", *SMALL, *asked, "--json", str(path))
    assert done.code == 0, done.stderr
    document: dict[str, Any] = json.loads(path.read_text())
    assert document["simulated"] is True
    assert document["callers"] == [1]
    rows = document["rows"]
    speeds = [row["tokens_per_second"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert {row["name"]: row["gpus"] for row in rows} == {
        "2 x (70b-4xh100), off": 8,
        "70b-4xh100 + 1b-h100, chain": 5,
        "70b-4xh100 + 1b-h100 x 4, chain": 8,
    }
    # One caller's sequence has one drafter at a time, so three more GPUs gain nothing.
    one, four = (row for row in rows if row["policy"] == "chain")
    assert one["tokens_per_second"] == pytest.approx(four["tokens_per_second"], rel=0.01)
    assert one["speedup"] > 1.5
    for row in rows:
        shares = row["target_busy"] + row["target_waiting"] + row["target_idle"]
        assert shares == pytest.approx(1.0)
        assert row["same_text"] is True
        assert row["name"] in done.stdout
    assert "best" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


@pytest.mark.parametrize("columns", ["40", "80"])
@pytest.mark.parametrize("on_terminal", [False, True])
def test_no_figure_is_cut_however_narrow_it_is(columns: str, on_terminal: bool) -> None:
    script = (
        "import json, sys\nfrom deploy.cli.__main__ import main\n"
        "sys.argv = json.load(sys.stdin)\nmain()"
    )
    asked = ("--ratios", "1:1", "--policies", "chain")
    line = json.dumps(["paceline", "plan", *SMALL, *asked]).encode()
    shown = shown_by(script, line, columns, on_terminal).splitlines()
    words = " ".join(" ".join(shown).split())
    assert "1 70b-4xh100 + 1b-h100, chain: best; most tokens/s per GPU" in words
    assert not any("\u2026" in line for line in shown)
    titles = ["GPUs", "tok/s", "/GPU", "/off", "first", "token", "target", "drafter", "len", "used"]
    # "first" and "token" have two numbers, "target" three.
    numbers = 15
    if on_terminal:
        assert all(len(line) <= int(columns) for line in shown)
    if on_terminal and columns == "40":  # Cards.
        begin = shown.index("1") + 1
        assert [line.split()[0] for line in shown[begin : begin + len(titles)]] == titles
        return
    if on_terminal:
        assert "left out: used" in words
        titles.remove("used")
        numbers -= 1
    [headings] = [line for line in shown if "tok/s" in line and "/off" in line]
    assert headings.split() == titles
    rows = shown[shown.index(headings) + 1 :][:2]
    assert [len(row.split()) for row in rows] == [numbers, 13]


def test_a_full_batch_makes_drafters_a_bad_buy(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    config = tmp_path / "plan.toml"
    config.write_text(
        '[target]\nmax_num_seqs = 8\n[plan]\ntarget = "8b-h100"\ndrafter = "1b-h100"\n'
        'gpus_per_host = 2\npolicies = "chain"\nratios = "1:1"\nacceptance = 0.3\n'
        "concurrency = 16\nhit_rate = 0.0\n"
    )
    done = call("plan", "--config", str(config), *SMALL, "--json", str(path))
    assert done.code == 0, done.stderr
    chain = next(r for r in json.loads(path.read_text())["rows"] if r["policy"] == "chain")
    assert chain["per_gpu_gain"] < 1
    assert chain["faster_but_worse_per_gpu"] == (chain["speedup"] > 1.02)


def test_target_groups_that_share_a_sequence(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = ("--concurrency", "1", "--ratios", "2:1", "--gpus-per-host", "9")
    policies = ("--policies", "replicas", "--policies", "fanout")
    done = call("plan", *SMALL, *asked, *policies, "--json", str(path))
    assert done.code == 0, done.stderr
    rows = {row["policy"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["replicas"]["name"] == "70b-4xh100 of 2 replicas + 1b-h100, replicas"
    assert rows["replicas"]["target_groups"] == 2
    assert rows["replicas"]["gpus"] == 9
    assert rows["replicas"]["same_text"] is True
    assert rows["replicas"]["tokens_per_second"] > rows["fanout"]["tokens_per_second"]


def test_a_thousand_hosts_are_simulated_in_part(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = ("--hosts", "1000", "--concurrency", "4000", "--policies", "chain", "--ratios", "1:1")
    some = ("--simulated-groups", "2", "--requests", "24")
    done = call("plan", *SMALL, *asked, *some, "--json", str(path))
    assert done.code == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["target_groups"] for row in rows} == {2000, 1600}
    assert all(row["simulated_groups"] == 2 for row in rows)
    assert min(row["tokens_per_second"] for row in rows) > 100_000
    assert "Of larger layouts at most 2 target groups are simulated" in done.stdout


def test_layouts_side_by_side_give_the_same_figures(call: Call, tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        asked = ("--policies", "chain", "--policies", "fanout", "--ratios", "1:1")
        done = call("plan", *SMALL, *asked, "--jobs", jobs, "--json", str(path))
        assert done.code == 0, done.stderr
        found.append(json.loads(path.read_text())["rows"])
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_a_load_too_large_for_the_requests_is_measured_in_full(call: Call, tmp_path: Path) -> None:
    """Many callers begin at once. With few requests each, that burst is nearly all of the load."""
    path = tmp_path / "plan.json"
    asked = ("--concurrency", "64", "--policies", "lockstep", "--ratios", "1:4", "--hosts", "2")
    done = call("plan", *SMALL, *asked, "--json", str(path))
    assert done.code == 0, done.stderr
    for row in json.loads(path.read_text())["rows"]:
        assert row["requests"] >= 2 * 64 * row["simulated_groups"] / row["target_groups"]
        assert 0.5 < row["target_busy"] <= 1.001
        assert row["target_busy"] + row["target_waiting"] < 1.001


def test_requests_that_are_too_many_are_told(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    config = tmp_path / "plan.toml"
    config.write_text("[target]\nmax_num_seqs = 1\n")
    asked = ("--requests-per-second", "50", "--policies", "off", "--requests", "40")
    done = call("plan", "--config", str(config), *SMALL, *asked, "--json", str(path))
    assert done.code == 0, done.stderr
    [row] = json.loads(path.read_text())["rows"]
    assert row["keeps_up"] is False
    assert "does not keep up" in done.stdout


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_requests_that_are_few_are_kept_up_with(call: Call, seed: str) -> None:
    """This holds however many happen to arrive; here a tenth of what one target group can serve."""
    asked = ("--requests-per-second", "0.5", "--policies", "off", "--requests", "40")
    done = call("plan", *SMALL, *asked, "--seed", seed)
    assert done.code == 0, done.stderr
    assert "does not keep up" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--target", "70b-4xh10"), ("--target", "did you mean 70b-4xh100")),
        (("--target", "1b-h100"), ("--target", "a drafter")),
        (("--policies", "chian"), ("--policies", "did you mean chain")),
        (("--ratios", "1-1"), ("--ratios", "TARGETS:DRAFTERS")),
        (("--hosts", "0"), ("--hosts", "at least 1")),
        (("--jobs", "0"), ("jobs", "at least 1, got 0")),
        (("--acceptance", "1.5"), ("--acceptance", "at most 1")),
        (("--concurrency", "4", "--requests-per-second", "1"), ("plan", "both given")),
        (("--target", "70b-8xh100-2hosts"), ("plan.target", "fits 1 host")),
        (("--gpus-per-host", "4", "--policies", "chain"), ("plan.policies", "chain", "4 GPUs")),
        (("--kv-tokens", "1024", "--prompt-tokens", "2000"), ("plan.kv_tokens", "2128")),
        (("--policies", "replicas", "--ratios", "1:1"), ("plan.policies", "2 or more target")),
    ],
)
def test_what_cannot_be_planned_is_refused(
    call: Call, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = call("plan", *flags)
    assert done.code == 2
    assert all(word in done.stderr for word in words), done.stderr


def test_the_table_is_closed_and_flags_go_before_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[plan]\nhosts = 3\n")
    assert load_config(path, {}).plan.hosts == 3
    assert load_config(path, {}, flags=[Flag("--hosts", "plan", "hosts", 5)]).plan.hosts == 5
    assert load_config(path, {"PACELINE_PLAN__HOSTS": "4"}).plan.hosts == 4
    path.write_text("[plan]\nhost = 3\n")
    with pytest.raises(ConfigError, match=r"unknown key plan\.host.*did you mean hosts"):
        load_config(path, {})
