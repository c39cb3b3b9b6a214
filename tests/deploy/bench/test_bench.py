"""`paceline bench`: figures from samples, and the whole suite on tiny models."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config.model import Config
from deploy.bench.decode import (
    ASSISTANCES,
    DecodeResult,
    decode_json,
    deployments,
    find_fastest,
    print_decode,
)
from deploy.bench.harness import CORES, describe_machine, measure_in_turns, suites
from deploy.bench.openvino_peer import (
    PROMPT_LOOKUP,
    WEIGHTS,
    OpenVinoProcess,
    convert_checkpoint,
    is_installed,
)
from deploy.bench.transformers_peer import TransformersProcess
from deploy.rows.measure import Sample
from deploy.rows.peers import TransformersPeer
from paceline.errors import UnavailableError
from tests.deploy.bench.benches import run_bench
from tests.deploy.cli.test_generate import ROWS, write_rows
from tests.deploy.conftest import Call, Served
from workers.models.catalog import ModelFiles

ROW_NAMES = ("off", "off-1", "lockstep", "chain", "chain-ngram", "hf", "hf-assisted")


@dataclass
class Clockwork:
    """A contender that takes a fixed time for each prompt."""

    name: str
    seconds: float
    seen: list[tuple[str, int]] = field(default_factory=list)
    setting: str = "clockwork"

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        self.seen.append((self.name, prompt_token_ids[0]))
        return Sample((1, 2, 3, 4), self.seconds * prompt_token_ids[0], 2, {"shard-0": 0.5})


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


def test_a_report_has_a_speedup_for_every_row_against_off() -> None:
    contenders = [Clockwork(name, 0.1 * (1 + at)) for at, name in enumerate(ROW_NAMES)]
    rows = measure_in_turns(contenders, [[1]], max_tokens=4, repeats=1)
    result = DecodeResult(rows, {("off", 0.0): 0.4, ("off", 1.0): 0.9})
    report = decode_json(result, {"cores": 2})
    assert (report["suite"], report["emulated"]) == ("decode", False)
    found = report["rows"]
    assert isinstance(found, list)
    assert [row["name"] for row in found] == list(ROW_NAMES)
    assert [row["speedup"] for row in found[:2]] == [1.0, pytest.approx(0.5)]
    assert (found[0]["gap_ms_p50"], found[0]["gap_ms_p50_t1"]) == (0.4, 0.9)
    stream = io.StringIO()
    print_decode(Console(file=stream, width=80), result)
    assert "off / hf = 6.00" in stream.getvalue()
    assert "0.40/0.90" in stream.getvalue()
    assert max(map(len, stream.getvalue().splitlines())) <= 80


def test_deployments_keep_the_models_and_set_the_threads() -> None:
    configs = deployments(Config())
    assert configs["plain"].target.threads == CORES
    assert configs["plain"].drafters == ()
    assert configs["drafted"].target.threads == 1
    assert [one.kind for one in configs["drafted"].drafters] == ["model"]
    assert [one.kind for one in configs["ngram"].drafters] == ["ngram"]
    assert {one.server.grpc_port for one in configs.values()} == {0}


def test_the_help_lists_the_suites_that_are_registered(call: Call) -> None:
    said = " ".join(call("bench", "--help").stdout.split())
    assert list(suites()) == ["decode", "engine", "faults", "lookahead", "rules", "serving"]
    for suite in suites().values():
        assert f"{suite.name}: {suite.about[:20]}" in said


def test_the_machine_is_named() -> None:
    machine = describe_machine()
    assert machine["cpu"]
    assert machine["cores"]


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


@pytest.mark.skipif(not is_installed(), reason="the extra openvino is not installed")
def test_openvino_decodes_the_text_of_transformers(served: Served, tmp_path: Path) -> None:
    """Plainly, by prompt lookup, with a draft model, and several prompts as a batch."""
    peer = TransformersPeer(served.checkpoint, threads=1)
    prompts = [peer.encode(text) for text in ("The quick brown fox", "One two three one two")]
    converted, draft = (
        convert_checkpoint(
            served.checkpoint, tmp_path / weights, log=tmp_path / f"{weights}.log", weights=weights
        )
        for weights in WEIGHTS
    )
    for helper, candidates in ((None, None), (PROMPT_LOOKUP, 3), (draft, 2)):
        log = tmp_path / "pipeline.log"
        with OpenVinoProcess(converted, threads=1, log=log, draft=helper) as process:
            for batch in (prompts[:1], prompts):
                answer = process.generate(batch, max_tokens=12, num_assistant_tokens=candidates)
                for prompt, token_ids in zip(batch, answer.token_ids, strict=True):
                    departures = peer.departures(prompt, token_ids, 12)
                    assert all(one.tie for one in departures), departures


def test_openvino_says_why_it_cannot_convert(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="OpenVINO cannot convert"):
        convert_checkpoint(tmp_path / "none", tmp_path / "made", log=tmp_path / "log")


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
        (("nothing",), "suite: expected one of decode, engine, faults, lookahead, rules"),
        (("decode", "--part", "steps"), "--part: the suite decode does not take this flag"),
        (("decode", "--quick"), "--quick: the suite decode does not take this flag"),
        (("lookahead", "--limit", "1"), "--limit: the suite lookahead does not take this flag"),
        (("engine", "--device", "tpu"), "device: expected cpu or cuda"),
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


@pytest.mark.ray
@pytest.mark.long
def test_decode_measures_every_row(served: Served, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ROWS[:2])
    flags = ("--max-tokens", "8", "--repeats", "1", "--no-calibrate", "--gap-steps", "20")
    rows, said = run_bench("decode", served.config, tmp_path, "--input", source, *flags)
    assert [row["name"] for row in rows] == list(ROW_NAMES)
    assert all(row["same_text"] for row in rows)
    assert rows[0]["speedup"] == 1
    assert rows[0]["gap_ms_p50"] > 0
    assert "chain / hf-assisted" in said
