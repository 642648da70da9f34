"""Configs of every family with one field spoilt: each is refused in one line, or means the same.

The configs are those of the golden checkpoints, which cover every family and its branches. A value
of a wrong type must be refused with the field's name (an object, with that of what is wrong inside
of it), unless the field says nothing. A number that
is out of range may be refused for what it makes of the model. Nothing else may be raised, and
nothing may take long.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.errors import ModelError
from jaxserve.loading.spec import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.families import FAMILIES
from tests.slow_cases import slow_but

GOLDENS = sorted((Path(__file__).parents[2] / "golden").glob("*/config.json"))
SOME = GOLDENS[::3]  # a family's lie beside each other
GONE = object()
WRONG_TYPES = ("x", ["x"], [], {"a": 1}, math.nan)
OUT_OF_RANGE = (GONE, None, True, -1, 0, 1, 0.37, 2**70, -(2**70), 1e308, math.inf)
LONGEST = 330  # characters of an error
# Lists that say less when they are empty, or hold nothing but names.
MAY_BE_EMPTY = ("mlp_only_layers",)
type Path_ = tuple[str | int, ...]


def test_the_goldens_have_every_family() -> None:
    """Names of one class, such as the two of ERNIE, share a family's table."""
    tables = {id(FAMILIES[json.loads(path.read_text())["architectures"][0]]) for path in GOLDENS}
    missing = {name for name, family in FAMILIES.items() if id(family) not in tables}
    assert not missing


@pytest.mark.parametrize("path", slow_but(GOLDENS, SOME), ids=lambda path: path.parent.name)
def test_every_field_of_every_family(path: Path) -> None:
    config = json.loads(path.read_text())
    right = read_spec(config)
    for place in places(config):
        for value in (*WRONG_TYPES, *OUT_OF_RANGE):
            spoilt = with_value(config, place, value)
            try:
                found = read_spec(spoilt)
                param_specs(found[1], jnp.dtype(jnp.bfloat16))
            except (ModelError, CheckpointError) as error:
                check_words(str(error), place, value)
                continue
            if value in WRONG_TYPES and place[-1] not in MAY_BE_EMPTY:
                assert found == right, f"{place} = {value!r} is read as something else"


def test_a_field_that_nobody_knows() -> None:
    for path in GOLDENS:
        config = json.loads(path.read_text()) | {"wobble": 1}
        with pytest.raises(ModelError, match=r"does not understand: wobble \(ignoring"):
            read_spec(config)


def check_words(text: str, place: Path_, value: Any) -> None:
    assert "\n" not in text
    if place[0] != "architectures":  # whose error lists all families
        assert len(text) <= LONGEST, text
    if any(value is wrong for wrong in WRONG_TYPES) and not isinstance(value, dict):
        name = next(name for name in reversed(place) if isinstance(name, str))
        assert name in text, (place, text)


def places(fields: Mapping[str, Any], above: Path_ = ()) -> Iterator[Path_]:
    """Yield the place of every field, of those inside of objects, and of a list's first entries."""
    for name, value in fields.items():
        yield *above, name
        if isinstance(value, dict):
            yield from places(value, (*above, name))
        if isinstance(value, list):
            yield from ((*above, name, i) for i in range(min(len(value), 2)))


def with_value(config: dict[str, Any], place: Path_, value: Any) -> dict[str, Any]:
    spoilt = copy.deepcopy(config)
    inner: Any = spoilt
    for name in place[:-1]:
        inner = inner[name]
    if value is GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return spoilt
