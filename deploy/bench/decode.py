"""`paceline bench decode`: our policies and drafters beside transformers and OpenVINO GenAI.

Every row decodes the same prompts greedily, one request at a time, to the model's own end of
sequence. Our rows are policies of deployments that run side by side on one Ray. An idle deployment
or peer takes no processor time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from cluster.config.model import Config, DrafterConfig
from deploy.bench.harness import (
    CORES,
    Asked,
    Contender,
    Document,
    Goal,
    Measured,
    Ours,
    Prompts,
    Row,
    Suite,
    TimeLeft,
    encode_prompt,
    figure,
    find_fastest,
    measure_in_turns,
    print_goals,
    ratios,
    read_inputs,
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
from deploy.bench.processes import deployment, model_drafters, running_side_by_side
from deploy.bench.transformers_peer import (
    ASSISTANCES,
    USUAL_ASSISTANCE,
    TransformersProcess,
    assisted_transformers,
    transformers_row,
)
from paceline.client import Client
from paceline.options import GenerateOptions
from paceline.text import install_hint

DRAFTED, NGRAM, RECYCLING = "drafted", "ngram", "recycling"
"""Our deployments: with the model drafter of the configuration, and with one at hand."""

ROWS: Mapping[str, tuple[str, str, Sequence[int]]] = {
    "off": (NGRAM, "off", ()),
    "lockstep": (DRAFTED, "lockstep", (1, 2, 3, 4, 6)),
    "chain": (DRAFTED, "chain", (2, 3, 4, 6, 8)),
    "fanout": (DRAFTED, "fanout", (2, 4, 8)),
    "auto": (DRAFTED, "auto", ()),
    "lockstep-ngram": (NGRAM, "lockstep", (2, 4, 8)),
    "chain-ngram": (NGRAM, "chain", (2, 4, 8)),
    "auto-ngram": (NGRAM, "auto", ()),
    "lockstep-recycling": (RECYCLING, "lockstep", (1, 2, 4)),
    "chain-recycling": (RECYCLING, "chain", (1, 2, 4)),
    "auto-recycling": (RECYCLING, "auto", ()),
}
"""Our rows: deployment, policy, and the windows that are tried before the run. `off` is measured
where the target has all cores. `auto` chooses its own windows.
"""

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
    map(len, (*(windows for _, _, windows in ROWS.values()), *OPENVINO_CANDIDATES.values()))
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
COLUMNS = (
    ("", "name", ""),
    ("tok/s", "tokens_per_second", ".1f"),
    ("ms/tok", "ms_per_token", ".1f"),
    ("/off", "speedup", ".2f"),
    ("spread", "spread", ".0%"),
    ("len", "acceptance_length", ".2f"),
    ("busy", "busy", ".0%"),
    ("gap", "gap", ""),
    ("same", "same_text", ""),
)
LEGEND = """
spread: of a round over all prompts. len: tokens a step. busy: share of time in
forward passes, target then drafter. gap: median ms between two passes of the
target, at temperature 0/1. same: the tokens of off.
"""

C = TypeVar("C", bound=Contender)


def deployments(config: Config) -> dict[str, Config]:
    """The deployments to start, by name. They are served on any free ports.

    `config` names the models. Threads are those that `auto` gives to a deployment alone on CORES
    cores: a thread each for a target and its model drafter, else all cores for the target.
    """
    return {
        DRAFTED: deployment(config, 1, model_drafters(config)[:1]),
        NGRAM: deployment(config, CORES, [DrafterConfig(kind="ngram")]),
        RECYCLING: deployment(config, CORES, [DrafterConfig(kind="recycling")]),
    }


def own_contenders(clients: Mapping[str, Client]) -> list[Ours]:
    """Our rows, with the windows of the server. The first is `off`."""
    return [
        Ours(
            name,
            clients[deployed],
            GenerateOptions(temperature=0.0, seed=0, policy=policy),
            "model" if deployed == DRAFTED else deployed,
        )
        for name, (deployed, policy, _) in ROWS.items()
    ]


def with_windows(row: Ours) -> list[Ours]:
    """The row with each of the windows to try; with that of the server if there are none."""
    return [
        replace(row, options=replace(row.options, window=window)) for window in ROWS[row.name][2]
    ] or [row]


@dataclass(frozen=True, slots=True)
class DecodeBench:
    """The suite, once everything is started. `began`: when, by time.monotonic.

    `own`: our rows. `left_out`: what is not measured for lack of time.
    """

    asked: Asked
    own: Sequence[Ours]
    transformers: TransformersProcess
    openvino: Mapping[str, OpenVinoProcess]
    prompts: Prompts
    began: float
    left_out: list[str] = field(default_factory=list)

    def run(self) -> Document:
        """Find each row's best setting, measure all rows in turns, then the gaps between steps."""
        asked, prompts = self.asked, self.prompts
        contenders = self._with_best_settings()
        left = TimeLeft([one.name for one in contenders], rounds=len(prompts) * asked.repeats)

        def count(name: str, seconds: float) -> None:
            most = self._seconds_left()
            asked.tell(f"measuring {name}: {left.after(name, seconds, most=most)}")

        measured = measure_in_turns(
            urgent_first(contenders),
            prompts,
            max_tokens=asked.max_tokens,
            repeats=asked.repeats,
            on_sample=count,
            has_time=self._has_time,
        )
        by_name = {row.contender.name: row for row in measured}
        rows = [by_name[one.name] for one in contenders if one.name in by_name]
        self.left_out[:0] = [one.name for one in contenders if one.name not in by_name]
        if missing := len(prompts) - len(rows[0].samples):
            self.left_out.append(f"{missing} of {len(prompts)} prompts")
        asked.save(decode_document(rows, {}, self.left_out))
        return decode_document(rows, self._gaps(), self.left_out)

    def _seconds_left(self) -> float:
        limit = QUICK_SECONDS if self.asked.quick else math.inf
        return self.began + limit - time.monotonic()

    def _has_time(self, seconds: float) -> bool:
        return seconds < self._seconds_left()

    def _with_best_settings(self) -> list[Contender]:
        process = self.transformers
        assistants = {one: transformers_row("hf-assisted", process, one) for one in ASSISTANCES}
        tried_by: dict[str, Sequence[int | None]] = {
            name: OPENVINO_CANDIDATES.get(name.removesuffix(BF16), (None,))
            for name in self.openvino
        }
        self.asked.tell("waiting until all peers have loaded their models")
        assistants[USUAL_ASSISTANCE].decode(self.prompts[0], 1)
        for name, pipeline in self.openvino.items():
            openvino_row(name, pipeline, tried_by[name][0]).decode(self.prompts[0], 1)
        begin = time.monotonic()
        rows: list[Contender] = [self._best(with_windows(one), begin, one) for one in self.own]
        rows.append(transformers_row("hf", process, None))
        rows.append(self._best([*assistants.values()], begin, assistants[USUAL_ASSISTANCE]))
        candidates: dict[str, int | None] = {}
        for name, pipeline in self.openvino.items():
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
        if not self.asked.calibrate:
            return usual

        def probed(name: str) -> None:
            left = max(0.0, CALIBRATION_SECONDS - (time.monotonic() - begin))
            self.asked.tell(f"trying settings of {name}{told_left(left, 'at most ')}")

        return find_fastest(
            variants,
            self.prompts,
            max_tokens=self.asked.max_tokens,
            seconds=CALIBRATION_SECONDS * len(variants) / NUM_SETTINGS,
            clock=time.monotonic,
            on_probe=probed,
        )

    def _gaps(self) -> dict[tuple[str, float], float]:
        """The median gap between forward passes, in milliseconds. One row runs at a time.

        Without time for a row it has none.
        """
        measured = [one for one in self.own if one.name in GAP_ROWS]
        temperatures = GAP_TEMPERATURES[:1] if self.asked.quick else GAP_TEMPERATURES
        todo = [(one, at) for at in temperatures for one in measured]
        gaps: dict[tuple[str, float], float] = {}
        begin = time.monotonic()
        for done, (contender, temperature) in enumerate(todo):
            if not self._has_time(-QUICK_GAP_SECONDS):
                break
            spent = time.monotonic() - begin
            left = told_left(spent / done * (len(todo) - done)) if done else ""
            row = f"{contender.name}, temperature {temperature:g}"
            self.asked.tell(f"gap between steps: {row}{left}")
            gaps[contender.name, temperature] = self._gap_ms(contender, temperature)
        return gaps

    def _gap_ms(self, contender: Ours, temperature: float) -> float:
        client, steps = contender.client, self.asked.gap_steps
        options = replace(
            contender.options,
            max_tokens=min(256, steps),
            temperature=temperature,
            ignore_eos=True,
        )
        until = client.stats().steps + steps
        # The server's median is over its last 1,000 steps.
        for prompt in cycle(self.prompts):
            client.generate(list(prompt), options)
            if client.stats().steps >= until or not self._has_time(-QUICK_GAP_SECONDS):
                break
        return client.stats().gap_ms_p50


def urgent_first(contenders: Sequence[Contender]) -> list[Contender]:
    places = {name: place for place, name in enumerate(FIRST)}
    return sorted(contenders, key=lambda one: places.get(one.name, len(FIRST)))


def run_decode(asked: Asked) -> Document:
    """Start everything, measure, end everything. Missing models are fetched."""
    configs = deployments(asked.config)
    inputs = read_inputs(asked.inputs[0], asked.limit)
    began = time.monotonic()
    with (
        running_side_by_side(configs, home=asked.home, tell=asked.tell) as clients,
        assisted_transformers(asked) as (transformers, target, draft),
        ExitStack() as stack,
    ):
        pipelines, left_out = {}, ["openvino"]
        if not asked.quick or time.monotonic() - began < OPENVINO_SHARE * QUICK_SECONDS:
            left_out = []
            pipelines = openvino_pipelines(target.folder, draft.folder, asked)
        for one in pipelines.values():
            stack.enter_context(one)
        prompts = [encode_prompt(clients[NGRAM], row.input) for row in inputs]
        own = own_contenders(clients)
        return DecodeBench(asked, own, transformers, pipelines, prompts, began, left_out).run()


def openvino_pipelines(target: Path, draft: Path, asked: Asked) -> dict[str, OpenVinoProcess]:
    """Start OpenVINO GenAI's rows, the draft model with 8-bit weights. None without the extra.

    Rows in bfloat16 only where the processor computes in it.
    """
    import torch

    if not is_installed():
        asked.tell(f"OpenVINO GenAI is left out; {install_hint('openvino')}")
        return {}
    folder = asked.folder
    asked.tell("OpenVINO: converting the models")
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


# Report


def decode_document(
    measured: Sequence[Measured],
    gaps_ms: Mapping[tuple[str, float], float],
    left_out: Sequence[str] = (),
) -> Document:
    """Rows beside the first one, `off`. `gaps_ms`: milliseconds by row and temperature."""
    off = measured[0]
    rows: list[Row] = [
        {
            "name": one.contender.name,
            "setting": one.contender.setting,
            "speedup": one.tokens_per_second / off.tokens_per_second,
            "tokens": one.tokens,
            "tokens_per_second": one.tokens_per_second,
            "ms_per_token": 1000 / one.tokens_per_second,
            "spread": one.spread,
            "acceptance_length": one.acceptance_length,
            "busy": dict(one.busy),
            "gap_ms_p50": gaps_ms.get((one.contender.name, 0.0)),
            "gap_ms_p50_t1": gaps_ms.get((one.contender.name, 1.0)),
            "same_text": one.same_text(off),
        }
        for one in measured
    ]
    chosen = recommended(rows)
    return {
        "emulated": False,
        "rows": rows,
        "ratios": {name.replace(" ", ""): one for name, one in ratios(goals(rows)).items()},
        "recommended": None if chosen is None else chosen["name"],
        "left_out": list(left_out),
    }


def own_rows(rows: Iterable[Row]) -> list[Row]:
    """Ours: each of them decodes in steps."""
    return [row for row in rows if row["acceptance_length"] is not None]


def _speed(row: Row) -> float:
    speed: float = row["tokens_per_second"]
    return speed


def recommended(rows: Sequence[Row]) -> Row | None:
    """The row to choose: our fastest one with the tokens of `off`, or an `auto` that is as fast.

    None: no other row of ours was measured, so that there is nothing to compare.
    """
    own = own_rows(rows)
    if len(own) < 2:
        return None
    right = [row for row in own if row["same_text"]]
    fastest = max(map(_speed, right))
    near = [row for row in right if _speed(row) >= AS_FAST * fastest]
    return max(near, key=lambda row: (row["name"].startswith("auto"), _speed(row)))


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Our fastest row over each peer, in tokens/s; `off` over `hf`; and the gap."""
    by_name = {row["name"]: row for row in rows}
    ours = max(own_rows(rows), key=_speed)
    for peer, aim in AIMS:
        names = (peer, *(OPENVINO_CANDIDATES if peer == "openvino" else ()))
        if theirs := [by_name[name] for name in names if name in by_name]:
            best = max(theirs, key=_speed)
            yield Goal(f"{ours['name']} / {best['name']}", _speed(ours) / _speed(best), aim)
    if "hf" in by_name:
        yield Goal("off / hf", _speed(by_name["off"]) / _speed(by_name["hf"]), OFF_AIM)
    if gap := by_name["off"]["gap_ms_p50"]:
        yield Goal(f"{GAP_AIM_MS} ms / gap of off", GAP_AIM_MS / gap, 1.0)


def show_decode(console: Console, document: Document) -> None:
    """Print the rows, how each ran, the ratios, and the row to choose; at most 80 columns."""
    rows = document["rows"]
    console.print(table(COLUMNS, [{**row, "gap": _gaps_shown(row)} for row in rows]))
    console.print()
    for row in rows:
        console.print(f"{row['name']}: {row['setting']}", highlight=False)
    console.print(LEGEND, highlight=False)
    print_goals(console, goals(rows))
    if left_out := document["left_out"]:
        console.print(f"\nNot measured for lack of time: {', '.join(left_out)}.")
    chosen = recommended(rows)
    if chosen is None:
        console.print(
            "\nNo row that drafts was measured, so there is nothing to choose from: give it more "
            "time (without --quick), or end what keeps the cores busy."
        )
        return
    console.print(
        f"\nFor one request at a time on this machine, choose {chosen['setting']}: "
        f"{chosen['speedup']:.2f} x off.",
        highlight=False,
    )


def _gaps_shown(row: Row) -> str:
    gaps = (row["gap_ms_p50"], row["gap_ms_p50_t1"])
    return "/".join(figure(gap) for gap in gaps if gap is not None)


register(
    Suite(
        "decode",
        "every policy and drafter beside transformers and OpenVINO GenAI, one request a time; by "
        "default 8 rows of the input, 64 tokens, 5 rounds (half an hour); with --quick 2 rows, 48 "
        "tokens, at most 3 rounds, within 4 minutes once the models are fetched; what does not fit "
        "into them is left out and named",
        run_decode,
        show_decode,
        {
            "limit": (8, 2),
            "max_tokens": (64, 48),
            "repeats": (5, 3),
            "calibrate": (True, False),
            "gap_steps": (1000, 100),
        },
    )
)
