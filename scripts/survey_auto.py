"""Compare policy `auto` with fixed policies in the simulator: `python scripts/survey_auto.py`.

Each cell prints one line: the tokens per second of `off`, the best fixed policy and `auto` as
multiples of it, and `auto` as a share of the best. A cell is marked if `auto` misses the aim: 0.95
of the best, and 0.98 of `off`. All requests come at once. Tokens are counted between the first and
the last token of all sequences; with `--in-swing`, from the time when each sequence has a token on,
as in `paceline bench lookahead`. Times are virtual, so the same commit gives the same figures on
any host.

    python scripts/survey_auto.py --pair 8b-h100+0.5b-h100 --batch 2 --batch 16 --json FILE
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import Layout, Load
from cluster.simulation.trial import in_swing_of
from workers.emulated.profiles import LinkProfile, load_profile
from workers.emulated.replay_text import Guess

PAIRS = (
    "70b-4xh100+1b-h100",
    "70b-8xh100-2hosts+1b-h100",
    "8b-h100+1b-h100",
    "8b-h100+0.5b-h100",
)
TOKENS = {1: 400, 2: 300, 4: 300, 8: 200, 16: 120, 64: 60}
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
OF_THE_BEST, OF_PLAIN = 0.95, 0.98


@dataclass(frozen=True, slots=True)
class Cell:
    """One condition. `slower`: the time of a draft pass, as a multiple of its profile's.

    `groups`: the number of target groups.
    """

    pair: str
    slower: float
    batch: int
    acceptance: float
    hit_rate: float
    rtt_ms: float
    groups: int = 1


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
    )
    guess = Guess(cell.acceptance, cell.hit_rate, seed=1)
    load = Load(cell.batch, 16, tokens or TOKENS[cell.batch], guess, concurrency=cell.batch)
    fleet = Fleet(layout, load)
    fleet.run()
    assert fleet.same_text, f"{policy} gave another text"
    if in_swing:
        tokens_in_swing, seconds = in_swing_of(fleet.answered)
        return tokens_in_swing / seconds, fleet
    begin = min(one.first_at for one in fleet.answered)
    end = max(one.last_at for one in fleet.answered)
    return sum(len(one.token_ids) for one in fleet.answered) / (end - begin), fleet


def main(
    pair: Annotated[
        list[str],
        typer.Option(default_factory=lambda: list(PAIRS), help="TARGET+DRAFTER, profiles"),
    ],
    batch: Annotated[
        list[int], typer.Option(default_factory=lambda: list(TOKENS), help="sequences at once")
    ],
    acceptance: Annotated[
        list[float], typer.Option(default_factory=lambda: [0.0, 0.3, 0.5, 0.75, 0.85, 0.95])
    ],
    hit_rate: Annotated[
        list[float], typer.Option(default_factory=lambda: [0.0], help="of branches")
    ],
    rtt_ms: Annotated[
        list[float], typer.Option(default_factory=lambda: [0.1, 10.0], help="driver to drafter")
    ],
    slower: Annotated[
        list[float],
        typer.Option(default_factory=lambda: [1.0], help="factors on the time of a draft pass"),
    ],
    groups: Annotated[list[int], typer.Option(default_factory=lambda: [1], help="of the target")],
    tokens: Annotated[int | None, typer.Option(help="of a request, instead of by batch")] = None,
    in_swing: Annotated[bool, typer.Option(help="count once each sequence has a token")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="rows, to this file")] = None,
) -> None:
    """Print a line a cell, those that miss the aim marked, and how many do."""
    cells = [
        Cell(*one) for one in product(pair, slower, batch, acceptance, hit_rate, rtt_ms, groups)
    ]
    rows = []
    print("pair, slower by, batch, acceptance, hit rate, rtt, groups: off, best, auto, of the best")
    for row in survey(cells, tokens=tokens, in_swing=in_swing):
        rows.append(row)
        one = row.cell
        print(
            f"{one.pair:26} x{one.slower:g} {one.batch:3} {one.acceptance:4g} {one.hit_rate:4g} "
            f"{one.rtt_ms:5g} {one.groups}: {row.plain:6.0f} {row.best:5.2f} {row.best_policy:14} "
            f"{row.auto:5.2f} {row.of_the_best:6.3f} {'MISSED' if row.misses else ''}",
            flush=True,
        )
    print(f"{sum(row.misses for row in rows)} of {len(rows)} miss the aim")
    if output is not None:
        output.write_text(json.dumps({"emulated": True, "rows": [asdict(one) for one in rows]}))


if __name__ == "__main__":
    typer.run(main)
