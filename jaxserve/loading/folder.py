"""Loads a checkpoint folder as a model on a mesh: configuration, tokenizer and parameters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.checkpoints.hf import HFCheckpoint, note_on_weights
from jaxserve.checkpoints.orbax_store import AS_STORED
from jaxserve.loading.digests import WeightDigests
from jaxserve.loading.parameters import Progress, load_params
from jaxserve.loading.spec import Checkpoint, open_checkpoint, read_architecture
from jaxserve.loading.token_ids import TokenIds, read_token_ids
from jaxserve.models.decoder import param_specs
from jaxserve.models.families.weight_table import Stored
from jaxserve.models.quant import scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.params import is_param_spec
from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint.

    spec: the architecture as these devices hold it, see ModelSpec.on. parameters: their number in
    the checkpoint, without the copies of kv heads. weights: the quantization scheme as --weights
    names it, or auto. fingerprint: a hash of spec, dtype, weights and folder, which is part of the
    identity of cached pages. weight_note: line on weights in the folder that were not read.
    generation_config: contents of that file.
    """

    spec: ModelSpec
    params: dict
    mesh: Mesh
    tokens: TokenIds
    fingerprint: str
    parameters: int
    weights: str
    weight_note: str | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which has ids of the model alone."""
        return self.tokens.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.tokens.eos_ids

    @property
    def dtype(self) -> str:
        """The type that the model computes in."""
        return str(self.params["embed"].dtype)


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint whose weights have not been read yet.

    note: line on weights in the folder that will not be read.
    """

    folder: Path
    checkpoint: Checkpoint
    spec: ModelSpec
    tokens: TokenIds
    note: str | None


def open_model(folder: Path, tensors: Mapping[str, Stored] | None = None) -> ModelFiles:
    """Open a Hugging Face folder, or an Orbax folder of jaxserve convert.

    Args:
        folder: The checkpoint folder.
        tensors: Tensors by their names, instead of those in the folder.

    Raises:
        ModelError: The architecture is not supported (one line).
        CheckpointError: A file is missing or damaged (one line).
        TokenizerError: The tokenizer's files cannot be read, or are those of another model.
    """
    checkpoint = open_checkpoint(folder, tensors)
    _, spec = read_architecture(checkpoint)
    tokens = read_token_ids(folder, checkpoint, spec.vocab_size)
    from_hf = tensors is None and isinstance(checkpoint, HFCheckpoint)
    note = note_on_weights(folder) if from_hf else None
    return ModelFiles(folder, checkpoint, spec, tokens, note)


def load(
    files: ModelFiles,
    mesh: Mesh,
    dtype: str = "auto",
    progress: Progress = lambda done, total, what: None,
    weights: str = "auto",
    digests: WeightDigests | None = None,
) -> Model:
    """Load a checkpoint onto the mesh.

    Args:
        files: The open checkpoint.
        mesh: The mesh that the parameters are split over.
        dtype: float32, bfloat16, or auto, which keeps the checkpoint's precision: half precision
            becomes bfloat16, double becomes float32.
        progress: Called with the bytes done, the bytes in total, and the tensor that is read.
        weights: The name of a quantization scheme (models/quant.py) such as int8, or auto, which
            keeps weights as they are stored: in dtype unless they are quantized.
        digests: Digests of the tensors to add up while they are read.

    Raises:
        ModelError: The tensors do not fit the architecture (one line).
        CheckpointError: A file is missing or damaged (one line).
    """
    spec = files.spec
    params = load_params(files.checkpoint, mesh, dtype, progress, weights, digests=digests)
    held = spec.on(mesh.shape["tensor"])
    kept = str(scheme_in(params) or AS_STORED)
    fingerprint = sha256(
        repr((held, dtype, kept, str(files.folder.resolve()))).encode()
    ).hexdigest()
    leaves = jax.tree.leaves(param_specs(spec, params["embed"].dtype), is_leaf=is_param_spec)
    parameters = sum(math.prod(leaf.shape) for leaf in leaves)
    return Model(
        held,
        params,
        mesh,
        files.tokens,
        fingerprint,
        parameters,
        kept,
        files.note,
        files.checkpoint.generation_config,
    )
