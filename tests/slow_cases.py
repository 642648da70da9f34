"""Breadth that `make test-slow` runs: of many cases, `make test` runs a few."""

from collections.abc import Collection, Sequence

import pytest
from _pytest.mark.structures import ParameterSet


def slow_but[Case](cases: Sequence[Case], quick: Collection[Case]) -> list[ParameterSet]:
    """Return the cases as parameters, of which all but the quick ones are marked slow.

    A case of several strings is one parameter too, a tuple.
    """
    unknown = [case for case in quick if case not in cases]
    if unknown:
        raise ValueError(f"{unknown} are not among the cases")
    return [
        pytest.param(
            case,
            marks=[] if case in quick else [pytest.mark.slow],
            id=_joined(case),
        )
        for case in cases
    ]


def _joined(case: object) -> str | None:
    """Return the name of a case of several strings."""
    if isinstance(case, tuple) and case and all(isinstance(part, str) for part in case):
        return "-".join(case)
    return None
