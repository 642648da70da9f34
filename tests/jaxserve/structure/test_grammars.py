"""Compiled grammars by themselves: what a matcher says is checked by walking texts that fit, and
others.
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sys import getsizeof

import numpy as np
import pytest

from jaxserve.errors import GrammarError, NotBuiltInError, RequestError
from jaxserve.structure import KINDS, Matcher, Structure, grammars
from jaxserve.structure.checked import CheckedGrammars
from jaxserve.structure.grammars import Bounds, Grammars
from jaxserve.structure.worker import definition
from jaxserve.tokenizer import load_tokenizer
from tests.byte_tokenizer import ByteTokenizer
from tests.slow_cases import slow_but

pytestmark = pytest.mark.system
BUNDLED = Path(__file__).parents[3] / "checkpoints" / "bundled" / "tiny-chat"
END = 257


@pytest.fixture
def compiler() -> Iterator[Grammars]:
    made = Grammars(ByteTokenizer(), (END,), ByteTokenizer.vocab_size)
    yield made
    made.close()


def tokens_of(mask: bytes) -> set[int]:
    return set(
        np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    )


def matcher_of(compiler: Grammars, kind: str, value: object) -> Matcher:
    return compiler.compile(Structure.of(kind, value)).matcher()


def accepts(matcher: Matcher, text: bytes) -> bool:
    """Return whether the text is complete: the masks allow each byte, and an end after the last."""
    for byte in text:
        if matcher.ended or byte not in tokens_of(matcher.masks()[0]):
            return False
        assert matcher.accept(byte)
    return matcher.ended or END in tokens_of(matcher.masks()[0])


@pytest.mark.parametrize(
    ("kind", "value", "right", "wrong"),
    [
        ("regex", "a+b?", ["a", "aab"], ["", "b", "abb"]),
        ("choice", ["no", 'a "b"\n', "é"], ["no", 'a "b"\n', "é"], ["n", "nono", "e"]),
        ("lark", 'start: "(" start ")" | "x"', ["x", "((x))"], ["(x", "(x))", ""]),
        (
            "json_object",
            True,
            ["{}", '{"a": [1, null]}', '{\n  "a": {}\n}'],
            ["[]", "1", '{"a"}', "{" + " " * 40 + "}"],
        ),
        (
            "json_schema",
            {
                "type": "object",
                "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", 2]}},
                "required": ["a"],
            },
            ['{"a": "x"}', '{"b": -3,"a": 2}', '{ "a": 2, "more": [true] }'],
            ["{}", '{"b": 1.5, "a": 2}', '{"a": 3}'],
        ),
        (
            "json_schema",
            '{"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}',
            ["[[],[]]"],
            ["[1]"],
        ),
    ],
)
def test_texts_that_fit_and_texts_that_do_not(
    compiler: Grammars, kind: str, value: object, right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert accepts(matcher_of(compiler, kind, value), text.encode()), text
    for text in wrong:
        assert not accepts(matcher_of(compiler, kind, value), text.encode()), text


def test_masks_behind_drafted_tokens_are_those_of_going_there(compiler: Grammars) -> None:
    ahead, behind = (matcher_of(compiler, "regex", "ab[cd]{1,2}e?") for _ in range(2))
    drafted = b"abcx"
    masks = ahead.masks(drafted)
    assert len(masks) == 4 and ahead.fits(drafted) == 3 and ahead.fits(drafted, free=True) == 0
    for mask, token in zip(masks, drafted, strict=True):
        assert behind.masks() == [mask]
        assert behind.accept(token) == (token != ord("x"))
    assert behind.failure and not ahead.failure
    assert ahead.masks() == masks[:1], "nothing has moved it"
    assert ahead.fits([*b"abcd", END]) == 5 and ahead.fits([*b"abcde", END]) >= 5
    assert len(ahead.masks(b"abcde")) == 5, "behind the end there is none"


def test_every_choice_has_its_own_state(compiler: Grammars) -> None:
    grammar = compiler.compile(Structure.of("regex", "ab|cd"))
    one = grammar.matcher()
    other = grammar.matcher()
    assert one.accept(ord("a")) and other.accept(ord("c"))
    assert (one.forced(), other.forced()) == ([ord("b")], [ord("d")])


@pytest.mark.parametrize(
    "name",
    slow_but(
        ("bundled", "deepseek_r1", "gpt2", "gpt_neox_20b", "open_llama"),
        ("bundled", "gpt2", "open_llama"),
    ),
)
def test_forced_tokens_spell_what_is_forced(name: str) -> None:
    """In the vocabulary's own pieces, whichever library it is of."""
    data = os.environ.get("JAXSERVE_TEST_DATA")
    if name != "bundled" and not data:
        pytest.skip("JAXSERVE_TEST_DATA is not set")
    folder = BUNDLED if name == "bundled" else Path(data or "") / "tokenizers" / name
    text = '{"name":"Zoë’s fox"}'
    tokenizer = load_tokenizer(folder)
    ends = tokenizer.eos_ids or (0,)
    compiler = Grammars(tokenizer, ends, tokenizer.vocab_size)
    matcher = matcher_of(compiler, "choice", [text + "!", text + "?"])
    said = b""
    tokens = matcher.forced()
    assert tokens and all(map(matcher.accept, tokens))
    while not matcher.ended:
        tokens.append(min(tokens_of(matcher.masks()[0])))
        assert matcher.accept(tokens[-1])
        tokens += (more := matcher.forced())
        assert all(map(matcher.accept, more))
    said = b"".join(tokenizer.token_bytes(token)[0] for token in tokens)
    assert said.decode() in (text + "!", text + "?")
    assert len(tokens) < len(text), "one token for each letter would be no spelling"
    compiler.close()


def test_a_model_without_an_end_token_ends_where_nothing_can_follow() -> None:
    compiler = Grammars(ByteTokenizer(), (), ByteTokenizer.vocab_size)
    matcher = matcher_of(compiler, "regex", "ab?c")
    assert [len(mask) for mask in matcher.masks()] == [36]
    assert accepts_all(matcher, b"abc") and matcher.ended
    compiler.close()


def accepts_all(matcher: Matcher, text: bytes) -> bool:
    return all(map(matcher.accept, text))


def test_grammars_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    one = getsizeof("a") + getsizeof("") + getsizeof(definition("regex", "a"))
    compiler = Grammars(ByteTokenizer(), (END,), 258, Bounds(cache_bytes=3 * one))
    checked = list[str]()
    once = compiler._check
    monkeypatch.setattr(compiler, "_check", lambda asked: checked.append(asked.text) or once(asked))
    for text in "abcacdab":
        compiler.compile(Structure.of("regex", text))
    # d took the place of b, which was used longest ago, and b that of c.
    assert "".join(checked) == "abcdb"
    compiler.compile(Structure.of("regex", "x" * 60_000))
    assert len(compiler._checked) == 1
    compiler.compile(Structure.of("regex", "a"))
    compiler.compile(Structure.of("regex", "b"))
    assert len(compiler._checked) == 2, "what was dropped counts no more"
    compiler.close()


def test_no_kept_grammar_is_read_to_keep_another() -> None:
    """A full cache holds 100,000 small grammars; whoever asks for one waits for no sum."""

    class Form(str):
        measured = 0

        def __sizeof__(self) -> int:
            type(self).measured += 1
            return 1000

    kept = CheckedGrammars(max_bytes=200_000)
    for number in range(1000):
        kept.add(Structure.of("regex", f"{number:04}"), Form())
    assert 150 < len(kept) < 200
    assert Form.measured < 2000, "once as it comes, and once as it goes"


def test_what_one_answer_took_of_the_lexer_is_not_missing_for_the_next(compiler: Grammars) -> None:
    """Six fields, each of which takes a fifth of the states that a lexer may have."""
    fields = [f"field{i}" for i in range(6)]
    lengths = {
        name: {"type": "string", "maxLength": 1400 + 100 * i} for i, name in enumerate(fields)
    }
    schema = {
        "type": "object",
        "properties": lengths,
        "required": fields,
        "additionalProperties": False,
    }
    for long in fields:
        text = json.dumps(
            {name: "x" * 1350 if name == long else "short" for name in fields},
            separators=(",", ":"),
        )
        matcher = matcher_of(compiler, "json_schema", schema)
        assert accepts(matcher, text.encode()), matcher.failure


def test_what_a_thread_has_no_stack_for_is_refused(compiler: Grammars) -> None:
    """The process that checks it has less."""

    def chain(length: int) -> Structure:
        links = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {}]} for i in range(length)}
        return Structure.of(
            "json_schema", {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "null"}}}
        )

    with pytest.raises(GrammarError, match="or nests too deep"):
        compiler.compile(chain(400))
    compiler.compile(chain(80))


def test_many_threads_ask_for_few_grammars(
    compiler: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is checked once, and followed by itself."""
    checked: list[str] = []
    once = compiler._check
    monkeypatch.setattr(compiler, "_check", lambda asked: checked.append(asked.text) or once(asked))
    with ThreadPoolExecutor(8) as threads:
        found = list(
            threads.map(
                lambda i: compiler.compile(Structure.of("regex", f"[ab]{{{i % 3}}}c")), range(48)
            )
        )
    assert len(checked) == 3 and len({id(grammar) for grammar in found}) == 48


def test_a_worker_that_dies_is_replaced(compiler: Grammars) -> None:
    compiler.compile(Structure.of("regex", "a"))
    process = compiler._worker._process
    assert process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    compiler.compile(Structure.of("regex", "b"))


def test_without_the_library_it_is_named(
    compiler: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    with pytest.raises(
        NotBuiltInError, match="needs the package llguidance, which is not installed here"
    ):
        compiler.compile(Structure.of("regex", "a"))


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        ("xml", "", f"xml is 'xml'; it must be one of {', '.join(KINDS)}"),
        ("json_schema", 5, "json_schema is 5; give a JSON schema"),
        ("json_schema", {"const": float("nan")}, "json_schema cannot be written as JSON"),
        ("json_object", 1, "json_object is 1; it must be true"),
        ("regex", "", "regex is ''; it must be a text that is not empty"),
        ("regex", "\ud800", "regex has half a surrogate pair"),
        ("choice", "ab", "choice is 'ab'; give a list of texts"),
        ("choice", [], "choice has 0 entries; give 1 to 1024"),
        ("choice", ["a", ""], r"choice[1] is ''; it must be a text that is not empty"),
    ],
)
def test_what_is_no_structure(kind: str, value: object, problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        Structure.of(kind, value)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"properties": {"a": {"uniqueItems": True}}},
            "/properties/a/uniqueItems cannot be followed",
        ),
        ({"contains": {}}, "/contains cannot be followed"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "/uniqueItems cannot be followed"),
        ({"not": {}}, "/ allows no value at all"),
        (
            {"type": "string", "format": "letters"},
            "/format is 'letters'; those that can be followed",
        ),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "Default retriever does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "Default retriever does not fetch"),
        ({"type": "string", "pattern": "("}, "cannot be used"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "cannot be used"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused(
    compiler: Grammars, schema: dict, words: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(Structure.of("json_schema", json.dumps(schema), "sampling.json_schema"))
    assert caught.value.field == "sampling.json_schema" and words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
