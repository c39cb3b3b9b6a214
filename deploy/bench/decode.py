"""`paceline bench decode`: speculation, plain decoding and transformers, one request at a time.

Every row decodes the same prompts greedily, to the model's own end of sequence. Our rows are
policies of deployments that run side by side on one Ray. An idle deployment takes no processor
time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from cluster.config.model import Config, DrafterConfig, TargetConfig
from deploy.bench.harness import (
    CORES,
    Asked,
    Contender,
    Goal,
    Measured,
    Prompts,
    Report,
    Suite,
    measure_in_turns,
    print_goals,
    register,
    table,
)
from deploy.bench.processes import on_free_ports, running_side_by_side
from deploy.bench.transformers_peer import Assistance, TransformersProcess
from deploy.rows.measure import Sample, measure
from paceline.client import Client
from paceline.generation import GenerateInput
from paceline.options import GenerateOptions
from workers.models.catalog import resolve_model

LIMIT, MAX_TOKENS, REPEATS, GAP_STEPS = 8, 64, 3, 1000
"""Defaults: rows of the input, tokens of a row, rounds, and steps over which gaps are measured."""
GAP_ROWS = ("off", "chain")
GAP_TEMPERATURES = (0.0, 1.0)
CALIBRATION_SECONDS = 50.0
"""Time to try all settings. Each row has a share of it, which its last probe may exceed."""
ASSISTANCES = tuple(
    Assistance(tokens, schedule, threshold)
    for tokens, schedule, threshold in (
        (2, "constant", 0.0),
        (3, "constant", 0.0),
        (4, "constant", 0.0),
        (6, "constant", 0.0),
        (5, "heuristic", 0.0),
        (6, "constant", 0.4),
        (10, "constant", 0.4),
        (20, "constant", 0.4),
        (10, "constant", 0.6),
    )
)
"""Settings of transformers' assistant that are tried. The last but one is its default."""
WINDOWS: Mapping[str, Sequence[int]] = {
    "lockstep": (1, 2, 3, 4, 6),
    "chain": (2, 3, 4, 6, 8),
    "chain-ngram": (2, 4, 8),
}
"""Windows that are tried for each row before the run. The row gets the fastest."""
NUM_SETTINGS = len(ASSISTANCES) + sum(len(windows) for windows in WINDOWS.values())
RATIOS = (
    ("off", "hf", 2.0),
    ("chain", "hf-assisted", 1.8),
    ("chain", "off-1", 1.15),
    ("chain", "lockstep", 1.0),
)
"""A row, the row to compare it with, and the ratio to aim at on two cores."""
LEGEND = """
spread: of a round over all prompts. len: tokens a step. busy: share of time in
forward passes, target then drafter. gap: median ms between two passes of the
target, at temperature 0/1. same: the tokens of off.
"""
PROBE_TOKENS = 8
"""Tokens of the first probes; each round doubles them."""

C = TypeVar("C", bound=Contender)


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How much to measure."""

    max_tokens: int
    repeats: int
    calibrate: bool
    gap_steps: int


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The rows, and the gaps in milliseconds by row and temperature. Our first row is `off`."""

    rows: Sequence[Measured]
    gaps_ms: Mapping[tuple[str, float], float]


@dataclass(frozen=True, slots=True)
class OwnContender:
    """A policy of a deployment of ours."""

    name: str
    client: Client
    policy: str
    window: int | None
    devices: str

    @property
    def setting(self) -> str:
        """Policy, window and devices."""
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.policy}{window}; {self.devices}"

    def options(self, max_tokens: int, temperature: float = 0.0) -> GenerateOptions:
        """The request that this row sends."""
        return GenerateOptions(
            temperature=temperature,
            seed=0,
            max_tokens=max_tokens,
            policy=self.policy,
            window=self.window,
        )

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """Send the request through the client library, as any caller would."""
        return measure(self.client, list(prompt_token_ids), self.options(max_tokens))


@dataclass(frozen=True, slots=True)
class PeerContender:
    """transformers' generate, with or without an assistant."""

    name: str
    process: TransformersProcess
    assistance: Assistance | None
    threads: int

    @property
    def setting(self) -> str:
        """The assistant's settings and the threads."""
        assistance = "" if self.assistance is None else f"{self.assistance}; "
        return f"{assistance}{self.threads} threads"

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """Decode in the peer's process, which measures the time."""
        answer = self.process.generate(
            [prompt_token_ids],
            max_tokens=max_tokens,
            threads=self.threads,
            assistance=self.assistance,
        )
        return Sample(answer.token_ids[0], answer.seconds)


def find_fastest(
    contenders: Sequence[C],
    prompts: Prompts,
    *,
    max_tokens: int,
    seconds: float,
    clock: Callable[[], float],
    on_probe: Callable[[str], None] = lambda name: None,
) -> C:
    """The fastest contender, by short probes in a bounded time (successive halving).

    In each round, every contender decodes a few tokens of one prompt. The faster half goes on to
    the next round, with another prompt and twice the number of tokens, until one contender is left
    or the time is up (Karnin et al. 2013, "Almost optimal exploration in multi-armed bandits").

    The first round only warms up: it drops no contender. No probe begins after `seconds` of
    `clock`, so only the last probe can exceed them. A round that is cut short does not count: the
    fastest of the last complete round is taken. If no round after the warm-up is complete, the
    fastest of those probed after the warm-up is taken; if none was, the first contender.
    """
    until = clock() + seconds
    left = list(contenders)
    tokens = PROBE_TOKENS
    number = 0
    while len(left) > 1:
        costs: list[tuple[float, int]] = []
        for place, contender in enumerate(left):
            if clock() >= until:
                return left[min(costs)[1]] if number == 1 and costs else left[0]
            on_probe(contender.name)
            sample = contender.decode(prompts[number % len(prompts)], min(tokens, max_tokens))
            costs.append((sample.seconds / max(1, len(sample.token_ids)), place))
        if number > 0:
            left = [left[place] for _, place in sorted(costs)[: math.ceil(len(left) / 2)]]
            tokens *= 2
        number += 1
    return left[0]


def deployments(config: Config) -> dict[str, Config]:
    """The deployments to start, by the names that rows use. They are served on any free ports.

    `config` names the models. The deployments differ in drafters and in the threads of each device.
    """
    drafter = next((one for one in config.drafters if one.model is not None), DrafterConfig())
    one_core = config.target.model_copy(update={"threads": 1})
    model_drafter = drafter.model_copy(update={"count": 1, "threads": 1})

    def deployment(target: TargetConfig, *drafters: DrafterConfig) -> Config:
        return on_free_ports(config, target=target, drafters=drafters)

    return {
        "plain": deployment(config.target.model_copy(update={"threads": CORES})),
        "drafted": deployment(one_core, model_drafter),
        "ngram": deployment(one_core, DrafterConfig(kind="ngram", threads=1)),
    }


def own_contenders(clients: Mapping[str, Client]) -> list[OwnContender]:
    """Our rows, with the windows of the server."""
    return [
        OwnContender("off", clients["plain"], "off", None, f"target {CORES} threads"),
        OwnContender("off-1", clients["drafted"], "off", None, "target 1 thread"),
        OwnContender("lockstep", clients["drafted"], "lockstep", None, "1 thread each"),
        OwnContender("chain", clients["drafted"], "chain", None, "1 thread each"),
        OwnContender("chain-ngram", clients["ngram"], "chain", None, "target 1 thread"),
    ]


def encode_prompts(client: Client, inputs: Sequence[GenerateInput]) -> list[tuple[int, ...]]:
    """The prompts' token ids. Every row gets these, so that no row's time includes tokenizing."""
    one_token = GenerateOptions(max_tokens=1, temperature=0.0, policy="off")
    return [client.generate(one, one_token).prompt_token_ids for one in inputs]


class DecodeBench:
    """The suite, once everything is started."""

    def __init__(
        self,
        clients: Mapping[str, Client],
        process: TransformersProcess,
        prompts: Prompts,
        settings: DecodeSettings,
        *,
        tell: Callable[[str], None],
    ) -> None:
        self._own = own_contenders(clients)
        self._process = process
        self._prompts = prompts
        self._settings = settings
        self._tell = tell

    def run(self) -> DecodeResult:
        """Find each row's best setting, measure all rows in turns, then the gaps between steps."""
        assistance = self._best_assistance()
        self._own = [self._with_best_window(one) for one in self._own]
        contenders: list[Contender] = [
            *self._own,
            PeerContender("hf", self._process, None, CORES),
            PeerContender("hf-assisted", self._process, assistance, CORES),
        ]
        total = len(contenders) * len(self._prompts) * self._settings.repeats
        done = 0

        def count(name: str) -> None:
            nonlocal done
            done += 1
            self._tell(f"measuring: {done} of {total} ({name})")

        rows = measure_in_turns(
            contenders,
            self._prompts,
            max_tokens=self._settings.max_tokens,
            repeats=self._settings.repeats,
            on_sample=count,
        )
        return DecodeResult(rows, self._gaps())

    def _best_assistance(self) -> Assistance:
        default = ASSISTANCES[-2]
        if not self._settings.calibrate:
            return default
        peers = [PeerContender(str(one), self._process, one, CORES) for one in ASSISTANCES]
        best = self._calibrate(peers)
        return next(one for one in ASSISTANCES if str(one) == best.name)

    def _with_best_window(self, contender: OwnContender) -> OwnContender:
        if contender.name not in WINDOWS or not self._settings.calibrate:
            return contender
        variants = {
            f"{contender.name} window {window}": replace(contender, window=window)
            for window in WINDOWS[contender.name]
        }
        renamed = [replace(variant, name=name) for name, variant in variants.items()]
        return variants[self._calibrate(renamed).name]

    def _calibrate(self, contenders: Sequence[C]) -> C:
        return find_fastest(
            contenders,
            self._prompts,
            max_tokens=self._settings.max_tokens,
            seconds=CALIBRATION_SECONDS * len(contenders) / NUM_SETTINGS,
            clock=time.monotonic,
            on_probe=lambda name: self._tell(f"calibrating: {name}"),
        )

    def _gaps(self) -> dict[tuple[str, float], float]:
        """The median gap between forward passes, in milliseconds. One row runs at a time."""
        gaps: dict[tuple[str, float], float] = {}
        for temperature in GAP_TEMPERATURES:
            for contender in self._own:
                if contender.name in GAP_ROWS:
                    self._tell(f"gap between steps: {contender.name}, temperature {temperature:g}")
                    gaps[contender.name, temperature] = self._gap_ms(contender, temperature)
        return gaps

    def _gap_ms(self, contender: OwnContender, temperature: float) -> float:
        client = contender.client
        options = replace(contender.options(256, temperature), ignore_eos=True)
        until = client.stats().steps + self._settings.gap_steps
        number = 0
        # The server's median is over its last 1,000 steps.
        while client.stats().steps < until:
            client.generate(list(self._prompts[number % len(self._prompts)]), options)
            number += 1
        return client.stats().gap_ms_p50


def run_decode(
    configs: Mapping[str, Config],
    inputs: Sequence[GenerateInput],
    settings: DecodeSettings,
    *,
    home: Path,
    log_folder: Path,
    tell: Callable[[str], None],
) -> DecodeResult:
    """Start everything, measure, end everything. Missing models are fetched."""
    with running_side_by_side(configs, home=home, tell=tell) as clients, ExitStack() as stack:
        target = resolve_model(configs["drafted"].target.model, home=home)
        drafter = configs["drafted"].drafters[0].model
        assert drafter is not None
        draft = resolve_model(drafter, home=home)
        process = stack.enter_context(
            TransformersProcess(
                target.folder, draft=draft, threads=CORES, log=log_folder / "transformers.log"
            )
        )
        prompts = encode_prompts(clients["plain"], inputs)
        return DecodeBench(clients, process, prompts, settings, tell=tell).run()


def decode_json(result: DecodeResult, machine: Mapping[str, object]) -> dict[str, object]:
    """The document of `bench decode --json`."""
    rows = by_name(result)
    return {
        "suite": "decode",
        "machine": machine,
        "emulated": False,
        "rows": [_row_json(result, row, rows["off"]) for row in result.rows],
        "ratios": {goal.name.replace(" ", ""): goal.ratio for goal in goals(result)},
    }


def by_name(result: DecodeResult) -> dict[str, Measured]:
    """The rows by their names."""
    return {row.contender.name: row for row in result.rows}


def goals(result: DecodeResult) -> Iterator[Goal]:
    """The goals: ratios of tokens/s between rows."""
    rows = by_name(result)
    for one, other, aim in RATIOS:
        ratio = rows[one].tokens_per_second / rows[other].tokens_per_second
        yield Goal(f"{one} / {other}", ratio, aim)


def print_decode(console: Console, result: DecodeResult) -> None:
    """Print the rows, how each ran, and the ratios; at most 80 columns."""
    off = by_name(result)["off"]
    shown = table(("", "tok/s", "ms/tok", "/off", "spread", "len", "busy", "gap", "same"))
    for row in result.rows:
        length = row.acceptance_length
        shown.add_row(
            row.contender.name,
            f"{row.tokens_per_second:.1f}",
            f"{1000 / row.tokens_per_second:.1f}",
            f"{row.tokens_per_second / off.tokens_per_second:.2f}",
            f"{row.spread:.0%}",
            "" if length is None else f"{length:.2f}",
            " ".join(f"{share:.0%}" for share in row.busy.values()),
            _gaps_shown(result, row),
            "yes" if row.same_text(off) else "no",
        )
    console.print(shown)
    console.print()
    for row in result.rows:
        console.print(f"{row.contender.name}: {row.contender.setting}", highlight=False)
    console.print(LEGEND, highlight=False)
    print_goals(console, goals(result))


def _gaps_shown(result: DecodeResult, row: Measured) -> str:
    gaps = [result.gaps_ms.get((row.contender.name, one)) for one in GAP_TEMPERATURES]
    return "/".join(f"{gap:.2f}" for gap in gaps if gap is not None)


def _row_json(result: DecodeResult, row: Measured, off: Measured) -> dict[str, object]:
    name = row.contender.name
    return {
        "name": name,
        "setting": row.contender.setting,
        "speedup": row.tokens_per_second / off.tokens_per_second,
        "tokens": row.tokens,
        "tokens_per_second": row.tokens_per_second,
        "ms_per_token": 1000 / row.tokens_per_second,
        "spread": row.spread,
        "acceptance_length": row.acceptance_length,
        "busy": dict(row.busy),
        "gap_ms_p50": result.gaps_ms.get((name, 0.0)),
        "gap_ms_p50_t1": result.gaps_ms.get((name, 1.0)),
        "same_text": row.same_text(off),
    }


def _run(asked: Asked) -> Report:
    settings = DecodeSettings(
        asked.max_tokens or MAX_TOKENS,
        asked.repeats or REPEATS,
        asked.calibrate is not False,
        asked.gap_steps or GAP_STEPS,
    )
    result = run_decode(
        deployments(asked.config),
        asked.read_inputs(asked.limit or LIMIT),
        settings,
        home=asked.home,
        log_folder=asked.folder,
        tell=asked.tell,
    )
    return Report(decode_json(result, asked.machine), lambda console: print_decode(console, result))


register(
    Suite(
        "decode",
        "speculation beside plain decoding and transformers, one request a time; by default "
        "8 rows of the input, 64 tokens, 3 rounds (minutes)",
        _run,
        frozenset({"limit", "max_tokens", "repeats", "calibrate", "gap_steps"}),
    )
)
