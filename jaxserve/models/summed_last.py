"""Weights in the order of checkpoints, for a CPU's kernel of products with few rows.

A weight is declared with the dimensions that its product sums over before the others (DCF), the
order in which XLA multiplies best on most devices. The kernel of jaxserve.cpu_kernels reads the
numbers of one output after the other (CFD), which is also how checkpoints have them.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_map_with_path
from jaxtyping import Array, Float

from jaxserve.cpu_kernels.products import CpuProduct, multiply
from jaxserve.models.matmul import contract
from jaxserve.models.matmul_w8a8 import w8a8_matmul
from jaxserve.models.quant import CONTRACTED, Quantized, contracted
from jaxserve.sharding.params import ParamSpec, is_param_spec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SummedLast:
    """A weight whose summed dimensions lie last, or its declaration.

    Only weights in full precision and those of w8a8-int8 are held so.
    """

    weight: Any  # array or Quantized of shape [*N, *K], or a declaration of one
    summed: int = field(metadata={"static": True})  # number of the dimensions K
    product: CpuProduct = field(metadata={"static": True})  # how it is multiplied


def is_summed_last(leaf: object) -> bool:
    return isinstance(leaf, SummedLast)


def product_in(params: Any) -> CpuProduct | None:
    """Return how parameters, declarations or abstract values are multiplied; None if by XLA."""
    leaves = jax.tree.leaves(params, is_leaf=is_summed_last)
    return next((leaf.product for leaf in leaves if is_summed_last(leaf)), None)


def summed_last_specs(specs: dict, product: CpuProduct) -> dict:
    """Return declarations with a SummedLast for each weight that the kernel can multiply.

    Experts keep their order, as do the dense weights beside them, weights whose numbers are
    widened before a product, and those of fp8.

    Args:
        specs: Declarations, as decoder.param_specs gives them.
    """

    def declare(path: tuple[Any, ...], leaf: Any) -> Any:
        name = str(path[-1].key)
        is_in_block = len(path) > 3  # "layers", the layer, "experts" or "shared", the name
        if name not in CONTRACTED or is_in_block:
            return leaf
        if isinstance(leaf, ParamSpec):
            at = contracted(name, leaf.axes)
            return SummedLast(_with_last(leaf, at), at.stop - at.start, product)
        if not (leaf.scheme.activations and leaf.values.dtype == jnp.int8):
            return leaf
        at = contracted(name, leaf.values.axes)
        turned = replace(
            leaf,
            values=_with_last(leaf.values, at),
            scales=_with_last(leaf.scales, slice(at.start, at.start + 1)),
        )
        return SummedLast(turned, at.stop - at.start, product)

    def is_leaf(leaf: object) -> bool:
        return is_param_spec(leaf) or isinstance(leaf, Quantized)

    return tree_map_with_path(declare, specs, is_leaf=is_leaf)


def _with_last(param: ParamSpec, at: slice) -> ParamSpec:
    """Return a declaration whose dimensions `at` come behind the others."""
    axes = param.axes[: at.start] + param.axes[at.stop :] + param.axes[at]
    shape = param.shape[: at.start] + param.shape[at.stop :] + param.shape[at]
    return replace(param, axes=axes, shape=shape)


def summed_last_matmul(x: Float[Array, "T K"], weight: SummedLast) -> Float[Array, "T *N"]:
    """Contract activations with a weight; float32.

    Up to `max_rows` of the weight's product tokens are multiplied by the kernel, more of them by
    XLA.
    """
    if isinstance(weight.weight, Quantized):
        *columns, _ = weight.weight.scales.shape
        flat = replace(
            weight.weight,
            values=_flatten(weight.weight.values, weight.summed),
            scales=weight.weight.scales.reshape(-1, 1),
        )
        found = w8a8_matmul("TK,MK->TM", x, flat, partial(_multiply, product=weight.product))
    else:
        columns = weight.weight.shape[: -weight.summed]
        flat = _flatten(weight.weight, weight.summed)
        found = _multiply("TK,MK->TM", x, flat, weight.product)
    return found.reshape(len(x), *columns)


def _flatten(weight: Array, summed: int) -> Array:
    """Join the columns of a weight, and the dimensions that are summed over."""
    return weight.reshape(-1, math.prod(weight.shape[-summed:]))


def _multiply(subscripts: str, x: Array, weight: Array, product: CpuProduct) -> Array:
    """Multiply by the kernel or, where XLA is faster, by XLA; int32 for int8, else float32."""
    if len(x) <= getattr(product.max_rows, x.dtype.name):
        return multiply(x, weight, product.instructions)
    return contract(subscripts, x, weight)
