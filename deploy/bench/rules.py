"""`paceline bench rules`: times and acceptance of rules.

- Part "time": how long each rule takes to verify a window on this CPU.
- Part "acceptance": tokens per step under each rule, with the same number of candidates for all
  rules. Requests run one at a time under policy lockstep. There a step waits for the whole window,
  so the acceptance does not depend on the speed of the machine. Every row decodes prompt i with
  seed i.

`candidates` of a row is "chain" or "N wide"; `ms` is the time to verify a batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from rich.console import Console

from cluster.config.model import Config
from deploy.bench.harness import (
    Asked,
    Document,
    Goal,
    Prompts,
    Row,
    Suite,
    encode_prompt,
    figure,
    jackknife_error,
    length_of,
    length_ratio,
    print_goals,
    ratios,
    read_inputs,
    register,
    table,
)
from deploy.bench.processes import deployment, model_drafters, running_side_by_side
from paceline.client import Client
from paceline.options import GenerateOptions
from paceline.sampling import SamplingParams, SequenceSpec
from workers.verification.candidates import CandidateTree, DraftProbs, merge_paths
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


def candidates_shown(branches: int) -> str:
    return "chain" if branches == 1 else f"{branches} wide"


def drafted(config: Config) -> Config:
    """The deployment of part "acceptance": with a model drafter."""
    speculation = config.speculation.model_copy(update={"wait_ms": WAIT_MS})
    return deployment(config, 1, model_drafters(config)[:1], speculation=speculation)


def run_rules(asked: Asked) -> Document:
    """Measure the parts in the order of PART_NAMES. Missing models are fetched."""
    inputs = read_inputs(asked.inputs[0], asked.limit)
    rows: list[Row] = []
    parts = asked.part or PART_NAMES
    if "time" in parts:
        windows = QUICK_WINDOWS if asked.quick else WINDOWS
        rows += time_rules(asked.tell, windows=windows, repeats=asked.repeats)
    if "acceptance" in parts:
        configs = {"drafted": drafted(asked.config)}
        with running_side_by_side(configs, home=asked.home, tell=asked.tell) as clients:
            client = clients["drafted"]
            prompts = [encode_prompt(client, row.input) for row in inputs]
            rows += measure_acceptance(
                client, prompts, max_tokens=asked.max_tokens, tell=asked.tell
            )
    return rules_document(rows)


def rules_document(rows: list[Row]) -> Document:
    return {"emulated": False, "rows": rows, "ratios": ratios(goals(rows))}


# Part "time"


def time_rules(
    tell: Callable[[str], None],
    *,
    repeats: int,
    vocab_sizes: Sequence[int] = VOCAB_SIZES,
    windows: Sequence[int] = WINDOWS,
    batches: Sequence[int] = BATCHES,
) -> list[Row]:
    """Time every rule on a chain of each window, and the rules for trees on trees of that size.

    The drafter's logits are the target's. So the coupled rule and the rules with draft
    probabilities accept nearly all of a chain. They then look at the most rows, which is the
    slowest case. (The one-hot rule accepts by the target's probability alone.) The windows of a
    batch share logits, not seeds.
    """
    rows: list[Row] = []
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
                        tell(f"time: {rows[-1]['name']}")
    return rows


def _time_rule(rule: str, logits_RV: torch.Tensor, width: int, batch: int, repeats: int) -> Row:
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
    return {
        "part": "time",
        "name": f"{rule}, {candidates}, V={vocab_size}, window {window}, batch {batch}",
        "rule": rule,
        "candidates": candidates,
        "temperature": 1.0,
        "ms": statistics.median(counted) * 1e3,
        "acceptance_length": None,
        "vocab_size": vocab_size,
        "window": window,
        "batch": batch,
        "best_ms": min(counted) * 1e3,
        "worst_ms": max(counted) * 1e3,
        "accepted": accepted / batch,
    }


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
    elif drawn_as is CandidateKind.SHARED_NOISE:
        first = top_children(logits_V, spec, prefix, width)
        tree = _branches(first, [top_children(logits_V, spec, (0,) * at, 1)[0] for at in positions])
    else:
        if drawn_as is CandidateKind.WITH_REPLACEMENT:
            first = draw_independent(cut, spec, len(prefix), range(width))
        else:
            first = draw_without_replacement(cut, spec, len(prefix), width)
        tree = _branches(first, [draw_chain_token(cut, spec, at) for at in positions])
    probs = None
    if rule_named(rule).needs_draft_probs:
        probs = DraftProbs({n: cut for n in range(len(tree) + 1) if tree.children(n)})
    return Window(rule, logits_RV[: len(tree) + 1], tree, spec, prefix, probs)


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
) -> list[Row]:
    rows: list[Row] = []
    for temperature in TEMPERATURES:
        for rule, branches in _shapes():
            tell(f"acceptance: {rule}, {candidates_shown(branches)}, temperature {temperature:g}")
            answers = []
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
                answers.append(client.generate(list(prompt), options))
            candidates = candidates_shown(branches)
            by_prompt = [(len(one.token_ids), one.stats.steps) for one in answers]
            rows.append(
                {
                    "part": "acceptance",
                    "name": f"{rule}, {candidates}, T={temperature:g}",
                    "rule": rule,
                    "candidates": candidates,
                    "temperature": temperature,
                    "ms": None,
                    "acceptance_length": length_of(by_prompt),
                    "policy": "lockstep",
                    "drafter": "model",
                    "window": NODES,
                    "tokens": sum(tokens for tokens, _ in by_prompt),
                    "steps": sum(steps for _, steps in by_prompt),
                    "by_prompt": by_prompt,
                    "standard_error": jackknife_error(by_prompt, length_of),
                    "drafted": sum(one.stats.drafted for one in answers),
                    "accepted": sum(one.stats.accepted for one in answers),
                }
            )
    return rows


# Report


def goals(rows: Sequence[Row]) -> list[Goal]:
    return [*_time_goal(rows), *_acceptance_goals(rows)]


def _time_goal(rows: Sequence[Row]) -> Iterator[Goal]:
    wanted = ("time", "coupled", "chain", VOCAB_SIZES[0], 8, 1)
    names = ("part", "rule", "candidates", "vocab_size", "window", "batch")
    for row in rows:
        if tuple(row.get(name) for name in names) == wanted:
            yield Goal(f"{AIM_MS:g} ms / coupled chain of 8", AIM_MS / row["ms"], 1.0)


def _acceptance_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    counts = {
        (row["rule"], row["candidates"], row["temperature"]): row["by_prompt"]
        for row in rows
        if row["part"] == "acceptance"
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


def show_rules(console: Console, document: Document) -> None:
    """Print a table for each part that was measured, then the ratios; at most 80 columns."""
    rows = document["rows"]
    _print_part(
        console,
        "Verification in ms, by vocabulary and batch",
        sorted((row for row in rows if row["part"] == "time"), key=_order),
        ("rule", "candidates", "window"),
        heading=lambda row: f"V={row['vocab_size']}, {row['batch']}",
        cell=lambda row: figure(row["ms"]),
    )
    _print_part(
        console,
        f"Tokens a step, policy lockstep, {NODES} candidates a step",
        [row for row in rows if row["part"] == "acceptance"],
        ("rule", "candidates"),
        heading=lambda row: f"T={row['temperature']:g}",
        cell=_length_shown,
    )
    print_goals(console, goals(rows))


def _order(row: Row) -> tuple[int, bool, str]:
    return row["window"], row["candidates"] != candidates_shown(1), row["rule"]


def _length_shown(row: Row) -> str:
    error = row["standard_error"]
    return figure(row["acceptance_length"]) + ("" if error is None else f" +- {error:.2f}")


def _print_part(
    console: Console,
    title: str,
    rows: Sequence[Row],
    fields: Sequence[str],
    *,
    heading: Callable[[Row], str],
    cell: Callable[[Row], str],
) -> None:
    """Print a line for each value of `fields`, with the cells of its rows below their headings."""
    lines: dict[tuple[object, ...], Row] = {}
    for row in rows:
        line = lines.setdefault(tuple(row[name] for name in fields), dict(row))
        line[heading(row)] = cell(row)
    if lines:
        console.print(title, highlight=False)
        headings = dict.fromkeys([*fields, *map(heading, rows)])
        console.print(table([(one, one, "d") for one in headings], lines.values(), left=2))
        console.print()


register(
    Suite(
        "rules",
        "verification rules, in parts time and acceptance (default: both); 4 rows of the input, 32 "
        "tokens, 2 rounds (some ten minutes)",
        run_rules,
        show_rules,
        {"limit": (4, 2), "max_tokens": (32, 24), "repeats": (2, 1)},
        parts=PART_NAMES,
    )
)
