"""Outcomes of reading published config.json files; writes the table of docs/published-models.md.

    python -m tests.published_models > docs/published-models.md

`published/configs` has the files, `published/sources.json` the public repository that each one is
from and its SHA-256.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.errors import JaxserveError
from jaxserve.loading.spec import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.sharding.params import is_param_spec

FOLDER = Path(__file__).parent / "published"

HEAD = """# Published models

What becomes of config.json files of published models, as other public repositories have them: how
many parameters of the text model are read, or why the file is refused. `python -m
tests.published_models` writes this table. The files are in [tests/published](../tests/published);
the repository that each one is from, and its SHA-256, is in
[sources.json](../tests/published/sources.json); that of Seed-OSS was put together from the figures
that its source lists, that of ERNIE-4.5-21B-A3B-PT from such figures and the other fields of
ERNIE-4.5-21B-A3B. That a config is read says nothing about the
tokenizer and the weights of the same model; what was proved of each family is in
[support.md](support.md#model-families).
"""


@dataclass(frozen=True)
class Published:
    """A published config.json, and the public repository that it is from."""

    model: str
    file: str  # below FOLDER / "configs"
    sha256: str
    repository: str
    path: str
    commit: str

    @property
    def text(self) -> bytes:
        return (FOLDER / "configs" / self.file).read_bytes()

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(self.text)

    @property
    def is_unchanged(self) -> bool:
        """True if the file has the SHA-256 that was noted with its source."""
        return sha256(self.text).hexdigest() == self.sha256


def published() -> list[Published]:
    """Return all files, in the order of their names."""
    rows = json.loads((FOLDER / "sources.json").read_text())
    return [Published(**row) for row in rows]


def outcome(config: dict[str, Any]) -> str:
    """Return how many parameters are read, or the refusal without the names that would be taken."""
    try:
        spec = read_spec(config)[1]
    except (JaxserveError, CheckpointError) as error:
        return "refused: " + re.sub(r" \((implemented|ignoring|use another)[^)]*\)", "", str(error))
    declared = param_specs(spec, jnp.dtype(jnp.bfloat16))
    leaves = jax.tree.leaves(declared, is_leaf=is_param_spec)
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    shortened = f", at most {spec.max_positions:,} tokens" if spec.context_note else ""
    return f"{size / 1e9:,.2f} B parameters{shortened}"


def document() -> Iterator[str]:
    """Yield the lines of docs/published-models.md."""
    yield HEAD
    all_of_them = [(each, outcome(each.config)) for each in published()]
    taken = sum(not found.startswith("refused") for _, found in all_of_them)
    yield f"{taken} of {len(all_of_them)} files are read.\n"
    yield "| model | architecture | what becomes of it | source |"
    yield "|---|---|---|---|"
    for each, found in all_of_them:
        architecture = " ".join(each.config.get("architectures") or ["none named"])
        where = f"https://github.com/{each.repository}/blob/{each.commit}/{each.path}"
        yield f"| {each.model} | {architecture} | {found} | [{each.repository}]({where}) |"


if __name__ == "__main__":
    print("\n".join(document()))
