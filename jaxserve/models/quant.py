"""Quantized weights: schemes of 8 and 4 bits, and which parameters they apply to.

A quantized weight is small numbers with float32 scales: one scale per output channel, or one for
each `group` of numbers that are summed up in an output. Activations keep their precision except in
the schemes that begin with w8a8, which also round the activations that meet such a weight
(matmul_w8a8.py). Parameters that CONTRACTED does not name are never quantized: embeddings (also as
a tied head), norms, biases, and the routers of experts.

Which axes a scale has follows from the weight's declaration and from CONTRACTED. layers.einsum
hides quantization from the rest of the decoder; quantize.py rounds weights while they are read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import tree_map_with_path

from jaxserve.errors import ModelError
from jaxserve.flag_errors import flag_text
from jaxserve.models.precision import AS_STORED, HEAD, check_form
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.quantized_matmul.api import GROUPS, Demand, QuantizedMatmul
from jaxserve.sharding.params import ParamSpec, is_param_spec

# Names of parameters that are quantized -> the letters that their product sums over. Not here: two
# matrices of latent attention that are applied head by head, the rates of layers with a state, and
# routers.
CONTRACTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "qkv": "D",
        "o": "NHw",
        "gate_up": "D",
        "down": "F",
        "compress": "D",
        "query": "Dy",
        "attn_gate": "D",
        "state_in": "D",
        "state_out": "krv",
        "conv_in": "D",
        "conv_out": "kf",
        "head": "D",
    }
)
W8A8: Final = "w8a8-"
SPREAD: Final = 6  # standard deviations of a random weight that fit into its range of numbers


@dataclass(frozen=True)
class QuantScheme:
    """How weights are quantized."""

    name: str
    dtype: np.dtype  # of the numbers
    largest: float  # largest number that is used
    group: int | None = None  # numbers that share a scale; None: all numbers of an output channel
    head: bool = False  # whether the head is quantized too
    activations: bool = False  # whether activations are rounded to the dtype as well (w8a8)

    def __str__(self) -> str:
        return self.name + HEAD if self.head else self.name

    @property
    def weights_alone(self) -> str:
        """Name of the scheme that leaves activations as they are, as --weights takes it."""
        return str(self).removeprefix(W8A8)

    @property
    def numbers(self) -> str:
        """Name of the kind of numbers for errors and chip figures, such as int8."""
        return self.name.removeprefix(W8A8)

    def flag_error(self, problem: str) -> ModelError:
        """Return the error of a model or of chips that do not allow this scheme."""
        return ModelError(flag_text("--weights", self, problem))


INT8: Final = QuantScheme("int8", np.dtype(np.int8), 127)
FP8: Final = QuantScheme("fp8", np.dtype(jnp.float8_e4m3fn), 448)
INT4: Final = QuantScheme("int4", np.dtype(jnp.int4), 7)
_ALL: Final = (
    *(INT8, FP8, INT4),
    *(replace(INT4, name=f"int4-g{group}", group=group) for group in GROUPS),
    *(replace(scheme, name=W8A8 + scheme.name, activations=True) for scheme in (INT8, FP8)),
)
SCHEMES: Final[Mapping[str, QuantScheme]] = MappingProxyType(
    {scheme.name: scheme for scheme in _ALL}
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A quantized weight, or its declaration: then values and scales are ParamSpecs."""

    values: Any  # in the weight's shape
    # float32, with one dimension of length n in place of the dimensions that are summed over; n is
    # the number of groups, in the order of the numbers, and 1 without groups.
    scales: Any
    scheme: QuantScheme = field(metadata={"static": True})
    # Kernel that multiplies the weight, inside a step; None: XLA multiplies it.
    kernel: "KernelBinding | None" = field(default=None, metadata={"static": True})


@dataclass(frozen=True)
class KernelBinding:
    """The kernel that multiplies a weight, and how the weight lies on the mesh."""

    axes: str  # of the weight's values, as declared
    mesh: Mesh
    kernel: QuantizedMatmul
    demand: Demand  # what one shard asks of the kernel


def is_quantized(leaf: object) -> bool:
    return isinstance(leaf, Quantized)


def parse_scheme(asked: str) -> QuantScheme | None:
    """Return the scheme that --weights names, None for auto; ModelError for an unknown name."""
    check_form(asked)
    if asked == AS_STORED:
        return None
    return replace(SCHEMES[asked.removesuffix(HEAD)], head=asked.endswith(HEAD))


def scheme_in(params: Any) -> QuantScheme | None:
    """Return the scheme of parameters, of declarations or of abstract values; None without one.

    All quantized parameters of a model have the same scheme.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    return next((leaf.scheme for leaf in leaves if is_quantized(leaf)), None)


def quantized_specs(spec: ModelSpec, specs: dict, scheme: QuantScheme) -> dict:
    """Return declarations with a Quantized for each weight that the scheme quantizes.

    ModelError where the model cannot be quantized so.
    """
    if spec.mixture and scheme.activations:
        problem = f"it is not built in for mixtures of experts (choose {scheme.weights_alone})"
        raise scheme.flag_error(problem)
    if scheme.head and not spec.has_head:
        raise scheme.flag_error(f"this model has no head beside its embedding (leave {HEAD} out)")

    def declare(path: tuple[Any, ...], param: ParamSpec) -> ParamSpec | Quantized:
        name = path[-1].key
        if name not in CONTRACTED or (name == "head" and not scheme.head):
            return param
        return _declare(name, param, scheme)

    return tree_map_with_path(declare, specs, is_leaf=is_param_spec)


def _declare(name: str, param: ParamSpec, scheme: QuantScheme) -> Quantized:
    at = contracted(name, param.axes)
    summed = math.prod(param.shape[at])
    _check_sum(name, summed, scheme)
    axes = scale_axes(name, param.axes, scheme)
    groups = summed // scheme.group if scheme.group else 1
    shape = (*param.shape[: at.start], groups, *param.shape[at.stop :])
    values = replace(
        param,
        dtype=jnp.dtype(scheme.dtype),
        std=scheme.largest / SPREAD,
        summed=param.axes[at] if scheme.group else "",
    )
    # Random numbers times this scale have the spread that the weight would have.
    mean = param.std * SPREAD / scheme.largest
    scales = ParamSpec(axes, shape, jnp.dtype(jnp.float32), mean=mean, std=0.0)
    return Quantized(values, scales, scheme)


def _check_sum(name: str, summed: int, scheme: QuantScheme) -> None:
    """Raise ModelError unless groups divide the sum and int32 holds it."""
    if scheme.group and summed % scheme.group:
        fitting = [str(size) for size in GROUPS if summed % size == 0]
        hint = f"groups of {' or '.join(fitting)} do" if fitting else "choose one without groups"
        problem = f"{name} sums {summed} numbers, no multiple of {scheme.group} ({hint})"
        raise scheme.flag_error(problem)
    is_int8_product = scheme.activations and scheme.numbers == INT8.name
    if is_int8_product and summed * INT8.largest**2 >= 2**31:
        problem = f"{name} sums {summed} products, more than int32 holds (choose int8)"
        raise scheme.flag_error(problem)


def scale_axes(name: str, axes: str, scheme: QuantScheme) -> str:
    """Return the axes of the scales of a weight with these axes."""
    at = contracted(name, axes)
    # Groups are split over the mesh as numbers are.
    letter = axes[at.start] if scheme.group else "g"
    return axes[: at.start] + letter + axes[at.stop :]


def contracted(name: str, axes: str) -> slice:
    """Return which dimensions of a weight its product sums over; they are neighbours."""
    found = [i for i, letter in enumerate(axes) if letter in CONTRACTED[name]]
    return slice(found[0], found[-1] + 1)
