"""Opens a checkpoint folder and reads the architecture that its config.json describes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.checkpoints.orbax_store import (
    CONVERT_AGAIN,
    MANIFEST,
    OrbaxCheckpoint,
    is_orbax,
    read_manifest,
)
from jaxserve.checkpoints.quantized import check_method, dequantized
from jaxserve.errors import ModelError
from jaxserve.models.families import FAMILIES
from jaxserve.models.families.needs import NEEDS
from jaxserve.models.families.pooling import embeds
from jaxserve.models.families.text_part import with_text_fields
from jaxserve.models.families.typed_fields import in_config
from jaxserve.models.families.weight_table import Family, Stored
from jaxserve.models.quant import QuantScheme, parse_scheme
from jaxserve.models.spec import ModelSpec

Checkpoint = HFCheckpoint | OrbaxCheckpoint


def open_checkpoint(folder: Path, tensors: Mapping[str, Stored] | None = None) -> Checkpoint:
    """Open a Hugging Face folder, or an Orbax folder written by jaxserve convert.

    Args:
        tensors: Tensors of a Hugging Face folder whose weights lie elsewhere.
    """
    if tensors is None and is_orbax(folder):
        return OrbaxCheckpoint.open(folder)
    return HFCheckpoint.open(folder, tensors)


def declared_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype of the weights that config.json names, of the text where there is more."""
    for fields in (config, with_text_fields(config)):
        for name in ("dtype", "torch_dtype"):
            if fields.get(name):
                return str(fields[name])
    return None


def expected_dtype(config: Mapping[str, Any]) -> str:
    """Return float32 or bfloat16, as weights are loaded whose tensors are what config.json says.

    Quantized tensors become bfloat16 when they are read.
    """
    is_wide = declared_dtype(config) in ("float32", "float64") and check_method(config) is None
    return "float32" if is_wide else "bfloat16"


@dataclass(frozen=True, eq=False)
class ModelCheckpoint:
    """An open checkpoint, with the family and the architecture that its configs describe."""

    checkpoint: Checkpoint
    family: Family
    spec: ModelSpec
    # Scheme of weights that are stored quantized as models/quant.py has them; None without one.
    scheme: QuantScheme | None

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """Tensors by their names; those that the publisher quantized are dequantized when read.

        CheckpointError where quantized tensors and their scales do not fit each other.
        """
        checkpoint = self.checkpoint
        if isinstance(checkpoint, OrbaxCheckpoint):
            return checkpoint.tensors
        return dequantized(checkpoint.tensors, checkpoint.config)


def read_architecture(checkpoint: Checkpoint) -> ModelCheckpoint:
    """Read the architecture of a checkpoint. Errors: see read_spec and stored_scheme.

    Unlike read_spec, the spec also says whether the model embeds, which follows from the
    sentence-transformers files beside config.json.
    """
    family, spec = read_spec(checkpoint.config)
    spec = replace(spec, embeds=embeds(checkpoint.modules))
    converted = isinstance(checkpoint, OrbaxCheckpoint)
    scheme = _parse_manifest(checkpoint.folder, checkpoint.weights) if converted else None
    return ModelCheckpoint(checkpoint, family, spec, scheme)


def stored_scheme(folder: Path) -> QuantScheme | None:
    """Return the scheme of a converted folder's weights; None for full precision, as published.

    Raises CheckpointError where the folder was converted and has no manifest, and ModelError if the
    scheme is unknown.
    """
    return _parse_manifest(folder, read_manifest(folder).weights) if is_orbax(folder) else None


def _parse_manifest(folder: Path, weights: str) -> QuantScheme | None:
    try:
        return parse_scheme(weights)
    except ModelError:
        raise ModelError(
            f"{folder / MANIFEST}: weights in {weights!r} are not known here; {CONVERT_AGAIN}"
        ) from None


def read_spec(config: Mapping[str, Any]) -> tuple[Family, ModelSpec]:
    """Read the family and the architecture that config.json names.

    ModelError when the family is not implemented or a field is not understood; CheckpointError
    when the quantization method is unknown.
    """
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelError(f"config.json: architectures is {named!r}; it must be a list of names")
    known = [name for name in named if name in FAMILIES]
    if not known:
        needs = "".join(f"; {NEEDS[name]} would be needed" for name in named if name in NEEDS)
        raise ModelError(
            f"config.json: architectures {named!r} are not implemented (implemented: "
            f"{', '.join(FAMILIES)}){needs}"
        )
    check_method(config)
    family = FAMILIES[known[0]]
    try:
        return family, family.spec_from_hf(config)
    except ModelError as error:  # sizes that contradict each other are found by the spec
        raise ModelError(in_config(str(error))) from error
