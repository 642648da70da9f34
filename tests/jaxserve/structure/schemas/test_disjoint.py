"""Schemas that exclude each other: found where it is so, and never claimed where it is not."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.structure.schemas.disjoint import all_disjoint, disjoint
from jaxserve.structure.schemas.document import Document
from tests.jaxserve.structure.schemas.test_rewriting import PLAIN, VALUES, larger


def with_kind(kind: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"type": "string"}, {"type": ["number", "null"]}, True),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": "integer"}, {"const": 1.5}, True),
        ({"enum": [1, "a"]}, {"enum": [1.0, True]}, False),
        ({"const": 1}, {"const": True}, True),
        ({"const": "abc"}, {"type": "string", "maxLength": 2}, True),
        ({"minimum": 3, "type": "number"}, {"exclusiveMaximum": 3}, True),
        ({"minimum": 3, "type": "number"}, {"maximum": 3}, False),
        ({"minimum": 3}, {"maximum": 2}, False),  # both hold for texts
        (with_kind("a"), with_kind("b"), True),
        (with_kind("a"), {"properties": {"kind": {"const": "b"}}}, True),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"required": ["n"]}]}, with_kind("b"), True),
        ({"anyOf": [with_kind("a"), with_kind("b")]}, with_kind("c"), True),
        ({"anyOf": [with_kind("a"), with_kind("b")]}, with_kind("b"), False),
        ({"type": "object", "required": ["x"]}, {"additionalProperties": False}, True),
        ({"type": "object", "minProperties": 2}, {"maxProperties": 1}, True),
        ({"type": "array", "minItems": 1, "items": {"const": 1}}, {"items": {"const": 2}}, True),
        ({"type": "array", "items": {"const": 1}}, {"items": {"const": 2}}, False),  # both: []
        ({"type": "string", "not": {"enum": ["a", "b"]}}, {"const": "b"}, True),
        (False, {}, True),
        ({"$ref": "http://elsewhere"}, {"$ref": "#"}, False),
    ],
)
def test_two_schemas(first: Any, second: Any, expected: bool) -> None:
    document = Document({"$defs": {"a": with_kind("a")}})
    assert disjoint(document, first, second) == expected
    assert disjoint(document, second, first) == expected


def test_many_schemas_take_one_pass() -> None:
    many = [with_kind(f"k{i}") for i in range(2000)]
    assert all_disjoint(Document({}), many)
    assert all_disjoint(Document({}), [{"const": i} for i in range(2000)])
    assert not all_disjoint(Document({}), [*many, with_kind("k7")])
    assert not all_disjoint(Document({}), [*many, {"type": "object"}])


@settings(deadline=None, max_examples=200, derandomize=True, database=None)
@given(
    st.lists(larger(PLAIN) | PLAIN, min_size=2, max_size=2),
    st.lists(VALUES, min_size=6, max_size=6),
)
def test_no_value_follows_two_that_exclude_each_other(pair: list[Any], values: list[Any]) -> None:
    if disjoint(Document({}), *pair):
        first, second = (jsonschema.Draft202012Validator(schema) for schema in pair)
        assert not any(first.is_valid(value) and second.is_valid(value) for value in values)
