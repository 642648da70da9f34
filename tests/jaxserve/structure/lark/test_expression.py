"""Regular expressions of Lark grammars, held against the library that follows the grammars themselves."""

import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxserve.structure.lark import LarkError, check_part, expression_of
from jaxserve.structure.lark.common import COMMON
from jaxserve.structure.schemas.texts import as_the_library_takes_it
from jaxserve.structure.worker import JSON_OPTIONS

MAX_BYTES = 64 * 1024
BYTES = LLTokenizer("byte")
# Of Codex, which gives it to models that take its patches as a custom tool.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
QUERY = r"""
// ---------- Punctuation ----------
SP: " "
COMMA: ","

start: "SELECT" SP columns SP "FROM" SP NAME (SP "LIMIT" SP NUMBER)? ";"
columns: "*" | NAME (COMMA SP NAME)*   # a list
NAME: /[a-z_][a-z0-9_]*/i
NUMBER: /[0-9]+/
"""
SUM = r"""
start: sum
?sum: sum ("+" | "-") product | product
?product: product "*" NUMBER
        | NUMBER
%import common (NUMBER, WS_INLINE)
%ignore WS_INLINE
"""
LEFT_AND_RIGHT = r"""
start: unit
unit: unit "," unit | "!" unit | unit "?" | "a".."c"
"""
WORDS = r"""
start: (NAME | NUMBER | OTHER)+
NAME: /^[\w.]+$/
NUMBER: /\d/ | /^\d$/ "x"
OTHER: /[^\w\s]/ | /\W\S\D/
"""
COUNTS = r'start: "a"~2 "b"~1..2 "c"{2,3} ["d"] "e"* "\x41\u00e9\n\t\"\\" ("f" | "g"i){1,}'
PATCHED = '*** Begin Patch\n*** Update File: a.py\n@@ def f():\n-a "b"\n+c\\d\n*** End Patch'
CASES = (
    (
        PATCH,
        (
            PATCHED,
            PATCHED + "\n",
            "*** Begin Patch\n*** Add File: a\n+\n+*** End Patch\n*** Delete File: b\n*** End Patch",
        ),
        ("*** Begin Patch\n*** End Patch", PATCHED + "\n\n", PATCHED.replace("\n-a", "\na"), ""),
    ),
    (
        QUERY,
        ("SELECT * FROM t;", "SELECT a, B FROM t_1 LIMIT 10;"),
        ("select * FROM t;", "SELECT a,b FROM t;", "SELECT * FROM t LIMIT;", "SELECT * FROM 1;"),
    ),
    (SUM, ("1", "1+2*3 - 4", "1.5e3 +   2"), ("1+", "*1", "1 2 +", "(1)", "")),
    ('start: item\nitem: item | "a"', ("a",), ("", "aa")),
    (
        'start: ("a"{00000000000002,3} | "\\x00".."\\x0f" | "\\x10".."\\x1f")',
        ("aa",),
        ("", "a", '"', "\\"),
    ),
    (WORDS, ("\u00e9", "a.b\u0665", "\u0665x", "!", "\u2028ab"), ("", " ", "a b", "\u2028")),
    (LEFT_AND_RIGHT, ("a", "!!a??,b,!c", "!a?"), ("", "d", "a,", "a!", ",a", "?a")),
    (
        COUNTS,
        ('aabccAé\n\t"\\f', 'aabbcccdeeeAé\n\t"\\gGff'),
        ('abccAé\n\t"\\f', 'aabccccAé\n\t"\\f', 'aabccAé\n\t"\\', 'aabccAé\n\t"\\F'),
    ),
)


def follows(grammar: str, text: str) -> bool:
    """Return whether the library takes a text as a whole."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    given = list(text.encode())
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()


def in_json(expression: str) -> str:
    """Return the library's grammar of JSON texts that an expression matches."""
    schema = json.dumps({"type": "string", "pattern": f"^(?:{expression})$"})
    taken = as_the_library_takes_it("json_schema", schema, JSON_OPTIONS)
    return LLMatcher.grammar_from_json_schema(taken)


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_an_expression_is_equal_to_its_grammar_inside_of_json(
    grammar: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    lark = LLMatcher.grammar_from_lark(grammar)
    found = in_json(expression_of(grammar, MAX_BYTES))
    for text in good:
        assert follows(lark, text) and follows(found, json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        assert not follows(lark, text), text
        assert not follows(found, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize("name", COMMON)
def test_imported_terminals_are_those_of_the_library(name: str) -> None:
    texts = (
        *(
            "0",
            "7",
            "a",
            "F",
            "g",
            "Z",
            "_",
            "_a1",
            "12",
            "+3",
            "-3",
            "1.",
            ".5",
            "1.5",
            "1e5",
            "1.5e-3",
        ),
        *(
            "e5",
            "E+5",
            "-1.5",
            '"a"',
            '"a\\"b"',
            '"',
            "ab",
            "aB",
            " ",
            " \t",
            " \n\f\r",
            "\r",
            "\n",
        ),
        *("\r\n\n", "# a", "// a", "/* a * b */", "/* a", "-- a", "é", ""),
    )
    grammar = f"start: X\n%import common.{name} -> X"
    lark = LLMatcher.grammar_from_lark(grammar)
    found = in_json(expression_of(grammar, MAX_BYTES))
    for text in texts:
        assert follows(found, json.dumps(text, ensure_ascii=False)) == follows(lark, text), text


@pytest.mark.parametrize(
    ("grammar", "line", "problem"),
    [
        ('start: "(" start ")" | "a"', 1, "'start' is used inside of itself"),
        ('start: a\na: b\nb: "x" a "y"', 3, "'a' is used inside of itself"),
        ('start: start "a"', 1, "never ends"),
        ("start: a", 1, "'a' is not defined"),
        ('begin: "a"', 1, "'start' is not defined"),
        ("start: A\nA: b\nb: /x/", 2, "the rule 'b' is used in a terminal"),
        ('start: "a"\nstart: "b"', 2, "defined a second time"),
        ('start: "a"\n%import common.FOO', 2, "common has no 'FOO'"),
        ('%import other.INT\nstart: "a"', 1, "only common can be imported"),
        ('start: "a"\n%declare B', 2, "%declare is not supported"),
        ("start[lazy]: /a+/", 1, "attributes"),
        ('start.2: "a"', 1, "priorities"),
        ("start: <think>", 1, "'<think>' is not supported"),
        ("start: @other", 1, "'@other' is not supported"),
        ('start: %json {"type": "string"}', 1, "'%json'"),
        ("start: A\nA: /a/ & /b/", 2, "'&'"),
        ('start: "a', 1, "is not supported"),
        ('start: ("a"', 1, "the end of the grammar"),
        ('start: "a")', 1, "')'"),
        ("start: /a/x", 1, "flag 'x'"),
        ("start: /[a-z&&[^b]]/", 1, "'&&' in a class"),
        ("start: /a)|(b/", 1, "'/a)|(b/' has a ) without a ("),
        ("start: /[[:alpha:]]/", 1, "'[' in a class"),
        ('start: "ab".."c"', 1, "no range"),
        ('start: "c".."a"', 1, "no range"),
        ('start: "a"i.."c"', 1, "a range has none"),
        ("start: /[\\W]/", 1, "has \\W in a class"),
        ("start: " + "?" * 60_000, 1, "'?' stands where"),
        ('start: "a"{3,2}', 1, "repeated 3 to 2 times"),
        ('start: "a"~0', 1, "repeated 0 to 0 times"),
        ('start: "\\ud800"', 1, "half a surrogate pair"),
        ("start: " + "(" * 40 + '"a"' + ")" * 40, 1, "more than 30 groups"),
    ],
)
def test_what_is_no_regular_grammar_is_refused_by_its_line(
    grammar: str, line: int, problem: str
) -> None:
    with pytest.raises(LarkError, match=f"^line {line}: ") as refused:
        expression_of(grammar, MAX_BYTES)
    assert problem in str(refused.value)


def test_expressions_have_a_bound() -> None:
    doubled = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(20))
    with pytest.raises(LarkError, match="more than 1000 bytes as a regular expression"):
        expression_of(f"start: r0\n{doubled}\nr20: /a/", 1000)
    ignored = f"start:\n{doubled.upper()}\nR20: /a/\n%ignore R15\n" + "%ignore R16\n" * 20
    with pytest.raises(LarkError, match="more than 1000 bytes"):
        expression_of(ignored, 1000)


@pytest.mark.parametrize(("rules", "groups"), [(200, 0), (100, 1), (30, 9), (15, 28)])
def test_depth_has_a_bound(rules: int, groups: int) -> None:
    """Also on a stack of which a server has used a part."""
    inner, outer = "(" * groups, ")" * groups
    chained = "\n".join(f'r{i}: {inner}r{i + 1} "x"{outer} "y"' for i in range(rules))
    grammar = f"start: r0\n{chained}\nr{rules}: /a/"

    def ask(frames: int) -> str:
        return ask(frames - 1) if frames else expression_of(grammar, MAX_BYTES)

    with pytest.raises(LarkError, match="150 parts deep"):
        ask(300)


def test_letters_of_texts_stand_for_themselves() -> None:
    for text in ("\\\u0001", "\u007f\\", "\n\\x{1}", "*\u00e9\u2028"):
        found = expression_of(f"start: {json.dumps(text)}", MAX_BYTES)
        assert re.fullmatch(
            re.sub(r"\\x\{(\w+)\}", lambda code: re.escape(chr(int(code[1], 16))), found), text
        )


def test_a_class_without_an_end_is_read_once() -> None:
    """Looking for each of these ends by itself would take minutes."""
    for expression in ("[" * 1_000_000, "[" + "\\" * 1_000_001, "(" * 1_000_000):
        with pytest.raises(ValueError, match=r"no end|without"):
            check_part(expression)


@pytest.mark.parametrize("expression", [r"[a\]b]", "[^]a]", r"a[\[b]+", r"\[[a-z]", "[a-]", "[]]"])
def test_plain_classes_pass(expression: str) -> None:
    check_part(expression)


@pytest.mark.parametrize("expression", ["a)|(b", "(a", "a)", "a\\", "[a", "[a\\]", "(?:a))("])
def test_what_would_change_the_expression_around_it_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"without|ends with|has no end"):
        check_part(expression)


def test_what_is_ignored_may_also_stand_before_the_first_terminal() -> None:
    """As in the Lark toolkit; llguidance ignores only what stands between two."""
    found = in_json(expression_of(SUM, MAX_BYTES))
    assert follows(found, '"  1+2"') and not follows(found, '"1+2 "')
