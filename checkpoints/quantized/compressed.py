"""compressed-tensors, the format of llm-compressor: integers and FP8 with scales.

Scales are per tensor, channel, group or block. A weight is X.weight [O, I] in eight bits, or
X.weight_packed int32 [O, I * bits / 32] with X.weight_shape; and X.weight_scale. If quantization is
not symmetric there is X.weight_zero_point, packed like the weight but along the outputs. A weight
is quantized if it has scales. Where the config has several schemes, their `targets` say which
modules each applies to.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.quantized.blocks import (
    FLOAT8,
    BlockScaled,
    Matrix,
    block_entry,
    block_size,
    check_scales,
    check_zeros,
    group_size_of,
    note_activations,
)
from jaxserve.checkpoints.quantized.fields import Fields
from jaxserve.checkpoints.quantized.modules import Parts, by_module, check_complete
from jaxserve.checkpoints.quantized.packed import packed

ZEROS: Final = "weight_zero_point"
ORDER: Final = "weight_g_idx"
WEIGHT: Final = ("weight", "weight_packed", "weight_shape", "weight_scale", ZEROS, ORDER)
# Scales of activations and pages are dropped: both stay in full precision here.
ACTIVATIONS: Final = tuple(
    f"{what}_{part}" for what in "input output q k v".split() for part in ("scale", "zero_point")
)
PACKED: Final = "pack-quantized"
PLAIN: Final = ("int-quantized", "float-quantized", "naive-quantized")
MIXED: Final = "mixed-precision"
INT8: Final = np.dtype(np.int8)
ARGUMENTS: Final = """
    num_bits type symmetric group_size strategy block_structure dynamic actorder observer
    observer_kwargs scale_dtype zp_dtype
""".split()
# Repeats in a pattern. The time to match grows with the length of a name to the power of repeats.
MAX_REPEATS: Final = 4


@dataclass(frozen=True)
class Scheme:
    """Storage of the weights of some modules."""

    targets: tuple[str, ...]  # the modules: a class, a name, or a pattern after "re:"
    packed: bool  # numbers are packed in words
    floating: bool  # FP8
    bits: int
    symmetric: bool
    strategy: str
    group: int  # inputs that share a scale, for the strategy "group"
    block: tuple[int, int]  # rows and columns that share a scale, for the strategy "block"
    ordered: bool  # the group of each input is listed (act-order)

    @property
    def parts(self) -> tuple[str, ...]:
        """Tensors that every module of the scheme must have."""
        parts = ["weight_packed", "weight_shape"] if self.packed else ["weight"]
        parts.append("weight_scale")
        if not self.symmetric:
            parts.append(ZEROS)
        if self.ordered:
            parts.append(ORDER)
        return tuple(parts)

    def block_of(self, name: str, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns that share a scale in a weight of this shape."""
        if self.strategy == "group":
            return 1, group_size_of(name, columns, self.group)
        if self.strategy == "tensor":
            return rows, columns
        if self.strategy == "channel":
            return 1, columns
        return self.block


def read(fields: Fields) -> tuple[Scheme, ...]:
    """Read the schemes; CheckpointError for sparsity, transforms and other formats."""
    stored = fields.among("format", (PACKED, *PLAIN, MIXED))
    fields.among("quantization_status", ("compressed", "frozen"), "compressed")
    _refuse_unless(fields, "sparsity_config", "format", ("dense", None))
    _refuse_unless(fields, "transform_config", "config_groups", ({}, None))
    fields.empty("moe_sparsity_config")
    fields.ignore("ignore", "ignored_layers", "global_compression_ratio", "version")
    fields.ignore("run_compressed")
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
    """Accept any quantization of activations, which stay in full precision here.

    Unknown fields are refused all the same: they could concern weights.
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
    types = ("int",) if is_packed else ("int", "float")
    floating = weights.among("type", types, "int") == "float"
    widths = (4, 8)
    if floating:
        widths = (8,)
    elif is_packed:
        widths = (2, 4, 8)
    group = weights.group_size()
    strategies = ("channel", "group") if is_packed else ("tensor", "channel", "group", "block")
    strategy = weights.among("strategy", strategies, "group" if group > 0 else None)
    weights.among("dynamic", (False,), False)
    order = weights.among("actorder", (False, True, "weight", "static", "group", "dynamic"), False)
    scheme = Scheme(
        targets=targets,
        packed=is_packed,
        floating=floating,
        bits=weights.among("num_bits", widths),
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
    """Refuse a pattern that may take forever: a checkpoint may come from anyone."""
    if not target.startswith("re:"):
        return
    try:
        re.compile(target[3:])
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.refusal("targets", target, f"is not a pattern ({error})") from error
    if re.search(r"\)[*+{]", target) or len(re.findall(r"[*+{]", target)) > MAX_REPEATS:
        raise fields.refusal(
            "targets", target, f"repeats a group, or has more than {MAX_REPEATS} repeats"
        )


def dequantized(tensors: Mapping[str, np.ndarray], schemes: tuple[Scheme, ...]) -> dict[str, Any]:
    """Join X.weight, or X.weight_packed, and its scales to X.weight.

    Scales of activations are left out.
    """
    modules, others = by_module(tensors, frozenset((*WEIGHT, *ACTIVATIONS)))
    found: dict[str, Any] = dict(others)
    unused = list[str]()
    for module, parts in modules.items():
        for part in ACTIVATIONS:
            if parts.pop(part, None) is not None:
                unused.append(f"{module}.{part}")
        if set(parts) == {"weight"} and parts["weight"].dtype not in (FLOAT8 | {INT8}):
            found[f"{module}.weight"] = parts["weight"]
        elif parts:
            found[f"{module}.weight"] = _joined(module, parts, _scheme_of(module, schemes))
    note_activations(unused)
    return found


def _scheme_of(module: str, schemes: tuple[Scheme, ...]) -> Scheme:
    """Return the scheme of a module.

    A single scheme applies to all modules. Otherwise a target with the module's name comes before
    a pattern, and a pattern before its class, which is Linear for all quantized modules.
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
    scales = _as_matrix(parts["weight_scale"])
    check_scales(name, values, scales, block)
    zeros = _zeros(module, parts, scheme, scales)
    order = parts.get(ORDER)
    if order is None or (order == -1).all():  # -1 is the value before groups are assigned
        return BlockScaled(values, scales, block, zeros)
    groups = block_entry(f"{module}.{ORDER}", order, name, columns, block[1])
    return BlockScaled(values, scales, (block[0], groups), zeros)


def _as_matrix(scales: np.ndarray) -> np.ndarray:
    """Return scales or zero points with two dimensions; files leave the second out if it is 1."""
    return scales if scales.ndim == 2 else scales.reshape(-1, 1)


def _values(module: str, name: str, parts: Parts, scheme: Scheme) -> Matrix:
    values = parts["weight_packed" if scheme.packed else "weight"]
    if values.ndim != 2 or not values.size:
        raise CheckpointError(
            f"tensor {name} of shape {list(values.shape)} is quantized, and no matrix"
        )
    if not scheme.packed:
        fits = values.dtype in FLOAT8 if scheme.floating else values.dtype == INT8
        if not fits:
            wanted = "float8" if scheme.floating else "int8"
            raise CheckpointError(
                f"tensor {name} is {values.dtype}; config_groups make it {wanted}"
            )
        return values
    shape = parts["weight_shape"]
    if shape.shape != (2,) or shape.dtype.kind not in "iu" or shape[0] != len(values):
        raise CheckpointError(
            f"tensor {module}.weight_shape is {shape.tolist()}, for {len(values)} rows of words "
            f"in {name}"
        )
    return packed(name, values, scheme.bits, 1, int(shape[1]), f"{module}.weight_shape")


def _zeros(module: str, parts: Parts, scheme: Scheme, scales: np.ndarray) -> Matrix | int:
    """Return the zero points of a weight, or one number for all of it.

    Packed numbers, those of the weight and of zero points, are stored with half their range added.
    """
    name = f"{module}.{ZEROS}"
    if scheme.symmetric:
        if ZEROS in parts and parts[ZEROS][:].astype(bool).any():
            raise CheckpointError(
                f"tensor {name} is not zero, and config_groups make the weight symmetric"
            )
        return 2 ** (scheme.bits - 1) if scheme.packed else 0
    zeros = parts[ZEROS]
    matrix: Matrix = _as_matrix(zeros)
    if scheme.packed:
        told_by = f"{module}.weight_scale"
        matrix = packed(name, zeros, scheme.bits, 0, len(scales), told_by)
    check_zeros(name, matrix, scales)
    return matrix
