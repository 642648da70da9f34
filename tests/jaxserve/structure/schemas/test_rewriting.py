"""Schemas with keywords that the grammar library does not know, judged by the package jsonschema."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import jsonschema.validators
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import GrammarError
from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars
from jaxserve.structure.schemas.patterns import exact_pattern, parts_of
from jaxserve.structure.schemas.rewriting import rewritten
from tests.followed_texts import byte_grammars, follows, grammar_of
from tests.slow_cases import slow_but

CARD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "card": {"type": "integer"}, "street": {}},
    "required": ["name"],
}
COUNTRY = {
    "type": "object",
    "properties": {"country": {"enum": ["nl", "us", "fr"]}, "code": {"type": "string"}},
    "required": ["country", "code"],
}


def code_of(country: str, pattern: str) -> dict[str, Any]:
    """Return the usual form of what a property demands of another."""
    return {
        "if": {"properties": {"country": {"const": country}}},
        "then": {"properties": {"code": {"pattern": pattern}}},
    }


# Schema, values that follow it, values that do not.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "not a type": ({"not": {"type": ["string", "number"]}}, [None, True, [1]], ["a", 1, 1.5]),
    "not a constant": ({"type": "string", "not": {"const": "ab"}}, ["", "a", "abc", "b\n"], ["ab"]),
    "none of the texts": (
        {"type": "string", "pattern": "^[a-z]*$", "not": {"enum": ["root", "", "é"]}},
        ["roo", "roots", "x"],
        ["root", "", "é", "R"],
    ),
    "none of the numbers": ({"type": "integer", "not": {"enum": [1, 3]}}, [0, 2, 4], [1, 3, 1.5]),
    "not an object": ({"type": "object", "not": {"const": {"a": 1}}}, [{}, {"a": 2}], [{"a": 1}]),
    "not a list": ({"type": "array", "not": {"const": [1]}}, [[], [2], [1, 1]], [[1]]),
    "not a boolean": ({"type": "boolean", "not": {"const": True}}, [False], [True]),
    "not a range": ({"type": "number", "not": {"minimum": 2}}, [1.5, -3], [2, 3]),
    "not a length": ({"type": "string", "not": {"maxLength": 2}}, ["abc"], ["", "ab"]),
    "not required": ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    "not both": (
        {"properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
        [{"a": 1}, {"b": 1}, {}],
        [{"a": 1, "b": 1}],
    ),
    "not contained": ({"type": "array", "not": {"contains": {"const": 1}}}, [[], [2]], [[2, 1]]),
    "not a reference": (
        {"not": {"$ref": "#/$defs/s"}, "$defs": {"s": {"type": "string", "maxLength": 1}}},
        ["ab", 1],
        ["a", ""],
    ),
    "one of overlapping": (
        {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]},
        [4, -1],
        [5, 6, "a"],
    ),
    "one property": (
        {
            "properties": {"a": {}, "b": {}, "c": {}},
            "oneOf": [{"required": [name]} for name in "abc"],
            "type": "object",
            "additionalProperties": False,
        },
        [{"a": 1}, {"b": 1}, {"c": 1}],
        [{}, {"a": 1, "b": 1}, {"b": 1, "c": 1}, {"d": 1}],
    ),
    "one of references": (
        {
            "oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/pair"}],
            "$defs": {
                "leaf": {"type": "integer"},
                "pair": {"type": "array", "items": {"$ref": "#"}, "minItems": 2},
            },
        },
        [1, [1, [2, 3]]],
        ["a", [1], [1, [2]]],
    ),
    "if then else": (
        {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "null"}},
        ["ab", None],
        ["a", 1],
    ),
    "a chain of if": (
        {**COUNTRY, "allOf": [code_of("nl", "^[0-9]{4}$"), code_of("us", "^[0-9]{5}$")]},
        [{"country": "nl", "code": "1234"}, {"country": "fr", "code": "x"}],
        [{"country": "nl", "code": "12345"}, {"country": "us", "code": "1234"}, {"code": "x"}],
    ),
    "a chain of if for all values": (
        {
            "type": "object",
            "properties": {"country": {"enum": ["nl", "us"]}, "code": {"type": "string"}},
            "required": ["country"],
            "allOf": [code_of("nl", "^[0-9]{4}$"), code_of("us", "^[0-9]{5}$")],
        },
        [{"country": "nl", "code": "1234"}, {"country": "us"}, {"country": "us", "code": "12345"}],
        [{"country": "nl", "code": "12345"}, {"country": "us", "code": "1234"}, {"code": "x"}],
    ),
    "tags that may be absent": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "n": {"type": "integer"}},
                    "additionalProperties": False,
                }
                for kind in ("a", "b", "c")
            ]
        },
        [{"kind": "a", "n": 1}, {"kind": "c"}],
        [{"n": 1}, {}, {"kind": "d"}, {"kind": "a", "n": 1.5}],
    ),
    "an integer that the rest tells": (
        {
            "type": "object",
            "properties": {"age": {"type": "integer"}, "guardian": {}},
            "required": ["age"],
            "if": {"properties": {"age": {"type": "integer", "minimum": 18}}},
            "else": {"required": ["guardian"]},
        },
        [{"age": 18}, {"age": 3, "guardian": "x"}],
        [{"age": 17}, {"age": 18.5}],
    ),
    "if without required": (
        {"type": "object", **code_of("nl", "^a$")},
        [{}, {"country": "us"}, {"country": "nl", "code": "a"}, {"code": "a"}],
        [{"country": "nl", "code": "b"}, {"code": "b"}],
    ),
    "then without if": ({"then": False, "else": False, "type": "null"}, [None], [1]),
    "dependentRequired": (
        {**CARD, "dependentRequired": {"card": ["street"]}},
        [{"name": "a"}, {"name": "a", "card": 1, "street": 2}, {"name": "a", "street": 2}],
        [{"name": "a", "card": 1}, {"card": 1, "street": 2}],
    ),
    "dependentSchemas": (
        {**CARD, "dependentSchemas": {"card": {"properties": {"street": {"type": "null"}}}}},
        [{"name": "a", "card": 1}, {"name": "a", "street": 2}],
        [{"name": "a", "card": 1, "street": 2}],
    ),
    "dependencies": (
        {**CARD, "dependencies": {"card": ["street"], "street": {"minProperties": 2}}},
        [{"name": "a"}, {"name": "a", "street": 2}],
        [{"name": "a", "card": 1}],
    ),
    "listed names": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/color"},
            "additionalProperties": {"type": "integer"},
            "$defs": {"color": {"enum": ["red", "blue"], "title": "Color"}},
        },
        [{}, {"red": 1, "blue": 2}],
        [{"red": "x"}, {"green": 1}],
    ),
    "no other properties": (
        {"properties": {"a": {}}, "unevaluatedProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    "no other items": (
        {"prefixItems": [{"type": "null"}], "unevaluatedItems": False},
        [[], [None]],
        [[1], [None, None]],
    ),
    "six needs": (
        {
            "type": "object",
            "properties": {name: {} for name in "abcdefg"},
            "dependentRequired": {name: ["g"] for name in "abcdef"},
        },
        [{"a": 1, "g": 1}, {"f": 1, "g": 1}, {"g": 1}, {}],
        [{"a": 1}, {"f": 1}, {"b": 1, "f": 1}],
    ),
    "quotes": (
        {"type": "string", "not": {"enum": ['"', "\\", 'a"b', "c\\"]}},
        ["", '""', 'a"', "c", "\\\\", "\n"],
        ['"', "\\", 'a"b', "c\\"],
    ),
    "names of unevaluated properties": (
        {"propertyNames": {"enum": ["a", "b"]}, "unevaluatedProperties": {"type": "null"}},
        [{}, {"a": None}],
        [{"a": 1}, {"c": None}],
    ),
    "references beside and above": (
        {
            "properties": {
                "a": {"$ref": "#/properties/b~1c/oneOf/1"},
                "b/c": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
                "d": {"$ref": "#/$defs/List%5BItem%5D"},
            },
            "$defs": {"List[Item]": {"type": "array", "not": {"const": []}}},
            "additionalProperties": False,
        },
        [{"a": 1, "b/c": "x", "d": [1]}, {"b/c": 2}],
        [{"a": "x"}, {"b/c": None}, {"d": []}],
    ),
    "siblings of a reference in draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "properties": {"a": {"$ref": "#/definitions/n", "not": {"const": 2}}},
            "definitions": {"n": {"type": "integer", "not": {"const": 3}}},
        },
        [{"a": 2}, {"a": 4}],
        [{"a": 3}, {"a": "x"}],
    ),
    "properties that are called like keywords": (
        {
            "type": "object",
            "properties": {name: {"type": "null"} for name in ("not", "if", "$ref", "enum")},
            "dependentRequired": {"if": ["enum"]},
            "default": {"not": 5, "$id": "x"},
            "examples": [{"$ref": "other.json"}, {"oneOf": 1e308}],
        },
        [{"not": None}, {"if": None, "enum": None}, {"$ref": None}],
        [{"not": 1}, {"if": None}],
    ),
    "a constant inside of allOf": (
        {
            "type": "object",
            "properties": {"a": {}, "k": {}},
            "if": {"required": ["k"]},
            "then": {"properties": {"a": {"allOf": [{"const": "x"}, {"type": "string"}]}}},
        },
        [{"a": "x", "k": 1}, {"a": "y"}, {"k": 1}],
        [{"a": "y", "k": 1}],
    ),
    "a definition that nothing follows": (
        {
            "$defs": {"n": {"oneOf": [{"type": "string"}, {"type": "string"}]}},
            "anyOf": [{"$ref": "#/$defs/n"}, {"type": "integer"}],
        },
        [1],
        ["a", None],
    ),
    "items may repeat": ({"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
    "everything": (True, [1, {"a": []}], []),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "unique": (
        {"items": {"uniqueItems": True}},
        "/items/uniqueItems cannot be followed: a grammar",
    ),
    "contains": ({"properties": {"a/b": {"contains": {}}}}, "/properties/a~1b/contains cannot be"),
    "names": (
        {"propertyNames": {"maxLength": 2}},
        "/propertyNames cannot be followed: only a list",
    ),
    "unevaluated": (
        {"allOf": [{}], "unevaluatedProperties": False},
        "/unevaluatedProperties cannot be followed: beside allOf",
    ),
    "opposite of a pattern": ({"not": {"pattern": "a"}}, "/not/pattern has no opposite that can"),
    "opposite of a step": (
        {"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}]},
        "/oneOf/1/multipleOf has no opposite that can be followed (it stands in",
    ),
    "opposite of items": (
        {"if": {"items": {"type": "null"}}, "then": False},
        "/if/items has no opposite",
    ),
    "numbers with a fraction": (
        {"not": {"type": "integer"}},
        "/not/type has no opposite that can be followed: numbers that",
    ),
    "loop": (
        {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
        "/$defs/a/items has no opposite",
    ),
    "loop of complements": (
        {
            "not": {"$ref": "#/$defs/a"},
            "$defs": {"a": {"properties": {"next": {"$ref": "#/$defs/a"}}}},
        },
        "/$defs/a/properties/next/$ref leads back to itself inside of 'not'",
    ),
    "a keyword of a later draft": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "not": {"dependentRequired": {"a": ["b"]}},
        },
        "/not/dependentRequired is no keyword of the schema's draft, which $schema names",
    ),
    "no type": ({"not": {"type": "strng"}}, "/not/type is 'strng'; it must be one of null,"),
    "no schema": ({"oneOf": [5]}, "/oneOf is [5]; it must be a list of schemas"),
    "no schema in not": ({"not": {"not": 5}}, "/not/not is 5; it must be a schema, which is"),
    "no needs": ({"dependentRequired": {"a": "b"}}, "/dependentRequired is {'a': 'b'}; it must be"),
    "no names": ({"not": {"required": [5]}}, "/not/required is [5]; it must be a list of names"),
    "many cases": (
        {"dependentRequired": {f"a{i}": ["b"] for i in range(10)}},
        "/ has more than 256 cases that may hold together",
    ),
    "pattern of names": (
        {"not": {"patternProperties": {"^a/b": False}}},
        "/not/patternProperties/^a~1b has no opposite",
    ),
    "behind a reference": (
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"uniqueItems": True}}},
        "/$defs/a b/uniqueItems cannot be followed",
    ),
    "nothing left": ({"type": "null", "not": {"type": "null"}}, "/ allows no value at all"),
    "false": (False, "/ allows no value at all"),
    "list": ({"oneOf": {}}, "/oneOf is {}; it must be a list of schemas"),
    "names in a list": (
        {"dependentRequired": []},
        "/dependentRequired is []; it must be an object of lists",
    ),
    "nowhere": ({"not": {"$ref": "#/$defs/a"}}, "/not/$ref is '#/$defs/a'; no schema is there"),
    "other names": (
        {"$defs": {"a": {"$id": "http://x/y", "type": "null"}}, "$ref": "http://x/y", "not": {}},
        'Unimplemented keys: ["not"]',
    ),
    "one of by other names": (
        {"$defs": {"a": {"$anchor": "x"}}, "oneOf": [{"$ref": "#x"}, {"type": "null"}]},
        "oneOf constraints are not supported.",
    ),
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = byte_grammars()
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
def test_rewritten_schemas_are_followed(name: str, grammars: Grammars) -> None:
    schema, right, wrong = CASES[name]
    grammar = grammar_of(grammars, schema)
    judge = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for value in right:
        assert judge.is_valid(value) and follows(grammar, json.dumps(value, ensure_ascii=False))
    for value in wrong:
        if name != "dependencies":  # which the judge's draft does not know
            assert not judge.is_valid(value)
        assert not follows(grammar, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rewritten_is_refused_with_its_path(name: str, grammars: Grammars) -> None:
    schema, problem = REFUSED[name]
    with pytest.raises(GrammarError) as caught:
        grammars.compile(Structure.of("json_schema", json.dumps(schema), "f"))
    assert str(caught.value).startswith(f"f cannot be used: {problem}")
    assert "coerce_one_of" not in str(caught.value)


def test_a_schema_of_known_keywords_stays_as_it_is() -> None:
    schema = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"const": 1}}}
    assert rewritten(schema) is schema


def test_cases_that_exclude_each_other_are_left_out() -> None:
    """A property with n values and n if/then gives n cases and the rest, where 2^n are possible."""
    count = 12
    countries = [f"c{i}" for i in range(count)]
    schema = {**COUNTRY, "allOf": [code_of(country, "^a$") for country in countries]}
    schema["properties"] = {"country": {"enum": [*countries, "other"]}, "code": {}}
    cases = rewritten(schema)["anyOf"]
    assert len(cases) == count + 1 and len(json.dumps(cases)) < 5000


def test_a_schema_inside_of_a_grammar_is_rewritten(grammars: Grammars) -> None:
    schema = {"type": "integer", "not": {"const": 7}}
    grammar = grammars.compile(
        Structure.of("lark", f'start: "<" v ">"\nv: %json {json.dumps(schema)}')
    )
    assert follows(grammar, "<8>") and not follows(grammar, "<7>")
    texts = 'start: "say %json {} now" v // %json {"uniqueItems": true}\nv: %json {"not": {}}'
    with pytest.raises(GrammarError, match="the schema in line 2: / allows no value at all"):
        grammars.compile(Structure.of("lark", texts))
    with pytest.raises(GrammarError, match="the schema in line 2: /uniqueItems cannot be followed"):
        grammars.compile(Structure.of("lark", 'start: v\nv: %json {"uniqueItems": true}'))


# ---- schemas at random

NAMES = ("a", "b")
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, -1, 0.5, "", "a", "ab", "é"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    ),
    max_leaves=4,
)
TYPES = st.sampled_from(["string", "number", "object", "array", "null", ["boolean", "integer"]])
PLAIN = st.one_of(
    st.booleans(),
    TYPES.map(lambda kind: {"type": kind}),
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.tuples(
        st.sampled_from(
            ["minimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxProperties"]
        ),
        st.integers(0, 2),
    ).map(lambda pair: {pair[0]: pair[1]}),
    st.lists(st.sampled_from(NAMES), unique=True).map(lambda names: {"required": names}),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas that hold others, two keywords each."""
    named = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1)
    needs = st.lists(st.sampled_from(NAMES), unique=True)
    keywords = st.one_of(
        inner.map(lambda schema: {"not": schema}),
        st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"oneOf": schemas}),
        st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"anyOf": schemas}),
        st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"allOf": schemas}),
        st.tuples(inner, inner, inner).map(
            lambda three: dict(zip(("if", "then", "else"), three, strict=True))
        ),
        named.map(lambda schemas: {"properties": schemas}),
        named.map(lambda schemas: {"dependentSchemas": schemas}),
        st.dictionaries(st.sampled_from(NAMES), needs).map(lambda all: {"dependentRequired": all}),
        st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"prefixItems": schemas}),
    )
    chains = st.lists(st.tuples(st.sampled_from(["", "a", "é", 0]), inner), min_size=2, max_size=3)
    plain = PLAIN.filter(lambda schema: isinstance(schema, dict))
    both = st.tuples(keywords, plain | keywords).map(lambda pair: {**pair[0], **pair[1]})
    return both | chains.map(chain)


def chain(cases: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return a schema in which one property says what another one must be."""
    return {
        "properties": {"a": {"enum": ["", "a", "é", 0]}, "b": {}},
        "required": ["a"],
        "allOf": [
            {"if": {"properties": {"a": {"const": value}}}, "then": {"properties": {"b": schema}}}
            for value, schema in cases
        ],
    }


@settings(deadline=None, max_examples=100, derandomize=True, database=None)
@given(larger(st.recursive(PLAIN, larger, max_leaves=4)), st.lists(VALUES, min_size=8, max_size=8))
def test_random_schemas_are_judged_as_the_reference_judges_them(
    grammars: Grammars, schema: Any, values: list[Any]
) -> None:
    """Objects of several properties come in one order alone, so that valid ones may be refused."""
    try:
        grammar = grammar_of(grammars, schema)
    except GrammarError:
        return
    judge = jsonschema.Draft202012Validator(schema)
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        taken = follows(grammar, text)
        assert taken == judge.is_valid(value) or (not taken and '"b"' in text), (schema, value)


@pytest.mark.parametrize(
    "part", slow_but(["[", r"\p{", "[^]\\", r"[\p{", "("], ["[", r"\p{", "[^]\\", r"[\p{"])
)
def test_a_pattern_is_read_once_however_many_parts_have_no_end(part: str) -> None:
    """Looking for each of these ends by itself would take minutes."""
    pattern = part * (400_000 // len(part))
    assert "".join(parts_of(pattern)) == pattern
    assert len(exact_pattern(pattern)) >= len(pattern)
