"""Compare policy `auto` with fixed policies in the simulator: `python scripts/survey_auto.py`.

Each cell prints one line: the tokens per second of `off`, the best fixed policy and `auto` as
multiples of it, and `auto` as a share of the best. A cell is marked if `auto` misses the aim: 0.90
of the best, and 0.98 of `off`. Tokens are counted between the first and the last token of all
sequences; with `--in-swing`, from the time when each sequence has a token on, as in
`paceline bench lookahead`. Times are virtual, so the same commit gives the same figures on any
host. The server is cold: it has decoded nothing before.

Without options it surveys `CELLS`. Options choose all their combinations instead:

    python scripts/survey_auto.py --pair 8b-h100+0.5b-h100 --batch 2 --batch 16 --json FILE
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import Layout, Load
from cluster.simulation.trial import in_swing_of
from workers.emulated.latency_profiles import LinkProfile, load_profile
from workers.emulated.replay_text import Guess

PAIRS = ("70b-4xh100+1b-h100", "8b-h100+0.5b-h100")
TOKENS = {1: 400, 2: 300, 4: 300, 6: 200, 8: 200, 16: 120, 64: 60}
"""Output tokens of a request, by the number of requests at once."""
FIXED = (
    ("lockstep", 2, 1),
    ("lockstep", 4, 1),
    ("lockstep", 8, 1),
    ("pearl", 8, 1),
    ("chain", 2, 1),
    ("chain", 4, 1),
    ("chain", 8, 1),
    ("fanout", 4, 1),
    ("fanout", 8, 1),
    ("fanout", 12, 1),
    ("fanout", 12, 2),
    ("fanout", 32, 2),
)
"""Policy, window and branches. With more than one branch, a step verifies trees."""
FIXED_OF_GROUPS = (("replicas", 4, 1), ("replicas", 8, 1))
"""Further policies for layouts with several target groups."""
AUTO_WINDOW = 32
OF_THE_BEST, OF_PLAIN, MEAN = 0.90, 0.98, 0.985


@dataclass(frozen=True, slots=True)
class Cell:
    """One condition. `slower`: the time of a draft pass, as a multiple of its profile's.

    `groups`: the number of target groups. `shared`: how much longer a step takes beside drafting
    (simulation.layout); None: the drafter has a host of its own. `short`: instead of `batch`
    requests at once, 6 of 64 tokens each come, `batch` of them at a time.
    """

    pair: str
    slower: float
    batch: int
    acceptance: float
    hit_rate: float
    rtt_ms: float
    groups: int = 1
    shared: float | None = None
    short: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """The results of a cell. `plain`: tokens per second; `best` and `auto`: multiples of it."""

    cell: Cell
    plain: float
    best: float
    best_policy: str
    auto: float
    choices: dict[str, int]

    @property
    def of_the_best(self) -> float:
        """`auto` as a share of the best fixed policy, which may be plain decoding."""
        return self.auto / self.best

    @property
    def misses(self) -> bool:
        """Whether `auto` misses the aim."""
        return self.of_the_best < OF_THE_BEST or self.auto < OF_PLAIN


_COMBINATIONS: tuple[tuple[Any, ...], ...] = (
    *product(PAIRS, (1.0,), (1, 8), (0.0, 0.5, 0.75, 0.9), (0.0, 0.85), (0.1, 10.0)),
    *product(PAIRS, (1.0,), (64,), (0.0, 0.3, 0.85), (0.0, 0.85), (0.1, 10.0)),
    *product(PAIRS, (10.0,), (1, 8, 64), (0.75,), (0.0,), (0.1,)),
    *product(
        *(PAIRS, (1.0, 4.0), (1, 6), (0.3, 0.6, 0.85), (0.0,), (0.1,), (1,)),
        *((1.0, 1.5, 2.5), (True,)),
    ),
)
# Where no first guess is right, hardly any second one is.
CELLS = tuple(Cell(*one) for one in _COMBINATIONS if one[3] or not one[4])
"""A host of its own near and far; a large batch; a slow drafter; short requests on one host."""


def survey(cells: Sequence[Cell], *, tokens: int | None, in_swing: bool) -> Iterator[Row]:
    """Simulate each cell under every policy."""
    for cell in cells:

        def speed(
            policy: str, window: int, branches: int = 1, cell: Cell = cell
        ) -> tuple[float, Fleet]:
            return _speed(cell, policy, window, branches, tokens=tokens, in_swing=in_swing)

        plain, _ = speed("off", 1)
        fixed = {
            f"{policy} {window}{' tree' if branches > 1 else ''}": speed(policy, window, branches)[
                0
            ]
            for policy, window, branches in FIXED + FIXED_OF_GROUPS * (cell.groups > 1)
        }
        fixed["off"] = plain
        best = max(fixed, key=fixed.__getitem__)
        auto, fleet = speed("auto", AUTO_WINDOW)
        choices = dict(fleet.drivers[0].scheduler.speculation().choices)
        yield Row(cell, plain, fixed[best] / plain, best, auto / plain, choices)


def _speed(
    cell: Cell,
    policy: str,
    window: int,
    branches: int,
    *,
    tokens: int | None,
    in_swing: bool,
) -> tuple[float, Fleet]:
    """Tokens per second, and the simulated deployment."""
    target, drafter = cell.pair.split("+")
    layout = Layout(
        load_profile(target, role="target"),
        policy,
        window,
        drafter=load_profile(drafter, role="drafter").scaled(cell.slower),
        drafters=1,
        replicas=cell.groups,
        link=LinkProfile(rtt_ms=cell.rtt_ms),
        branches=branches,
        shared_host=cell.shared,
    )
    guess = Guess(cell.acceptance, cell.hit_rate, seed=1)
    tokens = tokens or (64 if cell.short else TOKENS[cell.batch])
    load = Load(6 if cell.short else cell.batch, 16, tokens, guess, concurrency=cell.batch)
    fleet = Fleet(layout, load)
    fleet.run()
    assert fleet.same_text, f"{policy} gave another text"
    if in_swing:
        tokens_in_swing, seconds = in_swing_of([one.arrivals for one in fleet.answered])
        return tokens_in_swing / seconds, fleet
    begin = min(one.first_at for one in fleet.answered)
    end = max(one.last_at for one in fleet.answered)
    return sum(len(one.token_ids) for one in fleet.answered) / (end - begin), fleet


def main(
    pair: Annotated[list[str] | None, typer.Option(help="TARGET+DRAFTER, profiles")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="sequences at once")] = None,
    acceptance: Annotated[list[float] | None, typer.Option(help="chance of a candidate")] = None,
    hit_rate: Annotated[list[float] | None, typer.Option(help="of branches")] = None,
    rtt_ms: Annotated[list[float] | None, typer.Option(help="driver to drafter")] = None,
    slower: Annotated[list[float] | None, typer.Option(help="factor on a draft pass")] = None,
    groups: Annotated[list[int] | None, typer.Option(help="of the target")] = None,
    shared: Annotated[
        list[float] | None, typer.Option(help="one host: factor on a step beside drafting")
    ] = None,
    short: Annotated[bool, typer.Option(help="6 requests of 64 tokens")] = False,
    every: Annotated[int, typer.Option(help="survey only each N-th of the cells")] = 1,
    tokens: Annotated[int | None, typer.Option(help="of a request, instead of by batch")] = None,
    in_swing: Annotated[bool, typer.Option(help="count once each sequence has a token")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="rows, to this file")] = None,
) -> None:
    """Print a line a cell, those that miss the aim marked; the mean, and how many miss."""
    cells: Sequence[Cell] = CELLS
    if any((pair, batch, acceptance, hit_rate, rtt_ms, slower, groups, shared, short)):
        default_batch = [1, 6] if short else [1, 8, 64]
        cells = [
            Cell(*one)
            for one in product(
                pair or PAIRS,
                slower or [1.0],
                batch or default_batch,
                acceptance or [0.0, 0.5, 0.75, 0.9],
                hit_rate or [0.0],
                rtt_ms or [0.1],
                groups or [1],
                shared or [None],
                [short],
            )
        ]
    rows = []
    print(
        "pair, slower, batch, acceptance, hits, rtt, groups, shared: off, best, auto, of the best"
    )
    for row in survey(cells[::every], tokens=tokens, in_swing=in_swing):
        rows.append(row)
        one = row.cell
        shares = "" if one.shared is None else f"{one.shared:g}"
        print(
            f"{one.pair:26} x{one.slower:g} {one.batch:3}{'s' if one.short else ' '} "
            f"{one.acceptance:4g} {one.hit_rate:4g} {one.rtt_ms:5g} {one.groups} {shares:3}: "
            f"{row.plain:6.0f} {row.best:5.2f} {row.best_policy:14} "
            f"{row.auto:5.2f} {row.of_the_best:6.3f} {'MISSED' if row.misses else ''}",
            flush=True,
        )
    shares_of_best = [row.of_the_best for row in rows]
    print(
        f"mean {mean(shares_of_best):.4f} (aim {MEAN}), lowest {min(shares_of_best):.3f}; "
        f"{sum(row.misses for row in rows)} of {len(rows)} miss the aim"
    )
    if output is not None:
        output.write_text(json.dumps({"emulated": True, "rows": [asdict(one) for one in rows]}))


if __name__ == "__main__":
    typer.run(main)
