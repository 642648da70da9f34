"""From a checkpoint folder to a model on a mesh: joins the reader, the family's weight-name table
and the shards.

The only file that knows both checkpoints and models.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from checkpoints.hf import HFCheckpoint
from checkpoints.orbax_store import AS_THEY_ARE, OrbaxCheckpoint, is_orbax
from checkpoints.quantized import check_method, dequantized
from jaxserve.errors import ModelError
from jaxserve.loading.orbax_layout import chosen_weights, match_parameters, some
from jaxserve.loading.shards import is_float, load_parameter
from jaxserve.models.decoder import ALWAYS_FLOAT32, param_specs
from jaxserve.models.families import FAMILIES
from jaxserve.models.families.pooling import embeds
from jaxserve.models.families.weight_table import Family, Stored, Tensor
from jaxserve.models.fused import PARTS
from jaxserve.models.matmul_w8a8 import check_chip
from jaxserve.models.quant import Quantized, form_in, form_of
from jaxserve.models.spec import ModelSpec
from jaxserve.request import MAX_EOS_IDS
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from sharding.params import is_param_spec

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, tensor
Checkpoint = HFCheckpoint | OrbaxCheckpoint
Keep = Callable[
    [tuple[str | int, ...], str, Any], Any
]  # path, axes and parameter -> what is kept of it


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint.

    spec: as these devices hold it, see ModelSpec.on. parameters: of the checkpoint, without copies.
    weights: the form of those that are quantized, as --weights names it, or auto. fingerprint: of
    spec, dtype, weights and folder, for the identity of cached pages.
    """

    spec: ModelSpec
    params: dict
    mesh: Mesh
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    fingerprint: str
    parameters: int
    weights: str


def load(
    folder: Path,
    mesh: Mesh,
    dtype: str = "auto",
    progress: Progress = lambda done, total, what: None,
    weights: str = "auto",
) -> Model:
    """Load a folder, Hugging Face's or one of checkpoints.convert, onto the mesh.

    dtype: auto keeps the checkpoint's precision (half and double become bfloat16 and float32), or
    float32, bfloat16. weights: a form of models/quant.py, such as int8; auto: as they are stored,
    in dtype unless they are quantized. ModelError or CheckpointError, one line each, when something
    is not as it has to be.
    """
    checkpoint = open_checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    _, spec = _architecture(checkpoint)
    added = {*tokenizer.special_tokens.values(), *tokenizer.added_tokens.values()}
    if any(token not in added for token in range(spec.vocab_size, tokenizer.vocab_size)):
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary "
            f"{spec.vocab_size} "
            "(the files are not of one checkpoint)"
        )
    eos_ids = _eos_ids(checkpoint, tokenizer, spec)
    params = load_params(checkpoint, mesh, dtype, progress, weights)
    held, kept = spec.on(mesh.shape["tensor"]), str(form_in(params) or AS_THEY_ARE)
    fingerprint = sha256(repr((held, dtype, kept, str(folder.resolve()))).encode()).hexdigest()
    leaves = jax.tree.leaves(param_specs(spec, params["embed"].dtype), is_leaf=is_param_spec)
    parameters = sum(math.prod(leaf.shape) for leaf in leaves)
    return Model(held, params, mesh, tokenizer, eos_ids, fingerprint, parameters, kept)


def open_checkpoint(folder: Path) -> Checkpoint:
    """By what lies in the folder."""
    return OrbaxCheckpoint.open(folder) if is_orbax(folder) else HFCheckpoint.open(folder)


def load_params(
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: str = "auto",
    progress: Progress = lambda done, total, what: None,
    weights: str = "auto",
    keep: Keep = lambda path, axes, parameter: parameter,
) -> dict:
    """The parameters of `spec.on` these devices, each read from the folder straight into its
    shards.

    Once; what is quantized here twice, for its scales and then for its numbers. keep: for whoever
    writes them elsewhere and needs no more than one at a time.
    """
    stored = checkpoint.weights if isinstance(checkpoint, OrbaxCheckpoint) else AS_THEY_ARE
    form = form_of(chosen_weights(checkpoint.folder, weights, stored))
    check_chip(form, mesh)
    family, spec = _architecture(checkpoint)
    spread = spec.on(mesh.shape["tensor"])
    tensors = _stored_tensors(checkpoint)
    if isinstance(checkpoint, OrbaxCheckpoint):
        table = match_parameters(spec, spread, checkpoint)
    else:
        table = _match(family, spec, tensors)
    kept = DTYPES[dtype] if dtype in DTYPES else _checkpoint_dtype(dtype, table, tensors)
    params: Any = param_specs(spread, jnp.dtype(kept), form)
    total, done = sum(param.nbytes for param in jax.tree.leaves(params, is_leaf=is_param_spec)), 0
    for path, rows in by_parameter(table).items():
        progress(done, total, rows[0].name)
        holder = params
        for step in path[:-1]:
            holder = holder[step]
        declared = holder[path[-1]]
        done += sum(param.nbytes for param in jax.tree.leaves(declared, is_leaf=is_param_spec))
        loaded = load_parameter(str(path[-1]), rows, declared, tensors, (spec, spread), mesh)
        axes = declared.values.axes if isinstance(declared, Quantized) else declared.axes
        holder[path[-1]] = keep(path, axes, loaded)
    progress(total, total, "")
    return params


def _stored_tensors(checkpoint: Checkpoint) -> Mapping[str, Stored]:
    """What a checkpoint holds, by name: of Hugging Face's the published tensors, of a converted one
    the parameters.
    """
    if isinstance(checkpoint, OrbaxCheckpoint):
        return checkpoint.tensors
    return dequantized(_with_prefix(checkpoint.tensors), checkpoint.config)


def by_parameter(table: list[Tensor]) -> dict[tuple[str | int, ...], list[Tensor]]:
    """Rows of the weight-name table by the path of the parameter that they are, or are parts of."""
    grouped: dict[tuple[str | int, ...], list[Tensor]] = {}
    for row in table:
        fused = PARTS.get(str(row.path[-1]))
        grouped.setdefault((*row.path[:-1], fused.fused) if fused else row.path, []).append(row)
    return grouped


def _architecture(checkpoint: Checkpoint) -> tuple[Family, ModelSpec]:
    """What config.json says, and the files beside it: whether the model embeds."""
    family, spec = read_spec(checkpoint.config)
    return family, replace(spec, embeds=embeds(checkpoint.modules))


def _with_prefix(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Under the names that a whole model's have: a decoder that was stored without its head lacks
    their beginning.
    """
    if "embed_tokens.weight" not in tensors:
        return tensors
    return {
        name if name.startswith("lm_head.") else f"model.{name}": tensor
        for name, tensor in tensors.items()
    }


def read_spec(config: Mapping[str, Any]) -> tuple[Family, ModelSpec]:
    """The family that config.json names, and its architecture."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelError(f"config.json: architectures is {named!r}; it must be a list of names")
    known = [name for name in named if name in FAMILIES]
    if not known:
        raise ModelError(
            f"config.json: architectures {named!r} are not implemented (implemented: "
            f"{', '.join(FAMILIES)})"
        )
    check_method(config)
    family = FAMILIES[known[0]]
    return family, family.spec_from_hf(config)


def _checkpoint_dtype(asked: str, table: list[Tensor], tensors: Mapping[str, Stored]) -> np.dtype:
    if asked != "auto":
        raise ModelError(f"--dtype {asked!r}: choose auto, {' or '.join(DTYPES)}")
    quantized = {row.path for row in table if row.scales}
    rows = (
        row for row in table if row.path[-1] not in ALWAYS_FLOAT32 and row.path not in quantized
    )
    stored = {tensors[row.name].dtype for row in rows}
    if any(not is_float(dtype) for dtype in stored):
        raise ModelError(
            f"the checkpoint stores weights as {', '.join(sorted(map(str, stored)))}; floating "
            f"point is needed"
        )
    return DTYPES["float32"] if any(dtype.itemsize > 2 for dtype in stored) else DTYPES["bfloat16"]


def _match(family: Family, spec: ModelSpec, tensors: Mapping[str, Stored]) -> list[Tensor]:
    """The weight-name table; ModelError when a tensor is left over or missing."""
    table = family.tensors(spec)
    wanted = {row.name for row in table}
    missing = sorted(wanted - set(tensors))
    ignored = (*family.ignored(spec), *(("lm_head.weight",) if spec.embeds else ()))
    extra = sorted(
        name
        for name in set(tensors) - wanted
        if not any(fnmatchcase(name, pattern) for pattern in ignored)
    )
    if spec.tied_head and "lm_head.weight" in extra:  # some publishers store the tied head twice
        if not np.array_equal(
            tensors["lm_head.weight"][:, :], tensors["model.embed_tokens.weight"][:, :]
        ):
            raise ModelError(
                "config.json ties the head to the embedding, but lm_head.weight differs from it"
            )
        extra.remove("lm_head.weight")
    extra = [name for name in extra if not _adds_nothing(name, wanted, tensors)]
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors: {some(missing)}")
    if extra:
        raise ModelError(
            f"the checkpoint has {len(extra)} tensors that config.json does not account for: "
            f"{some(extra)}"
        )
    return table


def _adds_nothing(name: str, wanted: set[str], tensors: Mapping[str, Stored]) -> bool:
    """Whether it is a bias of zeros: AutoGPTQ gives one to every layer that it quantizes."""
    layer = name.removesuffix(".bias")
    return layer != name and f"{layer}.weight" in wanted and not tensors[name][:].any()


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, spec: ModelSpec) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the tokenizer."""
    for source in (checkpoint.generation_config, checkpoint.config):
        ids = source.get("eos_token_id")
        if ids is not None:
            ids = tuple(ids) if isinstance(ids, list) else (ids,)
            if (
                not all(type(i) is int and 0 <= i < spec.vocab_size for i in ids)
                or len(ids) > MAX_EOS_IDS
            ):
                raise ModelError(
                    f"eos_token_id {ids!r}: at most {MAX_EOS_IDS} ids of the vocabulary (0 to "
                    f"{spec.vocab_size - 1})"
                )
            return ids
    return tokenizer.eos_ids
