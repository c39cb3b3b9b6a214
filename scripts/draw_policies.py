"""Draw a target and its drafter on one time line, under three policies (docs/pictures).

    python scripts/draw_policies.py            run the emulated pair, write the trace, draw it
    python scripts/draw_policies.py --draw     draw the committed trace again

The pair is EMULATED: real processes over gRPC whose passes take the times of a profile, a 70B on
four H100 and a 1B drafter on a fifth, 2 ms away and right with the chance .85. It decodes one
request under each policy and keeps what the driver's trace tells of its devices (trace.proto). Each
picture shows the same stretch of milliseconds after the first verdict.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
TRACE = PICTURES / "policies.json"
POLICIES = {"lockstep": 5, "chain": 8, "fanout": 8}
"""The windows of the policies. Of `lockstep`, the best by its formula for this pair."""
TARGET, DRAFTER, RTT_MS, ACCEPTANCE, HIT_RATE = "70b-4xh100", "1b-h100", 2.0, 0.85, 0.85
TOKENS = 96
SHOWN_MS = 200.0

SCHEMES = {
    "light": {
        "paper": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "line": "#d1d9e0",
        "target": "#0969da", "drafter": "#bc4c00", "lane": "#f6f8fa",
    },
    "dark": {
        "paper": "#0d1117", "ink": "#f0f6fc", "soft": "#9198a1", "line": "#3d444d",
        "target": "#4493f8", "drafter": "#db6d28", "lane": "#151b23",
    },
}  # fmt: skip
WIDTH, LEFT, RIGHT, TOP = 960, 84, 92, 58
LANE, GAP, PANEL = 26, 22, 122
SAYS = {
    "lockstep": "draft, then verify: each waits for the other",
    "chain": "the drafter keeps drafting; a step takes what has arrived",
    "fanout": "and it also drafts for the likeliest other outcomes",
}


def rounds() -> dict[str, Any]:
    """Run the pair, and return for each policy its tokens/s and the rounds of its trace."""
    from cluster.driver.driver import Driver, DriverOptions
    from cluster.driver.round_tap import RoundTap
    from cluster.gateway.console import told_round
    from deploy.bench.lookahead_cells import EmulatedPair, emulated_pair
    from paceline.generation import Chunk
    from paceline.options import GenerateOptions
    from workers.emulated.replay_text import Guess

    guess = Guess(ACCEPTANCE, HIT_RATE, 1)

    async def decode(pair: EmulatedPair, policy: str, window: int) -> dict[str, Any]:
        driver = Driver(
            DriverOptions(
                folder=pair.folder,
                target_addresses=pair.target_addresses,
                target_groups=1,
                drafter_addresses=pair.drafters(RTT_MS, guess, 1),
                prefix_cache=False,
            )
        )
        told: list[dict[str, Any]] = []
        failed: list[Exception] = []
        tap = RoundTap(
            lambda message: told.append(told_round(message)),
            time.monotonic,
            on_failure=failed.append,
        )
        options = GenerateOptions(
            max_tokens=TOKENS, temperature=0.0, seed=0, ignore_eos=True,
            policy=policy, window=window,
        )  # fmt: skip
        try:
            await driver.start()
            with driver.tapped(tap):
                arrivals = [
                    (time.monotonic(), len(event.token_ids))
                    async for event in await driver.submit(list(range(5, 37)), options)
                    if isinstance(event, Chunk) and event.token_ids
                ]
        finally:
            await driver.stop()
        if failed:
            raise failed[0]
        seconds = arrivals[-1][0] - arrivals[0][0]
        speed = sum(count for _, count in arrivals[1:]) / seconds
        until = begin_of(told) + SHOWN_MS / 1000 + 0.1
        kept = [one for one in told if one.get("end", 0.0) <= until] if policy in POLICIES else []
        return {"window": window, "tokens_per_second": round(speed, 1), "rounds": kept}

    with emulated_pair(TARGET, DRAFTER, rtts_ms=[RTT_MS], guesses=[guess]) as pair:
        wanted = {"off": 1, **POLICIES}

        async def all_of_them() -> dict[str, Any]:
            return {name: await decode(pair, name, window) for name, window in wanted.items()}

        found = asyncio.run(all_of_them())
    return {
        "emulated": True, "target": TARGET, "drafter": DRAFTER, "rtt_ms": RTT_MS,
        "acceptance": ACCEPTANCE, "hit_rate": HIT_RATE, "tokens": TOKENS,
        "measured": time.strftime("%Y-%m-%d"), "policies": found,
    }  # fmt: skip


def begin_of(told: Sequence[Mapping[str, Any]]) -> float:
    """When the first verdict that made a token final had come, in seconds of the trace."""
    return next(
        float(one["end"]) for one in told if "step" in one and one["windows"][0]["committed"]
    )


def shown(told: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """What the picture shows: steps (begin ms, end ms, tokens, their passes) and passes.

    A pass is (begin ms, end ms, number).
    """
    begin = begin_of(told)
    steps, passes = [], []
    for one in told:
        if "step" not in one and "pass" not in one:
            continue
        end = 1000 * (one["end"] - begin)
        start = end - 1000 * one["seconds"]
        if end <= 0 or start >= SHOWN_MS:
            continue
        if "pass" in one:
            passes.append((start, end, one["pass"]))
        else:
            window = one["windows"][0]
            steps.append((start, end, window["committed"], window["passes"]))
    return steps, passes


def picture(trace: Mapping[str, Any], scheme: str) -> str:
    """The SVG in a color scheme."""
    color = SCHEMES[scheme]
    height = TOP + PANEL * len(POLICIES) + 34
    scale = (WIDTH - LEFT - RIGHT) / SHOWN_MS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Target and drafter on one time line under lockstep, chain and fanout "
        "(EMULATED)</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="{color["paper"]}"/>',
        f'<text x="16" y="24" font-size="16" font-weight="600" fill="{color["ink"]}">'
        "One request, one target, one drafter, three policies</text>",
        f'<text x="16" y="44" fill="{color["soft"]}">EMULATED: a 70B on 4 GPUs, a 1B drafter on a '
        f"fifth, {trace['rtt_ms']:g} ms apart, right with the chance {trace['acceptance']:g}. "
        "A number is the tokens that a step made final.</text>",
    ]
    plain = trace["policies"]["off"]["tokens_per_second"]

    def x(ms: float) -> float:
        return round(LEFT + scale * min(max(ms, 0.0), SHOWN_MS), 1)

    for row, policy in enumerate(POLICIES):
        top = TOP + PANEL * row + 14
        steps, passes = shown(trace["policies"][policy]["rounds"])
        times = trace["policies"][policy]["tokens_per_second"] / plain
        parts.append(
            f'<text x="{LEFT}" y="{top}" fill="{color["ink"]}">'
            f'<tspan font-weight="600">{policy}</tspan>'
            f'<tspan dx="8" fill="{color["soft"]}">{escape(SAYS[policy])}</tspan></text>'
        )
        lanes = {"target": top + 10, "drafter": top + 10 + LANE + GAP}
        for name, y in lanes.items():
            parts += [
                f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end" fill="{color["soft"]}">'
                f"{name}</text>",
                f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" rx="3" '
                f'fill="{color["lane"]}"/>',
            ]
        ends = {number: end for _, end, number in passes}
        for start, _, _, used in steps:
            for number in used:
                if ends.get(number, -1.0) >= 0 and start >= 0:
                    parts.append(
                        f'<line x1="{x(ends[number])}" y1="{lanes["drafter"]}" x2="{x(start)}" '
                        f'y2="{lanes["target"] + LANE}" stroke="{color["soft"]}" '
                        'stroke-width="0.8"/>'
                    )
        for start, end, _ in passes:
            parts.append(_bar(x(start), x(end), lanes["drafter"], color["drafter"]))
        for start, end, committed, _ in steps:
            parts.append(_bar(x(start), x(end), lanes["target"], color["target"]))
            if end <= SHOWN_MS and x(end) - x(start) > 16:
                parts.append(
                    f'<text x="{(x(start) + x(end)) / 2:.1f}" y="{lanes["target"] + 18}" '
                    f'text-anchor="middle" font-weight="600" fill="{color["paper"]}">'
                    f"+{committed}</text>"
                )
        side = WIDTH - RIGHT + 12
        parts += [
            f'<text x="{side}" y="{lanes["target"] + 30}" font-size="20" font-weight="600" '
            f'fill="{color["ink"]}">{times:.1f} x</text>',
            f'<text x="{side}" y="{lanes["target"] + 48}" fill="{color["soft"]}">plain</text>',
        ]
    axis = TOP + PANEL * len(POLICIES) + 6
    for ms in range(0, int(SHOWN_MS) + 1, 50):
        parts.append(
            f'<text x="{x(ms)}" y="{axis + 12}" text-anchor="middle" fill="{color["soft"]}">'
            f"{ms}{' ms' if ms == SHOWN_MS else ''}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(start: float, end: float, y: float, color: str) -> str:
    width = max(end - start - 0.8, 0.8)
    return f'<rect x="{start}" y="{y}" width="{width:.1f}" height="{LANE}" rx="3" fill="{color}"/>'


def main(arguments: Sequence[str]) -> None:
    """Write the trace, unless --draw is given, and both pictures."""
    if "--draw" not in arguments:
        TRACE.write_text(json.dumps(rounds(), separators=(",", ":")) + "\n", encoding="utf-8")
    trace = json.loads(TRACE.read_text(encoding="utf-8"))
    for scheme in SCHEMES:
        path = PICTURES / f"policies-{scheme}.svg"
        path.write_text(picture(trace, scheme), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
