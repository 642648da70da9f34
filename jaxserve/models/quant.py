"""Weights in 8 or 4 bits: which, what their numbers become, and how a shard is quantized while it
is read.

A quantized weight is small numbers and float32 scales: an output channel has one, or one for each
`group` numbers that are summed up in it. Rounding is to nearest, against the largest number that
shares the scale. Activations keep their precision but in the forms that begin with w8a8, which
round them too where they meet such a weight (low_precision_product.py); so does what CONTRACTED
does not name: embeddings (a head that is tied to one, too), norms, biases, the routers of experts.
Which axes a scale has follows from a weight's declaration and from CONTRACTED; layers.einsum hides
it all.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import tree_map_with_path

from jaxserve.errors import ModelError
from jaxserve.models.spec import ModelSpec
from pallas_kernels.quantized_matmul.api import GROUPS, Demand, QuantizedMatmul
from sharding.params import ParamSpec, is_param_spec

# What is quantized -> the letters that its product sums over. Of a latent attention's two matrices
# that are applied head by head, of routers and of whatever else is not here, nothing is.
CONTRACTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "qkv": "D",
        "o": "NHw",
        "gate_up": "D",
        "down": "F",
        "compress": "D",
        "query": "Dy",
        "head": "D",
    }
)
HEAD: Final = "+head"
PIECE: Final = 2**24  # numbers of a weight that are in memory as float32 at a time
SPREAD: Final = 6  # standard deviations of a random weight that its numbers have room for

Ranges = tuple[range, ...]  # of every dimension, what is asked for


@dataclass(frozen=True)
class Form:
    """What numbers become. largest: the largest of them. group: numbers with one scale; None: a
    whole sum's.

    head: whether the head is quantized too. activations: whether what is multiplied with them is.
    """

    name: str
    dtype: np.dtype
    largest: float
    group: int | None = None
    head: bool = False
    activations: bool = False

    def __str__(self) -> str:
        return self.name + HEAD * self.head

    @property
    def weights_alone(self) -> str:
        """The same without the activations, as --weights names it."""
        return str(self).removeprefix(W8A8)

    @property
    def numbers(self) -> str:
        """As errors name them."""
        return self.name.removeprefix(W8A8)


W8A8: Final = "w8a8-"
INT8: Final = Form("int8", np.dtype(np.int8), 127)
FP8: Final = Form("fp8", np.dtype(jnp.float8_e4m3fn), 448)
INT4: Final = Form("int4", np.dtype(jnp.int4), 7)
FORMS: Final[Mapping[str, Form]] = MappingProxyType(
    {
        form.name: form
        for form in (
            *(INT8, FP8, INT4),
            *(replace(INT4, name=f"int4-g{group}", group=group) for group in GROUPS),
            *(replace(form, name=W8A8 + form.name, activations=True) for form in (INT8, FP8)),
        )
    }
)


@flax.struct.dataclass
class Quantized:
    """A weight, or its declaration: then values and scales are ParamSpecs.

    values: in the weight's shape. scales: float32, with one dimension of length n in place of those
    that are summed over; n counts the groups, in the order of those numbers, and is 1 without
    groups. placed: within a step, of a weight whose product is a kernel's; None: XLA's.
    """

    values: Any
    scales: Any
    form: Form = flax.struct.field(pytree_node=False)
    placed: "Placed | None" = flax.struct.field(pytree_node=False, default=None)


@dataclass(frozen=True)
class Placed:
    """Where a weight lies and what multiplies it. axes: of its values, as declared. demand: of one
    shard.
    """

    axes: str
    mesh: Mesh
    kernel: QuantizedMatmul
    demand: Demand


def is_quantized(leaf: object) -> bool:
    return isinstance(leaf, Quantized)


def form_of(asked: str) -> Form | None:
    """--weights; None for auto. ModelError for what there is not."""
    if asked == "auto":
        return None
    name = asked.removesuffix(HEAD)
    if name not in FORMS:
        raise ModelError(
            f"--weights {asked}: choose auto, {', '.join(FORMS)} ({HEAD} behind it: the head as "
            f"well)"
        )
    return replace(FORMS[name], head=asked.endswith(HEAD))


def form_in(params: Any) -> Form | None:
    """Of parameters, or of their declarations or abstract values."""
    found = (
        leaf.form for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)
    )
    return next(found, None)


# ---- declared


def quantized_specs(spec: ModelSpec, specs: dict, form: Form) -> dict:
    """Declarations with a Quantized for each weight that is quantized. ModelError where that cannot
    be done.
    """
    if spec.mixture and form.activations:
        raise ModelError(
            f"--weights {form} is not built in for mixtures of experts (choose "
            f"{form.weights_alone})"
        )
    if form.head and not spec.has_head:
        raise ModelError(
            f"--weights {form}: this model has no head beside its embedding (leave {HEAD} out)"
        )

    def declare(path: tuple[Any, ...], param: ParamSpec) -> ParamSpec | Quantized:
        name = path[-1].key
        return (
            _declare(name, param, form)
            if name in CONTRACTED and (name != "head" or form.head)
            else param
        )

    return tree_map_with_path(declare, specs, is_leaf=is_param_spec)


def _declare(name: str, param: ParamSpec, form: Form) -> Quantized:
    at = contracted(name, param.axes)
    summed = math.prod(param.shape[at])
    if form.group and summed % form.group:
        fitting = [str(size) for size in GROUPS if summed % size == 0]
        hint = f"groups of {' or '.join(fitting)} do" if fitting else "choose one without groups"
        raise ModelError(
            f"--weights {form}: {name} sums {summed} numbers, no multiple of {form.group} ({hint})"
        )
    if form.activations and form.numbers == INT8.name and summed * INT8.largest**2 >= 2**31:
        raise ModelError(
            f"--weights {form}: {name} sums {summed} products, more than int32 holds (choose int8)"
        )
    axes = scale_axes(name, param.axes, form)
    shape = (*param.shape[: at.start], summed // (form.group or summed), *param.shape[at.stop :])
    summed_up = param.axes[at] if form.group else ""
    values = replace(
        param, dtype=jnp.dtype(form.dtype), std=form.largest / SPREAD, summed=summed_up
    )
    scales = ParamSpec(
        axes, shape, jnp.dtype(jnp.float32), mean=param.std * SPREAD / form.largest, std=0.0
    )
    return Quantized(values, scales, form)


def scale_axes(name: str, axes: str, form: Form) -> str:
    """Of the scales of a weight with these axes."""
    at = contracted(name, axes)
    letter = axes[at.start] if form.group else "g"  # groups are split as their numbers are
    return axes[: at.start] + letter + axes[at.stop :]


def contracted(name: str, axes: str) -> slice:
    """Which dimensions of a weight its product sums over; they are neighbours."""
    found = [i for i, letter in enumerate(axes) if letter in CONTRACTED[name]]
    return slice(found[0], found[-1] + 1)


# ---- rounded


def grouped(weight: Any, at: slice, groups: int) -> Any:
    """Dimensions `at` as two, [groups, numbers of each]; of NumPy's arrays and jax's."""
    return weight.reshape(*weight.shape[: at.start], groups, -1, *weight.shape[at.stop :])


def find_scales(weight: np.ndarray, at: slice, groups: int, largest: float) -> np.ndarray:
    """Of a float32 weight, all of what shares a scale in it: 1 where there is nothing but zeros."""
    scales = np.abs(grouped(weight, at, groups)).max(axis=at.start + 1) / np.float32(largest)
    return np.where(scales < np.finfo(np.float32).tiny, np.float32(1), scales)


def round_to(dtype: np.dtype, weight: np.ndarray, at: slice, scales: np.ndarray) -> np.ndarray:
    """The nearest numbers of the dtype to a float32 weight divided by its scales."""
    numbers = grouped(weight, at, scales.shape[at.start]) / np.expand_dims(scales, at.start + 1)
    if jnp.issubdtype(dtype, jnp.integer):
        np.rint(numbers, out=numbers)
    return numbers.astype(dtype).reshape(weight.shape)


class Rounding:
    """Quantizes one weight shard by shard, reading it in pieces; what shards share is found once.

    read: gives float32 of the ranges asked for, in the weight's own dimensions. A shard of what is
    summed over (N of an `o`, F of a `down`) has the scales of the whole sum, for which all of it is
    read: so that shards are, bit for bit, parts of what one device would hold.
    """

    def __init__(self, name: str, param: Quantized, read: Callable[[Ranges], np.ndarray]):
        self._param, self._read, self._at = param, read, contracted(name, param.values.axes)
        self.scales = cache(self._scales)

    def values(self, asked: Ranges) -> np.ndarray:
        """Of these ranges of the weight."""
        at, inner, form = self._at, self._inner, self._param.form
        summed, numbers = asked[at.start], np.empty(_lengths(asked), form.dtype)
        groups = range(1)
        if form.group:
            groups = range(summed.start * inner // form.group, summed.stop * inner // form.group)
        scales = self.scales((*asked[: at.start], groups, *asked[at.stop :]))
        for piece, place in _pieces(asked, at):
            shared = (*place[: at.start], slice(None), *place[at.stop :])
            numbers[place] = round_to(form.dtype, self._read(piece), at, scales[shared])
        return numbers

    def _scales(self, asked: Ranges) -> np.ndarray:
        """Of these ranges of the scales, float32."""
        at, inner, form = self._at, self._inner, self._param.form
        groups, whole = asked[at.start], [range(size) for size in self._param.values.shape[at]]
        if form.group:
            whole[0] = range(groups.start * form.group // inner, groups.stop * form.group // inner)
        found = np.empty(_lengths(asked), np.float32)
        for piece, place in _pieces((*asked[: at.start], *whole, *asked[at.start + 1 :]), at):
            shared = (*place[: at.start], slice(None), *place[at.stop :])
            found[shared] = find_scales(self._read(piece), at, len(groups), form.largest)
        return found

    @property
    def _inner(self) -> int:
        """Numbers that are summed over for each entry of the first dimension that is."""
        return math.prod(self._param.values.shape[self._at][1:])


def _lengths(ranges: Ranges) -> list[int]:
    return [len(part) for part in ranges]


def _pieces(asked: Ranges, at: slice, first: int = 0) -> Iterator[tuple[Ranges, tuple[slice, ...]]]:
    """The ranges cut along what is not summed over, from the dimension `first` on, and where each
    piece lies in them.

    The outermost is cut first, so that a piece is of one expert or of few: each may have tensors of
    its own.
    """
    size = math.prod(_lengths(asked))
    if size <= PIECE or first == len(asked):
        yield asked, (slice(None),) * len(asked)
    elif at.start <= first < at.stop:
        yield from _pieces(asked, at, first + 1)
    else:
        step = max(PIECE * len(asked[first]) // size, 1)
        for begin in range(0, len(asked[first]), step):
            here = slice(begin, begin + step)
            for piece, place in _pieces(
                (*asked[:first], asked[first][here], *asked[first + 1 :]), at, first + 1
            ):
                yield piece, (*place[:first], here, *place[first + 1 :])
