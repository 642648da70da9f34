"""Matches a checkpoint's tensors with the parameters of its model.

Every tensor has to be accounted for: a tensor that no row of the family's weight table names, or a
row without its tensor, is an error.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.checkpoints.quantized import dequantized
from jaxserve.errors import ModelError
from jaxserve.models.families.weight_table import Family, ParamPath, Stored, Tensor
from jaxserve.models.fused import PARTS
from jaxserve.models.spec import ModelSpec


def stored_tensors(checkpoint: HFCheckpoint) -> Mapping[str, Stored]:
    """Return the published tensors by name, dequantized as they are read."""
    return dequantized(_with_prefix(checkpoint.tensors), checkpoint.config)


def _with_prefix(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Add the prefix "model." to the names of a decoder that was stored without its head.

    transformers leaves the prefix out when it saves such a decoder (AutoModel) on its own.
    """
    if "embed_tokens.weight" not in tensors:
        return tensors
    return {
        name if name.startswith("lm_head.") else f"model.{name}": tensor
        for name, tensor in tensors.items()
    }


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
    return table


def _left_over(
    family: Family, spec: ModelSpec, tensors: Mapping[str, Stored], wanted: set[str]
) -> list[str]:
    """Return the names of tensors that the model neither wants nor may ignore."""
    ignored = family.ignored(spec)
    if spec.embeds:  # an embedding model has no use for a head
        ignored = (*ignored, "lm_head.weight")
    extra = sorted(
        name
        for name in set(tensors) - wanted
        if not any(fnmatchcase(name, pattern) for pattern in ignored)
    )
    if spec.tied_head and "lm_head.weight" in extra:  # some publishers store the tied head twice
        head = tensors["lm_head.weight"][:, :]
        if not np.array_equal(head, tensors["model.embed_tokens.weight"][:, :]):
            raise ModelError(
                "config.json ties the head to the embedding, but lm_head.weight differs from it"
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
