"""Between the messages of drafting.proto and a session's plain values."""

from __future__ import annotations

from paceline.convert import ANY_VOCABULARY, spec_from_wire
from paceline.errors import InvalidRequestError, ProtocolError
from paceline.v1 import drafting_pb2, types_pb2
from workers.drafting.desk import DraftingSession, SessionNews


def apply_request(
    session: DraftingSession, request: drafting_pb2.DraftRequest
) -> drafting_pb2.Declined | None:
    """Apply one message. Returns a refusal; raises ProtocolError naming the field that is wrong."""
    kind = request.WhichOneof("message")
    if kind == "outcome":
        outcome = request.outcome
        session.outcome(outcome.sequence_id, outcome.position, list(outcome.token_ids))
    elif kind == "grant":
        grant = request.grant
        session.grant(grant.sequence_id, grant.until_position, grant.branches)
    elif kind == "open":
        return _open(session, request.open)
    elif kind == "close":
        session.close(request.close.sequence_id)
    else:
        raise ProtocolError("message: expected open, outcome, grant or close, got none")
    return None


def _open(
    session: DraftingSession, message: drafting_pb2.OpenSequence
) -> drafting_pb2.Declined | None:
    try:
        spec = spec_from_wire(message.spec, vocab_size=session.vocab_size or ANY_VOCABULARY)
    except InvalidRequestError as error:
        raise ProtocolError(f"open.spec.{error}") from error
    reason = session.open(message.sequence_id, spec, list(message.token_ids))
    if reason is None:
        return None
    return drafting_pb2.Declined(sequence_id=message.sequence_id, reason=reason)


def to_responses(news: SessionNews, pass_seconds: float) -> list[drafting_pb2.DraftResponse]:
    """What a pass gave for one stream: a batch, then what it had to decline."""
    batch = drafting_pb2.ProposalBatch(
        proposals=[
            drafting_pb2.Proposal(
                sequence_id=proposal.sequence_id,
                base=types_pb2.Base(length=proposal.base_length, hash=proposal.base_hash),
                token_ids=proposal.token_ids,
                last=proposal.last,
            )
            for proposal in news.proposals
        ],
        pass_seconds=pass_seconds,
        tokens_fed=news.tokens_fed,
    )
    declined = [
        drafting_pb2.DraftResponse(
            declined=drafting_pb2.Declined(sequence_id=sequence_id, reason=reason)
        )
        for sequence_id, reason in news.declined
    ]
    return [drafting_pb2.DraftResponse(proposals=batch), *declined]
