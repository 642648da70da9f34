"""compressed-tensors, the form of llm-compressor: integers and FP8 with scales per tensor, channel,
group or block.

X.weight [O, I] in eight bits, or X.weight_packed int32 [O, I * bits / 32] with X.weight_shape, and
X.weight_scale; if quantization is not symmetric X.weight_zero_point, packed like the weight but
along the outputs. Which weights are quantized is seen from their scales; of several schemes,
`targets` say whose is whose.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.blocks import (
    FLOAT8,
    BlockScaled,
    Matrix,
    block_size,
    check_groups,
    check_scales,
    check_zeros,
    share_of_each,
)
from checkpoints.quantized.fields import Fields
from checkpoints.quantized.modules import Parts, by_module, check_complete
from checkpoints.quantized.packed import packed

log = logging.getLogger(__name__)

ZEROS, ORDER = "weight_zero_point", "weight_g_idx"
WEIGHT: Final = ("weight", "weight_packed", "weight_shape", "weight_scale", ZEROS, ORDER)
# Of activations and pages, which stay in full precision here.
ACTIVATIONS: Final = tuple(
    f"{what}_{part}" for what in "input output q k v".split() for part in ("scale", "zero_point")
)
PACKED, PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")
MIXED: Final = "mixed-precision"
INT8: Final = np.dtype(np.int8)
ARGUMENTS: Final = (
    "num_bits type symmetric group_size strategy block_structure dynamic actorder observer "
    "observer_kwargs "
    "scale_dtype zp_dtype"
).split()
MOST_REPEATS = 4  # in a pattern: how long it takes grows with their power of a name's length


@dataclass(frozen=True)
class Scheme:
    """How the weights are stored that `targets` name: a class of modules, a name, or a pattern
    after "re:".

    group: inputs that share a scale, for the strategy "group". ordered: which group an input has is
    listed.
    """

    targets: tuple[str, ...]
    packed: bool
    floating: bool
    bits: int
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int]
    ordered: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """Of a module's tensors those that there must be."""
        stored = ("weight_packed", "weight_shape") if self.packed else ("weight",)
        zeros = () if self.symmetric else (ZEROS,)
        return (*stored, "weight_scale", *zeros, *((ORDER,) if self.ordered else ()))

    def block_of(self, name: str, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns that share a scale in a weight of this shape."""
        if self.strategy == "group":
            return 1, check_groups(name, columns, self.group)
        return {"tensor": (rows, columns), "channel": (1, columns), "block": self.block}[
            self.strategy
        ]


def read(fields: Fields) -> tuple[Scheme, ...]:
    """CheckpointError for sparsity, transforms, and every form that is not integers or FP8 as
    above.
    """
    stored = fields.among("format", (PACKED, *PLAIN, MIXED))
    fields.among("quantization_status", ("compressed", "frozen"), "compressed")
    _refuse_unless(fields, "sparsity_config", "format", ("dense", None))
    _refuse_unless(fields, "transform_config", "config_groups", ({}, None))
    fields.empty("moe_sparsity_config")
    fields.ignore("ignore", "global_compression_ratio", "version", "run_compressed")
    _check_activations(fields, "kv_cache_scheme")
    groups = fields.take("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.refusal("config_groups", groups, "is not a set of schemes")
    return tuple(
        _read_scheme(Fields(f"config_groups.{name}", group), stored)
        for name, group in groups.items()
    )


def _refuse_unless(fields: Fields, name: str, field: str, harmless: tuple[Any, ...]) -> None:
    value = fields.take(name, {})
    if not isinstance(value, dict) or value.get(field) not in harmless:
        raise fields.refusal(name, value, "is not implemented; use a checkpoint without it")


def _check_activations(fields: Fields, name: str) -> None:
    """Whatever it says of activations, they are not quantized; but it must be of them that it says
    it.
    """
    arguments = Fields(f"{fields.where}.{name}", fields.take(name, {}))
    arguments.ignore(*ARGUMENTS)
    arguments.finish()


def _read_scheme(fields: Fields, stored: str) -> Scheme:
    targets = fields.take("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise fields.refusal("targets", targets, "is not a list of names")
    for target in targets:
        _check_pattern(fields, target)
    stored = fields.among("format", (PACKED, *PLAIN), None if stored == MIXED else stored)
    for name in ("input_activations", "output_activations"):
        _check_activations(fields, name)
    scheme = _read_weights(
        Fields(f"{fields.where}.weights", fields.take("weights")), tuple(targets), stored == PACKED
    )
    fields.finish()
    return scheme


def _read_weights(weights: Fields, targets: tuple[str, ...], is_packed: bool) -> Scheme:
    floating = weights.among("type", ("int",) if is_packed else ("int", "float"), "int") == "float"
    group = weights.group_size()
    strategies = ("channel", "group") if is_packed else ("tensor", "channel", "group", "block")
    strategy = weights.among("strategy", strategies, "group" if group > 0 else None)
    weights.among("dynamic", (False,), False)
    order = weights.among("actorder", (False, True, "weight", "static", "group", "dynamic"), False)
    scheme = Scheme(
        targets=targets,
        packed=is_packed,
        floating=floating,
        bits=weights.among("num_bits", (8,) if floating else (2, 4, 8) if is_packed else (4, 8)),
        symmetric=weights.among("symmetric", (False, True), True),
        strategy=strategy,
        group=group,
        block=block_size(weights, "block_structure") if strategy == "block" else (1, 1),
        ordered=order in (True, "group", "dynamic"),
    )
    weights.ignore(*ARGUMENTS)
    weights.finish()
    return scheme


def _check_pattern(fields: Fields, target: str) -> None:
    """A pattern that takes forever is refused: anybody may have written it."""
    if not target.startswith("re:"):
        return
    try:
        re.compile(target[3:])
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.refusal("targets", target, f"is not a pattern ({error})") from error
    if re.search(r"\)[*+{]", target) or len(re.findall(r"[*+{]", target)) > MOST_REPEATS:
        raise fields.refusal(
            "targets", target, f"repeats a group, or has more than {MOST_REPEATS} repeats"
        )


def dequantized(tensors: Mapping[str, np.ndarray], schemes: tuple[Scheme, ...]) -> dict[str, Any]:
    """X.weight, or X.weight_packed, and its scales become X.weight; the scales of activations are
    left out.
    """
    modules, others = by_module(tensors, frozenset((*WEIGHT, *ACTIVATIONS)))
    found: dict[str, Any] = dict(others)
    unused = list[str]()
    for module, parts in modules.items():
        unused += (f"{module}.{part}" for part in ACTIVATIONS if parts.pop(part, None) is not None)
        if set(parts) == {"weight"} and parts["weight"].dtype not in (FLOAT8 | {INT8}):
            found[f"{module}.weight"] = parts["weight"]
        elif parts:
            found[f"{module}.weight"] = _joined(module, parts, _scheme_of(module, schemes))
    if unused:
        log.warning(
            "left out %d scales of activations, which stay in full precision: %s, ...",
            len(unused),
            unused[0],
        )
    return found


def _scheme_of(module: str, schemes: tuple[Scheme, ...]) -> Scheme:
    """By its name before a pattern before its class: Linear, of all that is quantized. One scheme
    is everybody's.
    """
    if len(schemes) == 1:
        return schemes[0]
    matches = (
        lambda target: target == module,
        lambda target: target.startswith("re:") and re.match(target[3:], module) is not None,
        lambda target: target == "Linear",
    )
    for match in matches:
        for scheme in schemes:
            if any(map(match, scheme.targets)):
                return scheme
    raise CheckpointError(
        f"tensor {module}.weight is quantized, and no target of config_groups names it"
    )


def _joined(module: str, parts: Parts, scheme: Scheme) -> BlockScaled:
    check_complete(module, parts, scheme.parts)
    name = f"{module}.weight_packed" if scheme.packed else f"{module}.weight"
    values = _values(module, name, parts, scheme)
    rows, columns = values.shape
    block = scheme.block_of(name, rows, columns)
    scales = parts["weight_scale"]
    scales = scales.reshape(
        scales.shape if scales.ndim == 2 else (-1, 1)
    )  # of one dimension where one would do
    check_scales(name, values, scales, block)
    zeros = _zeros(module, parts, scheme, scales)
    order = parts.get(ORDER)
    if order is None or (order == -1).all():  # as it is before groups are given out
        return BlockScaled(values, scales, block, zeros)
    groups = share_of_each(f"{module}.{ORDER}", order, columns, block[1])
    return BlockScaled(values, scales, (block[0], groups), zeros)


def _values(module: str, name: str, parts: Parts, scheme: Scheme) -> Matrix:
    values = parts["weight_packed" if scheme.packed else "weight"]
    if values.ndim != 2 or not values.size:
        raise CheckpointError(
            f"tensor {name} of shape {list(values.shape)} is quantized, and no matrix"
        )
    if not scheme.packed:
        if (values.dtype not in FLOAT8) if scheme.floating else (values.dtype != INT8):
            wanted = "float8" if scheme.floating else "int8"
            raise CheckpointError(
                f"tensor {name} is {values.dtype}; config_groups make it {wanted}"
            )
        return values
    shape = parts["weight_shape"]
    if shape.shape != (2,) or shape.dtype.kind not in "iu" or shape[0] != len(values):
        raise CheckpointError(
            f"tensor {module}.weight_shape is {shape.tolist()}, for {len(values)} rows of words"
        )
    return packed(name, values, scheme.bits, 1, int(shape[1]))


def _zeros(module: str, parts: Parts, scheme: Scheme, scales: np.ndarray) -> Matrix | int:
    """Packed numbers, the weight's and its zero points, are stored with half their range added."""
    name = f"{module}.{ZEROS}"
    if scheme.symmetric:
        if ZEROS in parts and parts[ZEROS].astype(bool).any():
            raise CheckpointError(
                f"tensor {name} is not zero, and config_groups make the weight symmetric"
            )
        return 2 ** (scheme.bits - 1) if scheme.packed else 0
    zeros = parts[ZEROS]
    matrix: Matrix = zeros.reshape(zeros.shape if zeros.ndim == 2 else (-1, 1))
    if scheme.packed:
        matrix = packed(name, zeros, scheme.bits, 0, len(scales))
    check_zeros(name, matrix, scales)
    return matrix
