"""Values and annotations as text that stays the same wherever things are defined."""

import inspect
import re
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

ROOT = Path(__file__).parents[2]
PACKAGES = ("jaxserve", "sharding", "pallas_kernels", "checkpoints")
PLAIN = (type(None), bool, int, float, str, bytes)


def is_ours(thing: Any) -> bool:
    """True for classes and functions of this project."""
    return str(getattr(thing, "__module__", "")).split(".")[0] == "jaxserve"


def value(default: Any) -> str:
    """A plain value as Python writes it, and the kind of any other: its name may be private."""
    if isinstance(default, Enum):
        return repr(default.value)
    if isinstance(default, Path):
        inside = default.is_relative_to(ROOT)
        return str(default.relative_to(ROOT) if inside else default)
    if isinstance(default, PLAIN):
        return repr(default)
    if isinstance(default, list | tuple | dict):
        return repr(default)
    if inspect.isclass(default):
        return "a class"
    return "a function" if callable(default) else "an object"


def annotation(hint: Any) -> str:
    """A type without the modules that its names come from."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(annotation, get_args(hint)))
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("NoneType", "None")
