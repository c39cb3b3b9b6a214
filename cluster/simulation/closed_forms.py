"""Closed forms of the speed-up over plain decoding, for several ways to overlap.

`alpha`: the chance that a drafted token is right if those before it are; the same at each position.
Times are milliseconds: `step_ms` of a target's step, `draft_ms` of a draft pass. Plain decoding
commits 1 token a step.
"""

from __future__ import annotations

import math

LONGEST_WINDOW = 32


def expected_tokens(alpha: float, window: int) -> float:
    """Tokens of a step that verifies a chain of `window` candidates, its own token included."""
    if alpha >= 1:
        return window + 1
    return float((1 - alpha ** (window + 1)) / (1 - alpha))


def lockstep(
    alpha: float,
    window: int,
    *,
    step_ms: float,
    draft_ms: float,
    rtt_ms: float,
    tokens_a_pass: float = 1,
) -> float:
    """Draft a window, verify it, repeat (Leviathan et al. 2023). `rtt_ms`: the round trip.

    `tokens_a_pass`: those of a parallel drafter; that later ones are right less often is left out.
    """
    round_ms = math.ceil(window / tokens_a_pass) * draft_ms + step_ms + rtt_ms
    return expected_tokens(alpha, window) * step_ms / round_ms


def best_lockstep_window(
    alpha: float, *, step_ms: float, draft_ms: float, rtt_ms: float, tokens_a_pass: float = 1
) -> int:
    return max(
        range(1, LONGEST_WINDOW + 1),
        key=lambda window: lockstep(
            alpha,
            window,
            step_ms=step_ms,
            draft_ms=draft_ms,
            rtt_ms=rtt_ms,
            tokens_a_pass=tokens_a_pass,
        ),
    )


def ideal_overlap(alpha: float, *, step_ms: float, draft_ms: float) -> float:
    """The bound if every outcome is foreseen and drafted for: acceptance or the drafter's pace."""
    pace = step_ms / draft_ms + 1
    return pace if alpha >= 1 else min(1 / (1 - alpha), pace)
