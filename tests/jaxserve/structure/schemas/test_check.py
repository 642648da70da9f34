"""Schemas whose numbers or references the library would not follow are refused, with their place.

Origin: networknt/json-schema-validator#132, bounds that doubles round. llguidance 1.9.1 lets
9007199254740992 through a bound of 9007199254740993, and makes a constant its neighbour. JSON Schema
2020-12 (core, 4.2.1 and 6.3) compares numbers as they are written.
"""

import contextlib
import json
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import GrammarError
from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars
from jaxserve.structure.schemas.check import grammar_problem, schema_problem
from tests.byte_tokenizer import ByteTokenizer
from tests.followed_texts import byte_grammars, follows, grammar_of, may_end

BIG = 2**53 + 1
AS_DOUBLE = (
    "numbers of a schema are held as floating-point numbers of 64 bits, and the nearest one is"
)
FAR = "such a far bound cannot be followed"
REFUSED = {
    '{"type": "integer", "minimum": 9007199254740993}': f"/minimum is {BIG}; {AS_DOUBLE} {2**53}",
    '{"maximum": 0.30000000000000000001}': f"/maximum is 0.30000000000000000001; {AS_DOUBLE} 0.3",
    '{"minimum": 123456789012345678}': "/minimum is 123456789012345678; numbers of a schema",
    '{"type": "integer", "minimum": 1152921504606847000, "maximum": 2e18}': "/minimum is 11529",
    '{"type": "integer", "exclusiveMinimum": 9007199254740992}': "must be below 2^53",
    '{"allOf": [{"type": "integer"}, {"exclusiveMinimum": 9007199254740992}]}': "/allOf/1/exclusive",
    '{"properties": {"a/b": {"items": [{"maximum": 9007199254740993}]}}}': "/properties/a~1b/items/0/m",
    '{"const": {"x": [1, 9007199254740993]}}': "/const/x/1 is 9007199254740993; numbers of",
    '{"anyOf": [{}, {"enum": ["a", 18446744073709551617]}]}': "/anyOf/1/enum/1 is 184467440737095",
    '{"multipleOf": 9007199254740993}': "/multipleOf is",
    '{"allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]}': "/ has several multipleOf at once",
    '{"minimum": 1e400}': f"/minimum is 1E+400; {FAR}",
    '{"minimum": 1e-300}': "/minimum is 1E-300; such small bounds cannot be followed",
    '{"minimum": 1e99999999999999999999}': FAR,
    '{"const": 1e400}': "/const is 1E+400; such large or small numbers cannot be followed",
    '{"type": "integer", "minimum": 1e18}': f"/minimum is 1E+18; {FAR}",
    '{"type": "number", "maximum": 1e19}': f"/maximum is 1E+19; {FAR}",
    '{"type": "integer", "minimum": -9223372036854775808}': f"/minimum is -9223372036854775808; {FAR}",
    '{"type": "string", "minLength": 9007199254740993}': "it must be at most 4294967295",
    '{"$ref": "#"}': "/$ref leads back to itself, so that no text follows it",
    '{"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}': "leads back to itself",
    '{"$ref": "#x", "$defs": {"a": {"$anchor": "x", "minimum": 9007199254740993}}}': "/$defs/a/minimum",
    '{"$id": "http://x/s", "$ref": "http://x/s#/c/a", "c": {"a": {"minimum": 9007199254740993}}}': "/c/a",
}
FOLLOWED = [
    '{"type": "integer", "minimum": 9007199254740992}',
    '{"type": "integer", "minimum": 0, "maximum": 18446744073709551615}',  # of unsigned 64 bits
    '{"type": "integer", "exclusiveMaximum": 9223372036854775808}',  # of signed ones
    '{"type": "integer", "minimum": 0, "maximum": 9223372036854774784}',  # the last double below
    '{"type": "integer", "minimum": 1000000000000000000, "maximum": 2000000000000000000}',
    '{"type": "number", "minimum": 0.1, "maximum": 1e18, "multipleOf": 0.01}',
    '{"type": "string", "minimum": 9007199254740993, "maxLength": 4294967295}',
    '{"type": "array", "maxItems": 18446744073709551615}',
    '{"const": 1.10}',
    '{"enum": [1e2, -0.0, 1e-40]}',
    '{"properties": {"minimum": {"type": "integer"}, "enum": {"type": "null"}}}',
    '{"type": "integer", "default": 9007199254740993, "examples": [9007199254740993]}',
    '{"type": "integer", "$defs": {"unused": {"minimum": 9007199254740993}}}',
    '{"type": "integer", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
    '{"type": "object", "properties": {"next": {"$ref": "#"}}}',
    '{"anyOf": [{"$ref": "#"}, {"type": "null"}]}',
    '{"allOf": [{"multipleOf": 0.1}, {"multipleOf": 25}]}',
]


@pytest.fixture(scope="module")
def compiler():
    grammars = byte_grammars()
    yield grammars
    grammars.close()


@pytest.mark.parametrize("text", REFUSED)
def test_what_would_not_be_followed_is_refused(text: str, compiler: Grammars) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(Structure.of("json_schema", text, "response_format"))
    problem = str(caught.value)
    assert problem.startswith("response_format cannot be used: /") and REFUSED[text] in problem
    assert len(problem) < 300


@pytest.mark.parametrize("text", FOLLOWED)
def test_what_can_be_followed_is_not(text: str, compiler: Grammars) -> None:
    compiler.compile(Structure.of("json_schema", text))


def test_what_is_no_json_is_left_to_the_library() -> None:
    assert schema_problem('{"not json') is None


def test_schemas_inside_of_a_grammar(compiler: Grammars) -> None:
    """Calls of tools are such grammars."""
    lark = (
        'start: a "," b // no %json here\n'
        'a: %json {"type": "string", "const": "%json "}\n'
        'b: %json {"type": "integer", "minimum": LEAST}'
    )
    compiler.compile(Structure.of("lark", lark.replace("LEAST", "5")))
    problem = f"the schema in line 3: /minimum is {BIG}; numbers of a schema"
    with pytest.raises(GrammarError, match=problem):
        compiler.compile(Structure.of("lark", lark.replace("LEAST", str(BIG))))
    assert grammar_problem('start: "%json"') is None


@pytest.mark.parametrize(
    "text",
    [
        '{"const":{"' + "k" * 20_000 + '\U0001f600":[' + "0," * 20_000 + "0]}}",
        '{"$ref":"a","$defs":{' + ",".join(f'"a{i}":{{"$ref":"a"}}' for i in range(2800)) + "}}",
        '{"anyOf":[' + "0," * 15_000 + '0],"oneOf":[' + '{"$ref":"#/anyOf"},' * 300 + "{}]}",
        pytest.param(
            '{"$ref":"#/$defs/a0","$defs":{'
            + ",".join(f'"a{i}":{{"$ref":"#/$defs/a{i + 1}"}}' for i in range(1400))
            + "}}",
            marks=pytest.mark.slow,
        ),
        '{"allOf":[{"$ref":"#/allOf/' + "1" * 5000 + '"}]}',
        '{"type":"number","multipleOf":12345678.9}',  # the library does not come to an end
        '{"a":' * 5000 + "1" + "}" * 5000,
    ],
)
def test_a_schema_that_takes_much_work_ends_in_the_worker(text: str, compiler: Grammars) -> None:
    """Whatever it costs there, the process of the server only waits, and the next one is checked."""
    with contextlib.suppress(GrammarError):
        compiler._check(Structure.of("json_schema", text))
    compiler.compile(Structure.of("json_schema", '{"type": "integer"}'))


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    st.integers(-(2**54), 2**54)
    | st.integers(-99, 99)
    | st.integers(-(2**12), 2**12).map(lambda n: n * 2**50)  # as doubles have them
    | st.integers(-99999, 99999).map(lambda n: n * 10**13),
    st.sampled_from(["integer", "number"]),
)
def test_bounds_that_are_taken_hold(compiler: Grammars, key: str, bound: int, kind: str) -> None:
    """The neighbours of a bound are on the side that arithmetic says, or the bound is refused."""
    schema = {"type": kind, key: bound}
    if schema_problem(json.dumps(schema)):
        return
    for value in (bound - 1, bound, bound + 1):
        right = {
            "minimum": value >= bound,
            "maximum": value <= bound,
            "exclusiveMinimum": value > bound,
            "exclusiveMaximum": value < bound,
        }[key]
        taken = follows(grammar_of(compiler, schema), str(value))
        is_capped = kind == "integer" and value > 2**63 - 1  # narrower than asked, never wider
        assert taken == right or (is_capped and not taken), (schema, value)


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(st.decimals(-(10**6), 10**6, allow_nan=False, places=6) | st.integers(-(2**70), 2**70))
def test_constants_that_are_taken_come_out(compiler: Grammars, value: Decimal | int) -> None:
    text = f'{{"const": {value}}}'
    if schema_problem(text):
        assert Decimal(repr(float(value))) != value
        return
    grammar = compiler.compile(Structure.of("json_schema", text))
    matcher = grammar.matcher()
    said = b""
    while not may_end(matcher):
        mask = int.from_bytes(matcher.masks()[0], "little")
        token = mask.bit_length() - 1
        said += ByteTokenizer().token_bytes(token)[0]
        assert matcher.accept(token)
    assert Decimal(said.decode()) == value
