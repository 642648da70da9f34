"""What a client asks a text to follow."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from jaxserve.errors import RequestError

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_CHOICES = 1024  # texts of a choice


@dataclass(frozen=True)
class Structure:
    """One of: a JSON schema, any JSON object, a regular expression of the whole text, one of
    several texts, a grammar.

    text: the schema as JSON text, the expression in the syntax of Rust's regex crate, the texts as
    a JSON array, or the grammar in llguidance's dialect of Lark; nothing for a JSON object. `of`
    checks what can be checked without the library. field: where the request has it, for errors.
    """

    kind: Kind
    text: str = ""
    field: str = ""

    @staticmethod
    def of(kind: str, value: Any, field: str = "") -> "Structure":
        """value: a JSON schema as text or as plain values, true, or what the kind is. RequestError
        names the field.
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
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | bool):
        raise RequestError(field, f"is {value!r:.80}; give a JSON schema")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(field, f"cannot be written as JSON: {error}") from None


def _object(value: Any, field: str) -> str:
    if value is not True:
        raise RequestError(field, f"is {value!r:.80}; it must be true (or leave it out)")
    return ""


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(field, f"is {value!r:.80}; it must be a text that is not empty")
    return value


def _choice(value: Any, field: str) -> str:
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
