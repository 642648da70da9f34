"""Matches a checkpoint's tensors with the parameters of its model.

Every tensor has to be accounted for: a tensor that no row of the family's weight table names is an
error, unless it is of a tower that is left out, and so is a row without its tensor.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

import numpy as np

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.checkpoints.quantized import dequantized
from jaxserve.errors import ModelError
from jaxserve.loading.tensor_names import is_of, naming_of
from jaxserve.models.families.weight_table import Family, ParamPath, Stored, Tensor
from jaxserve.models.fused import PARTS
from jaxserve.models.spec import ModelSpec


def stored_tensors(checkpoint: HFCheckpoint) -> Mapping[str, Stored]:
    """Return the published tensors by their plain names, dequantized as they are read."""
    tensors = dequantized(checkpoint.tensors, checkpoint.config)
    naming = naming_of(tensors)
    named = {naming.to_plain(name): tensor for name, tensor in tensors.items()}
    if len(named) < len(tensors):
        plain = ((name, naming.to_plain(name)) for name in tensors)
        twice = sorted(name for name, own in plain if own != name and own in tensors)
        raise ModelError(
            f"the checkpoint has {len(twice)} tensors below two prefixes: {first_names(twice)}"
        )
    return named


def by_parameter(table: Sequence[Tensor]) -> dict[ParamPath, list[Tensor]]:
    """Group the rows of a weight table by the path of the parameter that they fill.

    Rows that are parts of one fused parameter, such as q, k and v of qkv, share a group.
    """
    grouped: dict[ParamPath, list[Tensor]] = {}
    for row in table:
        path = row.path
        fused = PARTS.get(str(path[-1]))
        if fused:
            path = (*path[:-1], fused.fused)
        grouped.setdefault(path, []).append(row)
    return grouped


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
    """Return the family's weight table; ModelError when a tensor is left over or missing."""
    table = family.tensors(spec)
    wanted = {row.name for row in table}
    missing = sorted(wanted - set(tensors))
    extra = _left_over(family, spec, tensors, wanted)
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors: {first_names(missing)}")
    if extra:
        raise ModelError(
            f"the checkpoint has {len(extra)} tensors that config.json does not account for: "
            f"{first_names(extra)}"
        )
    return [row.as_stored(tensors[row.name].shape, row.sizes(spec)) for row in table]


def _left_over(
    family: Family, spec: ModelSpec, tensors: Mapping[str, Stored], wanted: set[str]
) -> list[str]:
    """Return the names of tensors that the model neither wants nor may ignore."""
    ignored = family.ignored(spec)
    towers = family.towers
    if spec.embeds:  # an embedding model has no use for a head
        ignored = (*ignored, "lm_head.weight")
    extra = sorted(
        name
        for name in set(tensors) - wanted
        if not any(fnmatchcase(name, pattern) for pattern in ignored)
        and not any(is_of(tower, name) for tower in towers)
    )
    if spec.tied_head and "lm_head.weight" in extra:  # some publishers store the tied head twice
        head = tensors["lm_head.weight"][:, :]
        if not np.array_equal(head, tensors["model.embed_tokens.weight"][:, :]):
            raise ModelError(
                "config.json ties the head to the embedding, but lm_head.weight differs from it; "
                "set tie_word_embeddings to false there if the checkpoint's head is right"
            )
        extra.remove("lm_head.weight")
    return [name for name in extra if not _is_zero_bias(name, wanted, tensors)]


def _is_zero_bias(name: str, wanted: set[str], tensors: Mapping[str, Stored]) -> bool:
    """Return whether the tensor is a bias of zeros beside a wanted weight.

    AutoGPTQ adds such a bias to every layer that it quantizes.
    """
    layer = name.removesuffix(".bias")
    return layer != name and f"{layer}.weight" in wanted and not tensors[name][:].any()


def first_names(names: Sequence[str]) -> str:
    """Join the first five names for an error message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
