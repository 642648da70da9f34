"""Parser of grammars in llguidance's dialect of Lark, of what regular expressions can say."""

import json
import re
from collections.abc import Sequence
from typing import Final

from jaxserve.structure.lark.common import COMMON
from jaxserve.structure.lark.errors import LarkError
from jaxserve.structure.lark.nodes import (
    Choice,
    Definition,
    Grammar,
    Name,
    Node,
    Pattern,
    Repeated,
    Sequel,
)
from jaxserve.structure.lark.parts import check_part, with_unicode_classes, without_anchors
from jaxserve.structure.lark.tokens import END, Token, tokens_of

MAX_DEPTH: Final = 30  # of groups inside of each other, as the library has it
COUNTS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
FLAGS: Final = frozenset("ims")
HEXADECIMAL: Final = re.compile(r'\\(?:x([0-9a-fA-F]{2})|(u[0-9a-fA-F]{4}|["\\/bfnrt]))')


def parse(grammar: str) -> Grammar:
    """Return the parts of a grammar; LarkError names the line of what is not supported."""
    return Parser(tokens_of(grammar)).grammar()


class Parser:
    """Reads the tokens of one grammar."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        self._definitions: dict[str, Definition] = {}
        self._ignored: list[Choice] = []

    def grammar(self) -> Grammar:
        """Read all of it."""
        while self._skip_newlines().kind != END:
            self._item()
        return Grammar(self._definitions, self._ignored)

    # ---- tokens

    def _next(self) -> Token:
        return self._tokens[self._place]

    def _take(self, *kinds: str) -> Token:
        """Return the next token and go on; LarkError is raised if it is of another kind."""
        token = self._next()
        if token.kind not in kinds:
            raise LarkError(token.line, f"{_shown(token)} stands where {_names(kinds)} is expected")
        self._place += 1
        return token

    def _takes(self, kind: str) -> bool:
        """Return whether the next token is of a kind, and go on if it is."""
        found = self._next().kind == kind
        self._place += found
        return found

    def _skip_newlines(self) -> Token:
        while self._takes("newline"):
            pass
        return self._next()

    def _end_line(self) -> None:
        if self._next().kind != END:
            self._take("newline")

    # ---- items

    def _item(self) -> None:
        token = self._take("name", "keyword")
        if token.kind == "name":
            self._definition(token)
        elif token.text == "%ignore":
            self._ignored.append(self._choice())
        elif token.text == "%import":
            self._import(token)
        else:
            raise LarkError(token.line, f"{token.text} is not supported here")
        self._end_line()

    def _definition(self, token: Token) -> None:
        if self._next().kind != ":":
            problem = "attributes, priorities and parameters of rules are not supported here"
            follower = _shown(self._next())
            raise LarkError(token.line, f"{follower} follows {token.text!r:.80}: {problem}")
        self._take(":")
        self._define(token.text.lstrip("!?"), self._choice(), token.line)

    def _define(self, name: str, body: Choice, line: int) -> None:
        if name in self._definitions:
            raise LarkError(line, f"{name!r:.80} is defined a second time")
        self._definitions[name] = Definition(name, body, line)

    def _import(self, token: Token) -> None:
        """Read one of `%import common.INT`, `common.INT -> NUMBER` and `common (INT, WORD)`."""
        library = self._take("name").text
        if library != "common":
            raise LarkError(token.line, f"only common can be imported, not {library!r:.80}")
        if self._takes("."):
            imported = self._take("name").text
            self._bring(imported, self._take("name").text if self._takes("->") else imported, token)
            return
        self._take("(")
        while not self._takes(")"):
            imported = self._take("name").text
            self._bring(imported, imported, token)
            self._takes(",")

    def _bring(self, imported: str, name: str, token: Token) -> None:
        if imported not in COMMON:
            raise LarkError(token.line, f"common has no {imported!r:.80}")
        self._define(name, Choice([Pattern(COMMON[imported])]), token.line)

    # ---- bodies

    def _choice(self) -> Choice:
        """Read alternatives; one that begins a line goes on with them."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            problem = f"more than {MAX_DEPTH} groups inside of each other"
            raise LarkError(self._next().line, problem)
        options: list[Node] = [self._sequel()]
        while self._takes_bar():
            options.append(self._sequel())
        self._depth -= 1
        return Choice(options)

    def _takes_bar(self) -> bool:
        place = self._place
        self._skip_newlines()
        if self._takes("|"):
            return True
        self._place = place
        return False

    def _sequel(self) -> Node:
        parts: list[Node] = []
        while self._next().kind not in ("newline", "|", "->", ")", "]", END):
            parts.append(self._counted(self._atom()))
        if self._takes("->"):
            self._take("name")  # of a node in a syntax tree, which nobody reads here
        return parts[0] if len(parts) == 1 else Sequel(parts)

    def _atom(self) -> Node:
        token = self._take("text", "expression", "name", "(", "[")
        match token.kind:
            case "text":
                return self._text(token)
            case "expression":
                return _expression(token)
            case "name":
                return Name(token.text, token.line)
            case "(":
                group = self._choice()
                self._take(")")
                return group
        part = self._choice()
        self._take("]")
        return Repeated(part, 0, 1)

    def _text(self, token: Token) -> Node:
        """Return a text, or the range that it begins."""
        if not self._takes(".."):
            text = "".join(map(_escaped, _unquoted(token)))
            return Pattern(f"(?i:{text})" if token.text.endswith("i") else text)
        last = self._take("text")
        if token.text.endswith("i") or last.text.endswith("i"):
            raise LarkError(token.line, f"{token.text}..{last.text} has a flag; a range has none")
        bounds = [_unquoted(each) for each in (token, last)]
        if any(len(bound) != 1 for bound in bounds) or bounds[0] > bounds[1]:
            raise LarkError(token.line, f"{token.text}..{last.text} is no range of characters")
        first, final = (f"\\x{{{ord(bound):x}}}" for bound in bounds)
        return Pattern(f"[{first}-{final}]")

    def _counted(self, part: Node) -> Node:
        """Return a part with the count behind it, if there is one."""
        token = self._next()
        if token.kind in COUNTS:
            self._take(token.kind)
            return Repeated(part, *COUNTS[token.kind])
        if self._takes("~"):
            least = self._number()
            return _repeated(part, least, self._number() if self._takes("..") else least, token)
        if not self._takes("{"):
            return part
        least = 0 if self._next().kind == "," else self._number()
        most: int | None = least
        if self._takes(","):
            most = None if self._next().kind == "}" else self._number()
        self._take("}")
        return _repeated(part, least, most, token)

    def _number(self) -> int:
        return int(self._take("number").text.lstrip("0")[:10] or "0")


def _repeated(part: Node, least: int, most: int | None, token: Token) -> Repeated:
    if most is not None and most < max(least, 1):
        raise LarkError(token.line, f"a part is repeated {least} to {most} times")
    return Repeated(part, least, most)


def _expression(token: Token) -> Pattern:
    written, _, flags = token.text[1:].rpartition("/")
    if unknown := set(flags) - FLAGS:
        raise LarkError(token.line, f"flag {min(unknown)!r} of an expression is not supported here")
    try:
        check_part(written)
        written = with_unicode_classes(written)
    except ValueError as error:
        raise LarkError(token.line, f"{token.text!r:.80} {error}") from None
    return Pattern(f"(?{flags}:{without_anchors(written)})")


def _unquoted(token: Token) -> str:
    """Return the text that a token stands for."""
    quoted = token.text.removesuffix("i")
    text = json.loads(HEXADECIMAL.sub(_of_json, quoted))
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise LarkError(token.line, f"{token.text:.80} has half a surrogate pair")
    return text


def _escaped(letter: str) -> str:
    """Return the expression of one character."""
    return re.escape(letter) if letter.isprintable() else f"\\x{{{ord(letter):x}}}"


def _of_json(escape: re.Match[str]) -> str:
    return rf"\u00{escape[1]}" if escape[1] else escape[0]


def _shown(token: Token) -> str:
    return "the end of the line" if token.kind == "newline" else f"{token.text!r:.80}"


def _names(kinds: Sequence[str]) -> str:
    return " or ".join("the end of the line" if kind == "newline" else kind for kind in kinds)
