"""Structures that clients ask an output to follow, checked before they are compiled."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from jaxserve.config.flag_values import text_of_file
from jaxserve.config.option import option
from jaxserve.errors import RequestError

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_CHOICES = 1024  # texts that one choice lists


@dataclass(frozen=True, kw_only=True)
class StructureForms:
    """A structure in the forms that a command takes; one of them is given, named by its kind."""

    json_schema: str | None = option(
        None, "write JSON that the schema in this file allows", metavar="FILE", parse=text_of_file
    )
    json_object: bool = option(False, "write a JSON object")
    regex: str | None = option(
        None,
        "write text that matches this regular expression as a whole, in Rust's syntax",
        metavar="REGEX",
    )
    choice: tuple[str, ...] = option(
        (), "write one of these texts; given once for each", metavar="TEXT"
    )
    lark: str | None = option(
        None,
        "write text that follows the grammar in this file, in llguidance's Lark",
        metavar="FILE",
        parse=text_of_file,
    )


@dataclass(frozen=True)
class Structure:
    """Structure that an output follows as a whole. `Structure.of` makes and checks one."""

    # "json_schema", "json_object" (any object), "regex", "choice" (one of several texts) or "lark"
    # (a context-free grammar).
    kind: Kind
    # Schema as JSON text, expression in the syntax of Rust's regex crate, texts as a JSON array, or
    # grammar in llguidance's dialect of Lark; empty for a JSON object.
    text: str = ""
    field: str = ""  # path of the structure in the request, for errors
    # Grammar in Lark of the whole output, in which @body stands for the structure; empty where the
    # structure is all of it.
    frame: str = ""

    @property
    def size(self) -> int:
        """Bytes of all its text."""
        return len(self.text.encode()) + len(self.frame.encode())

    @staticmethod
    def of(kind: str, value: Any, field: str = "") -> "Structure":
        """Make a structure and check what can be checked without the grammar library.

        Args:
            kind: One of KINDS.
            value: JSON schema as text or as plain values, True for "json_object", expression, list
                of texts, or grammar.
            field: Path of the structure in the request; by default the kind.

        Returns:
            The structure.

        Raises:
            RequestError: The kind is unknown, or the value is none of this kind.
        """
        field = field or kind
        if kind not in READ:
            raise RequestError(field, f"is {kind!r:.80}; it must be one of {', '.join(READ)}")
        text = READ[kind](value, field)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError(
                field, "has half a surrogate pair, which is not valid Unicode"
            ) from None
        return Structure(kind, text, field)  # type: ignore[arg-type]


def _schema(value: Any, field: str) -> str:
    """Return a JSON schema as text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | bool):
        raise RequestError(field, f"is {value!r:.80}; give a JSON schema")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(field, f"cannot be written as JSON: {error}") from None


def _object(value: Any, field: str) -> str:
    """Return the empty text of "json_object", whose value can only be True."""
    if value is not True:
        raise RequestError(field, f"is {value!r:.80}; it must be true (or leave it out)")
    return ""


def _text(value: Any, field: str) -> str:
    """Return a regular expression or a grammar, which must not be empty."""
    if not isinstance(value, str) or not value:
        raise RequestError(field, f"is {value!r:.80}; it must be a text that is not empty")
    return value


def _choice(value: Any, field: str) -> str:
    """Return a list of texts as a JSON array."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(field, f"is {value!r:.80}; give a list of texts")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise RequestError(field, f"has {len(value)} entries; give 1 to {MAX_CHOICES}")
    for i, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"{field}[{i}]", f"is {text!r:.80}; it must be a text that is not empty"
            )
    return json.dumps(list(value), ensure_ascii=False)


READ: Mapping[str, Callable[[Any, str], str]] = MappingProxyType(
    {
        "json_schema": _schema,
        "json_object": _object,
        "regex": _text,
        "choice": _choice,
        "lark": _text,
    }
)
