"""Patterns of ECMA-262, written as the grammar library needs them to follow what they mean."""

import re
from typing import Final

# White space and line terminators of ECMA-262 (12.2, 12.3), where the regex crate has Unicode's.
SPACES: Final = (
    r"\t\n\x{b}\x{c}\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
    r"\x{feff}"
)
CLASS: Final = r"\[\^?\]?(?:\\.|[^\[\]\\])*\]"
TOKEN: Final = re.compile(
    rf"(?P<cls>{CLASS})|\\(?P<space>[sS])|\\P(?P<property>\w|\{{[^}}]*\}})|\\.|.", re.S
)
# Characters of which a class must leave one out to be told from all of them, as by `without_nul`.
CONTROLS: Final = "".join(map(chr, range(32))).replace("\n", "")


def exact_pattern(pattern: str) -> str:
    """Return a pattern that the grammar library follows as it is meant.

    llguidance 1.9.1 lets a quotation mark and a backslash, which JSON escapes, through a class that
    has all control characters but not these two: "[^\\"]" matches them. Such a class loses NUL.
    """
    return TOKEN.sub(_exact, pattern)


def _exact(token: re.Match[str]) -> str:
    if found := token["cls"]:
        spelled = re.sub(r"\\(.)", lambda m: _space_in_class(m[1]) or m[0], found, flags=re.S)
        return without_nul(spelled) if _takes_quotes(found) else spelled
    if token["property"]:
        return without_nul(rf"[{token[0]}]")
    match token["space"]:
        case "s":
            return f"[{SPACES}]"
        case "S":
            return f"[^{SPACES}]"
    return token[0]


def _space_in_class(letter: str) -> str:
    return {"s": SPACES, "S": f"[^{SPACES}]"}.get(letter, "")


def _takes_quotes(found: str) -> bool:
    """Return whether the library would let quotation marks or backslashes through a class."""
    try:
        one = re.compile(found)
    except re.error:  # not of Python's dialect: classes that are negated are taken to be such
        return found.startswith("[^")
    if not all(map(one.fullmatch, CONTROLS)):
        return False
    return not (one.fullmatch('"') and one.fullmatch("\\"))


def without_nul(found: str) -> str:
    """Return a class without NUL, which no other text of JSON needs."""
    return rf"[{found}&&[^\x00]]"
