"""Matches a checkpoint's tensors with the parameters of its model.

Every tensor has to be accounted for: a tensor that no row of the family's weight table names is an
error, unless it is of a tower that is left out, and so is a row without its tensor.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

import numpy as np

from jaxserve.errors import ModelError
from jaxserve.loading.tensor_names import Naming, is_of, naming_of, weight_table
from jaxserve.models.families.weight_table import Family, Stored, Tensor
from jaxserve.models.spec import ModelSpec

# Plain names, as of tensor_names.PLAIN.
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def note_on_towers(family: Family, tensors: Mapping[str, Stored]) -> str | None:
    """Return a line on the tensors of a checkpoint's towers; None where there are none."""
    left = [
        prod(tensor.shape) * tensor.dtype.itemsize
        for name, tensor in tensors.items()
        if any(is_of(tower, name) for tower in family.towers)
    ]
    if not left:
        return None
    towers = " and ".join(family.towers)
    return (
        f"the text part is loaded: {len(left)} tensors of {towers} ({sum(left) / 2**20:,.1f} MiB) "
        "are not read, and requests take text alone"
    )


def match_tensors(family: Family, spec: ModelSpec, tensors: Mapping[str, Stored]) -> list[Tensor]:
    """Return the family's weight table, with the names that the checkpoint gives its tensors.

    ModelError when a tensor is left over or missing.
    """
    naming = naming_of(tensors)
    table = weight_table(family, spec, naming, tensors)
    wanted = {row.name for row in table}
    missing = sorted(wanted - tensors.keys())
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors: {first_names(missing)}")
    extra = _left_over(family, spec, naming, tensors, wanted)
    twice = sorted(wanted.intersection(map(naming.from_plain, extra)))
    if twice:
        raise ModelError(
            f"the checkpoint has {len(twice)} tensors below two prefixes: {first_names(twice)}"
        )
    if extra:
        raise ModelError(
            f"the checkpoint has {len(extra)} tensors that config.json does not account for: "
            f"{first_names(extra)}"
        )
    return [row.as_stored(tensors[row.name].shape, row.sizes(spec)) for row in table]


def _left_over(
    family: Family,
    spec: ModelSpec,
    naming: Naming,
    tensors: Mapping[str, Stored],
    wanted: set[str],
) -> list[str]:
    """Return the names of tensors that the model neither wants nor may ignore."""
    ignored = family.ignored(spec)
    if spec.embeds:  # an embedding model has no use for a head
        ignored = (*ignored, HEAD)

    def is_ignored(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in ignored) or any(
            is_of(tower, name) for tower in family.towers
        )

    extra = sorted(
        name for name in tensors.keys() - wanted if not is_ignored(naming.to_plain(name))
    )
    head, embedding = (naming.own_name(name, tensors) for name in (HEAD, EMBEDDING))
    if spec.tied_head and head in extra:  # some publishers store the tied head twice
        if not np.array_equal(_whole(tensors[head]), _whole(tensors[embedding])):
            raise ModelError(
                f"config.json ties the head to the embedding, but {head} differs from it; set "
                f"tie_word_embeddings to false there if the checkpoint's head is right"
            )
        extra.remove(head)
    return [name for name in extra if not _is_zero_bias(name, wanted, tensors)]


def _is_zero_bias(name: str, wanted: set[str], tensors: Mapping[str, Stored]) -> bool:
    """Return whether the tensor is a bias of zeros beside a wanted weight.

    AutoGPTQ adds such a bias to every layer that it quantizes.
    """
    layer = name.removesuffix(".bias")
    return layer != name and f"{layer}.weight" in wanted and not _whole(tensors[name]).any()


def _whole(tensor: Stored) -> np.ndarray:
    """Read all of a tensor, however many dimensions it has."""
    return tensor[(slice(None),) * len(tensor.shape)]


def first_names(names: Sequence[str]) -> str:
    """Join the first five names for an error message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
