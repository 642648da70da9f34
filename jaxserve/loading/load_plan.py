"""Plan of a load: which parameters a mesh holds, and the stored tensors that each consists of.

It is made before any parameter is read. Of the numbers, only a stored head that is tied and biases
that may be zero are looked at.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoints.orbax_store import AS_STORED, OrbaxCheckpoint
from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.errors import ModelError
from jaxserve.flag_errors import flag_text
from jaxserve.loading.match import match_tensors
from jaxserve.loading.orbax_layout import match_parameters
from jaxserve.loading.spec import ModelCheckpoint
from jaxserve.models.declarations import Declaration, declarations, is_declaration
from jaxserve.models.decoder import param_specs, stored_float32
from jaxserve.models.families.weight_table import ParamPath, Stored, Tensor, by_parameter
from jaxserve.models.matmul_w8a8 import check_chip
from jaxserve.models.precision import check_dtype
from jaxserve.models.quant import Quantized, QuantScheme, parse_scheme
from jaxserve.models.spec import ModelSpec
from jaxserve.models.summed_last import SummedLast, is_summed_last
from jaxserve.sharding.params import ParamSpec, is_param_spec

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is loaded."""

    path: ParamPath
    declared: Declaration  # on the mesh
    rows: Sequence[Tensor]  # table rows of the stored tensors that the parameter consists of
    # Table rows of stored scales; none if there are no scales, or they are computed while the
    # weight is quantized.
    scale_rows: Sequence[Tensor]
    published: Sequence[Tensor]  # rows of the family's weight table, under plain names

    @property
    def weight(self) -> ParamSpec | Quantized:
        """Declaration of the parameter's numbers, and of the scales of a quantized one."""
        return self.declared.weight if isinstance(self.declared, SummedLast) else self.declared

    @property
    def values(self) -> ParamSpec:
        """Declaration of the parameter's numbers, without the scales of a quantized one."""
        return self.weight.values if isinstance(self.weight, Quantized) else self.weight

    @property
    def nbytes(self) -> int:
        leaves = jax.tree.leaves(self.declared, is_leaf=is_param_spec)
        return sum(leaf.nbytes for leaf in leaves)


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """How the parameters of a checkpoint are loaded onto a mesh."""

    mesh: Mesh
    # Architecture as the devices hold it, which may have copies of kv heads (ModelSpec.on).
    held: ModelSpec
    scheme: QuantScheme | None  # scheme of quantized weights
    declared: dict  # tree of the declarations
    parameters: Sequence[ParameterPlan]  # leaves of `declared`, in their order
    tensors: Mapping[str, Stored]  # stored tensors, by the names in the rows of `parameters`

    def multiplied_by(self, product: CpuProduct) -> "LoadPlan":
        """Return the plan with another product for the weights that the CPU's kernel multiplies."""

        def changed(leaf: Declaration) -> Declaration:
            return replace(leaf, product=product) if is_summed_last(leaf) else leaf

        declared = jax.tree.map(changed, self.declared, is_leaf=is_declaration)
        parameters = [
            replace(parameter, declared=changed(parameter.declared))
            for parameter in self.parameters
        ]
        return replace(self, declared=declared, parameters=parameters)

    @property
    def size(self) -> int:
        """Numbers in the checkpoint's parameters, without the copies of kv heads."""
        spec = self.held.single
        return sum(
            _numbers(parameter.published, parameter.values.axes, spec)
            for parameter in self.parameters
        )


def choose_scheme(folder: Path, asked: str, stored: QuantScheme | None) -> QuantScheme | None:
    """Return the scheme to load: the one asked for of a folder in full precision, else the stored.

    ModelError for an unknown name, and where another scheme than the stored one is asked for:
    quantized weights are not quantized again.
    """
    if stored is None:
        return parse_scheme(asked)
    if asked not in (AS_STORED, str(stored)):
        problem = (
            f"{folder} has {stored} weights, which stay what they are (leave it out, or convert "
            f"their source)"
        )
        raise ModelError(flag_text("--weights", asked, problem))
    return stored


def plan_load(
    source: ModelCheckpoint,
    mesh: Mesh,
    dtype: str = "auto",
    weights: str = "auto",
    product: CpuProduct | None = None,
) -> LoadPlan:
    """Plan how a checkpoint is loaded onto a mesh.

    Args:
        dtype: float32, bfloat16, or auto, which keeps the checkpoint's precision: half precision
            becomes bfloat16, double becomes float32.
        weights: The name of a quantization scheme (models/quant.py) such as int8, or auto, which
            keeps weights as they are stored: in dtype unless they are quantized.
        product: How a CPU multiplies by the weights; None where XLA does.

    Raises:
        ModelError: The tensors do not fit the architecture, or the model, the checkpoint or the
            chips do not allow this dtype or scheme (one line).
        CheckpointError: A file is damaged or cannot be read, or quantized tensors and their scales
            do not fit each other (one line).
    """
    check_dtype(dtype)
    spec = source.spec
    held = spec.on(mesh.shape["tensor"])
    scheme = choose_scheme(source.checkpoint.folder, weights, source.scheme)
    check_chip(scheme, mesh)
    tensors = source.stored
    if isinstance(source.checkpoint, OrbaxCheckpoint):
        table = match_parameters(source, held)
    else:
        table = match_tensors(source.family, spec, tensors)
    kept = _dtype(dtype, table, tensors, spec)
    declared = param_specs(held, kept, scheme, product)
    parameters = _plan_parameters(declared, table, source.family.tensors(spec))
    for parameter in parameters:
        _check(parameter, held, tensors)
    return LoadPlan(mesh, held, scheme, declared, parameters, tensors)


def _dtype(
    asked: str, table: Sequence[Tensor], tensors: Mapping[str, Stored], spec: ModelSpec
) -> jnp.dtype:
    """Return the dtype of weights that are not quantized.

    Of auto it is float32 if any weight is stored wider than 16 bits, else bfloat16. Scales, and
    parameters that files have in float32 whatever the others are, say nothing about that.
    """
    if asked in DTYPES:
        return jnp.dtype(DTYPES[asked])
    apart = stored_float32(spec)
    weights = [row for row in table if not row.scales and row.path[-1] not in apart]
    wide = any(tensors[row.name].dtype.itemsize > 2 for row in weights)
    return jnp.dtype(DTYPES["float32" if wide else "bfloat16"])


def _plan_parameters(
    declared: dict, table: Sequence[Tensor], published_table: Sequence[Tensor]
) -> list[ParameterPlan]:
    leaves = declarations(declared)
    rows = by_parameter(table)
    published = by_parameter(published_table)
    undeclared = rows.keys() - {path for path, _ in leaves}
    if undeclared:
        names = ", ".join(sorted(map(str, undeclared)))
        raise ModelError(f"the weight table fills parameters that the model does not have: {names}")
    missing = [path for path, _ in leaves if path not in published]
    if missing:
        raise ModelError(f"the weight table has no row for {missing[0]}")
    plans = list[ParameterPlan]()
    for path, leaf in leaves:
        values = [row for row in rows.get(path, ()) if not row.scales]
        scales = [row for row in rows.get(path, ()) if row.scales]
        plans.append(ParameterPlan(path, leaf, values, scales, published[path]))
    return plans


def _check(parameter: ParameterPlan, held: ModelSpec, tensors: Mapping[str, Stored]) -> None:
    """Raise ModelError unless tensors of the right kind fill the whole parameter."""
    _check_filled(parameter.path, parameter.values, parameter.rows, held)
    if parameter.scale_rows and isinstance(parameter.weight, Quantized):
        _check_filled(parameter.path, parameter.weight.scales, parameter.scale_rows, held)
        return
    for row in parameter.rows:
        stored = tensors[row.name].dtype
        if not jnp.issubdtype(stored, jnp.floating) or stored.itemsize < 2:
            raise ModelError(f"tensor {row.name} is stored as {stored}; floating point is needed")


def _check_filled(
    path: ParamPath, param: ParamSpec, rows: Sequence[Tensor], held: ModelSpec
) -> None:
    wanted = math.prod(param.shape)
    filled = _numbers(rows, param.axes, held)
    if filled != wanted:
        raise ModelError(f"the weight table has {filled} of the {wanted} numbers of {path}")


def _numbers(rows: Sequence[Tensor], axes: str, spec: ModelSpec) -> int:
    """Return how many numbers of a parameter with these axes the tensors fill."""
    return sum(row.size(axes, row.sizes(spec)) for row in rows)
