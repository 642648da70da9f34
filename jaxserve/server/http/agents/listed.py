"""Objects of which every field is listed: as honoured, without effect, or refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import ValidationError, ValidationInfo, model_validator

from jaxserve.chat import UnknownFields
from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.ignored_names import IgnoredField
from jaxserve.server.http.body import request_error
from jaxserve.server.http.errors import UnknownFieldError, UnsupportedError
from jaxserve.server.http.other_fields import ONLY, OTHER_NAMES
from jaxserve.server.http.types import Body, ChatBody

MOST_NOTED = 64  # fields of one request; a client may send any number of others
NO_REASONS: Mapping[str, str] = MappingProxyType({})
# Names of fields that change what an answer says, in any of the APIs or on another server.
OF_ANSWERS = frozenset(
    {
        *OTHER_NAMES,
        *ONLY,
        *ChatBody.model_fields,
        *(each.name for each in fields(SamplingParams)),
        *("instructions", "input", "text", "reasoning", "include", "previous_response_id"),
        *("conversation", "prompt", "output_config", "output_format", "system", "system_prompt"),
        *("stop_sequences", "max_output_tokens", "max_tokens_to_sample", "max_thinking_length"),
        *("typical_p", "tfs_z", "epsilon_cutoff", "eta_cutoff", "top_a", "length_penalty"),
        *("mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "xtc_probability"),
        *("budget_tokens", "effort", "bad_words", "assistant_prefix", "continue_final_message"),
    }
)


@dataclass
class Notes:
    """Ignored fields of one request, and the rule for fields that no list has."""

    unknown: UnknownFields
    fields: dict[str, IgnoredField] = field(default_factory=dict)  # by name

    def add(self, name: str, listed: bool = True) -> None:
        """Note a field, or a part of the request, that changes nothing; no more than MOST_NOTED."""
        if len(self.fields) < MOST_NOTED:
            self.fields.setdefault(name, IgnoredField(name, listed))

    def take_unlisted(self, name: str, path: str, what: str) -> None:
        """Note a field of `what` that no list has, or refuse it."""
        if self.unknown == "error":
            raise UnknownFieldError(path[:200], f"is not a field of {what}; leave it out")
        self.add(name, listed=False)

    def take_unknown(self, name: str, path: str, value: str) -> None:
        """Note a value that no list has, such as a type of tools, or refuse it."""
        if self.unknown == "error":
            raise UnsupportedError(path, f"is {value!r:.80}, which is not known here; leave it out")
        self.add(name, listed=False)


class Listed(Body):
    """An object whose fields in the API are all listed.

    The fields of the class are honoured, those in `ignored` have no effect for the reason there,
    and those in `refused` raise UnsupportedError with the reason there, unless their value is one
    in `only`, which asks for nothing. `Notes` has what becomes of others. To be parsed by `parsed`.
    """

    what: ClassVar[str] = "this request"
    place: ClassVar[str] = ""  # before the names of its fields in the header
    # Whether its fields say how to answer, so that one that is not here but in another API is an
    # error.
    is_of_answers: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = NO_REASONS
    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES  # of other APIs, with those of this one

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any, info: ValidationInfo) -> dict[str, Any]:  # type: ignore[override]
        if not isinstance(given, dict):
            raise ValueError("must be an object")
        notes = info.context
        assert isinstance(notes, Notes)
        found = dict[str, Any]()
        for name, value in given.items():
            if value is None:
                continue
            if name in cls.model_fields:
                found[name] = cls._whole(name, value)
            else:
                cls._take_other(name, value, notes)
        return found

    @classmethod
    def _take_other(cls, name: str, value: Any, notes: Notes) -> None:
        """Note a field that is not honoured, or refuse it."""
        if name in cls.ignored:
            notes.add(f"{cls.place}{name}")
        elif name in cls.refused:
            if value not in cls.only.get(name, ()):
                raise UnsupportedError(name, f"is not supported: {cls.refused[name]}")
        elif cls.is_of_answers and name in OF_ANSWERS:
            other = cls.other_names.get(name)
            advice = f"use {other}" if other in cls.model_fields else "leave it out"
            raise UnknownFieldError(name, f"is not a field of {cls.what}; {advice}")
        else:
            notes.take_unlisted(f"{cls.place}{name}", name, cls.what)


def parsed[T: Listed](kind: type[T], given: Any, notes: Notes, path: str = "") -> T:
    """Return an object of a request; RequestError has the path of what is wrong.

    Args:
        path: Path of the object in the request; empty for the request itself.
    """
    try:
        return kind.model_validate(given, context=notes)
    except ValidationError as error:
        raise request_error(error, path) from None


def named_type(given: Any, path: str, default: str = "") -> str:
    """Return the `type` of an object; RequestError where it is no object, or has none."""
    if not isinstance(given, dict):
        raise RequestError(path, f"is {given!r:.80}; it must be an object")
    kind = given.get("type") or default
    if not isinstance(kind, str) or not kind:
        raise RequestError(f"{path}.type", f"is {given.get('type')!r:.80}; it must be a string")
    return kind


def json_of(value: Any) -> str:
    """Return a value as JSON text on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
