"""Patterns of ECMA-262, written as the grammar library needs them to follow what they mean."""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

# White space and line terminators of ECMA-262 (12.2, 12.3), where the regex crate has Unicode's.
SPACES: Final = (
    r"\t\n\x{b}\x{c}\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
    r"\x{feff}"
)
ESCAPE: Final = (
    r"\\(?:[pP](?:\{[^}]{0,64}\}|.)|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
    r"|[xuU]\{[0-9a-fA-F]+\}|c[a-zA-Z]|.)"
)
# A class that has no end goes on to that of the pattern: it is looked for once.
TOKEN: Final = re.compile(
    rf"(?P<escape>{ESCAPE})"
    rf"|\[(?P<negated>\^?)(?P<inside>\]?(?:{ESCAPE}|[^\]\\])*+)(?P<end>\]|\\?\Z)"
    r"|.",
    re.DOTALL,
)
ATOM: Final = re.compile(rf"{ESCAPE}|.", re.DOTALL)
# Sets of ECMA-262 as they stand in a class; \d and \w are ASCII's.
SETS: Final = {"s": SPACES, "d": "0-9", "w": "0-9A-Za-z_"}
NAMED_CONTROLS: Final = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
# Characters that JSON escapes, as the library does not in some classes.
QUOTES: Final = tuple(map(ord, '"\\'))


def exact_pattern(pattern: str) -> str:
    """Return a pattern that the grammar library follows as it is meant.

    A class of ECMA-262 has no operators: &, ~ and [ stand for themselves in it. llguidance 1.9.1
    lets a quotation mark and a backslash, which JSON escapes, through a class that has all control
    characters but not these two: "[^\\"]" matches them, and so do classes that together are such a
    one. A class that has NUL and not both of these loses NUL.
    """
    return TOKEN.sub(_exact, pattern)


def parts_of(pattern: str) -> Iterator[str]:
    """Yield the parts of a pattern: escapes, classes, and other characters one by one."""
    return (token[0] for token in TOKEN.finditer(pattern))


def has_bare_alternatives(parts: Iterable[str]) -> bool:
    """Return whether | stands outside of groups, given the parts of a pattern."""
    depth = 0
    for part in parts:
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth == 0:
            return True
    return False


def literal_characters(pattern: str) -> Iterator[str]:
    """Yield the characters that a pattern names one by one, also as a class of one of them."""
    for token in TOKEN.finditer(pattern):
        if token["inside"] is None:
            code = _code(token[0])
        else:
            items = list(_items(token["inside"]))
            alone = items[0].codes if len(items) == 1 and not token["negated"] else None
            code = alone[0] if alone and alone[0] == alone[1] else None
        if code is not None:
            yield chr(code)


def _exact(token: re.Match[str]) -> str:
    if token["escape"]:
        letter = token["escape"][1]
        if letter in "pP":
            return _without_nul(f"[{token['escape']}]")
        return f"[{_named_set(token['escape'])}]" if letter in "dDwWsS" else token["escape"]
    if token["inside"] is None or token["end"] != "]":
        return token[0]
    items = list(_items(token["inside"]))
    negated = token["negated"]
    written = f"[{negated}{''.join(item.written for item in items)}]"
    return _without_nul(written) if _may_take_quotes(items, bool(negated)) else written


def _without_nul(found: str) -> str:
    """Return a class without NUL, which no other text of JSON needs."""
    return rf"[{found}&&[^\x00]]"


@dataclass(frozen=True)
class Item:
    """One character, range or named set inside of a class."""

    written: str
    codes: tuple[int, int] | None = None  # first and last character; None for a named set
    letter: str = ""  # of a named set

    def has(self, code: int, unknown: bool) -> bool:
        """Return whether a character is in it, or `unknown` for a set of Unicode's."""
        if self.codes:
            return self.codes[0] <= code <= self.codes[1]
        match self.letter:
            case "d" | "w":
                return False  # asked of control characters and quotes alone
            case "D" | "W":
                return True
            case "p" | "P":
                return unknown
        is_space = chr(code) in "\t\n\v\f\r "
        return is_space == (self.letter == "s")


def _items(inside: str) -> Iterator[Item]:
    atoms = [match[0] for match in ATOM.finditer(inside)]
    place = 0
    while place < len(atoms):
        first = _code(atoms[place])
        is_range = place + 2 < len(atoms) and atoms[place + 1] == "-"
        last = _code(atoms[place + 2]) if is_range else None
        if first is None:
            yield Item(_named_set(atoms[place]), letter=atoms[place][1])
            place += 1
        elif last is not None:
            yield Item(f"{_spelled(first)}-{_spelled(last)}", (first, last))
            place += 3
        else:
            yield Item(_spelled(first), (first, first))
            place += 1


def _code(atom: str) -> int | None:
    """Return the character that an atom of a class stands for; None for a set of them."""
    if not atom.startswith("\\") or len(atom) == 1:
        return ord(atom)
    letter = atom[1]
    if letter in "dDwWsSpP":
        return None
    if letter in "xuU" and len(atom) > 2:
        code = int(atom[2:].strip("{}"), 16)
        if code > sys.maxunicode:
            raise ValueError(f"{atom:.40} is no character")
        return code
    if letter == "c" and len(atom) > 2:
        return ord(atom[2].upper()) - 64
    if letter == "0":
        return 0
    return NAMED_CONTROLS.get(letter, ord(letter))


def _named_set(atom: str) -> str:
    """Return a set as it stands inside of a class."""
    if atom[1] in "pP":
        return atom
    codes = SETS[atom[1].lower()]
    return codes if atom[1].islower() else f"[^{codes}]"


def _spelled(code: int) -> str:
    """Return a character as it stands in a class, where others than letters could be operators."""
    letter = chr(code)
    return letter if letter.isalnum() else f"\\x{{{code:x}}}"


def _may_take_quotes(items: list[Item], negated: bool) -> bool:
    """Return whether a class has NUL, perhaps, and not certainly both quotes."""

    def may_have(code: int) -> bool:
        if negated:
            return not any(item.has(code, unknown=False) for item in items)
        return any(item.has(code, unknown=True) for item in items)

    def surely_has(code: int) -> bool:
        if negated:
            return not any(item.has(code, unknown=True) for item in items)
        return any(item.has(code, unknown=False) for item in items)

    return may_have(0) and not all(map(surely_has, QUOTES))
