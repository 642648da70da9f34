"""Report of the memory that weights take, by part of the model and by dtype."""

from collections import Counter
from typing import Any

import jax

from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.models import gated_delta, short_convolution

WeightSizes = dict[str, dict[str, int]]  # part -> dtype -> bytes of one device

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
ORDER = ("embedding", "attention", "recurrence", "mlp", "experts", "norms and biases", "head")
# Parts of the parameters that are in no layer.
OUTSIDE = {"embed": "embedding", "norm": "norms and biases", "head": "head"}
# Parts whose weights --dtype and --weights round, and the option that halves those of a dtype.
PRODUCTS = ("attention", "recurrence", "mlp", "experts")
ROUNDED_BY = {"float32": "--dtype bfloat16", "bfloat16": "--weights w8a8-int8"}
# Parameters of a layer with a recurrent state that it has in place of attention's.
RECURRENCE = (*gated_delta.AXES, *short_convolution.AXES)
# Parameters of a layer's MLP, without routed experts; other ones are attention's.
MLP = ("gate_up", "down", "shared", "router", "shared_gate", "correction")


def weight_sizes(params: dict) -> WeightSizes:
    """Add up the bytes of parameters, or of their abstract values, on one device."""
    found = {part: Counter[str]() for part in ORDER}
    for path, leaf in jax.tree.leaves_with_path(params):
        found[_part(path)][str(leaf.dtype)] += bytes_per_device(leaf)
    return {part: dict(held.most_common()) for part, held in found.items() if held}


def _part(path: tuple[Any, ...]) -> str:
    """Name the part of the model that the parameter at this path belongs to."""
    names = [key.key for key in path if hasattr(key, "key")]
    if names[0] != "layers":
        return OUTSIDE[names[0]]
    if names[1] == "experts":
        return "experts"
    if names[-1].endswith(("norm", "bias")):
        return "norms and biases"
    if names[1] in RECURRENCE:
        return "recurrence"
    return "mlp" if names[1] in MLP else "attention"


def describe_weights(sizes: WeightSizes) -> str:
    """Describe the sizes in one line: the total, then every part."""
    total = sum(sum(held.values()) for held in sizes.values())
    unit, scale = _unit(total)
    parts = (
        f"{part} " + " + ".join(f"{size / scale:,.2f} {dtype}" for dtype, size in held.items())
        for part, held in sizes.items()
    )
    return f"{total / scale:,.2f} {unit} on each device: {', '.join(parts)}"


def describe_rounding(sizes: WeightSizes) -> str | None:
    """Name the option that rounds the weights of layers to half of their bytes.

    None where most of these bytes are quantized already.
    """
    held = Counter[str]()
    for part in PRODUCTS:
        held.update(sizes.get(part, {}))
    dtype, size = held.most_common(1)[0]
    if dtype not in ROUNDED_BY:
        return None
    unit, scale = _unit(size)
    now = f"{size / scale:,.2f} {unit} of {dtype}"
    return f"{ROUNDED_BY[dtype]} would halve {now}; steps of few rows read the weights sooner"


def _unit(size: float) -> tuple[str, int]:
    """Return the unit to show a number of bytes in, and its bytes."""
    return next((unit for unit in UNITS if size >= unit[1]), UNITS[-1])
