"""Names of a decoder's tensors, which checkpoints store below different prefixes."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import ModelSpec


@dataclass(frozen=True)
class Naming:
    """Prefixes of a decoder's tensors in a checkpoint.

    A plain name is one of PLAIN, as the weight tables of families have them.
    """

    body: str  # of all tensors but the head's
    head: str

    def to_plain(self, name: str) -> str:
        """Return the plain name of a stored tensor; names of other tensors stay as they are."""
        return _exchange(name, self, PLAIN)

    def from_plain(self, name: str) -> str:
        """Return the name under which a tensor with this plain name is stored."""
        return _exchange(name, PLAIN, self)

    def own_name(self, plain: str, names: Collection[str]) -> str:
        """Return the name that a checkpoint gives a tensor; the plain one where it has only that.

        Args:
            names: Names of the checkpoint's tensors.
        """
        own = self.from_plain(plain)
        return plain if plain in names and own not in names else own


PLAIN: Final = Naming("model.", "lm_head.")
NAMINGS: Final = (
    PLAIN,
    Naming("", "lm_head."),  # of a decoder that transformers saved on its own (AutoModel)
    # Of text parts: the prefixes of most publishers, and those of classes of transformers 5.
    Naming("language_model.model.", "language_model.lm_head."),
    Naming("model.language_model.", "lm_head."),
)


def naming_of(names: Collection[str]) -> Naming:
    """Return the naming below which the embedding and the layers are; PLAIN where none has either.

    One of them may be missing, or also be below another prefix.
    """

    def found(naming: Naming) -> int:
        has_layers = any(name.startswith(f"{naming.body}layers.") for name in names)
        return (f"{naming.body}embed_tokens.weight" in names) + has_layers

    return max(NAMINGS, key=found)


def weight_table(
    family: Family, spec: ModelSpec, naming: Naming, names: Collection[str]
) -> list[Tensor]:
    """Return the family's weight table of which a checkpoint lacks fewest tensors, by its names.

    Args:
        names: Names of the checkpoint's tensors.
    """
    tables = [
        [replace(row, name=naming.own_name(row.name, names)) for row in of_spec(spec)]
        for of_spec in (family.tensors, *family.other_tensors)
    ]
    return min(tables, key=lambda table: sum(row.name not in names for row in table))


def is_of(block: str, name: str) -> bool:
    """Return whether a tensor is of a block beside the decoder, such as a vision tower."""
    return name.startswith((f"{block}.", f"model.{block}."))


def _exchange(name: str, old: Naming, new: Naming) -> str:
    for before, after in ((old.head, new.head), (old.body, new.body)):
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name
