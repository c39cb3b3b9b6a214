"""`paceline bench`: figures from samples, and the whole suite on tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.config.model import Config
from deploy.bench.decode import (
    decode_document,
    deployments,
    own_contenders,
    recommended,
    show_decode,
    urgent_first,
    with_windows,
)
from deploy.bench.harness import (
    CORES,
    Document,
    TimeLeft,
    describe_machine,
    find_fastest,
    measure_in_turns,
    suites,
)
from deploy.bench.openvino_peer import (
    PROMPT_LOOKUP,
    WEIGHTS,
    OpenVinoProcess,
    convert_checkpoints,
    is_installed,
)
from deploy.bench.transformers_peer import ASSISTANCES, TransformersProcess
from deploy.rows.measure import Sample
from deploy.rows.peers import TransformersPeer
from paceline.client import Client
from paceline.errors import UnavailableError
from tests.deploy.bench.benches import run_bench, shown_by
from tests.deploy.cli.test_generate import ROWS, write_rows
from tests.deploy.conftest import Call, Served
from workers.models.catalog import ModelFiles

OWN_NAMES = (
    *("off", "lockstep", "chain", "fanout", "auto"),
    *("lockstep-ngram", "chain-ngram", "auto-ngram"),
    *("lockstep-recycling", "chain-recycling", "auto-recycling"),
)
PEER_NAMES = ("hf", "hf-assisted", "openvino", "openvino-draft", "openvino-lookup")


@dataclass
class Clockwork:
    """A contender that takes a fixed time for each prompt. A peer has no steps."""

    name: str
    seconds: float
    seen: list[tuple[str, int]] = field(default_factory=list)
    setting: str = "clockwork"
    token_ids: tuple[int, ...] = (1, 2, 3, 4)

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        self.seen.append((self.name, prompt_token_ids[0]))
        steps = None if self.name in PEER_NAMES else 2
        busy = None if steps is None else {"shard-0": 0.5}
        return Sample(self.token_ids, self.seconds * prompt_token_ids[0], steps, busy)


def test_contenders_take_turns_and_each_goes_first() -> None:
    seen: list[tuple[str, int]] = []
    fast, slow = Clockwork("fast", 0.1, seen), Clockwork("slow", 0.2, seen)
    rows = measure_in_turns([fast, slow], [[1], [3]], max_tokens=4, repeats=2)
    warm_up, turns = seen[:2], seen[2:]
    assert [name for name, _ in warm_up] == ["fast", "slow"]
    assert turns[:4] == [("fast", 1), ("slow", 1), ("slow", 3), ("fast", 3)]
    assert turns[4:] == [("slow", 1), ("fast", 1), ("fast", 3), ("slow", 3)]
    assert rows[0].tokens == 8
    assert rows[0].seconds == pytest.approx(0.4)
    assert rows[0].spread == 0
    assert rows[0].acceptance_length == 2
    assert rows[0].same_text(rows[1])


@dataclass
class Timed:
    """A contender whose tokens take a fixed time, by a clock that it moves itself."""

    name: str
    seconds_a_token: float
    now: list[float]
    probes: list[tuple[str, int]]
    setting: str = "timed"

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        self.probes.append((self.name, max_tokens))
        seconds = self.seconds_a_token * max_tokens
        self.now[0] += seconds
        return Sample((1,) * max_tokens, seconds)


def calibrated(costs: Sequence[float], seconds: float) -> tuple[str, float, list[tuple[str, int]]]:
    """The chosen name, the time that calibration took, and its probes."""
    now, probes = [0.0], list[tuple[str, int]]()
    contenders = [Timed(str(number), cost, now, probes) for number, cost in enumerate(costs)]
    found = find_fastest(
        contenders, [[1], [2]], max_tokens=64, seconds=seconds, clock=lambda: now[0]
    )
    return found.name, now[0], probes


def test_calibration_halves_with_longer_probes() -> None:
    name, _, probes = calibrated([0.04, 0.03, 0.01, 0.02, 0.05], 100)
    assert name == "2"
    assert [tokens for _, tokens in probes] == [8] * 5 + [8] * 5 + [16] * 3 + [32] * 2
    assert sorted(probes[-2:]) == [("2", 32), ("3", 32)]


def test_calibration_is_bounded_by_its_time_and_one_probe() -> None:
    costs = [1.0, 0.9, 0.8, 0.7]
    for seconds in (1, 10, 30, 40, 60):
        name, took, _ = calibrated(costs, seconds)
        assert took <= seconds + 16
        assert name in "0123"
    assert calibrated(costs, 1)[0] == "0"
    # All were probed once after the warm-up, and the first of the fastest half is taken.
    assert calibrated(costs, 55)[0] == "3"


def test_a_setting_alone_is_not_probed() -> None:
    assert calibrated([1.0], 10) == ("0", 0.0, [])


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (100.0, {"fast": [3, 3], "slow": [3, 3], "last": [3, 3]}),
        (34.0, {"fast": [1, 1], "slow": [1, 1], "last": [1, 1]}),  # no time for a second round
        (20.0, {"fast": [1], "slow": [1], "last": [1]}),  # it ends in the second prompt
        (13.0, {"fast": [1], "slow": [1]}),  # in the first prompt
        (5.0, {"fast": [1]}),  # while it warms up
    ],
)
def test_what_does_not_fit_into_the_time_is_left_out(
    limit: float, kept: dict[str, list[int]]
) -> None:
    """A warm-up and a prompt take 4 tokens at 0.5, 1 and 1 seconds each."""
    now, probes = [0.0], list[tuple[str, int]]()
    costs = {"fast": 0.5, "slow": 1.0, "last": 1.0}
    contenders = [Timed(name, cost, now, probes) for name, cost in costs.items()]
    rows = measure_in_turns(
        contenders,
        [[1], [3]],
        max_tokens=4,
        repeats=3,
        has_time=lambda seconds: now[0] + seconds < limit,
    )
    assert {row.contender.name: list(map(len, row.samples)) for row in rows} == kept
    assert now[0] <= limit + 4.0, "only one sample of 4 seconds exceeds it"
    assert all(row.spread == 0 for row in rows)


def test_time_that_ends_early_leaves_rows_of_ours_and_of_others() -> None:
    """Also where there is no OpenVINO."""
    names = (*OWN_NAMES, *PEER_NAMES)
    ordered = [one.name for one in urgent_first([Clockwork(name, 1.0) for name in names])]
    assert ordered[:4] == ["off", "hf", "openvino-lookup", "chain-ngram"]
    assert sorted(ordered) == sorted(names)
    without = [one.name for one in urgent_first([Clockwork(name, 1.0) for name in OWN_NAMES])]
    assert without[:3] == ["off", "chain-ngram", "lockstep-ngram"]
    assert [one for one in without if not one.endswith("-ngram")] == [
        one for one in OWN_NAMES if not one.endswith("-ngram")
    ]


def test_a_report_names_what_was_left_out() -> None:
    """`off` alone suffices for a report."""
    rows = measure_in_turns([Clockwork("off", 1.0)], [[1]], max_tokens=4, repeats=1)
    report = decode_document(rows, {}, ["hf", "openvino"])
    said = shown_by(show_decode, report)
    assert "Not measured for lack of time: hf, openvino." in said
    assert report["left_out"] == ["hf", "openvino"]


def test_the_time_left_goes_by_each_rows_own_time() -> None:
    left = TimeLeft(("fast", "slow"), rounds=3)
    assert left.after("fast", 6.0) == "1 of 6, 0.5 min left"  # the slow row may be as fast
    assert left.after("slow", 60.0) == "2 of 6, 2.2 min left"
    for _ in range(2):
        left.after("slow", 60.0)
    assert left.after("fast", 6.0) == "5 of 6, 0.1 min left"
    assert TimeLeft(("off",), rounds=9).after("off", 60.0, most=30.0) == "1 of 9, 0.5 min left"
    assert TimeLeft(("off",), rounds=1).after("off", 60.0) == "1 of 1"


def decoded(**seconds: float) -> Document:
    """A report of rows with these seconds for a prompt of four tokens."""
    contenders = [Clockwork(name.replace("_", "-"), one) for name, one in seconds.items()]
    return decode_document(measure_in_turns(contenders, [[1]], max_tokens=4, repeats=1), {})


def test_a_report_has_a_speedup_for_every_row_against_off() -> None:
    names = (*OWN_NAMES, *PEER_NAMES)
    contenders = [Clockwork(name, 0.1 * (1 + at)) for at, name in enumerate(names)]
    rows = measure_in_turns(contenders, [[1]], max_tokens=4, repeats=1)
    report = decode_document(rows, {("off", 0.0): 0.4, ("off", 1.0): 0.9})
    assert report["emulated"] is False
    found = report["rows"]
    assert [row["name"] for row in found] == list(names)
    assert [row["speedup"] for row in found[:2]] == [1.0, pytest.approx(0.5)]
    assert (found[0]["gap_ms_p50"], found[0]["gap_ms_p50_t1"]) == (0.4, 0.9)
    said = shown_by(show_decode, report)
    assert "off / hf = 12.00" in said
    assert "off / openvino = 14.00" in said, "the fastest of OpenVINO's"
    assert "1.5 ms / gap of off = 3.75" in said
    assert "0.40/0.90" in said


def test_the_row_to_choose_is_the_fastest_of_ours_or_an_auto_that_is_as_fast() -> None:
    assert chosen_of(decoded(off=1.0, chain=0.8, auto=0.9, openvino=0.1, hf=2.0)) == "chain"
    assert chosen_of(decoded(off=1.0, chain=0.8, auto=0.82, hf=2.0)) == "auto"


def chosen_of(report: Document) -> str:
    chosen = recommended(report["rows"])
    assert chosen is not None
    assert chosen["name"] == report["recommended"]
    return str(chosen["name"])


def test_without_a_comparison_there_is_no_verdict() -> None:
    alone = decoded(off=1.0, hf=2.0)
    assert alone["recommended"] is None
    said = " ".join(shown_by(show_decode, alone).split())
    assert "there is nothing to choose from" in said
    assert "choose plain" not in said


def test_a_row_with_another_text_is_never_recommended() -> None:
    contenders = [Clockwork("off", 1.0), Clockwork("chain", 0.5, token_ids=(1, 2, 3, 5))]
    rows = measure_in_turns(contenders, [[1]], max_tokens=4, repeats=1)
    assert chosen_of(decode_document(rows, {})) == "off"


def test_deployments_keep_the_models_and_differ_in_drafters_and_threads() -> None:
    configs = deployments(Config())
    found = {
        name: (one.target.threads, [(drafter.kind, drafter.threads) for drafter in one.drafters])
        for name, one in configs.items()
    }
    assert found == {
        "drafted": (1, [("model", 1)]),
        "ngram": (CORES, [("ngram", "auto")]),
        "recycling": (CORES, [("recycling", "auto")]),
    }
    assert {one.server.grpc_port for one in configs.values()} == {0}


def test_our_rows_have_a_name_each_and_try_windows() -> None:
    with Client("127.0.0.1:1") as client:  # nothing is sent
        rows = own_contenders(dict.fromkeys(deployments(Config()), client))
    assert {row.name for row in rows} == set(OWN_NAMES)
    assert rows[0].name == "off"
    assert with_windows(rows[0]) == [rows[0]]
    chain = next(row for row in rows if row.name == "chain")
    assert [row.options.window for row in with_windows(chain)] == [2, 3, 4, 6, 8]
    assert {row.name for row in with_windows(chain)} == {"chain"}


def test_the_help_lists_the_suites_that_are_registered(call: Call) -> None:
    said = " ".join(call("bench", "--help").stdout.split())
    assert list(suites()) == [
        *("decode", "drafters", "engine", "faults", "lookahead", "rules", "serving", "vllm")
    ]
    for suite in suites().values():
        assert f"{suite.name}: {suite.about[:20]}" in said


def test_the_machine_is_named() -> None:
    machine = describe_machine()
    assert machine["cpu"]
    assert machine["cores"]


@pytest.mark.release
def test_transformers_decodes_the_same_text_with_and_without_assistance(
    served: Served, tmp_path: Path
) -> None:
    peer = TransformersPeer(served.checkpoint, threads=1)
    prompt = peer.encode("The quick brown fox")
    expected = tuple(peer.greedy(prompt, 12).token_ids)
    folder = served.checkpoint
    log = tmp_path / "log"
    draft = ModelFiles(folder, "int8")
    with TransformersProcess(folder, draft=draft, threads=1, log=log) as process:
        for assistance in (None, ASSISTANCES[0], ASSISTANCES[-2]):
            answer = process.generate([prompt], max_tokens=12, threads=1, assistance=assistance)
            assert answer.token_ids == (expected,)
            assert answer.seconds > 0


@pytest.mark.release
@pytest.mark.skipif(not is_installed(), reason="the extra openvino is not installed")
def test_openvino_decodes_the_text_of_transformers(served: Served, tmp_path: Path) -> None:
    """Plainly, by prompt lookup, with a draft model, and several prompts as a batch."""
    peer = TransformersPeer(served.checkpoint, threads=1)
    prompts = [peer.encode(text) for text in ("The quick brown fox", "One two three one two")]
    converted, draft = (tmp_path / weights for weights in WEIGHTS)
    wanted = [(served.checkpoint, tmp_path / weights, weights) for weights in WEIGHTS]
    convert_checkpoints(wanted, log=tmp_path / "convert.log")
    for helper, candidates in ((None, None), (PROMPT_LOOKUP, 3), (draft, 2)):
        log = tmp_path / "pipeline.log"
        with OpenVinoProcess(converted, threads=1, log=log, draft=helper) as process:
            for batch in (prompts[:1], prompts):
                answer = process.generate(batch, max_tokens=12, num_assistant_tokens=candidates)
                for prompt, token_ids in zip(batch, answer.token_ids, strict=True):
                    departures = peer.departures(prompt, token_ids, 12)
                    assert all(one.tie for one in departures), departures


def test_openvino_says_why_it_cannot_convert(tmp_path: Path) -> None:
    wanted = tmp_path / "none", tmp_path / "made", WEIGHTS[0]
    with pytest.raises(UnavailableError, match="OpenVINO cannot convert"):
        convert_checkpoints([wanted], log=tmp_path / "log")


def test_a_process_that_ends_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        TransformersProcess(tmp_path, threads=1, log=log) as process,
        pytest.raises(UnavailableError, match="process ended"),
    ):
        process.generate([[1]], max_tokens=1, threads=1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nothing",), "suite: expected one of decode, drafters, engine, faults, lookahead"),
        (("decode", "--part", "steps"), "--part: the suite decode does not take this flag"),
        (("lookahead", "--limit", "1"), "--limit: the suite lookahead does not take this flag"),
        (("decode", "--repeats", "0"), "repeats"),
        (("decode", "--limit", "0"), "limit"),
        (("decode", "--input", "/nowhere.jsonl"), "input"),
        (("decode", "--json", "/nowhere/out.json"), "json"),
        (("rules", "--part", "nothing"), "part"),
        (("rules", "--limit", "0"), "limit"),
        (("rules", "--json", "/nowhere/out.json"), "json"),
    ],
)
def test_bad_flags_are_exit_2(call: Call, arguments: tuple[str, ...], named: str) -> None:
    done = call("bench", *arguments)
    assert done.code == 2
    assert named in done.stderr


@pytest.mark.release
@pytest.mark.ray
@pytest.mark.long
def test_decode_measures_every_row(served: Served, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ROWS[:2])
    flags = ("--max-tokens", "8", "--repeats", "1", "--no-calibrate", "--gap-steps", "20")
    rows, said = run_bench("decode", served.config, tmp_path, "--input", source, *flags)
    names = [row["name"] for row in rows]
    assert names[0] == "off"
    assert set(names) >= {*OWN_NAMES, "hf", "hf-assisted"}
    assert ("openvino-lookup" in names) == is_installed()
    # In bfloat16 the text may be another one.
    assert all(row["same_text"] for row in rows if not row["name"].endswith("-bf16"))
    assert rows[0]["speedup"] == 1
    assert rows[0]["gap_ms_p50"] > 0
    assert "off / hf" in said
    assert "For one request at a time on this machine, choose" in said
