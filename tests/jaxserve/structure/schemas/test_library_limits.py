"""What the grammar library would follow in another way than it is meant: refused, or narrowed."""

import json
import re
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import GrammarError
from jaxserve.structure.grammars import Grammars
from jaxserve.structure.schemas.formats import KNOWN
from jaxserve.structure.schemas.other_texts import other_texts
from tests.followed_texts import byte_grammars, follows, grammar_of


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = byte_grammars()
    yield made
    made.close()


# ---- names and control characters

FOO = {"properties": {"foo": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "text", "is_followed"),
    [
        (FOO, r'{"\u0066oo":"x"}', False),  # foo, which is an integer
        (FOO, r'{"bar":"\n"}', True),
        ({"patternProperties": {"^f": {"type": "integer"}}}, r'{"\u0066":"x"}', False),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, r'{"\u0061":1}', False),
        ({"type": "object", "not": {"const": {"a": 1}}}, r'{"\u0061":1}', False),
        ({"unevaluatedProperties": FOO}, r'{"x":{"\u0066oo":"s"}}', False),
        ({**FOO, "x-guidance": {"json_allowed_escapes": "u"}}, r'{"\u0066oo":"x"}', False),
        ({**FOO, "additionalProperties": False}, r'{"foo":1}', True),
        ({"type": "string"}, r'"\u001b[0m"', True),
        ({"const": "\x1b"}, r'"\u001b"', True),
        ({"pattern": r"^a[^\x00-\x1f]b$"}, '"ab"', False),
        ({"pattern": r"^a\\vb$"}, r'"a\\vb"', True),
    ],
)
def test_no_name_comes_in_another_spelling(
    grammars: Grammars, schema: Any, text: str, is_followed: bool
) -> None:
    assert follows(grammar_of(grammars, schema), text) == is_followed


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        *(
            ({"properties": {"a": {"pattern": pattern}}}, "/properties/a/pattern")
            for pattern in ("a\x01b", r"a\x01b", r"a\x{b}", r"a\u001F", r"a\vb", r"[\x0b]", r"\a")
        ),
        ({"patternProperties": {"a/\x01": {}}}, "/patternProperties/a~1\x01"),
        ({"properties": {"a": {"enum": ["b", ["\x7f"]]}}}, "/properties/a/enum"),
        ({"required": ["b"], "const": {"b": "\x00"}}, "/const"),
    ],
)
def test_control_characters_that_would_be_left_out(
    grammars: Grammars, schema: Any, place: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar_of(grammars, schema)
    assert f"{place} has a control character, which cannot be followed" in str(caught.value)


# ---- numbers


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, True),
        ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5}, True),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, True),
        ({"exclusiveMinimum": 1, "anyOf": [{"maximum": 7}, {"maximum": 1.5}]}, True),
        ({"allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}]}, True),
        ({"exclusiveMinimum": 0, "anyOf": [{"anyOf": [{"maximum": 0.5}, {"const": 7}]}]}, True),
        ({"allOf": [{"multipleOf": 65536}, {"anyOf": [{"multipleOf": 65537}]}]}, True),
        ({"exclusiveMinimum": 0, "maximum": 1}, False),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, False),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 0}, False),
        ({"exclusiveMinimum": 0, "allOf": [{"anyOf": [{"minLength": 1}, {}]}] * 16}, False),
        ({"exclusiveMinimum": 0.1, "maximum": 0.5}, False),
        ({"minimum": 0, "maximum": 0.5}, False),
        ({"exclusiveMinimum": 0, "minimum": 0.2, "maximum": 0.5}, False),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, False),
    ],
)
def test_ends_that_the_library_would_allow(
    grammars: Grammars, schema: Any, is_refused: bool
) -> None:
    schema = {"type": "number", **schema}
    if is_refused:
        problem = "a range shorter than 1 cannot exclude an integer|multiple is too large"
        with pytest.raises(GrammarError, match=problem):
            grammar_of(grammars, schema)
        of_property = [{"properties": {"a": {key: value}}} for key, value in schema.items()]
        with pytest.raises(GrammarError, match=problem):
            grammar_of(grammars, {"allOf": of_property})
        return
    grammar = grammar_of(grammars, schema)
    for key, end in schema.items():
        if key.startswith("exclusive"):
            assert not follows(grammar, str(end))


@pytest.mark.parametrize(
    "schema",
    [
        {
            "properties": {"a": {"type": "number", "exclusiveMinimum": 0}, "b": {}},
            "if": {"properties": {"b": {"const": True}}},
            "then": {"properties": {"a": {"maximum": 0.99}}},
        },
        {
            "properties": {"a": {"type": "number", "maximum": 0.5}},
            "not": {"properties": {"a": {"maximum": 0}}},
        },
        {
            "items": {"type": "number", "exclusiveMinimum": 0},
            "anyOf": [{"items": {"maximum": 0.5}}, {"maxItems": 3}],
        },
        {
            "properties": {"a": {"properties": {"b": {"type": "number", "exclusiveMinimum": 0}}}},
            "anyOf": [{"properties": {"a": {"properties": {"b": {"maximum": 0.5}}}}}, {}],
        },
    ],
)
def test_ends_that_several_schemas_make(grammars: Grammars, schema: Any) -> None:
    with pytest.raises(GrammarError, match="a range shorter than 1 cannot exclude an integer"):
        grammar_of(grammars, schema)


# ---- patterns


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r'^[^"]*$', ["", "ab", "\\", "\n"], ['"', 'a"b']),
        (r"^[^\\]*$", ["", 'a"b'], ["\\", "a\\b"]),
        (r'^[^"\\\n]+$', ["ab"], ["", '"', "\\", "a\n"]),
        (r"^[\x00-!#-~]$", ["a", "!"], ['"']),
        (r"^\P{P}$", ["a"], ['"', "."]),
        (r"^[^a]$", ["b", '"', "\\"], ["a"]),
        (r"^[^a&&b]$", ["c"], ["a", "b", "&"]),
        (r"^[^~~]$", ["a"], ["~"]),
        (r"^[^+--]$", ["a"], ["+", ",", "-"]),
        (r"^[^[a]$", ["b"], ["[", "a"]),
        (r"^[()[\]{}-]+$", ["([{}])-"], ["a"]),
        (r"^[!-/:-@[-`{-~]$", ["!", "[", "~", '"'], ["a", "0"]),
        (r"^[]a]$", ["]", "a"], ["b"]),
        (r"^\p{Cc}$", ["\n"], ['"', "\\"]),
        (r"^[\x{0}-!]$", ["!"], ['"', "a"]),
        (r"^[\u4e00-\u9fa5]+$", ["\u4e00\u9fa5"], ["a"]),
        (r"^\x41\x2D\u0042[\x43]$", ["A-BC"], ["A", ""]),
        (r"^[^\W\d]$", ["a", "_"], ["1", '"', "-"]),
        (r"^[^\x00-\x1f\x7f\"']$", ["a"], ['"', "'"]),
        (r"^\S\s[\S][^\s]$", ["a bc"], ["\ufeff bc", "aabc", "a b\u2028", "a b "]),
        (r"^[\s\d]$", [" ", "7", "\ufeff"], ["a", "\x85"]),
    ],
)
def test_patterns_are_followed_as_ecma_262_means_them(
    grammars: Grammars, pattern: str, right: list[str], wrong: list[str]
) -> None:
    grammar = grammar_of(grammars, {"type": "string", "pattern": pattern})
    named = grammar_of(
        grammars,
        {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False},
    )
    for text in (*right, *wrong):
        spelled = json.dumps(text, ensure_ascii=False)
        assert follows(grammar, spelled) == (text in right), spelled
        assert follows(named, f"{{{spelled}:1}}") == (text in right), spelled


def test_items_before_additional_items(grammars: Grammars) -> None:
    """The library reads additionalItems without the items that a keyword of its own stands behind."""
    schema = {
        "additionalItems": {"type": "boolean"},
        "allOf": [{"items": [{}, {"type": "string"}]}],
        "items": [{"type": "integer"}],
    }
    grammar = grammar_of(grammars, schema)
    assert follows(grammar, "[1]") and not follows(grammar, '[1, "hello"]')


def test_formats_and_patterns_behind_references(grammars: Grammars) -> None:
    place = {"components": {"schemas": {"X": {"type": "string", "format": "date"}}}}
    grammar = grammar_of(grammars, {**place, "$ref": "#/components/schemas/X"})
    assert follows(grammar, '"2024-02-29"') and not follows(grammar, '"2023-02-29"')


# ---- formats


def test_february_29_is_a_date_of_leap_years(grammars: Grammars) -> None:
    day = grammar_of(grammars, {"type": "string", "format": "date"})
    moment = grammar_of(grammars, {"type": "string", "format": "date-time"})
    for year in (1600, 1900, 1996, 1999, 2000, 2004, 2016, 2022, 2024, 2026, 2100, 2104, 2400):
        try:
            is_one = bool(date(year, 2, 29))
        except ValueError:
            is_one = False
        assert follows(day, f'"{year}-02-29"') == is_one
        assert follows(moment, f'"{year}-02-29T00:00:00Z"') == is_one
        for other in ("01-31", "02-28", "12-29", "10-20", "11-29"):
            assert follows(day, f'"{year}-{other}"')


@pytest.mark.parametrize(
    ("name", "text", "is_followed"),
    [
        ("time", "23:59:59Z", True),
        ("time", "22:59:60Z", False),
        ("date-time", "2026-11-28T10:20:30.5+01:00", True),
        ("date-time", "2026-11-28T10:20:60Z", False),
        ("hostname", "a-b.example.org", True),
        ("hostname", "x--y.org", True),
        ("hostname", "xn--x.org", False),
        ("hostname", "abcd--.org", False),
        ("hostname", ".".join(["a" * 61] * 4), True),
        ("hostname", ".".join(["a" * 63] * 4), False),
    ],
)
def test_formats_are_narrowed(grammars: Grammars, name: str, text: str, is_followed: bool) -> None:
    grammar = grammar_of(grammars, {"type": "string", "format": name})
    assert follows(grammar, json.dumps(text)) == is_followed


def test_every_known_format_is_known_to_the_library(grammars: Grammars) -> None:
    for name in KNOWN:
        grammar_of(grammars, {"type": "string", "format": name})
    grammar_of(grammars, {"type": "integer", "format": "int32"})  # of numbers, it says nothing


# ---- texts that are excluded


@settings(deadline=None, max_examples=200, derandomize=True, database=None)
@given(
    st.lists(st.text("ab]^-\\é\n", max_size=4), min_size=1, max_size=4),
    st.lists(st.text("ab]^-\\é\n", max_size=5), min_size=5, max_size=5),
)
def test_all_texts_but_some(texts: list[str], others: list[str]) -> None:
    expression = re.sub(
        r"\\x\{([0-9a-f]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", other_texts(texts)
    )
    assert expression.startswith("^") and expression.endswith("$")
    for text in (*texts, *others, *(text[:-1] for text in texts), *(text + "a" for text in texts)):
        assert bool(re.fullmatch(expression[1:-1], text)) == (text not in texts)
