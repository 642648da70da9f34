"""Names of models on the hub: org/name, or org/name@revision."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
REPO = rf"(?P<repo>{PART}/{PART})"
NAME = re.compile(rf"(hf://)?{REPO}(@(?P<revision>\S+))?")
PAGE = re.compile(
    rf"https://(huggingface\.co|hf\.co)/{REPO}(/tree/(?P<revision>[^\s?#]*[^\s?#/]))?/?([?#].*)?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubModel:
    """A model of the hub."""

    repo: str  # org/name
    revision: str | None = None  # branch, tag or commit; None is the default branch

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def commit(self) -> str | None:
        """The revision, if it is a commit."""
        is_commit = self.revision and COMMIT.fullmatch(self.revision)
        return self.revision if is_commit else None


Given = str | Path | HubModel  # a model, as a program or a flag names it


def hub_model(given: Given) -> HubModel | None:
    """Return the model of the hub that is meant; None for a path, and for a text of another form.

    A Path is never a name; a text is none where such a path exists. The address of a model's page
    is taken for its name.
    """
    if not isinstance(given, str):
        return given if isinstance(given, HubModel) else None
    found = NAME.fullmatch(given) or PAGE.fullmatch(given)
    if found is None or os.path.lexists(given):
        return None
    return HubModel(found["repo"], found["revision"])


def model_of_flag(text: str) -> Path | HubModel:
    """Return the model that a flag names: of the hub, or the path of a folder."""
    return hub_model(text) or Path(text).expanduser()


def display_name(given: Given) -> str:
    """Return the name by which a model is known: org/name, or the name of its folder."""
    model = hub_model(given)
    return model.repo if model else folder_name(Path(str(given)))


def folder_name(folder: Path) -> str:
    """Return the name of a folder as text, see as_text."""
    return as_text(folder.resolve().name)


def as_text(name: str) -> str:
    """Return the name of a file as text; bytes of it that are not UTF-8 become U+FFFD.

    Messages of gRPC and JSON cannot hold what Python makes of such bytes.
    """
    return os.fsencode(name).decode("utf-8", "replace")
