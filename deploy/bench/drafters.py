"""`paceline bench drafters`: every kind of drafter on every input file, in one run.

For each kind: milliseconds of a pass, acceptance by position at three temperatures, and tokens/s
beside `off` and transformers. Ours are two deployments on one Ray: one whose target has a core
beside the model drafters, and one with all cores for the target, for kinds that need no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Console

from cluster.config.model import Config, DrafterConfig
from deploy.bench.harness import (
    CORES,
    Asked,
    Contender,
    Document,
    Measured,
    Ours,
    Row,
    Suite,
    TimeLeft,
    encode_prompt,
    measure_in_turns,
    read_inputs,
    register,
    table,
)
from deploy.bench.processes import deployment, model_drafters, running_side_by_side
from deploy.bench.transformers_peer import (
    USUAL_ASSISTANCE,
    assisted_transformers,
    transformers_row,
)
from paceline.client import Client
from paceline.options import GenerateOptions

TEMPERATURES = (0.0, 0.7, 1.0)
WINDOW = 8
"""Positions of a window whose acceptance is told."""
MOST_TOKENS = 48
"""Upper bound on a row's tokens where acceptance is counted."""
FREE = ("ngram", "recycling", "suffix")
MERGED, PREDICTED, PREDICTED_WRONG = "merged", "prediction", "prediction-wrong"
PEERS = {"hf": None, "hf-assisted": USUAL_ASSISTANCE}
KINDS = (*FREE, "model", "parallel", MERGED, PREDICTED, PREDICTED_WRONG, *PEERS)
"""The values of --part."""
COLUMNS = (
    ("ms", "pass_ms", ".2f"),
    *((f"T={one:g}", f"T={one:g}", "") for one in TEMPERATURES),
    ("chain", "speedup", ".2f"),
    ("len", "tokens_a_step", ".2f"),
    ("fanout", "fanout", ".2f"),
    ("same", "same_text", ""),
)
LEGEND = """
ms: of a pass. T: acceptance at positions 1 and 4 of a window, at this
temperature, of candidates whose forerunners are right. chain, fanout: tokens/s
over off. len: tokens a step under chain. same: the tokens of off. merged: the
model and suffix in one tree. prediction: the row's own; prediction-wrong: that
of another row.
"""


@dataclass(frozen=True, slots=True)
class Asks:
    """A row of a file: its tokens, and the text that its answer should repeat, if it has one."""

    prompt: tuple[int, ...]
    prediction: str | None


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind as it is asked for: its name, and options of a request."""

    name: str
    client: Client
    drafter: str | None = None
    merge: bool | None = None

    @property
    def predicts(self) -> bool:
        return self.name in (PREDICTED, PREDICTED_WRONG)

    def predictions(self, rows: Sequence[Asks]) -> dict[tuple[int, ...], str | None]:
        """The prediction of each row: its own or that of the row before."""
        if not self.predicts:
            return {}
        shift = int(self.name == PREDICTED_WRONG)
        return {row.prompt: rows[at - shift].prediction for at, row in enumerate(rows)}

    def under(self, policy: str, rows: Sequence[Asks]) -> Ours:
        options = GenerateOptions(seed=0, policy=policy, drafter=self.drafter, merge=self.merge)
        name = f"{policy} {self.name}".rstrip()
        return Ours(name, self.client, options, self.name, self.predictions(rows))


def deployments(config: Config, kinds: Sequence[str]) -> dict[str, Config]:
    """The deployments to start for `kinds`, some of KINDS."""
    models = model_drafters(config)
    wanted = [one for one in models if one.kind in kinds]
    wanted = wanted or (models[:1] if MERGED in kinds else [])
    found = {"free": deployment(config, CORES, [DrafterConfig(kind=kind) for kind in FREE])}
    if wanted:
        found["models"] = deployment(config, 1, [*wanted, DrafterConfig(kind="suffix")])
    return found


def kinds_of(
    clients: Mapping[str, Client], configs: Mapping[str, Config], kinds: Sequence[str]
) -> list[Kind]:
    free = clients["free"]
    found = [Kind(name, free, name) for name in FREE if name in kinds]
    if "models" in clients:
        models = [one.kind for one in configs["models"].drafters if one.model is not None]
        found += [Kind(name, clients["models"], name) for name in models if name in kinds]
        if MERGED in kinds:
            found.append(Kind(MERGED, clients["models"], merge=True))
    return found + [Kind(one, free) for one in (PREDICTED, PREDICTED_WRONG) if one in kinds]


def acceptance_at(kind: Kind, rows: Sequence[Asks], temperature: float, tokens: int) -> list[float]:
    """Acceptance by position of windows under lockstep; of a prediction, under chain."""
    tried, accepted = [0] * WINDOW, [0] * WINDOW
    asked = kind.under("chain" if kind.predicts else "lockstep", rows)
    for row in rows:
        options = replace(
            asked.options,
            temperature=temperature,
            max_tokens=tokens,
            window=WINDOW,
            prediction=asked.predictions.get(row.prompt),
            tenant=f"acceptance {kind.name} {temperature}",
        )
        stats = kind.client.generate(list(row.prompt), options).stats.speculation
        for sums, counts in ((tried, stats.tried_at), (accepted, stats.accepted_at)):
            sums[:] = [a + b for a, b in zip_longest(sums, counts[:WINDOW], fillvalue=0)]
    return [right / of for right, of in zip(accepted, tried, strict=True) if of]


def pass_ms(client: Client, kind: str, run: Callable[[], object]) -> float | None:
    """Milliseconds of the kind's passes during `run`; None: it made none."""

    def spent() -> tuple[float, int]:
        mine = [one for one in client.stats().workers if one.kind == kind]
        return sum(one.busy_seconds for one in mine), sum(one.passes for one in mine)

    seconds, passes = spent()
    run()
    later, more = spent()
    return 1000 * (later - seconds) / (more - passes) if more > passes else None


@dataclass(frozen=True, slots=True)
class DraftersBench:
    """The suite, once everything is started. `free`: the deployment whose `off` is the measure."""

    free: Client
    kinds: Sequence[Kind]
    peers: Sequence[Contender]
    asked: Asked

    def measure(self, path: Path) -> Iterator[Row]:
        asked, name = self.asked, path.stem
        rows = [
            Asks(encode_prompt(self.free, row.input), row.prediction)
            for row in read_inputs(path, asked.limit)
        ]
        num_predicted = sum(row.prediction is not None for row in rows)
        least = {PREDICTED: 1, PREDICTED_WRONG: 2}
        kinds = [one for one in self.kinds if num_predicted >= least.get(one.name, 0)]
        ours: list[Contender] = [Kind("", self.free).under("off", rows)]
        for kind in kinds:
            ours += [kind.under(policy, rows) for policy in self._policies(kind)]
        everyone = [*ours, *self.peers]
        left = TimeLeft([one.name for one in everyone], rounds=len(rows) * asked.repeats)
        measured = measure_in_turns(
            everyone,
            [row.prompt for row in rows],
            max_tokens=asked.max_tokens,
            repeats=asked.repeats,
            on_sample=lambda row, took: asked.tell(f"{name}: {row}: {left.after(row, took)}"),
        )
        by_name = {one.contender.name: one for one in measured}
        off = by_name["off"]
        yield {"file": name, "kind": "off", "tokens_per_second": off.tokens_per_second}
        for kind in kinds:
            speeds = {
                policy: _speed(by_name[f"{policy} {kind.name}"], off)
                for policy in self._policies(kind)
            }
            yield {"file": name, "kind": kind.name, **self._acceptance(kind, rows), **speeds}
        for peer in self.peers:
            yield {"file": name, "kind": peer.name, **_speed(by_name[peer.name], off)}

    def _policies(self, kind: Kind) -> Sequence[str]:
        """A prediction is verified as it is; branches need a model."""
        return ("chain",) if kind.client is self.free else ("chain", "fanout")

    def _acceptance(self, kind: Kind, rows: Sequence[Asks]) -> dict[str, object]:
        accepted: dict[str, list[float]] = {}

        def decode() -> None:
            for temperature in TEMPERATURES:
                self.asked.tell(f"acceptance of {kind.name}, temperature {temperature:g}")
                tokens = min(MOST_TOKENS, self.asked.max_tokens)
                accepted[f"{temperature:g}"] = acceptance_at(kind, rows, temperature, tokens)

        return {"pass_ms": pass_ms(kind.client, kind.name, decode), "acceptance_at": accepted}


def _speed(one: Measured, off: Measured) -> dict[str, object]:
    return {
        "tokens_per_second": one.tokens_per_second,
        "speedup": one.tokens_per_second / off.tokens_per_second,
        "tokens_a_step": one.acceptance_length,
        "spread": one.spread,
        "same_text": one.same_text(off),
    }


def run_drafters(asked: Asked) -> Document:
    """Start everything, measure, end everything. Saves after each file."""
    wanted = asked.part or [*KINDS, *(one.kind for one in asked.config.drafters)]
    configs = deployments(asked.config, wanted)
    rows: list[Row] = []
    document: Document = {"emulated": False, "rows": rows}
    with ExitStack() as stack:
        running = running_side_by_side(configs, home=asked.home, tell=asked.tell)
        clients = stack.enter_context(running)
        peers: list[Contender] = []
        if any(one in wanted for one in PEERS):
            process, _, _ = stack.enter_context(assisted_transformers(asked))
            peers += [
                transformers_row(name, process, assistance)
                for name, assistance in PEERS.items()
                if name in wanted
            ]
        kinds = kinds_of(clients, configs, wanted)
        bench = DraftersBench(clients["free"], kinds, peers, asked)
        for path in asked.inputs:
            rows.extend(bench.measure(path))
            asked.save(document)
    return document


def show_drafters(console: Console, document: Document) -> None:
    """Print a table for each file, at most 80 columns wide."""
    for file in dict.fromkeys(row["file"] for row in document["rows"]):
        rows = [_shown(row) for row in document["rows"] if row["file"] == file]
        console.print(table(((file, "kind", ""), *COLUMNS), rows))
        console.print()
    console.print(LEGEND, highlight=False)


def _shown(row: Row) -> Row:
    """The figures of a row by the headings of the table."""
    chain, fanout = row.get("chain", row), row.get("fanout", {})
    at_each = {
        f"T={name}": " ".join(f"{at[n]:.2f}" for n in (0, 3) if n < len(at))
        for name, at in row.get("acceptance_at", {}).items()
    }
    return {**row, **chain, **at_each, "fanout": fanout.get("speedup")}


register(
    Suite(
        "drafters",
        "every kind of drafter on every input file: acceptance by position, time of a pass, "
        "tokens/s under chain and fanout, and transformers beside it; by default 3 rows of each "
        "file, 96 tokens, 2 rounds. A part is a kind, merged (the model and suffix), prediction, "
        "hf or hf-assisted",
        run_drafters,
        show_drafters,
        {"limit": (3, 1), "max_tokens": (96, 96), "repeats": (2, 1)},
        parts=KINDS,
    )
)
