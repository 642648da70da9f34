"""Formats that the grammar library takes more loosely than their definitions."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.kinds import kinds_named
from jaxserve.structure.schemas.walk import schemas

LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
# February 29 is a date of leap years alone (RFC 3339, appendix C).
DATE: Final = f"^(?:.{{5}}(?:[^0].|0[^2])|.{{8}}(?:[01].|2[0-8])|{LEAP_YEAR}-02-29)"
# A second 60 is a leap second: which minutes have one is no matter of syntax (RFC 3339, 5.7).
SECOND_OF_TIME: Final = "^.{6}[0-5]"
SECOND_OF_DATE_TIME: Final = "^.{17}[0-5]"
# Hyphens at the third and fourth place of a label mark names in other encodings (RFC 5890, 2.3.1),
# which have rules of their own. A name has 253 letters at most (RFC 1035, 2.3.4).
LABEL: Final = r"(?:[^.]{1,3}|[^.]{2}(?:[^.\-][^.]|-[^.\-])[^.]*)"
NARROWER: Final[Mapping[str, tuple[Mapping[str, Any], ...]]] = MappingProxyType(
    {
        "date": ({"pattern": DATE},),
        "time": ({"pattern": SECOND_OF_TIME},),
        "date-time": ({"pattern": DATE}, {"pattern": SECOND_OF_DATE_TIME}),
        "hostname": ({"pattern": rf"^(?:{LABEL}\.)*{LABEL}$", "maxLength": 253},),
    }
)


# Formats that the library knows.
KNOWN: Final = (
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6"),
    *("time", "uri", "uuid"),
)


def check_formats(root: Any) -> None:
    """Raise SchemaError for the first format of texts that cannot be followed."""
    for path, schema in schemas(root):
        name = schema.get("format")
        if name is None or name in KNOWN or "string" not in kinds_named(schema.get("type")):
            continue
        raise SchemaError(
            f"{path}/format", f"is {name!r:.80}; those that can be followed are {', '.join(KNOWN)}"
        )


def narrower(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return schemas by which the texts of a schema's format certainly have it."""
    name = schema.get("format")
    return NARROWER.get(name, ()) if isinstance(name, str) else ()
