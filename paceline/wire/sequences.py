"""Names, sampling parameters and sequences as messages (types.proto)."""

from __future__ import annotations

from paceline.errors import InvalidRequestError
from paceline.options import Stopping, check_option
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.structure import Structure, StructureKind
from paceline.v1 import types_pb2
from paceline.wire.fields import read_fields, values_of

ANY_VOCABULARY = 1 << 32
"""A vocabulary size that exceeds every uint32 token id."""

STOPPINGS: dict[str, types_pb2.StoppingRule.ValueType] = {
    Stopping.FIXED.value: types_pb2.STOPPING_RULE_FIXED,
    Stopping.ADAEDL.value: types_pb2.STOPPING_RULE_ADAEDL,
    Stopping.CONFIDENCE.value: types_pb2.STOPPING_RULE_CONFIDENCE,
    Stopping.COST.value: types_pb2.STOPPING_RULE_COST,
}
"""The numbers of stopping rules, by name."""


def stopping_to_wire(stopping: Stopping) -> types_pb2.StoppingRule.ValueType:
    return STOPPINGS[stopping.value]


def stopping_from_wire(number: int) -> Stopping:
    """The stopping rule of a number; unspecified means fixed.

    Raises InvalidRequestError, which names the field `stopping`.
    """
    if number == types_pb2.STOPPING_RULE_UNSPECIFIED:
        return Stopping.FIXED
    for name, known in STOPPINGS.items():
        if known == number:
            return Stopping(name)
    expected = ", ".join(f"{name} ({known})" for name, known in STOPPINGS.items())
    raise InvalidRequestError("stopping", f"expected one of {expected}, got {number}")


def spec_to_wire(spec: SequenceSpec) -> types_pb2.SequenceSpec:
    """The message for `spec`. Floats are rounded to float32, as the wire has them."""
    nested = {
        "sampling": types_pb2.SamplingParams(**values_of(spec.sampling)),
        "structure": None if spec.structure is None else structure_to_wire(spec.structure),
        "bad_words": [types_pb2.TokenRun(token_ids=word) for word in spec.bad_words],
    }
    return types_pb2.SequenceSpec(**values_of(spec) | nested)


def spec_from_wire(
    message: types_pb2.SequenceSpec, *, vocab_size: int = ANY_VOCABULARY
) -> SequenceSpec:
    """The plain value of a message, checked. Raises InvalidRequestError, which names the field.

    The rule is any name: the caller looks it up.
    """
    if not message.HasField("sampling"):
        raise InvalidRequestError("sampling", "expected sampling parameters, got none")
    sampling = read_fields(SamplingParams, message.sampling)
    sampling.validate(vocab_size)
    structure = structure_from_wire(message.structure) if message.HasField("structure") else None
    if structure is not None:
        check_option("structure", structure)
    bad_words = tuple(tuple(word.token_ids) for word in message.bad_words)
    spec = read_fields(
        SequenceSpec, message, sampling=sampling, structure=structure, bad_words=bad_words
    )
    spec.validate(vocab_size)
    return spec


def structure_to_wire(value: Structure) -> types_pb2.Structure:
    match value.kind:
        case StructureKind.JSON_OBJECT:
            return types_pb2.Structure(json_object=types_pb2.JsonObject())
        case StructureKind.CHOICE:
            return types_pb2.Structure(choice=types_pb2.Choices(texts=value.choices))
        case kind:
            message = types_pb2.Structure()
            setattr(message, kind.value, value.text)
            return message


def structure_from_wire(message: types_pb2.Structure) -> Structure:
    """The plain value of a message; its size is checked elsewhere. Raises InvalidRequestError."""
    given = message.WhichOneof("kind")
    if given is None:
        kinds = ", ".join(kind.value for kind in StructureKind)
        raise InvalidRequestError("structure", f"expected one of {kinds}, got none")
    kind = StructureKind(given)
    if kind is StructureKind.JSON_OBJECT:
        return Structure(kind)
    if kind is StructureKind.CHOICE:
        return Structure(kind, choices=tuple(message.choice.texts))
    return Structure(kind, getattr(message, given))
