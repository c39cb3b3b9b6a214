"""The results of `paceline plan`: a table for people, a document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from cluster.config.model import PlanConfig
from cluster.simulation.plan import callers_of
from cluster.simulation.trial import FASTER, PlannedLayout
from deploy.terminal.lines import whole_table
from paceline.text import counted
from workers.emulated.profiles import DeviceProfile

_HEADINGS = (
    "GPUs",
    "tok/s",
    "/GPU",
    "/off",
    "first",
    "token",
    "target",
    "drafter",
    "len",
    "used",
)
_WIDTH_OF_A_FILE = 100
LEGEND = """
SIMULATED: the scheduler and the drafters' trees are real, devices and links are latency profiles;
nothing was measured on a GPU. /off: tokens/s over plain decoding on the same hosts. first, token:
ms to the first token, and ms a token after it; median and 99th percentile of requests. target:
share of time in steps, waiting although there are requests, and idle. drafter: share of time in
passes. len: tokens a step. used: share of the drafted tokens that was used.
"""


def plan_json(asked: PlanConfig, planned: Sequence[PlannedLayout]) -> dict[str, object]:
    """The document of `paceline plan --json`."""
    return {
        "simulated": True,
        "plan": asked.model_dump(mode="json"),
        "callers": None if asked.requests_per_second is not None else _callers(asked, planned),
        "profiles": [
            {"name": profile.name, "role": profile.role, "source": profile.source.strip()}
            for profile in _profiles(planned)
        ],
        "rows": [_row(one, planned) for one in planned],
    }


def print_plan(console: Console, asked: PlanConfig, planned: Sequence[PlannedLayout]) -> None:
    """Print the layouts by name, the best first, then their figures."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_FILE)
    gpus = asked.hosts * asked.gpus_per_host
    console.print(
        f"{asked.hosts} x {asked.gpus_per_host} GPUs, {_load(asked, planned)}, "
        f"{asked.prompt_tokens} prompt "
        f"and {asked.output_tokens} output tokens, acceptance {asked.acceptance:g}, "
        f"rtt {asked.rtt_ms:g} ms",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("", *_HEADINGS):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, one in enumerate(planned, start=1):
        notes = "; ".join(_notes(one, planned))
        said = f": {notes}" if notes else ""
        console.print(f"{place:>3}  {one.layout.name}{said}", highlight=False, soft_wrap=True)
        table.add_row(str(place), *_cells(one, gpus))
    console.print()
    whole_table(console, table)
    if any(one.simulated_groups < one.layout.groups for one in planned):
        most = max(one.simulated_groups for one in planned)
        console.print(
            f"Of larger layouts at most {counted(most, 'target group')} are simulated, with their "
            "part of the load.",
            highlight=False,
        )
    console.print(LEGEND, highlight=False)


def _cells(one: PlannedLayout, gpus: int) -> Iterator[str]:
    figures = one.figures
    yield f"{one.layout.gpus}/{gpus}"
    yield f"{one.tokens_per_second:.0f}"
    yield f"{one.tokens_per_second_per_gpu:.1f}"
    yield f"{one.speedup:.2f}"
    for median, high in (figures.ttft_ms, figures.token_ms):
        yield f"{median:.0f} {high:.0f}" if median >= 100 else f"{median:.1f} {high:.1f}"
    target = figures.target
    yield " ".join(f"{share:.0%}" for share in (target.busy, target.waiting, target.idle))
    yield "" if figures.drafter_busy is None else f"{figures.drafter_busy:.0%}"
    yield f"{figures.acceptance_length:.2f}"
    yield "" if figures.draft_used is None else f"{figures.draft_used:.0%}"


def _row(one: PlannedLayout, planned: Sequence[PlannedLayout]) -> dict[str, object]:
    layout, figures = one.layout, one.figures
    return {
        "name": layout.name,
        "policy": layout.policy,
        "window": layout.window,
        "target": layout.target.name,
        "drafter": None if layout.drafter is None else layout.drafter.name,
        "target_groups": layout.groups,
        "drafters": layout.cells * layout.drafters,
        "gpus": layout.gpus,
        "simulated_groups": one.simulated_groups,
        "requests": figures.requests,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu,
        "speedup": one.speedup,
        "per_gpu_gain": one.per_gpu_gain,
        "faster_but_worse_per_gpu": one.faster_but_worse_per_gpu,
        "keeps_up": one.keeps_up,
        "ttft_ms": dict(zip(("p50", "p99"), figures.ttft_ms, strict=True)),
        "token_ms": dict(zip(("p50", "p99"), figures.token_ms, strict=True)),
        "acceptance_length": figures.acceptance_length,
        "target_busy": figures.target.busy,
        "target_prefill": figures.target.prefill,
        "target_waiting": figures.target.waiting,
        "target_idle": figures.target.idle,
        "drafter_busy": figures.drafter_busy,
        "draft_used": figures.draft_used,
        "same_text": one.same_text,
        "notes": list(_notes(one, planned)),
    }


def _notes(one: PlannedLayout, planned: Sequence[PlannedLayout]) -> Iterator[str]:
    if one is planned[0]:
        yield "best"
    if one is max(planned, key=lambda each: each.tokens_per_second_per_gpu):
        yield "most tokens/s per GPU"
    if one.faster_but_worse_per_gpu:
        yield f"faster than off, but {1 - one.per_gpu_gain:.0%} worse per GPU"
    if one.speedup < 1 / FASTER:
        yield "slower than off"
    if not one.keeps_up:
        yield "does not keep up with the load"
    if not one.same_text:
        yield "NOT THE SAME TEXT"


def _load(asked: PlanConfig, planned: Sequence[PlannedLayout]) -> str:
    if asked.requests_per_second is not None:
        return f"{asked.requests_per_second:g} requests/s"
    return counted(_callers(asked, planned), "caller")


def _callers(asked: PlanConfig, planned: Sequence[PlannedLayout]) -> int:
    return callers_of(asked, (one.layout for one in planned))


def _profiles(planned: Sequence[PlannedLayout]) -> Iterator[DeviceProfile]:
    found = {}
    for one in planned:
        for profile in (one.layout.target, one.layout.drafter):
            if profile is not None:
                found[profile.name] = profile
    yield from found.values()
