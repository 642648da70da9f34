"""Regular expressions of strings that certainly follow a schema, up to a mark behind them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.chat.answers.call_grammar import ANY_TEXT, literal
from jaxserve.structure.lark import check_ends
from jaxserve.structure.schemas.patterns import exact_pattern, has_bare_alternatives, parts_of

# Some of the texts of a format, and no others. None of them has a line end or "<".
HEXADECIMAL = "[0-9a-fA-F]"
FORMATS = MappingProxyType(
    {
        "uri": (
            r"[a-zA-Z][a-zA-Z0-9+.\-]*:\/\/[a-zA-Z0-9.\-]+(?::[0-9]{1,5})?"
            r"(?:\/(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@\/]|%HH)*)?"
            r"(?:\?(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@\/?]|%HH)*)?"
            r"(?:#(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@\/?]|%HH)*)?"
        ).replace("HH", HEXADECIMAL * 2),
        "uuid": "HH{8}-HH{4}-HH{4}-HH{4}-HH{12}".replace("HH", HEXADECIMAL),
    }
)


def expression_of(schema: Mapping[str, Any], margin: str, closing: str) -> str:
    """Return the expression, in llguidance's Lark, of strings by a schema and of the margin.

    The schema has pattern, minLength, maxLength and format at most. ValueError is raised for what
    has no simple expression. The expression may leave out strings that the schema allows.

    Args:
        margin: Text that may stand behind the string and is none of it; empty where there is none.
        closing: Mark that ends the string.
    """
    if not schema:
        return ANY_TEXT
    if schema.keys() == {"pattern"}:
        text = _pattern(schema["pattern"], closing)
        return f"{text} {literal(margin)}" if margin else text
    if schema.keys() == {"format"}:
        if schema["format"] not in FORMATS:
            raise ValueError(f"has the format {schema['format']!r:.80}")
        return f"/{FORMATS[schema['format']]}{_escaped(margin)}/"
    if schema.keys() <= {"minLength", "maxLength"}:
        return _of_length(schema.get("minLength", 0), schema.get("maxLength"), margin)
    raise ValueError(f"has {' and '.join(sorted(schema))} at once")


def _pattern(pattern: Any, closing: str) -> str:
    """Return the expression of what a pattern matches as a whole, without the closing mark.

    A text that has the mark would be read up to it only.
    """
    if not (isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$")):
        raise ValueError(f"has the pattern {pattern!r:.80}, which does not match whole strings")
    try:
        check_ends(pattern[1:-1])
    except ValueError as error:
        raise ValueError(f"has the pattern {pattern!r:.80}, which {error}") from None
    inner = list(parts_of(exact_pattern(pattern[1:-1])))
    if has_bare_alternatives(inner):
        raise ValueError(f"has the pattern {pattern!r:.80}, whose ends belong to parts of it")
    written = "".join(map(_in_lark, inner))
    marked = f"{ANY_TEXT} {literal(closing)} {ANY_TEXT}"
    return f"(/(?:{written})/ & ~({marked}))"


def _in_lark(part: str) -> str:
    """Return a part of a pattern as it stands between slashes; classes are spelled already."""
    letter = part.removeprefix("\\")
    if len(letter) == 1 and ord(letter) < ord(" "):
        return f"\\x{{{ord(letter):x}}}"
    if part == "/":
        return r"\/"
    if "/" in part and part != r"\/":
        raise ValueError(f"has the pattern with {part!r:.80}, which no expression has")
    return part


def _of_length(least: Any, most: Any, margin: str) -> str:
    """Return the expression of strings by their number of characters.

    A string that is not long enough yet could end in the mark behind it: its first characters are
    no line end, and do not begin a mark.
    """
    if any(type(bound) is not int or bound < 0 for bound in (least, most) if bound is not None):
        raise ValueError("has a length that is no count")
    if most is not None and most < least:
        raise ValueError("has a maxLength below its minLength")
    # A pair of characters counts as one of the least, and as two of the most.
    pairs = most is None or most >= 2 * least
    head = r"(?:[^<\n]|<[^\/\n])" if pairs else r"[^<\n]"
    rest = "*" if most is None else f"{{0,{most - (2 if pairs else 1) * least}}}"
    end = f"(?:{_escaped(margin)})?" if margin else ""
    return f"/{head}{{{least}}}(?s:.{rest}){end}/" if least else f"/(?s:.{rest}){end}/"


def _escaped(margin: str) -> str:
    return margin.replace("\n", r"\n")
