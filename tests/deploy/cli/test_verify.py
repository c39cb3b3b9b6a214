"""`paceline verify`: it finds equal text equal, and finds differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.rows.comparison import Divergence, Variant, first_difference, variants_of
from deploy.rows.peers import TransformersPeer
from deploy.rows.verifier import MarginMeter
from paceline import Client, GenerateOptions
from paceline.sampling import SequenceSpec
from tests.deploy.cli.test_generate import ROWS, write_rows
from tests.deploy.conftest import Call, Served
from workers.models.catalog import ModelFiles

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def peer(served: Served) -> TransformersPeer:
    return TransformersPeer(served.checkpoint, threads=1)


def test_every_policy_is_the_same_text_and_that_of_transformers(
    call: Call, served: Served, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    found = tmp_path / "found.json"
    done = call(
        *("verify", "--server", served.address, "--config", served.config, "--input", source),
        *("--max-tokens", 24, "--policy", "off,lockstep,chain", "--window", "1,4"),
        *("--concurrency", "1,4", "--temperature", "0,0.7", "--json", found),
    )
    assert done.code == 0, done.stdout + done.stderr
    assert "same text: 0 divergences" in done.stdout
    report = json.loads(found.read_text())
    assert report["ok"] is True
    (file,) = report["files"]
    # Two temperatures; plain decoding alone and at 4; two policies x two windows x 1 and 4.
    assert len(file["runs"]) == 2 * (2 + 8)
    assert all(run["divergences"] == [] for run in file["runs"])
    assert file["transformers"]["rows"] == 4
    assert file["transformers"]["rows_with_other_prompt_tokens"] == []


def test_a_failed_row_is_exit_1(call: Call, served: Served, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [ROWS[0], "oops"])
    done = call(
        *("verify", "--server", served.address, "--config", served.config, "--input", source),
        *("--max-tokens", 4),
    )
    assert done.code == 1
    named = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(named) == 1
    assert named[0].startswith(f"error: {source}:2: is not JSON")
    assert str(source) + ":2" not in done.stdout
    assert "1 row failed" in done.stdout


def test_made_up_text_is_not_compared_with_transformers(
    call: Call, served: Served, tmp_path: Path
) -> None:
    """The stand-in of an emulated target has weights, which have nothing to do with its text."""
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    config = tmp_path / "emulated.toml"
    config.write_text('[target]\nemulated = "8b-h100"\n[[drafters]]\nemulated = "1b-h100"\n')
    done = call(
        *("verify", "--server", served.address, "--config", config, "--input", source),
        *("--max-tokens", 8, "--temperature", "0"),
    )
    assert done.code == 0, done.stdout + done.stderr
    assert "same text: 0 divergences among our policies" in done.stdout
    assert "transformers" not in done.stdout


def test_progress_is_plain_lines_that_quiet_leaves_out(
    call: Call, served: Served, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [ROWS[0], "oops"])
    arguments = (
        *("verify", "--server", served.address, "--config", served.config, "--input", source),
        *("--max-tokens", 4),
    )
    started, ended, error = call(*arguments).stderr.splitlines()
    assert started == f"verifying: 2 rows in 2 runs on the server at {served.address}"
    assert ended.startswith("verified after ")
    assert call(*arguments, "--quiet").stderr.splitlines() == [error]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--verification", "dice"), "verification"),
        (("--verification", "kseq", "--temperature", "0,0.7"), "--temperature 0"),
        (("--verification", "rejection", "--branches", "2", "--temperature", "0"), "branches"),
        (("--branches", "0"), "branches"),
        (("--branches", "4", "--window", "8,2"), "branches"),
        (("--stopping", "never"), "stopping"),
        (("--drafter", "oracle"), "drafter"),
        (("--policy", "chain,warp"), "policy"),
        (("--window", "1,two"), "window"),
        (("--window", "0,1"), "window"),
        (("--concurrency", "1,0"), "concurrency"),
        (("--temperature", "0,nan"), "temperature"),
        (("--json", "/nowhere/found.json"), "json"),
    ],
)
def test_bad_flags_are_exit_2_before_anything_starts(
    call: Call, flags: tuple[str, ...], named: str
) -> None:
    done = call("verify", "--server", "127.0.0.1:1", *flags)
    assert done.code == 2
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_rule_that_no_drafter_fits_is_exit_2_before_anything_starts(call: Call) -> None:
    done = call("verify", "--verification", "one-hot", "--temperature", "0")
    assert done.code == 2
    assert "'one-hot'" in done.stderr
    assert "'model'" in done.stderr


def test_a_law_at_the_checkpoint_s_own_temperature(
    call: Call, served: Served, tmp_path: Path
) -> None:
    """The tiny checkpoint is greedy, so a rule that keeps the law also keeps the text."""
    source = write_rows(tmp_path / "in.jsonl", ROWS[:2])
    flags = ("--max-tokens", 12, "--verification", "rejection")
    done = call(
        *("verify", "--server", served.address, "--config", served.config, "--input", source),
        *flags,
    )
    assert done.code == 0, done.stdout + done.stderr


def test_variants_leave_out_the_reference_and_windows_of_off() -> None:
    assert variants_of(["off", "chain"], [1, 2], [1, 4]) == [
        Variant("off", None, 4),
        Variant("chain", 1, 1),
        Variant("chain", 1, 4),
        Variant("chain", 2, 1),
        Variant("chain", 2, 4),
    ]


def test_the_first_difference_is_found_also_where_a_text_ended() -> None:
    assert first_difference(3, [1, 2, 3], [1, 2, 3]) is None
    assert first_difference(3, [1, 2, 3], [1, 5, 3]) == Divergence(3, 1, 2, 5)
    assert first_difference(3, [1, 2, 3], [1, 2]) == Divergence(3, 2, 3, None)
    assert first_difference(3, [1, 2], [1, 2, 3]) == Divergence(3, 2, None, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_margin_is_that_of_plain_decoding(served: Served, temperature: float) -> None:
    """By the engine's logits, plain decoding prefers its own token to any other."""
    meter = MarginMeter(ModelFiles(served.checkpoint, "float32"), threads=1)
    options = GenerateOptions(temperature=temperature, seed=5, max_tokens=8, policy="off")
    with Client(served.address) as client:
        plain = client.generate(PROMPT, options)
        sampling = replace(client.describe().default_sampling, temperature=temperature)
    spec = SequenceSpec(sampling, plain.seed, len(plain.prompt_token_ids), end_token_ids=(2, 0))
    for position, expected in enumerate(plain.token_ids):
        prefix = (*plain.prompt_token_ids, *plain.token_ids[:position])
        others = [t for t in range(384) if t != expected]
        margins = [meter.margin(spec, prefix, expected, other) for other in others[::40]]
        assert all(margin is not None and margin > 0 for margin in margins)
        margin = meter.margin(spec, prefix, expected, others[0])
        assert margin is not None
        assert meter.margin(spec, prefix, others[0], expected) == -margin


def test_a_divergence_below_the_margin_is_a_tie() -> None:
    assert Divergence(0, 3, 5, 6, margin=9e-5).tie
    assert not Divergence(0, 3, 5, 6, margin=1.1e-4).tie
    assert not Divergence(0, 3, 5, 6).tie, "chains are exact: no margin is asked for"


def test_a_wrong_token_is_a_departure_with_its_margin(peer: TransformersPeer) -> None:
    prompt = peer.encode(PROMPT)
    theirs = peer.greedy(prompt, 8)
    assert peer.departures(prompt, theirs.token_ids, 8) == []
    second = int(theirs.logits_TV[2].topk(2).indices[1])
    wrong = [*theirs.token_ids[:2], second, *theirs.token_ids[3:]]
    (departure,) = peer.departures(prompt, wrong, 8)
    assert (departure.position, departure.ours) == (2, second)
    expected = theirs.logits_TV[2].max() - theirs.logits_TV[2, second]
    assert departure.margin == pytest.approx(expected.item())
    assert not departure.tie


def test_a_tie_is_no_failure_and_hides_nothing(
    peer: TransformersPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = peer.encode(PROMPT)
    theirs = peer.greedy(prompt, 8)
    second = int(theirs.logits_TV[2].topk(2).indices[1])
    prefix = [*theirs.token_ids[:2], second]
    rest = peer.greedy([*prompt, *prefix], 5).token_ids
    # With so wide a margin the second-best token counts as a tie.
    monkeypatch.setattr("deploy.rows.peers.TIE_MARGIN", 1e3)
    (tie,) = peer.departures(prompt, [*prefix, *rest], 8)
    assert tie.tie
    wrong = [*prefix, *rest[:-1], (rest[-1] + 1) % 256]
    found = peer.departures(prompt, wrong, 8)
    assert [departure.position for departure in found] == [2, len(wrong) - 1]
