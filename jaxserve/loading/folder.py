"""Loads a checkpoint folder as a model on a mesh: configuration, tokenizer and parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import HFCheckpoint, note_on_weights
from jaxserve.checkpoints.orbax_store import AS_STORED
from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.errors import ModelError
from jaxserve.loading.digests import WeightDigests
from jaxserve.loading.load_plan import plan_load
from jaxserve.loading.match import note_on_towers
from jaxserve.loading.parameters import Progress, load_params
from jaxserve.loading.product import choose_product
from jaxserve.loading.product_rows import measured
from jaxserve.loading.spec import ModelCheckpoint, open_checkpoint, read_architecture
from jaxserve.loading.token_ids import TokenIds, read_token_ids
from jaxserve.models.families.weight_table import Stored
from jaxserve.models.precision import AUTO, XLA
from jaxserve.models.spec import ModelSpec
from jaxserve.models.summed_last import product_in
from jaxserve.tokenizer import Tokenizer, TokenizerError, load_tokenizer


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint."""

    spec: ModelSpec  # architecture as these devices hold it, see ModelSpec.on
    params: dict
    mesh: Mesh
    tokens: TokenIds
    # Hash of spec, dtype, weights and folder, which is part of the identity of cached pages.
    fingerprint: str
    parameters: int  # number in the checkpoint, without the copies of kv heads
    weights: str  # quantization scheme as --weights names it, or auto
    product: CpuProduct | None  # how a CPU multiplies by the weights; None where XLA does
    # Lines on weights in the folder that were not read, and on a shorter context.
    notes: tuple[str, ...] = ()
    generation_config: Mapping[str, Any] = field(default_factory=dict)  # contents of that file

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which has ids of the model alone."""
        return self.tokens.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.tokens.eos_ids

    @property
    def product_text(self) -> str:
        """How few and many rows are multiplied by the weights, in words."""
        if self.product is None:
            return XLA
        numbers = "int8" if self.weights.startswith("w8a8-int8") else self.dtype
        rows = getattr(self.product.max_rows, numbers)
        origin = ", as measured" if self.product.is_measured else ""
        return f"{self.product.instructions} up to {rows} rows{origin}, more by {XLA}"

    @property
    def dtype(self) -> str:
        """The type that the model computes in."""
        return str(self.params["embed"].dtype)


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint whose weights have not been read yet."""

    folder: Path
    source: ModelCheckpoint
    tokens: TokenIds
    notes: tuple[str, ...]  # lines on weights that will not be read, and on a shorter context

    @property
    def spec(self) -> ModelSpec:
        """Architecture of the checkpoint."""
        return self.source.spec


def open_model(folder: Path, tensors: Mapping[str, Stored] | None = None) -> ModelFiles:
    """Open a Hugging Face folder, or an Orbax folder of jaxserve convert.

    Args:
        tensors: Tensors by their names, instead of those in the folder.

    Raises:
        ModelError: The architecture is not supported (one line, which also says if the tokenizer
            cannot be read).
        CheckpointError: A file is missing or damaged (one line).
        TokenizerError: The tokenizer's files cannot be read, or are those of another model.
    """
    checkpoint = open_checkpoint(folder, tensors)
    try:
        source = read_architecture(checkpoint)
    except (ModelError, CheckpointError) as error:
        problem = _problem_of_tokenizer(folder)
        if problem is None:
            raise
        raise ModelError(f"{error}; and {problem}") from error
    tokens = read_token_ids(folder, checkpoint, source.spec.vocab_size)
    notes = [_note_on_context(source.spec)]
    if isinstance(checkpoint, HFCheckpoint):
        notes.append(note_on_towers(source.family, checkpoint.tensors))
        notes.append(note_on_weights(folder) if tensors is None else None)
    return ModelFiles(folder, source, tokens, tuple(note for note in notes if note))


def _problem_of_tokenizer(folder: Path) -> str | None:
    """Return why the tokenizer cannot be read; None for one that can."""
    try:
        load_tokenizer(folder)
    except TokenizerError as error:
        return str(error)
    return None


def _note_on_context(spec: ModelSpec) -> str | None:
    """Return a line on a context that ends before max_position_embeddings; None for others."""
    if not spec.context_note:
        return None
    return f"the context is at most {spec.max_positions} tokens: {spec.context_note}"


def load(
    files: ModelFiles,
    mesh: Mesh,
    dtype: str = "auto",
    progress: Progress = lambda done, total, what: None,
    weights: str = "auto",
    digests: WeightDigests | None = None,
    product: str = AUTO,
    measures: bool = False,
) -> Model:
    """Load a checkpoint onto the mesh.

    Other arguments, and errors, are as in `plan_load`, `load_params` and `choose_product`.

    Args:
        measures: Whether product "auto" measures how many rows the CPU's kernel multiplies.
    """
    chosen = choose_product(product, mesh)
    plan = plan_load(files.source, mesh, dtype, weights, chosen)
    if measures and product == AUTO and chosen:
        plan = plan.multiplied_by(measured(plan, chosen))
    kept = str(plan.scheme or AS_STORED)
    identity = repr((plan.held, dtype, kept, str(files.folder.resolve())))
    return Model(
        plan.held,
        load_params(plan, progress, digests=digests),
        mesh,
        files.tokens,
        sha256(identity.encode()).hexdigest(),
        plan.size,
        kept,
        product_in(plan.declared),
        files.notes,
        files.source.checkpoint.generation_config,
    )
