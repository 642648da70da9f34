"""Names of models on the hub: org/name, or org/name@revision."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
NAME = re.compile(rf"(?P<repo>{PART}/{PART})(@(?P<revision>\S+))?")


@dataclass(frozen=True)
class HubModel:
    """A model of the hub.

    repo: org/name. revision: branch, tag or commit; None is the default branch.
    """

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def hub_model(given: str | Path) -> HubModel | None:
    """Return the model of the hub that is meant; None for a path that exists, or another text."""
    found = NAME.fullmatch(str(given))
    if found is None or os.path.exists(given):
        return None
    return HubModel(found["repo"], found["revision"])


def display_name(given: str | Path) -> str:
    """Return the name by which a model is known: org/name, or the name of its folder."""
    model = hub_model(given)
    return model.repo if model else Path(given).resolve().name
