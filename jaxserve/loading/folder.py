"""Loads a checkpoint folder as a model on a mesh: configuration, tokenizer and parameters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxserve.checkpoints.orbax_store import AS_STORED
from jaxserve.errors import ModelError
from jaxserve.loading.digests import WeightDigests
from jaxserve.loading.parameters import Progress, load_params
from jaxserve.loading.spec import Checkpoint, open_checkpoint, read_architecture
from jaxserve.models.decoder import param_specs
from jaxserve.models.families.weight_table import Stored
from jaxserve.models.quant import scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.request import MAX_EOS_IDS
from jaxserve.sharding.params import is_param_spec
from jaxserve.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint.

    spec: the architecture as these devices hold it, see ModelSpec.on. parameters: their number in
    the checkpoint, without the copies of kv heads. weights: the quantization scheme as --weights
    names it, or auto. fingerprint: a hash of spec, dtype, weights and folder, which is part of the
    identity of cached pages.
    """

    spec: ModelSpec
    params: dict
    mesh: Mesh
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    fingerprint: str
    parameters: int
    weights: str

    @property
    def dtype(self) -> str:
        """The type that the model computes in."""
        return str(self.params["embed"].dtype)


def load(
    folder: Path,
    mesh: Mesh,
    dtype: str = "auto",
    progress: Progress = lambda done, total, what: None,
    weights: str = "auto",
    tensors: Mapping[str, Stored] | None = None,
    digests: WeightDigests | None = None,
) -> Model:
    """Load a Hugging Face folder, or an Orbax folder of jaxserve convert, onto the mesh.

    Args:
        folder: The checkpoint folder.
        mesh: The mesh that the parameters are split over.
        dtype: float32, bfloat16, or auto, which keeps the checkpoint's precision: half precision
            becomes bfloat16, double becomes float32.
        progress: Called with the bytes done, the bytes in total, and the tensor that is read.
        weights: The name of a quantization scheme (models/quant.py) such as int8, or auto, which
            keeps weights as they are stored: in dtype unless they are quantized.
        tensors: Tensors by their names, instead of those in the folder.
        digests: Digests of the tensors to add up while they are read.

    Raises:
        ModelError: The architecture is not supported or the tensors do not fit it (one line).
        CheckpointError: A file is missing or damaged (one line).
    """
    checkpoint = open_checkpoint(folder, tensors)
    tokenizer = load_tokenizer(folder)
    _, spec = read_architecture(checkpoint)
    _check_vocabulary(folder, tokenizer, spec)
    eos_ids = _eos_ids(checkpoint, tokenizer, spec)
    params = load_params(checkpoint, mesh, dtype, progress, weights, digests=digests)
    held = spec.on(mesh.shape["tensor"])
    kept = str(scheme_in(params) or AS_STORED)
    fingerprint = sha256(repr((held, dtype, kept, str(folder.resolve()))).encode()).hexdigest()
    leaves = jax.tree.leaves(param_specs(spec, params["embed"].dtype), is_leaf=is_param_spec)
    parameters = sum(math.prod(leaf.shape) for leaf in leaves)
    return Model(held, params, mesh, tokenizer, eos_ids, fingerprint, parameters, kept)


def _check_vocabulary(folder: Path, tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Raise ModelError when the tokenizer has ordinary tokens beyond the model's vocabulary.

    Special and added tokens may lie beyond it: some publishers list tokens that the model never
    had, and a prompt that contains one is refused when it comes.
    """
    added = {*tokenizer.special_tokens.values(), *tokenizer.added_tokens.values()}
    if any(token not in added for token in range(spec.vocab_size, tokenizer.vocab_size)):
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary "
            f"{spec.vocab_size} "
            "(the files are not of one checkpoint)"
        )


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, spec: ModelSpec) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json, else config.json, else the tokenizer."""
    for source in (checkpoint.generation_config, checkpoint.config):
        ids = source.get("eos_token_id")
        if ids is None:
            continue
        ids = tuple(ids) if isinstance(ids, list) else (ids,)
        in_vocabulary = all(type(i) is int and 0 <= i < spec.vocab_size for i in ids)
        if not in_vocabulary or len(ids) > MAX_EOS_IDS:
            raise ModelError(
                f"eos_token_id {ids!r}: at most {MAX_EOS_IDS} ids of the vocabulary (0 to "
                f"{spec.vocab_size - 1})"
            )
        return ids
    return tokenizer.eos_ids
