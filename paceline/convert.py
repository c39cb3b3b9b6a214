"""Between the wire (proto/paceline/v1/types.proto) and plain values (paceline.sampling)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from paceline.errors import InvalidRequestError
from paceline.rules import Rule, Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import types_pb2

ANY_VOCABULARY = 1 << 32
"""A vocabulary size that every uint32 token id is below."""

_RULE_TO_WIRE = MappingProxyType(
    {
        Rule.COUPLED: types_pb2.VERIFICATION_RULE_COUPLED,
        Rule.REJECTION: types_pb2.VERIFICATION_RULE_REJECTION,
        Rule.KSEQ: types_pb2.VERIFICATION_RULE_KSEQ,
        Rule.RECURSIVE: types_pb2.VERIFICATION_RULE_RECURSIVE,
        Rule.MCSD: types_pb2.VERIFICATION_RULE_RECURSIVE_WITH_REPLACEMENT,
        Rule.ONE_HOT: types_pb2.VERIFICATION_RULE_ONE_HOT,
    }
)
_RULE_FROM_WIRE: Mapping[int, Rule] = MappingProxyType(
    {number: rule for rule, number in _RULE_TO_WIRE.items()}
)
_STOPPING_TO_WIRE = MappingProxyType(
    {
        Stopping.FIXED: types_pb2.STOPPING_RULE_FIXED,
        Stopping.ADAEDL: types_pb2.STOPPING_RULE_ADAEDL,
        Stopping.CONFIDENCE: types_pb2.STOPPING_RULE_CONFIDENCE,
        Stopping.COST: types_pb2.STOPPING_RULE_COST,
    }
)
_STOPPING_FROM_WIRE: Mapping[int, Stopping] = MappingProxyType(
    {number: stopping for stopping, number in _STOPPING_TO_WIRE.items()}
)


def rule_to_wire(rule: Rule) -> types_pb2.VerificationRule.ValueType:
    """The number of a rule."""
    return _RULE_TO_WIRE[rule]


def rule_from_wire(number: int) -> Rule:
    """The rule of a number. Raises InvalidRequestError naming the field `rule`."""
    rule = _RULE_FROM_WIRE.get(number)
    if rule is None:
        known = ", ".join(f"{one.name} ({value})" for one, value in _RULE_TO_WIRE.items())
        raise InvalidRequestError("rule", f"expected one of {known}, got {number}")
    return rule


def stopping_to_wire(stopping: Stopping) -> types_pb2.StoppingRule.ValueType:
    """The number of a stopping rule."""
    return _STOPPING_TO_WIRE[stopping]


def stopping_from_wire(number: int) -> Stopping:
    """The stopping rule of a number, unspecified being fixed.

    Raises InvalidRequestError naming the field `stopping`.
    """
    if number == types_pb2.STOPPING_RULE_UNSPECIFIED:
        return Stopping.FIXED
    stopping = _STOPPING_FROM_WIRE.get(number)
    if stopping is None:
        known = ", ".join(f"{one.name} ({value})" for one, value in _STOPPING_TO_WIRE.items())
        raise InvalidRequestError("stopping", f"expected one of {known}, got {number}")
    return stopping


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
    """The message for `spec`."""
    return types_pb2.SequenceSpec(
        sampling=sampling_to_wire(spec.sampling),
        seed=spec.seed,
        sample_index=spec.sample_index,
        rule=rule_to_wire(spec.rule),
        prompt_length=spec.prompt_length,
        end_token_ids=spec.end_token_ids,
    )


def spec_from_wire(
    message: types_pb2.SequenceSpec, *, vocab_size: int = ANY_VOCABULARY
) -> SequenceSpec:
    """The plain value of a message, checked. Raises InvalidRequestError naming the field."""
    rule = rule_from_wire(message.rule)
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
        rule=rule,
    )
