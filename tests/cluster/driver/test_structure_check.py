"""Structures that would end or fill the process that compiles them end the checking one alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.driver.structure_check import StructureChecker
from paceline.errors import InvalidRequestError
from paceline.structure import Structure
from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StructureChecker]:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("checker") / "model")
    checker = StructureChecker(folder, vocab_size=384, end_token_ids=(1,))
    yield checker
    checker.close()


def test_good_structures_pass(checker: StructureChecker) -> None:
    checker.check(Structure.regex("[a-z]+"))
    checker.check(Structure.json_schema({"type": "object"}))
    checker.check(Structure.choice(["yes", "no"]))


def test_a_wrong_one_is_refused_with_its_reason(checker: StructureChecker) -> None:
    with pytest.raises(InvalidRequestError, match="regex parse error") as refused:
        checker.check(Structure.regex("["))
    assert refused.value.field == "structure"


TOO_MUCH = {
    "a chain of rules that overflows a stack": Structure.grammar(
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"'
    ),
    "a chain of references that overflows a stack": Structure.json_schema(
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1300)}
            | {"1300": {}},
        }
    ),
    "an expression that takes gigabytes": Structure.regex("a*" * 32_000),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_one_that_is_too_much_is_refused_and_others_go_on(
    checker: StructureChecker, name: str
) -> None:
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        checker.check(TOO_MUCH[name])
    checker.check(Structure.regex("[a-z]+"))
