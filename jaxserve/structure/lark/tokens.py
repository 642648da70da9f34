"""Tokens of a grammar's text, in llguidance's dialect of Lark."""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from jaxserve.structure.lark.errors import LarkError

END: Final = "end"
# A kind per alternative; the longer ones come before those that they begin with. Texts have the
# escapes of JSON, and \x.
TOKEN: Final = re.compile(
    r"""
      (?P<skip>[ \t\r]+|(?:\#|//)[^\n]*)
    | (?P<newline>\n)
    | (?P<text>"(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|[^"\\\x00-\x1f\x7f])*"i?)
    | (?P<expression>/(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<name>[!?]{0,2}_?[a-z][a-z0-9_\-]*|_?[A-Z][A-Z0-9_\-]*)
    | (?P<number>[0-9]+)
    | (?P<keyword>%[a-z]+)
    | (?P<sign>->|\.\.|[:,.()\[\]{}|+*?~=&])
    """,
    re.VERBOSE,
)


class Token(NamedTuple):
    """Token of a grammar.

    `kind` is text, expression, name, number, keyword, newline, END, or the sign itself.
    """

    kind: str
    text: str
    line: int  # from 1


def tokens_of(grammar: str) -> Sequence[Token]:
    """Return the tokens of a grammar and one of the kind END, without spaces and comments.

    LarkError is raised for what is no token of a grammar without nesting.
    """
    found: list[Token] = []
    place = 0
    line = 1
    while place < len(grammar):
        match = TOKEN.match(grammar, place)
        if match is None:
            rest = grammar[place : place + 40].split("\n")[0]
            raise LarkError(line, f"{rest!r} is not supported here")
        place = match.end()
        kind = str(match.lastgroup)
        if kind != "skip":
            found.append(Token(match[0] if kind == "sign" else kind, match[0], line))
        line += kind == "newline"
    return [*found, Token(END, "the end of the grammar", line)]
