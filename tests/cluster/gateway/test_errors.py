"""Errors as HTTP tells them, and counts of drafting under vLLM's names."""

from __future__ import annotations

import json
import logging

import pytest

from cluster.gateway.errors import (
    MAX_MESSAGE,
    BodyTooLargeError,
    SlowBodyError,
    UnknownModelError,
    http_error,
)
from cluster.gateway.openai_answers import speculative_decoding
from paceline import errors
from paceline.generation import RequestStats, SpeculationStats

STATUSES: dict[type[Exception], int] = {
    errors.InvalidRequestError: 400,
    errors.PromptTooLongError: 400,
    UnknownModelError: 404,
    SlowBodyError: 408,
    BodyTooLargeError: 413,
    errors.UnauthenticatedError: 401,
    errors.PermissionDeniedError: 403,
    errors.RequestFaultError: 422,
    errors.OverloadedError: 429,
    errors.RateLimitedError: 429,
    errors.ConfigError: 500,
    errors.CheckpointError: 500,
    errors.VocabularyMismatchError: 500,
    errors.ProtocolError: 500,
    errors.InternalError: 500,
    errors.PacelineError: 500,
    ValueError: 500,
    errors.ModelFetchError: 503,
    errors.UnavailableError: 503,
    errors.VersionMismatchError: 503,
    errors.WrongLifeError: 503,
    errors.WrongServerError: 503,
    errors.WorkerLostError: 503,
    errors.DeadlineError: 504,
}


def _made(kind: type[Exception]) -> Exception:
    if issubclass(kind, errors.InvalidRequestError):
        return kind("rule", "the secret")
    return kind("the secret")


@pytest.mark.parametrize(("kind", "status"), STATUSES.items(), ids=lambda one: str(one))
def test_each_error_has_its_status(
    kind: type[Exception], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        response = http_error(_made(kind)).response()
    assert response.status_code == status
    told = json.loads(bytes(response.body))["error"]
    assert told.keys() == {"message", "type", "param", "code"}
    # A defect is the operator's to read, and the caller gets the number to ask about.
    is_defect = status == 500
    assert ("the secret" in told["message"]) == (not is_defect)
    assert ("the secret" in caplog.text) == is_defect
    if is_defect:
        assert told["message"].split()[2].rstrip(";") in caplog.text
    assert told["param"] == ("speculation.verification" if "rule" in str(_made(kind)) else None)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert ("www-authenticate" in response.headers) == (status == 401)


@pytest.mark.parametrize(("wait", "told"), [(None, "1"), (0.0, "1"), (1.2, "2"), (60.0, "60")])
def test_a_wait_is_told_in_whole_seconds(wait: float | None, told: str) -> None:
    response = http_error(errors.RateLimitedError("later", wait)).response()
    assert response.headers["retry-after"] == told


def test_the_whole_tree_is_told() -> None:
    tree = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    tree = {kind for kind in tree if issubclass(kind, errors.PacelineError)}
    assert tree <= STATUSES.keys()


def test_a_message_that_quotes_much_is_cut() -> None:
    body = json.loads(http_error(errors.InvalidRequestError("stop", "a" * 10**7)).body())
    assert len(body["error"]["message"]) == MAX_MESSAGE


def _stats(drafted: int, accepted: int, speculation: SpeculationStats) -> RequestStats:
    return RequestStats(9, drafted, accepted, 2.0, 1.0, 0.1, speculation=speculation)


def test_counts_of_drafting_under_vllms_names() -> None:
    """Five steps with candidates: of 3, 3, 2, 1, 1, of which 3, 1, 1, 0, 0 were accepted."""
    counts = SpeculationStats(
        drafted_at=(5, 3, 2), tried_at=(5, 3, 1), accepted_at=(3, 1, 1), proposed=12
    )
    assert speculative_decoding(_stats(10, 5, counts), 4) == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [2, 2, 0, 1, 0],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 10,
        "num_spec_tokens": 4,
    }


def test_a_request_that_drafted_nothing_tells_nothing() -> None:
    assert speculative_decoding(_stats(0, 0, SpeculationStats()), 8) is None


def test_candidates_none_of_which_was_accepted() -> None:
    told = speculative_decoding(_stats(4, 0, SpeculationStats(drafted_at=(2, 2))), 1)
    assert told is not None
    assert told["acceptance_histogram"] == [2, 0, 0]
    assert told["mean_acceptance_length"] == 1
    assert told["num_spec_tokens"] == 2
