"""A span of OpenTelemetry for each request of a driver: its waiting, prefill, tokens and steps.

Steps are events of the span, the first MAX_STEP_EVENTS of them. The whole is in its attributes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cluster.decoding.events import Request
from cluster.decoding.instructions import Emit, Finish, Refuse, RunStep
from workers.process.tracing import CALLER, Attributes, Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

MAX_STEP_EVENTS = 64
"""Most steps of a request that its span tells one by one."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Traced:
    span: Span
    is_prefilling: bool = False
    num_steps: int = 0


class RequestSpans:
    """Hears what becomes of requests. A defect here ends the tracing, and nothing else."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._traced: dict[int, _Traced] = {}
        self._is_broken = False

    def admitted(self, request: Request, request_id: str, model: str) -> None:
        """A request began, in the task of its call."""
        self._safely(lambda: self._begin(request, request_id, model))

    def sent(self, step: RunStep) -> None:
        self._safely(lambda: self._note_prefills(step))

    def told(self, instruction: Emit | Finish | Refuse) -> None:
        self._safely(lambda: self._note(instruction))

    def failed(self, error: Exception) -> None:
        for sequence_id in list(self._traced):
            self._safely(partial(self._fail, sequence_id, error))

    def _safely(self, work: Callable[[], None]) -> None:
        if self._is_broken:
            return
        try:
            work()
        except Exception:  # It ends tracing, not the request.
            self._is_broken = True
            self._traced.clear()
            _log.exception("a defect ended the tracing of requests")

    def _begin(self, request: Request, request_id: str, model: str) -> None:
        from opentelemetry.trace import SpanKind

        sampling = request.spec.sampling
        attributes: dict[str, str | int | float | bool | list[str]] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.response.id": request_id,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "paceline.policy": str(request.policy),
            "paceline.window": request.window,
        }
        name = f"text_completion {model}"
        span = self._tracing.span(name, SpanKind.SERVER, parent=CALLER.get(), attributes=attributes)
        if span.is_recording():
            self._traced[request.sequence_id] = _Traced(span)

    def _note_prefills(self, step: RunStep) -> None:
        if not self._traced:
            return
        for part in step.slices:
            traced = self._traced.get(part.sequence_id)
            if traced is not None and not traced.is_prefilling:
                traced.is_prefilling = True
                traced.span.add_event("prefill", {"paceline.cached_tokens": part.start})

    def _note(self, instruction: Emit | Finish | Refuse) -> None:
        sequence_id = instruction.sequence_id
        if isinstance(instruction, Emit):
            self._note_tokens(instruction)
        elif isinstance(instruction, Refuse):
            self._fail(sequence_id, instruction.error)
        else:
            stats = instruction.stats
            told: Attributes = {
                "gen_ai.response.finish_reasons": [instruction.reason.value],
                "gen_ai.usage.output_tokens": instruction.output_tokens,
                "paceline.steps": stats.steps,
                "paceline.drafted_tokens": stats.drafted,
                "paceline.accepted_tokens": stats.accepted,
                "paceline.seconds": stats.seconds,
                "paceline.ttft_seconds": stats.ttft_seconds,
            }
            self._end(sequence_id, told)

    def _note_tokens(self, emit: Emit) -> None:
        traced = self._traced.get(emit.sequence_id)
        if traced is None:
            return
        if traced.num_steps == 0:
            traced.span.add_event("first_token")
        traced.num_steps += 1
        if traced.num_steps <= MAX_STEP_EVENTS:
            traced.span.add_event(
                "step",
                {
                    "paceline.offset": emit.offset,
                    "paceline.tokens": len(emit.token_ids),
                    "paceline.accepted_tokens": emit.num_drafted,
                },
            )

    def _fail(self, sequence_id: int, error: Exception) -> None:
        from opentelemetry.trace import StatusCode

        traced = self._traced.get(sequence_id)
        if traced is not None:
            traced.span.set_status(StatusCode.ERROR, type(error).__name__)
            self._end(sequence_id, {"error.type": type(error).__name__})

    def _end(self, sequence_id: int, attributes: Attributes) -> None:
        traced = self._traced.pop(sequence_id, None)
        if traced is not None:
            traced.span.set_attributes(dict(attributes))
            traced.span.end()
