"""Between the wire (proto/paceline/v1/types.proto) and plain values (paceline.sampling)."""

from __future__ import annotations

from paceline.errors import InvalidRequestError
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import types_pb2

ANY_VOCABULARY = 1 << 32
"""A vocabulary size that every uint32 token id is below."""


def sampling_to_wire(params: SamplingParams) -> types_pb2.SamplingParams:
    """The message for `params`. Floats are rounded to float32, as the wire has them."""
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
    )


def sampling_from_wire(message: types_pb2.SamplingParams) -> SamplingParams:
    """The plain value of a message; nothing is checked yet (`SamplingParams.validate`)."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
    )


def spec_to_wire(spec: SequenceSpec) -> types_pb2.SequenceSpec:
    """The message for `spec`, under the coupled rule."""
    return types_pb2.SequenceSpec(
        sampling=sampling_to_wire(spec.sampling),
        seed=spec.seed,
        sample_index=spec.sample_index,
        rule=types_pb2.VERIFICATION_RULE_COUPLED,
        prompt_length=spec.prompt_length,
        end_token_ids=spec.end_token_ids,
    )


def spec_from_wire(
    message: types_pb2.SequenceSpec, *, vocab_size: int = ANY_VOCABULARY
) -> SequenceSpec:
    """The plain value of a message, checked. Raises InvalidRequestError naming the field."""
    if message.rule != types_pb2.VERIFICATION_RULE_COUPLED:
        raise InvalidRequestError("rule", f"expected COUPLED (1), got {message.rule}")
    if not message.HasField("sampling"):
        raise InvalidRequestError("sampling", "expected sampling parameters, got none")
    sampling = sampling_from_wire(message.sampling)
    sampling.validate(vocab_size)
    end_token_ids = tuple(message.end_token_ids)
    if end_token_ids and max(end_token_ids) >= vocab_size:
        raise InvalidRequestError(
            "end_token_ids",
            f"token id {max(end_token_ids)} is not in the vocabulary of {vocab_size}",
        )
    return SequenceSpec(
        sampling=sampling,
        seed=message.seed,
        prompt_length=message.prompt_length,
        sample_index=message.sample_index,
        end_token_ids=end_token_ids,
    )
