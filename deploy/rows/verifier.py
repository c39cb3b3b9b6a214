"""Runs an input file under several policies on one server, and compares with transformers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.policy import policy_named
from cluster.driver.fitting import most_branches
from deploy.rows.batch import Answer, Failure, RowProgress, answers_in_order
from deploy.rows.comparison import (
    REFERENCE,
    Comparison,
    Divergence,
    Matrix,
    Run,
    Variant,
    check_text,
    divergences,
)
from deploy.rows.inputs import BadRow, InputRow
from deploy.rows.peers import Departure, TransformersPeer
from paceline.access import Access
from paceline.client import Client
from paceline.options import GenerateOptions
from paceline.sampling import SequenceSpec
from workers.engine.cpu.engine import CpuEngine
from workers.engine.kv_blocks import blocks_for
from workers.engine.slices import Slice
from workers.models.catalog import ModelFiles
from workers.verification.choice import noise_of
from workers.verification.distribution import adjusted_logits, distribution_of
from workers.verification.prefix import Prefix

_KV_BYTES = 1 << 30
_CHUNK = 512
Rows = Sequence[InputRow | BadRow]


@dataclass(slots=True)
class PeerReport:
    """Our greedy text compared with that of transformers."""

    rows: int = 0
    tokens: int = 0
    other_prompts: list[int] = field(default_factory=list)
    departures: list[tuple[int, Departure]] = field(default_factory=list)

    @property
    def ties(self) -> int:
        """Number of departures that rounding explains."""
        return sum(departure.tie for _, departure in self.departures)

    @property
    def failed(self) -> bool:
        """Whether anything but a tie was found."""
        return bool(self.other_prompts) or self.ties < len(self.departures)


@dataclass(frozen=True, slots=True)
class FileReport:
    """The results for one input file. `peer`: None if no run was greedy or there is no model."""

    path: str
    rows: Rows
    comparisons: Sequence[Comparison]
    peer: PeerReport | None

    @property
    def ok(self) -> bool:
        """Whether there is no divergence and no failed row."""
        return not (
            any(
                comparison.ties < len(comparison.divergences) or comparison.run.failures
                for comparison in self.comparisons
            )
            or (self.peer is not None and self.peer.failed)
        )


class Verifier:
    """Runs a matrix against the server at `address`.

    `options`: those that all runs share. `make_peer` and `make_meter` are called at most once. They
    are None if there is no model, as with an emulated target. `access`: of the clients.
    """

    def __init__(
        self,
        address: str,
        matrix: Matrix,
        options: GenerateOptions,
        *,
        progress: RowProgress,
        make_peer: Callable[[], TransformersPeer] | None,
        make_meter: Callable[[], MarginMeter] | None,
        access: Access | None = None,
    ) -> None:
        """Raises InvalidRequestError if the rule does not keep the text at a temperature."""
        self._address = address
        self._access = access or {}
        self._matrix = matrix
        assert options.max_tokens is not None
        self._max_tokens = options.max_tokens
        self._options = options
        self._progress = progress
        self._make_peer = make_peer
        self._make_meter = make_meter
        self._peer: TransformersPeer | None = None
        self._meter: MarginMeter | None = None
        with Client(address, **self._access) as client:
            self._model = client.describe()
        default = self._model.default_sampling.temperature
        for temperature in matrix.temperatures:
            check_text(options.rule, default if temperature is None else temperature)

    def verify_file(self, path: Path, rows: Rows) -> FileReport:
        """Run everything over the rows of one file, then compare a greedy run with transformers."""
        comparisons: list[Comparison] = []
        for temperature in self._matrix.temperatures:
            reference = self._run(rows, REFERENCE, temperature)
            comparisons.append(Comparison(reference, temperature, ()))
            for variant in self._matrix.variants:
                run = self._run(rows, variant, temperature)
                found = [
                    self._with_margin(one, reference, temperature)
                    for one in divergences(reference, run)
                ]
                comparisons.append(Comparison(run, temperature, found))
        greedy = self._greedy_reference(comparisons)
        peer = None if greedy is None else self._compare_with_peer(greedy)
        return FileReport(str(path), rows, comparisons, peer)

    def _greedy_reference(self, comparisons: Sequence[Comparison]) -> Run | None:
        for comparison in comparisons:
            temperature = comparison.temperature
            if temperature is None:
                temperature = self._model.default_sampling.temperature
            if temperature == 0:
                return comparison.run
        return None

    def _run(self, rows: Rows, variant: Variant, temperature: float | None) -> Run:
        branches = self._options.branches
        if branches is not None and variant.window is not None:
            branches = min(branches, variant.window)
        if branches is not None:
            rule = self._options.rule or "coupled"
            branches = min(branches, most_branches(variant.policy, rule))
        options = replace(
            self._options,
            temperature=temperature,
            policy=variant.policy,
            window=variant.window,
            branches=branches if policy_named(variant.policy).drafts else None,
        )
        shown = "" if temperature is None else f", temperature {temperature:g}"
        with self._progress.counting(f"{variant}{shown}", len(rows)) as advance:
            start = time.monotonic()
            answers = asyncio.run(self._answers(rows, options, variant.concurrency, advance))
            seconds = time.monotonic() - start
        return Run(variant, answers, seconds)

    def _with_margin(
        self, found: Divergence, reference: Run, temperature: float | None
    ) -> Divergence:
        """Add the margin if a tie is possible: only after trees, since chains are exact."""
        plain = reference.answers[found.row].outcome
        chain = self._options.branches in (None, 1)
        if chain or found.expected is None or found.got is None or isinstance(plain, Failure):
            return found
        if self._meter is None:
            if self._make_meter is None:
                return found
            self._meter = self._make_meter()
        chosen: dict[str, Any] = {
            "temperature": temperature,
            "top_k": self._options.top_k,
            "top_p": self._options.top_p,
        }
        spec = SequenceSpec(
            sampling=replace(
                self._model.default_sampling,
                **{name: value for name, value in chosen.items() if value is not None},
            ),
            seed=plain.seed,
            prompt_length=len(plain.prompt_token_ids),
            end_token_ids=self._model.end_token_ids,
        )
        prefix = (*plain.prompt_token_ids, *plain.token_ids[: found.position])
        return replace(found, margin=self._meter.margin(spec, prefix, found.expected, found.got))

    async def _answers(
        self, rows: Rows, options: GenerateOptions, concurrency: int, advance: Callable[[], None]
    ) -> list[Answer]:
        stream = answers_in_order(
            self._address,
            rows,
            options,
            concurrency=concurrency,
            access=self._access,
            on_done=advance,
        )
        return [answer async for answer in stream]

    def _compare_with_peer(self, run: Run) -> PeerReport | None:
        """Compare each answered row with transformers: the prompt's tokens, then the text's."""
        if self._peer is None:
            if self._make_peer is None:
                return None
            self._peer = self._make_peer()
        report = PeerReport()
        with self._progress.counting("transformers", len(run.answers)) as advance:
            for answer in run.answers:
                self._compare_row(self._peer, answer, report)
                advance()
        return report

    def _compare_row(self, peer: TransformersPeer, answer: Answer, report: PeerReport) -> None:
        if isinstance(answer.outcome, Failure) or isinstance(answer.row, BadRow):
            return
        ours = answer.outcome
        report.rows += 1
        report.tokens += len(ours.token_ids)
        if peer.encode(answer.row.input) != list(ours.prompt_token_ids):
            report.other_prompts.append(answer.index)
        found = peer.departures(ours.prompt_token_ids, ours.token_ids, self._max_tokens)
        report.departures += [(answer.index, departure) for departure in found]


class MarginMeter:
    """Computes margins with the target's engine, for one sequence at a time, without candidates."""

    def __init__(self, files: ModelFiles, *, threads: int) -> None:
        self._engine = CpuEngine(
            files.folder, weights=files.weights, threads=threads, kv_memory_bytes=_KV_BYTES
        )

    def margin(
        self, spec: SequenceSpec, prefix: Sequence[int], expected: int, got: int
    ) -> float | None:
        """Plain decoding's logit of `expected` minus its logit of `got`, after `prefix`.

        At a temperature above 0 both include the noise of the position. None: one of the two tokens
        could not have been chosen.
        """
        logits_V = self._logits_V(prefix)
        position = len(prefix)
        before = Prefix.of(prefix, prompt_length=spec.prompt_length)
        adjusted_V = adjusted_logits(logits_V, spec, before)
        if spec.sampling.greedy:
            gap = float(adjusted_V[expected]) - float(adjusted_V[got])
            return gap if np.isfinite(gap) else None
        kept = distribution_of(adjusted_V, spec.sampling)
        scores_N = kept.log_weights + noise_of(kept, adjusted_V.size, spec, position)
        ids = np.arange(adjusted_V.size) if kept.token_ids is None else kept.token_ids
        found = [scores_N[ids == token_id] for token_id in (expected, got)]
        if not all(scores.size for scores in found):
            return None
        return float(found[0][0] - found[1][0]) * spec.sampling.temperature

    def _logits_V(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        blocks = range(blocks_for(len(prefix), self._engine.block_size))
        for start in range(0, len(prefix), _CHUNK):
            fed = list(prefix[start : start + _CHUNK])
            logits_1V = self._engine.step([Slice(blocks, start, fed, 1)])
        return logits_1V[0].numpy()
