"""`paceline bench rules`: times and acceptance of rules.

- Part "time": how long each rule takes to verify a window on this CPU.
- Part "acceptance": tokens per step under each rule, with the same number of candidates for all
  rules. Requests run one at a time under policy lockstep. There a step waits for the whole window,
  so the acceptance does not depend on the speed of the machine. Every row decodes prompt i with
  seed i.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from rich.console import Console

from cluster.config.model import Config, DrafterConfig
from deploy.bench.decode import encode_prompts
from deploy.bench.harness import (
    Asked,
    Goal,
    Prompts,
    Report,
    Suite,
    TokensAndSteps,
    document,
    jackknife_error,
    length_of,
    length_ratio,
    print_goals,
    register,
    table,
)
from deploy.bench.processes import deployment, running_side_by_side
from paceline.client import Client
from paceline.generation import GenerateInput
from paceline.options import GenerateOptions
from paceline.sampling import SamplingParams, SequenceSpec
from workers.verification.candidates import CandidateTree, DraftProbs, SparseProbs, merge_paths
from workers.verification.draws import (
    cut_draft_probs,
    draw_chain_token,
    draw_independent,
    draw_without_replacement,
    top_children,
)
from workers.verification.rule import RULES, CandidateKind, rule_named
from workers.verification.verify import Window, verify_batch

PART_NAMES = ("time", "acceptance")
AMOUNT, QUICK_AMOUNT = (4, 32, 2), (2, 24, 1)
"""Defaults: rows of the input, tokens of a row, and rounds."""
WAIT_MS = 60_000.0
"""How long lockstep waits for its drafter, so that a busy host does not change the acceptance."""
VOCAB_SIZES = (49_152, 131_072)
WINDOWS, QUICK_WINDOWS = (1, 8, 16, 64), (1, 8)
BATCHES = (1, 16)
"""Batches of part "time"."""
AIM_MS = 3.0
"""Aim for the coupled rule: one sequence, a chain of 8, and the smaller vocabulary."""
_FALL = 2.0
"""Probabilities fall as rank^-2: the 64 likeliest tokens hold 99 %, and the noise could make any
token win, so that the noise of all tokens is computed."""

NODES = 8
"""Candidates per step in part "acceptance", for every shape."""
TEMPERATURES = (0.0, 0.7, 1.0)
WIDTHS = (1, 2, 4)
"""Children of a node, or paths, in part "acceptance"."""


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One row; None where a figure does not apply.

    `candidates` is "chain" or "N wide". `ms`: the time to verify a batch. `details` are further
    figures by name.
    """

    part: str
    name: str
    rule: str
    candidates: str
    temperature: float
    ms: float | None = None
    acceptance_length: float | None = None
    details: Mapping[str, object] = field(default_factory=dict)


def candidates_shown(branches: int | None) -> str:
    return "chain" if branches in (None, 1) else f"{branches} wide"


@dataclass(frozen=True, slots=True)
class RulesSettings:
    """What to measure. `parts`: some of PART_NAMES. `quick`: short windows in part "time"."""

    parts: Sequence[str]
    max_tokens: int
    repeats: int
    quick: bool = False


def drafted(config: Config) -> Config:
    """The deployment of part "acceptance": with a model drafter."""
    speculation = config.speculation.model_copy(update={"wait_ms": WAIT_MS})
    drafter = next((one for one in config.drafters if one.model is not None), DrafterConfig())
    drafter = drafter.model_copy(update={"count": 1, "threads": 1})
    return deployment(config, 1, [drafter], speculation=speculation)


def run_rules(
    config: Config,
    inputs: Sequence[GenerateInput],
    settings: RulesSettings,
    *,
    home: Path,
    tell: Callable[[str], None],
) -> list[RuleRow]:
    """Measure the parts in the order of PART_NAMES. Missing models are fetched."""
    rows: list[RuleRow] = []
    parts = [part for part in PART_NAMES if part in settings.parts]
    if "time" in parts:
        windows = QUICK_WINDOWS if settings.quick else WINDOWS
        rows += time_rules(tell, windows=windows, repeats=settings.repeats)
    if "acceptance" in parts:
        configs = {"drafted": drafted(config)}
        with running_side_by_side(configs, home=home, tell=tell) as clients:
            client = clients["drafted"]
            prompts = encode_prompts(client, inputs)
            rows += measure_acceptance(client, prompts, max_tokens=settings.max_tokens, tell=tell)
    return rows


# Part "time"


def time_rules(
    tell: Callable[[str], None],
    *,
    repeats: int,
    vocab_sizes: Sequence[int] = VOCAB_SIZES,
    windows: Sequence[int] = WINDOWS,
    batches: Sequence[int] = BATCHES,
) -> list[RuleRow]:
    """Time every rule on a chain of each window, and the rules for trees on trees of that size.

    The drafter's logits are the target's. So the coupled rule and the rules with draft
    probabilities accept nearly all of a chain. They then look at the most rows, which is the
    slowest case. (The one-hot rule accepts by the target's probability alone.) The windows of a
    batch share logits, not seeds.
    """
    rows: list[RuleRow] = []
    for vocab_size in vocab_sizes:
        rng = np.random.default_rng(vocab_size)
        ranks_V = 1 + rng.permutation(vocab_size)
        logits_V = torch.from_numpy((-_FALL * np.log(ranks_V)).astype(np.float32))
        for window in windows:
            logits_RV = logits_V.repeat(window + 1, 1)
            for rule in RULES:
                for width in (1, 4):
                    if width > 1 and (window < width or rule_named(rule).chain_only):
                        continue
                    for batch in batches:
                        rows.append(_time_rule(rule, logits_RV, width, batch, repeats))
                        tell(f"time: {rows[-1].name}")
    return rows


def _time_rule(rule: str, logits_RV: torch.Tensor, width: int, batch: int, repeats: int) -> RuleRow:
    """Time in milliseconds to verify the windows of a batch, noise included: the median of repeats.

    `accepted` is the mean number of accepted candidates. The rule looks at one row more.
    """
    window, vocab_size = logits_RV.shape[0] - 1, logits_RV.shape[1]
    drafted = [_draft(rule, logits_RV, width, seed) for seed in range(batch)]
    seconds: list[float] = []
    accepted = 0
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        verdicts = verify_batch(drafted)
        seconds.append(time.perf_counter() - begin)
        accepted = sum(verdict.num_accepted for verdict in verdicts)
    counted = seconds[1:]  # the first warms caches up
    candidates = candidates_shown(width)
    return RuleRow(
        part="time",
        name=f"{rule}, {candidates}, V={vocab_size}, window {window}, batch {batch}",
        rule=rule,
        candidates=candidates,
        temperature=1.0,
        ms=statistics.median(counted) * 1e3,
        details={
            "vocab_size": vocab_size,
            "window": window,
            "batch": batch,
            "best_ms": min(counted) * 1e3,
            "worst_ms": max(counted) * 1e3,
            "accepted": accepted / batch,
        },
    )


def _draft(rule: str, logits_RV: torch.Tensor, width: int, seed: int) -> Window:
    """Candidates in the form that the rule takes: `width` branches at the root, chains below."""
    logits_V, window = logits_RV[0], logits_RV.shape[0] - 1
    spec = SequenceSpec(SamplingParams(temperature=1.0), seed=seed, prompt_length=1)
    prefix = (1, 2, 3)
    cut = cut_draft_probs(logits_V, spec, prefix)
    depth = window // width
    positions = range(len(prefix) + 1, len(prefix) + depth)
    drawn_as = rule_named(rule).drawn_as
    if drawn_as is CandidateKind.INDEPENDENT_PATHS:
        tree = merge_paths(
            [
                [draw_independent(cut, spec, at, (n,))[0] for at in (len(prefix), *positions)]
                for n in range(width)
            ]
        )
    else:
        first = _first_tokens(rule, logits_V, cut, spec, prefix, width)
        below = [
            top_children(logits_V, spec, (0,) * at, 1)[0]
            if drawn_as is CandidateKind.SHARED_NOISE
            else draw_chain_token(cut, spec, at)
            for at in positions
        ]
        tree = _branches(first, below)
    probs = None
    if rule_named(rule).needs_draft_probs:
        probs = DraftProbs({n: cut for n in range(len(tree) + 1) if tree.children(n)})
    return Window(rule, logits_RV[: len(tree) + 1], tree, spec, prefix, probs)


def _first_tokens(
    rule: str,
    logits_V: torch.Tensor,
    cut: SparseProbs,
    spec: SequenceSpec,
    prefix: tuple[int, ...],
    width: int,
) -> tuple[int, ...]:
    drawn_as = rule_named(rule).drawn_as
    if drawn_as is CandidateKind.SHARED_NOISE:
        return top_children(logits_V, spec, prefix, width)
    if drawn_as is CandidateKind.WITH_REPLACEMENT:
        return draw_independent(cut, spec, len(prefix), range(width))
    return draw_without_replacement(cut, spec, len(prefix), width)


def _branches(first: Sequence[int], below: Sequence[int]) -> CandidateTree:
    token_ids, parents = list(first), [0] * len(first)
    for number in range(len(first)):
        parent = number + 1
        for token_id in below:
            token_ids.append(token_id)
            parents.append(parent)
            parent = len(token_ids)
    return CandidateTree(tuple(token_ids), tuple(parents))


# Part "acceptance"


@dataclass(slots=True)
class _Counts:
    by_prompt: list[TokensAndSteps] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


def _shapes() -> list[tuple[str, int]]:
    """The rules that a model drafts for, each with the WIDTHS that apply to it.

    On a chain, the rules for drawn trees are the same as rejection, so they are left out.
    """
    return [
        (name, width)
        for width in WIDTHS
        for name, rule in RULES.all().items()
        if rule.drawn_as is not None and (rule.shares_noise or rule.chain_only == (width == 1))
    ]


def measure_acceptance(
    client: Client, prompts: Prompts, *, max_tokens: int, tell: Callable[[str], None]
) -> list[RuleRow]:
    rows: list[RuleRow] = []
    for temperature in TEMPERATURES:
        for rule, branches in _shapes():
            tell(f"acceptance: {rule}, {candidates_shown(branches)}, temperature {temperature:g}")
            counts = _Counts()
            for number, prompt in enumerate(prompts):
                options = GenerateOptions(
                    temperature=temperature,
                    top_k=0,
                    top_p=1.0,
                    seed=number,
                    max_tokens=max_tokens,
                    policy="lockstep",
                    rule=rule,
                    window=NODES,
                    branches=branches,
                    stopping="fixed",
                    drafter="model",
                )
                completion = client.generate(list(prompt), options)
                counts.by_prompt.append((len(completion.token_ids), completion.stats.steps))
                counts.drafted += completion.stats.drafted
                counts.accepted += completion.stats.accepted
            rows.append(_acceptance_row(rule, branches, temperature, counts))
    return rows


def _acceptance_row(rule: str, branches: int, temperature: float, counts: _Counts) -> RuleRow:
    candidates = candidates_shown(branches)
    return RuleRow(
        part="acceptance",
        name=f"{rule}, {candidates}, T={temperature:g}",
        rule=rule,
        candidates=candidates,
        temperature=temperature,
        acceptance_length=length_of(counts.by_prompt),
        details={
            "policy": "lockstep",
            "drafter": "model",
            "window": NODES,
            "tokens": sum(tokens for tokens, _ in counts.by_prompt),
            "steps": sum(steps for _, steps in counts.by_prompt),
            "by_prompt": counts.by_prompt,
            "standard_error": jackknife_error(counts.by_prompt, length_of),
            "drafted": counts.drafted,
            "accepted": counts.accepted,
        },
    )


# Report


def goals(rows: Sequence[RuleRow]) -> list[Goal]:
    return [*_time_goal(rows), *_acceptance_goals(rows)]


def _time_goal(rows: Sequence[RuleRow]) -> Iterator[Goal]:
    wanted = {"vocab_size": VOCAB_SIZES[0], "window": 8, "batch": 1}
    for row in rows:
        if (row.part, row.rule, row.candidates) != ("time", "coupled", "chain"):
            continue
        if row.ms is not None and wanted.items() <= dict(row.details).items():
            yield Goal(f"{AIM_MS:g} ms / coupled chain of 8", AIM_MS / row.ms, 1.0)


def _acceptance_goals(rows: Sequence[RuleRow]) -> Iterator[Goal]:
    counts = {
        (row.rule, row.candidates, row.temperature): cast(
            "Sequence[TokensAndSteps]", row.details["by_prompt"]
        )
        for row in rows
        if row.part == "acceptance"
    }
    for (rule, candidates, temperature), theirs in counts.items():
        coupled = counts.get(("coupled", candidates, temperature))
        if rule != "coupled" and candidates != candidates_shown(1) and coupled is not None:
            pairs = list(zip(coupled, theirs, strict=True))
            yield Goal(
                f"length, {candidates}, T={temperature:g}: coupled / {rule}",
                length_ratio(pairs),
                1.0,
                jackknife_error(pairs, length_ratio),
            )


def rules_json(rows: Sequence[RuleRow], machine: Mapping[str, object]) -> dict[str, object]:
    return document("rules", rows, goals(rows), machine)


def print_rules(console: Console, rows: Sequence[RuleRow]) -> None:
    """Print a table for each part that was measured, then the ratios; at most 80 columns."""
    _print_times(console, [row for row in rows if row.part == "time"])
    _print_acceptance(console, [row for row in rows if row.part == "acceptance"])
    print_goals(console, goals(rows))


def _print_times(console: Console, rows: Sequence[RuleRow]) -> None:
    """Print a column for each vocabulary and batch, a line for each rule, shape and window."""
    columns = list(dict.fromkeys((row.details["vocab_size"], row.details["batch"]) for row in rows))
    lines: dict[tuple[object, ...], dict[tuple[object, object], str]] = {}
    for row in rows:
        at = (row.details["vocab_size"], row.details["batch"])
        line = lines.setdefault((row.rule, row.candidates, row.details["window"]), {})
        line[at] = f"{row.ms:.2f}"
    if not lines:
        return
    headings = [f"V={vocab_size}, {batch}" for vocab_size, batch in columns]
    console.print("Verification in ms, by vocabulary and batch", highlight=False)
    shown = table(("rule", "candidates", "window", *headings), left=2)
    for (rule, candidates, window), cells in sorted(lines.items(), key=lambda one: _order(one[0])):
        figures = (cells.get(column, "") for column in columns)
        shown.add_row(str(rule), str(candidates), str(window), *figures)
    console.print(shown)
    console.print()


def _order(line: tuple[object, ...]) -> tuple[int, str, str]:
    rule, candidates, window = line
    assert isinstance(window, int)
    return window, str(candidates != "chain"), str(rule)


def _print_acceptance(console: Console, rows: Sequence[RuleRow]) -> None:
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    lines: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        line = lines.setdefault((row.rule, row.candidates), {})
        error = row.details["standard_error"]
        line[row.temperature] = f"{row.acceptance_length:.2f}" + (
            "" if error is None else f" +- {error:.2f}"
        )
    if not lines:
        return
    console.print(f"Tokens a step, policy lockstep, {NODES} candidates a step", highlight=False)
    shown = table(("rule", "candidates", *(f"T={one:g}" for one in temperatures)), left=2)
    for (rule, candidates), cells in lines.items():
        shown.add_row(rule, candidates, *(cells[one] for one in temperatures))
    console.print(shown)
    console.print()


def _run(asked: Asked) -> Report:
    limit, max_tokens, repeats = QUICK_AMOUNT if asked.quick else AMOUNT
    settings = RulesSettings(
        asked.part or PART_NAMES,
        asked.max_tokens or max_tokens,
        asked.repeats or repeats,
        asked.quick,
    )
    rows = run_rules(
        asked.config,
        asked.read_inputs(asked.limit or limit),
        settings,
        home=asked.home,
        tell=asked.tell,
    )
    return Report(rules_json(rows, asked.machine), lambda console: print_rules(console, rows))


register(
    Suite(
        "rules",
        "verification rules, in parts time and acceptance (default: both); 4 rows of the input, 32 "
        "tokens, 2 rounds (some ten minutes)",
        _run,
        frozenset({"limit", "max_tokens", "repeats", "part", "quick"}),
        parts=PART_NAMES,
    )
)
