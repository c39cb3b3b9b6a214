"""docs/http.md and /openapi.json name every field that the gateway knows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cluster.gateway import openai_responses
from cluster.gateway.app import READERS
from cluster.gateway.openapi import BODIES, description
from cluster.gateway.requests import FIELDS, REFUSED, SPECULATION, ReadBody
from paceline.errors import InvalidRequestError
from tests.cluster.gateway.serving import Served

PAGE = Path(__file__).resolve().parents[3] / "docs" / "http.md"
UNDESCRIBED = {"/", "/docs", "/openapi.json", "/console/state", "/console/rounds"}
"""Paths for browsers."""


def test_the_page_names_every_field() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert {*FIELDS, *REFUSED["chat"], *REFUSED["completion"], *SPECULATION} - named == set()


@pytest.mark.parametrize("path", BODIES)
def test_each_body_is_described_as_it_is_read(path: str) -> None:
    """The names are those that are read, and what is of another type is refused by name."""
    _, schema, example = BODIES[path]
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(example)
    properties = schema["properties"]
    body = ReadBody(example)
    READERS[path](body)
    refused = {*REFUSED["chat"], *REFUSED["completion"], *openai_responses.REFUSED}
    if path.endswith("count_tokens"):
        # A count depends on no option.
        refused |= {*FIELDS, "stop_sequences", "speculation", "stream"}
    assert properties.keys() - body.names_read == set()
    assert body.names_read - properties.keys() - refused == set()
    for name, one in properties.items():
        wrong: Any = 1.5 if Draft202012Validator(one).is_valid("x") else "x"
        assert not Draft202012Validator(one).is_valid(wrong), name
        if name != "metadata":  # It comes back as it is.
            with pytest.raises(InvalidRequestError) as caught:
                READERS[path]({**example, name: wrong})
            assert name in caught.value.field, name


@pytest.mark.asyncio(loop_scope="module")
async def test_the_description_is_that_of_the_server(served: Served) -> None:
    told = (await served.http.get("/openapi.json")).json()
    assert told == description()
    paths = [str(getattr(route, "path", "")) for route in served.gateway.app.routes]
    served_paths = {path.replace(":path}", "}") for path in paths}
    assert served_paths == told["paths"].keys() | UNDESCRIBED
    for path, methods in told["paths"].items():
        for method, one in methods.items():
            asked = {}
            if "requestBody" in one:
                asked["json"] = one["requestBody"]["content"]["application/json"]["example"]
            answer = await served.http.request(method, path.format(name="target"), **asked)
            assert answer.status_code == 200, (path, answer.text)
            schema = one["responses"]["200"]["content"].get("application/json", {}).get("schema")
            if schema is not None:
                Draft202012Validator(schema).validate(answer.json())
