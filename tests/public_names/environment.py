"""Environment variables that the code asks for, found in the syntax trees of its modules."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.public_names.shown import PACKAGES, ROOT

NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
ASKS = re.compile(r"\bos\.(environ|getenv)\b")


def variables() -> dict[str, str]:
    """Names that this project asks for. What jax, gRPC and OpenTelemetry ask for is theirs."""
    return dict.fromkeys(sorted(name for path in _askers() for name in _names(path)), "is read")


def _askers() -> Iterator[Path]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if ASKS.search(path.read_text("utf-8")):
                yield path


def _names(path: Path) -> Iterator[str]:
    """Strings that are such a name as a whole, whoever of the module asks with them."""
    tree = ast.parse(path.read_text("utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    given = [node for call in calls for node in call.args if isinstance(node, ast.Constant)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            yield from _checked(str(node.value))
        elif isinstance(node, ast.JoinedStr):
            for part in given:
                yield from _checked(_filled(node, str(part.value)))


def _filled(text: ast.JoinedStr, part: str) -> str:
    """An f-string with this in its gaps, which may be the end of a name."""
    return "".join(str(v.value) if isinstance(v, ast.Constant) else part for v in text.values)


def _checked(text: str) -> Iterator[str]:
    if NAME.fullmatch(text):
        yield text
