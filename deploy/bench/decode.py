"""`paceline bench decode`: our policies and drafters beside transformers and OpenVINO GenAI.

Every row decodes the same prompts greedily, one request at a time, to the model's own end of
sequence. Our rows are policies of deployments that run side by side on one Ray. An idle deployment
or peer takes no processor time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from cluster.config.model import Config, DrafterConfig
from deploy.bench.harness import (
    CORES,
    Asked,
    Contender,
    Goal,
    Measured,
    Ours,
    Prompts,
    Report,
    Suite,
    TimeLeft,
    find_fastest,
    measure_in_turns,
    print_goals,
    register,
    table,
    told_left,
)
from deploy.bench.openvino_peer import (
    OPENVINO_CANDIDATES,
    OPENVINO_DRAFT,
    OPENVINO_LOOKUP,
    PROMPT_LOOKUP,
    OpenVinoProcess,
    convert_checkpoints,
    is_installed,
    openvino_row,
)
from deploy.bench.processes import deployment, running_side_by_side
from deploy.bench.transformers_peer import ASSISTANCES, TransformersProcess, transformers_row
from paceline.client import Client
from paceline.generation import GenerateInput
from paceline.options import GenerateOptions
from paceline.text import install_hint
from workers.models.catalog import resolve_model

DRAFTED, NGRAM, RECYCLING = "drafted", "ngram", "recycling"
"""Our deployments: with the model drafter of the configuration, and with one at hand."""

POLICIES: Mapping[str, Sequence[str]] = {
    DRAFTED: ("lockstep", "chain", "fanout", "auto"),
    NGRAM: ("off", "lockstep", "chain", "auto"),
    RECYCLING: ("lockstep", "chain", "auto"),
}
"""Policies measured in each deployment. `off` is measured where the target has all cores."""

WINDOWS: Mapping[str, Sequence[int]] = {
    "lockstep": (1, 2, 3, 4, 6),
    "chain": (2, 3, 4, 6, 8),
    "fanout": (2, 4, 8),
    "lockstep-ngram": (2, 4, 8),
    "chain-ngram": (2, 4, 8),
    "lockstep-recycling": (1, 2, 4),
    "chain-recycling": (1, 2, 4),
}
"""Windows that a row tries before the run, by its name. `auto` chooses its own."""

LIMIT, MAX_TOKENS, REPEATS, GAP_STEPS = 8, 64, 5, 1000
"""Defaults: rows of the input, tokens of a row, rounds, and steps over which gaps are measured."""
QUICK_LIMIT, QUICK_TOKENS, QUICK_REPEATS, QUICK_GAP_STEPS = 2, 48, 3, 100
QUICK_SECONDS, QUICK_GAP_SECONDS = 185.0, 15.0
"""With --quick, seconds after the start when the last row begins to decode, and after that, when
the last request begins that measures gaps. What began earlier, and the end of all processes, fits
into four minutes.
"""
OPENVINO_SHARE = 0.4
"""OpenVINO, whose models are converted first, is left out if ours started after this share."""
GAP_ROWS = ("off", "chain")
GAP_TEMPERATURES = (0.0, 1.0)
CALIBRATION_SECONDS = 120.0
"""Time to try all settings. Each row has a share of it, which its last probe may exceed."""
NUM_SETTINGS = len(ASSISTANCES) + sum(
    len(tried) for tried in (*WINDOWS.values(), *OPENVINO_CANDIDATES.values())
)
AS_FAST = 0.97
"""`auto` is recommended from this share of the fastest row's speed on, since it adapts to load."""
AIMS = (("hf", 3.0), ("hf-assisted", 2.0), ("openvino", 1.0))
"""Peers, and the ratio of our fastest row to aim at. "openvino": its fastest in float32."""
OFF_AIM, GAP_AIM_MS = 2.0, 1.5
"""Aims: `off` / `hf`, and the most milliseconds between two passes of `off` at temperature 0."""
BF16 = "-bf16"
"""Ends the name of a row in bfloat16."""
FIRST = ("off", "hf", OPENVINO_LOOKUP, "chain-ngram", "lockstep-ngram")
"""Rows that are measured first, so that a run without time for all compares ours with others'."""
LEGEND = """
spread: of a round over all prompts. len: tokens a step. busy: share of time in
forward passes, target then drafter. gap: median ms between two passes of the
target, at temperature 0/1. same: the tokens of off.
"""

C = TypeVar("C", bound=Contender)


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How much to measure. `seconds`: after these, no row begins to decode; None: no limit."""

    max_tokens: int
    repeats: int
    calibrate: bool
    gap_steps: int
    gap_temperatures: Sequence[float] = GAP_TEMPERATURES
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The rows, and the gaps in milliseconds by row and temperature. Our first row is `off`.

    `left_out`: what was not measured for lack of time.
    """

    rows: Sequence[Measured]
    gaps_ms: Mapping[tuple[str, float], float]
    left_out: Sequence[str] = ()

    @property
    def by_name(self) -> dict[str, Measured]:
        return {row.contender.name: row for row in self.rows}

    @property
    def own(self) -> list[Measured]:
        """Our rows: each of them decodes in steps."""
        return [row for row in self.rows if row.acceptance_length is not None]


@dataclass(frozen=True, slots=True)
class Peers:
    """The processes of others, and the rows of OpenVINO GenAI by name.

    `left_out`: peers that were not started for lack of time.
    """

    transformers: TransformersProcess
    openvino: Mapping[str, OpenVinoProcess]
    left_out: Sequence[str] = ()


def deployments(config: Config) -> dict[str, Config]:
    """The deployments to start, by name. They are served on any free ports.

    `config` names the models. Threads are those that `auto` gives to a deployment alone on CORES
    cores: a thread each for a target and its model drafter, else all cores for the target.
    """
    model = next((one for one in config.drafters if one.model is not None), DrafterConfig())
    model = model.model_copy(update={"count": 1, "threads": 1})
    return {
        DRAFTED: deployment(config, 1, [model]),
        NGRAM: deployment(config, CORES, [DrafterConfig(kind="ngram")]),
        RECYCLING: deployment(config, CORES, [DrafterConfig(kind="recycling")]),
    }


def own_contenders(clients: Mapping[str, Client]) -> list[Ours]:
    """Our rows, with the windows of the server. The first is `off`."""
    rows = []
    for deployed, policies in POLICIES.items():
        for policy in policies:
            kind = "model" if deployed == DRAFTED else deployed
            plain = kind == "model" or policy == "off"
            options = GenerateOptions(temperature=0.0, seed=0, policy=policy)
            name = policy if plain else f"{policy}-{kind}"
            rows.append(Ours(name, clients[deployed], options, kind))
    return sorted(rows, key=lambda row: row.name != "off")


def with_windows(row: Ours) -> list[Ours]:
    """The row with each of the windows to try; with that of the server if there are none."""
    return [
        replace(row, options=replace(row.options, window=window))
        for window in WINDOWS.get(row.name, ())
    ] or [row]


def encode_prompts(client: Client, inputs: Sequence[GenerateInput]) -> list[tuple[int, ...]]:
    """The prompts' token ids. Every row gets these, so that no row's time includes tokenizing."""
    one_token = GenerateOptions(max_tokens=1, temperature=0.0, policy="off")
    return [client.generate(one, one_token).prompt_token_ids for one in inputs]


class DecodeBench:
    """The suite, once everything is started. `began`: when, by time.monotonic."""

    def __init__(
        self,
        clients: Mapping[str, Client],
        peers: Peers,
        prompts: Prompts,
        settings: DecodeSettings,
        *,
        began: float,
        tell: Callable[[str], None],
        save: Callable[[DecodeResult], None],
    ) -> None:
        self._own = own_contenders(clients)
        self._peers = peers
        self._prompts = prompts
        self._settings = settings
        self._began = began
        self._tell = tell
        self._save = save

    def run(self) -> DecodeResult:
        """Find each row's best setting, measure all rows in turns, then the gaps between steps."""
        contenders = self._with_best_settings()
        left = TimeLeft(
            [one.name for one in contenders],
            rounds=len(self._prompts) * self._settings.repeats,
        )

        def count(name: str, seconds: float) -> None:
            most = self._seconds_left()
            self._tell(f"measuring {name}: {left.after(name, seconds, most=most)}")

        measured = measure_in_turns(
            urgent_first(contenders),
            self._prompts,
            max_tokens=self._settings.max_tokens,
            repeats=self._settings.repeats,
            on_sample=count,
            has_time=self._has_time,
        )
        by_name = {row.contender.name: row for row in measured}
        rows = [by_name[one.name] for one in contenders if one.name in by_name]
        left_out = [
            *(one.name for one in contenders if one.name not in by_name),
            *self._peers.left_out,
        ]
        if missing := len(self._prompts) - len(rows[0].samples):
            left_out.append(f"{missing} of {len(self._prompts)} prompts")
        self._save(DecodeResult(rows, {}, left_out))
        return DecodeResult(rows, self._gaps(), left_out)

    def _seconds_left(self) -> float:
        limit = self._settings.seconds
        return math.inf if limit is None else self._began + limit - time.monotonic()

    def _has_time(self, seconds: float) -> bool:
        return seconds < self._seconds_left()

    def _with_best_settings(self) -> list[Contender]:
        process = self._peers.transformers
        assistants = [transformers_row("hf-assisted", process, one) for one in ASSISTANCES]
        tried_by: dict[str, Sequence[int | None]] = {
            name: OPENVINO_CANDIDATES.get(name.removesuffix(BF16), (None,))
            for name in self._peers.openvino
        }
        self._tell("waiting until all peers have loaded their models")
        assistants[0].decode(self._prompts[0], 1)
        for name, pipeline in self._peers.openvino.items():
            openvino_row(name, pipeline, tried_by[name][0]).decode(self._prompts[0], 1)
        begin = time.monotonic()
        rows: list[Contender] = [self._best(with_windows(one), begin, one) for one in self._own]
        rows.append(transformers_row("hf", process, None))
        rows.append(self._best(assistants, begin, assistants[-2]))
        candidates: dict[str, int | None] = {}
        for name, pipeline in self._peers.openvino.items():
            kind = name.removesuffix(BF16)
            # A row in bfloat16 has the setting of its row in float32, which comes first.
            tried = (candidates[kind],) if kind in candidates else tried_by[name]
            variants = [openvino_row(name, pipeline, one) for one in tried]
            best = self._best(variants, begin, variants[min(1, len(variants) - 1)])
            candidates[kind] = tried[variants.index(best)]
            rows.append(best)
        return rows

    def _best(self, variants: Sequence[C], begin: float, usual: C) -> C:
        """The fastest variant of a row, or the usual one without calibration."""
        if len(variants) == 1:
            return variants[0]
        if not self._settings.calibrate:
            return usual

        def probed(name: str) -> None:
            left = max(0.0, CALIBRATION_SECONDS - (time.monotonic() - begin))
            self._tell(f"trying settings of {name}{told_left(left, 'at most ')}")

        return find_fastest(
            variants,
            self._prompts,
            max_tokens=self._settings.max_tokens,
            seconds=CALIBRATION_SECONDS * len(variants) / NUM_SETTINGS,
            clock=time.monotonic,
            on_probe=probed,
        )

    def _gaps(self) -> dict[tuple[str, float], float]:
        """The median gap between forward passes, in milliseconds. One row runs at a time.

        Without time for a row it has none.
        """
        measured = [one for one in self._own if one.name in GAP_ROWS]
        todo = [(one, at) for at in self._settings.gap_temperatures for one in measured]
        gaps: dict[tuple[str, float], float] = {}
        begin = time.monotonic()
        for done, (contender, temperature) in enumerate(todo):
            if not self._has_time(-QUICK_GAP_SECONDS):
                break
            spent = time.monotonic() - begin
            left = told_left(spent / done * (len(todo) - done)) if done else ""
            self._tell(f"gap between steps: {contender.name}, temperature {temperature:g}{left}")
            gaps[contender.name, temperature] = self._gap_ms(contender, temperature)
        return gaps

    def _gap_ms(self, contender: Ours, temperature: float) -> float:
        client = contender.client
        tokens = min(256, self._settings.gap_steps)
        options = replace(
            contender.options, max_tokens=tokens, temperature=temperature, ignore_eos=True
        )
        until = client.stats().steps + self._settings.gap_steps
        # The server's median is over its last 1,000 steps.
        for prompt in cycle(self._prompts):
            client.generate(list(prompt), options)
            if client.stats().steps >= until or not self._has_time(-QUICK_GAP_SECONDS):
                break
        return client.stats().gap_ms_p50


def urgent_first(contenders: Sequence[Contender]) -> list[Contender]:
    places = {name: place for place, name in enumerate(FIRST)}
    return sorted(contenders, key=lambda one: places.get(one.name, len(FIRST)))


def run_decode(
    configs: Mapping[str, Config],
    inputs: Sequence[GenerateInput],
    settings: DecodeSettings,
    *,
    home: Path,
    folder: Path,
    tell: Callable[[str], None],
    save: Callable[[DecodeResult], None],
) -> DecodeResult:
    """Start everything, measure, end everything. Missing models are fetched.

    `folder`: for logs and converted models. `save` gets the rows before the gaps are measured.
    """
    began = time.monotonic()
    with running_side_by_side(configs, home=home, tell=tell) as clients, ExitStack() as stack:
        target = resolve_model(configs[DRAFTED].target.model, home=home)
        drafter = configs[DRAFTED].drafters[0].model
        assert drafter is not None
        draft = resolve_model(drafter, home=home)
        transformers = TransformersProcess(
            target.folder, draft=draft, threads=CORES, log=folder / "transformers.log"
        )
        stack.enter_context(transformers)
        pipelines, left_out = {}, ["openvino"]
        limit = settings.seconds
        if limit is None or time.monotonic() - began < OPENVINO_SHARE * limit:
            left_out = []
            pipelines = openvino_pipelines(target.folder, draft.folder, folder=folder, tell=tell)
        for one in pipelines.values():
            stack.enter_context(one)
        prompts = encode_prompts(clients[NGRAM], inputs)
        peers = Peers(transformers, pipelines, left_out)
        bench = DecodeBench(clients, peers, prompts, settings, began=began, tell=tell, save=save)
        return bench.run()


def openvino_pipelines(
    target: Path, draft: Path, *, folder: Path, tell: Callable[[str], None]
) -> dict[str, OpenVinoProcess]:
    """Start OpenVINO GenAI's rows, the draft model with 8-bit weights. None without the extra.

    Rows in bfloat16 only where the processor computes in it.
    """
    import torch

    if not is_installed():
        tell(f"OpenVINO GenAI is left out; {install_hint('openvino')}")
        return {}
    tell("OpenVINO: converting the models")
    converted, int8 = folder / "target", folder / "draft"
    convert_checkpoints(
        [(target, converted, "float32"), (draft, int8, "int8")], log=folder / "convert.log"
    )
    helpers = {"openvino": None, OPENVINO_DRAFT: int8, OPENVINO_LOOKUP: PROMPT_LOOKUP}
    dtypes = {"": "float32"}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes[BF16] = "bfloat16"
    return {
        f"{name}{ending}": OpenVinoProcess(
            converted, threads=CORES, log=folder / f"{name}{ending}.log", dtype=dtype, draft=helper
        )
        for ending, dtype in dtypes.items()
        for name, helper in helpers.items()
    }


def decode_json(result: DecodeResult, machine: Mapping[str, object]) -> dict[str, object]:
    off, chosen = result.by_name["off"], recommended(result)
    return {
        "suite": "decode",
        "machine": machine,
        "emulated": False,
        "rows": [_row_json(result, row, off) for row in result.rows],
        "ratios": {goal.name.replace(" ", ""): goal.ratio for goal in goals(result)},
        "recommended": None if chosen is None else chosen.contender.name,
        "left_out": list(result.left_out),
    }


def recommended(result: DecodeResult) -> Measured | None:
    """The row to choose: our fastest one with the tokens of `off`, or an `auto` that is as fast.

    None: no other row of ours was measured, so that there is nothing to compare.
    """
    off = result.by_name["off"]
    speeds = {row.contender.name: row.tokens_per_second for row in result.own if row.same_text(off)}
    if len(result.own) < 2:
        return None
    fastest = max(speeds.values())
    near = [name for name, speed in speeds.items() if speed >= AS_FAST * fastest]
    return result.by_name[max(near, key=lambda name: (name.startswith("auto"), speeds[name]))]


def goals(result: DecodeResult) -> Iterator[Goal]:
    """Our fastest row over each peer, in tokens/s; `off` over `hf`; and the gap."""
    rows = result.by_name
    ours = max(result.own, key=lambda row: row.tokens_per_second)
    for peer, aim in AIMS:
        theirs = [rows[peer]] if peer in rows else []
        if peer == "openvino":
            theirs += [rows[name] for name in OPENVINO_CANDIDATES if name in rows]
        if theirs:
            best = max(theirs, key=lambda row: row.tokens_per_second)
            ratio = ours.tokens_per_second / best.tokens_per_second
            yield Goal(f"{ours.contender.name} / {best.contender.name}", ratio, aim)
    if "hf" in rows:
        ratio = rows["off"].tokens_per_second / rows["hf"].tokens_per_second
        yield Goal("off / hf", ratio, OFF_AIM)
    if gap := result.gaps_ms.get(("off", 0.0)):
        yield Goal(f"{GAP_AIM_MS} ms / gap of off", GAP_AIM_MS / gap, 1.0)


def print_decode(console: Console, result: DecodeResult) -> None:
    """Print the rows, how each ran, the ratios, and the row to choose; at most 80 columns."""
    off = result.by_name["off"]
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
    if result.left_out:
        console.print(f"\nNot measured for lack of time: {', '.join(result.left_out)}.")
    chosen = recommended(result)
    if chosen is None:
        console.print(
            "\nNo row that drafts was measured, so there is nothing to choose from: give it more "
            "time (without --quick), or end what keeps the cores busy."
        )
        return
    speedup = chosen.tokens_per_second / off.tokens_per_second
    console.print(
        f"\nFor one request at a time on this machine, choose {chosen.contender.setting}: "
        f"{speedup:.2f} x off.",
        highlight=False,
    )


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
    quick = asked.quick
    settings = DecodeSettings(
        asked.max_tokens or (QUICK_TOKENS if quick else MAX_TOKENS),
        asked.repeats or (QUICK_REPEATS if quick else REPEATS),
        not quick if asked.calibrate is None else asked.calibrate,
        asked.gap_steps or (QUICK_GAP_STEPS if quick else GAP_STEPS),
        gap_temperatures=GAP_TEMPERATURES[:1] if quick else GAP_TEMPERATURES,
        seconds=QUICK_SECONDS if quick else None,
    )
    result = run_decode(
        deployments(asked.config),
        asked.read_inputs(asked.limit or (QUICK_LIMIT if quick else LIMIT)),
        settings,
        home=asked.home,
        folder=asked.folder,
        tell=asked.tell,
        save=lambda rows: asked.save(decode_json(rows, asked.machine)),
    )
    return Report(decode_json(result, asked.machine), lambda console: print_decode(console, result))


register(
    Suite(
        "decode",
        "every policy and drafter beside transformers and OpenVINO GenAI, one request a time; by "
        "default 8 rows of the input, 64 tokens, 5 rounds (half an hour); with --quick 2 rows, 48 "
        "tokens, at most 3 rounds, within 4 minutes once the models are fetched; what does not fit "
        "into them is left out and named",
        _run,
        frozenset({"limit", "max_tokens", "repeats", "calibrate", "gap_steps", "quick"}),
    )
)
