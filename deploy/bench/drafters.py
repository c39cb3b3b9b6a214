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
    Report,
    Suite,
    TimeLeft,
    figure,
    measure_in_turns,
    register,
    table,
)
from deploy.bench.processes import deployment, running_side_by_side
from deploy.bench.transformers_peer import ASSISTANCES, TransformersProcess, transformers_row
from deploy.rows.inputs import BadRow, InputRow, read_rows
from paceline.client import Client
from paceline.errors import InvalidRequestError
from paceline.options import GenerateOptions
from workers.models.catalog import resolve_model

LIMIT, MAX_TOKENS, REPEATS = 3, 96, 2
"""Defaults: rows of each file, tokens of a row, rounds."""
TEMPERATURES = (0.0, 0.7, 1.0)
WINDOW = 8
"""Positions of a window whose acceptance is told."""
MOST_TOKENS = 48
"""Upper bound on a row's tokens where acceptance is counted."""
FREE = ("ngram", "recycling", "suffix")
MERGED, PREDICTED, PREDICTED_WRONG = "merged", "prediction", "prediction-wrong"
PEERS = ("hf", "hf-assisted")
LEGEND = """
ms: of a pass. T: acceptance at positions 1 and 4 of a window, at this temperature,
of candidates whose forerunners are right. chain, fanout: tokens/s over off. len:
tokens a step under chain. same: the tokens of off. merged: the model and suffix in
one tree. prediction: the row's own; prediction-wrong: that of another row.
"""


@dataclass(frozen=True, slots=True)
class Row:
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

    def predictions(self, rows: Sequence[Row]) -> dict[tuple[int, ...], str | None]:
        """The prediction of each row: its own or that of the row before."""
        if not self.predicts:
            return {}
        shift = int(self.name == PREDICTED_WRONG)
        return {row.prompt: rows[at - shift].prediction for at, row in enumerate(rows)}

    def under(self, policy: str, rows: Sequence[Row]) -> Ours:
        options = GenerateOptions(seed=0, policy=policy, drafter=self.drafter, merge=self.merge)
        name = f"{policy} {self.name}".rstrip()
        return Ours(name, self.client, options, predictions=self.predictions(rows))


@dataclass(frozen=True, slots=True)
class DraftersSettings:
    """How much to measure. `kinds`: only these; empty: all."""

    limit: int
    max_tokens: int
    repeats: int
    kinds: Sequence[str] = ()

    def wants(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds


def deployments(config: Config, settings: DraftersSettings) -> dict[str, Config]:
    """The deployments to start. Model drafters are those of the configuration, each with a core."""
    models = [one for one in config.drafters if one.model is not None] or [DrafterConfig()]
    wanted = [one for one in models if settings.wants(one.kind)]
    wanted = wanted or (models[:1] if settings.wants(MERGED) else [])
    wanted = [one.model_copy(update={"count": 1, "threads": 1}) for one in wanted]
    found = {"free": deployment(config, CORES, [DrafterConfig(kind=kind) for kind in FREE])}
    if wanted:
        found["models"] = deployment(config, 1, [*wanted, DrafterConfig(kind="suffix")])
    return found


def kinds_of(
    clients: Mapping[str, Client], configs: Mapping[str, Config], settings: DraftersSettings
) -> list[Kind]:
    free = clients["free"]
    found = [Kind(name, free, name) for name in FREE if settings.wants(name)]
    if "models" in clients:
        models = [one.kind for one in configs["models"].drafters if one.model is not None]
        found += [Kind(name, clients["models"], name) for name in models if settings.wants(name)]
        if settings.wants(MERGED):
            found.append(Kind(MERGED, clients["models"], merge=True))
    return found + [Kind(one, free) for one in (PREDICTED, PREDICTED_WRONG) if settings.wants(one)]


def read_file(path: Path, limit: int, client: Client) -> list[Row]:
    """The first rows of a file, as tokens. Raises InvalidRequestError."""
    found: list[InputRow] = []
    for row in read_rows(path, limit=limit):
        if isinstance(row, BadRow):
            raise InvalidRequestError("input", row.message)
        found.append(row)
    one_token = GenerateOptions(max_tokens=1, temperature=0.0, policy="off")
    return [
        Row(client.generate(row.input, one_token).prompt_token_ids, row.prediction) for row in found
    ]


def acceptance_at(kind: Kind, rows: Sequence[Row], temperature: float, tokens: int) -> list[float]:
    """Acceptance by position of windows under lockstep; of a prediction, under chain."""
    tried, accepted = [0] * WINDOW, [0] * WINDOW
    asked, predictions = (
        kind.under("chain" if kind.predicts else "lockstep", rows).options,
        kind.predictions(rows),
    )
    for row in rows:
        options = replace(
            asked,
            temperature=temperature,
            max_tokens=tokens,
            window=WINDOW,
            prediction=predictions.get(row.prompt),
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

    (seconds, passes), _, (later, more) = spent(), run(), spent()
    return 1000 * (later - seconds) / (more - passes) if more > passes else None


@dataclass(frozen=True, slots=True)
class DraftersBench:
    """The suite, once everything is started. `free`: the deployment whose `off` is the measure."""

    free: Client
    kinds: Sequence[Kind]
    peers: Sequence[Contender]
    settings: DraftersSettings
    tell: Callable[[str], None]

    def measure(self, path: Path, rows: Sequence[Row]) -> Iterator[dict[str, object]]:
        settings, name = self.settings, path.stem
        num_predicted = sum(row.prediction is not None for row in rows)
        least = {PREDICTED: 1, PREDICTED_WRONG: 2}
        kinds = [one for one in self.kinds if num_predicted >= least.get(one.name, 0)]
        ours: list[Contender] = [Kind("", self.free).under("off", rows)]
        for kind in kinds:
            ours += [kind.under(policy, rows) for policy in self._policies(kind)]
        everyone = [*ours, *self.peers]
        left = TimeLeft([one.name for one in everyone], rounds=len(rows) * settings.repeats)
        measured = measure_in_turns(
            everyone,
            [row.prompt for row in rows],
            max_tokens=settings.max_tokens,
            repeats=settings.repeats,
            on_sample=lambda row, took: self.tell(f"{name}: {row}: {left.after(row, took)}"),
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

    def _acceptance(self, kind: Kind, rows: Sequence[Row]) -> dict[str, object]:
        accepted: dict[str, list[float]] = {}

        def decode() -> None:
            for temperature in TEMPERATURES:
                self.tell(f"acceptance of {kind.name}, temperature {temperature:g}")
                tokens = min(MOST_TOKENS, self.settings.max_tokens)
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


def run_drafters(asked: Asked, settings: DraftersSettings) -> Document:
    """Start everything, measure, end everything. Saves after each file."""
    configs = deployments(asked.config, settings)
    results: list[dict[str, object]] = []
    document = {"suite": "drafters", "machine": asked.machine, "emulated": False, "rows": results}
    with ExitStack() as stack:
        running = running_side_by_side(configs, home=asked.home, tell=asked.tell)
        clients = stack.enter_context(running)
        peers: list[Contender] = []
        if wanted := [one for one in PEERS if settings.wants(one)]:
            target = resolve_model(asked.config.target.model, home=asked.home)
            models = (one.model for one in asked.config.drafters if one.model is not None)
            draft = resolve_model(next(models, "demo-draft"), home=asked.home)
            log = asked.folder / "transformers.log"
            process = TransformersProcess(target.folder, draft=draft, threads=CORES, log=log)
            stack.enter_context(process)
            helped = {"hf": None, "hf-assisted": ASSISTANCES[-2]}
            peers += [transformers_row(one, process, helped[one]) for one in wanted]
        kinds = kinds_of(clients, configs, settings)
        bench = DraftersBench(clients["free"], kinds, peers, settings, asked.tell)
        for path in asked.inputs:
            rows = read_file(path, settings.limit, clients["free"])
            results.extend(bench.measure(path, rows))
            asked.save(document)
    return document


def print_drafters(console: Console, document: Document) -> None:
    """Print a table for each file, at most 80 columns wide."""
    temperatures = [f"{one:g}" for one in TEMPERATURES]
    headings = ("ms", *(f"T={one}" for one in temperatures), "chain", "len", "fanout", "same")
    rows = document["rows"]
    assert isinstance(rows, list)
    for file in dict.fromkeys(row["file"] for row in rows):
        shown = table((file, *headings))
        for row in [one for one in rows if one["file"] == file]:
            accepted = row.get("acceptance_at", {})
            at_each = [accepted.get(one, ()) for one in temperatures]
            chain, fanout = row.get("chain", row), row.get("fanout", {})
            shown.add_row(
                row["kind"],
                figure(row.get("pass_ms")),
                *(" ".join(f"{at[n]:.2f}" for n in (0, 3) if n < len(at)) for at in at_each),
                figure(chain.get("speedup")),
                figure(chain.get("tokens_a_step")),
                figure(fanout.get("speedup")),
                {True: "yes", False: "no", None: ""}[chain.get("same_text")],
            )
        console.print(shown)
        console.print()
    console.print(LEGEND, highlight=False)


def _run(asked: Asked) -> Report:
    settings = DraftersSettings(
        asked.limit or (1 if asked.quick else LIMIT),
        asked.max_tokens or MAX_TOKENS,
        asked.repeats or (1 if asked.quick else REPEATS),
        tuple(asked.part or ()),
    )
    document = run_drafters(asked, settings)
    return Report(document, lambda console: print_drafters(console, document))


register(
    Suite(
        "drafters",
        "every kind of drafter on every input file: acceptance by position, time of a pass, "
        "tokens/s under chain and fanout, and transformers beside it; by default 3 rows of each "
        "file, 96 tokens, 2 rounds. A part is a kind, merged (the model and suffix), prediction, "
        "hf or hf-assisted",
        _run,
        frozenset({"limit", "max_tokens", "repeats", "part", "quick"}),
        parts=(*FREE, "model", "parallel", MERGED, PREDICTED, PREDICTED_WRONG, *PEERS),
    )
)
