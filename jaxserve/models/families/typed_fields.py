"""Typed reading of the fields of a JSON object, which keeps account of those that were read."""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from jaxserve.errors import ModelError

MAX_SIZE: Final = 2**31 - 1  # positions and ids are int32
# Lower limits for counts that are iterated over, which a hostile file could make endless. They are
# more than any checkpoint has.
MAX_COUNTS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "num_hidden_layers": 2**10,
        "num_attention_heads": 2**12,
        "num_key_value_heads": 2**12,
        "num_local_experts": 2**14,
        "num_experts": 2**14,
        "n_routed_experts": 2**14,
        "moe_num_experts": 2**14,
    }
)
MAX_SHOWN: Final = 80  # characters of a value in an error message


def shown(value: Any) -> str:
    """Return a value for an error message, shortened where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def in_config(problem: str) -> str:
    """Return the text of an error with the file that it is about."""
    return problem if "config.json" in problem else f"config.json: {problem}"


class Fields:
    """Reader of the fields of config.json, or of an object inside of it.

    `finish` refuses fields that were neither read nor ignored.

    Args:
        fields: The object.
        readers: What reads it, for the error of `finish`.
        known: Fields that change nothing.
    """

    def __init__(
        self, fields: Mapping[str, Any], readers: str = "this family", known: Iterable[str] = ()
    ) -> None:
        self._config = fields
        self._readers = readers
        self._seen: set[str] = set(known)

    def has(self, name: str) -> bool:
        """Return whether config.json has a field that is not null, without reading it."""
        return self._config.get(name) is not None

    def take(
        self, name: str, default: Any = None, *, kind: type | tuple[type, ...] = (int, float, bool)
    ) -> Any:
        """Return a field, or the default when it is absent or null.

        ModelError when the field has another type, or is absent and has no default.
        """
        self._seen.add(name)
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json lacks {name!r}, which {self._readers} needs")
        if not isinstance(value, kind):
            raise ModelError(
                f"config.json: {name} is {shown(value)}, not of the type it has in published files"
            )
        return value

    def nullable(self, name: str, default: float | None) -> float | None:
        """Return a number, the default where the field is absent, None where it is null."""
        self._seen.add(name)
        return None if self._config.get(name, default) is None else self.take(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1, also where it is written as 4.0; otherwise as `take`."""
        value = self.take(name, default, kind=(int, float))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool | float) or value < 1:
            raise ModelError(
                f"config.json: {name} is {shown(value)}; it must be an integer of at least 1"
            )
        limit = MAX_COUNTS.get(name, MAX_SIZE)
        if value > limit:
            raise ModelError(
                f"config.json: {name} is {shown(value)}; at most {limit} are supported"
            )
        return value

    def integer_or(self, name: str, default: int) -> int:
        """Return an integer of at least 1; the default where the field is absent, null or 0."""
        given = self.take(name, default, kind=(int, float))
        return self.integer(name, default) if given else default

    def count(self, name: str, default: int) -> int:
        """Return an integer of at least 0; otherwise as `take`."""
        value = self.take(name, default, kind=int)
        if isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
            raise ModelError(f"config.json: {name} is {shown(value)}; it must be 0 to {MAX_SIZE}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number as float; ModelError where it is too large for one."""
        value = self.take(name, default, kind=(int, float))
        if isinstance(value, bool):
            raise ModelError(f"config.json: {name} is {value}; it must be a number")
        try:
            return float(value)
        except OverflowError:
            raise ModelError(f"config.json: {name} is beyond the range of float64") from None

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.number(name, default)
        if not 0 < value < math.inf:
            raise ModelError(f"config.json: {name} is {value:g}; it must be a positive number")
        return value

    def small(self, name: str, default: float) -> float:
        """Return a number above 0 and below 1."""
        value = self.number(name, default)
        if not 0 < value < 1:
            raise ModelError(
                f"config.json: {name} is {value:g}; it must be a small positive number"
            )
        return value

    def either(self, name: str, other: str) -> int:
        """Return an integer that has two names; ModelError where both are there and differ."""
        present = [each for each in (name, other) if self._config.get(each) is not None]
        values = [self.integer(each) for each in present or [name]]
        if len(set(values)) > 1:
            raise ModelError(
                f"config.json: {name} is {values[0]} and {other} {values[1]}; they have to be "
                f"the same"
            )
        return values[0]

    def expect(self, name: str, *allowed: Any) -> None:
        """Accept a field that is absent or has one of the values that are implemented.

        The first value is the one that an absent field stands for.
        """
        self._seen.add(name)
        value = self._config.get(name, allowed[0])
        if value not in allowed:
            raise ModelError(
                f"config.json: {name} = {shown(value)} is not implemented (implemented: "
                f"{', '.join(map(repr, allowed))})"
            )

    def ignore(self, *names: str) -> None:
        """Accept fields that change nothing, whatever their values."""
        self._seen.update(names)

    def finish(self) -> None:
        """Raise ModelError naming the fields that were neither read nor ignored."""
        unknown = sorted(set(self._config) - self._seen)
        if unknown:
            raise ModelError(
                f"config.json has fields that {self._readers} does not understand: "
                f"{', '.join(unknown)} (ignoring them could change the answers; add them to the "
                "family file once their meaning is known)"
            )

    def object(self, name: str) -> dict[str, Any]:
        """Return an object, which is empty where the field is absent or null."""
        self._seen.add(name)
        given = self._config.get(name)
        if given is None:
            return {}
        if not isinstance(given, dict):
            raise ModelError(f"config.json: {name} is {shown(given)}; it must be an object or null")
        return given
