"""Decode steps with quantized weights, as real compilers build them.

Weights are read in the form in which they are stored.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import importlib.util
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.lowering import Lowering, abstract_params
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.models.quant import SCHEMES, is_quantized
from jaxserve.plan.hlo.inspection import find_copies, inspect
from jaxserve.plan.hlo.parser import Module, parse
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec
from tests.deviceless.attention_step import COMPILERS
from tests.deviceless.pallas_calls import pallas_calls
from tests.deviceless.test_steps import SPEC

CACHE = 64 * 1031
ROWS = 64  # of a decode step
TOKENS = 1536  # of a prefill step
QUICK = {("v5e", 1, "int8"), ("h200", 1, "int8")}
QUICK |= {("v5e", 1, "w8a8-int8"), ("h200", 1, "w8a8-int8"), ("h200", 1, "w8a8-fp8")}
QUICK_GROUPS = {("v5e", 1, "int4-g128", "decode"), ("h200", 1, "int4-g128", "decode")}
SHARDS = [("v5e", 1), ("v6e", 4), ("h200", 1), ("h200", 2)]
NAMES = {"w8a8-int8": "s8", "w8a8-fp8": "f8e4m3fn"}  # dtypes as HLO names them


def cases() -> Iterator[ParameterSet]:
    forms = product(SHARDS, [name for name, scheme in SCHEMES.items() if not scheme.activations])
    for (chip, tensor), weights in [*forms, *product([*SHARDS, ("v5p", 1), ("7x", 1)], NAMES)]:
        if weights in NAMES and not getattr(CHIPS[chip], SCHEMES[weights].numbers):
            continue
        marks = [] if (chip, tensor, weights) in QUICK else [pytest.mark.slow]
        yield pytest.param(chip, tensor, weights, marks=marks, id=f"{chip}x{tensor}-{weights}")


def cases_of_groups() -> Iterator[ParameterSet]:
    chips = [("v5e", 1), ("7x", 2), ("h200", 1), ("h200", 2)]
    names = [name for name, scheme in SCHEMES.items() if scheme.group]
    for (chip, tensor), weights, kind in product(chips, names, ("decode", "prefill")):
        marks = [] if (chip, tensor, weights, kind) in QUICK_GROUPS else [pytest.mark.slow]
        yield pytest.param(
            chip, tensor, weights, kind, marks=marks, id=f"{chip}x{tensor}-{weights}-{kind}"
        )


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "tensor", "weights"), list(cases()))
def test_a_decode_step_reads_weights_as_they_are_kept(chip: str, tensor: int, weights: str) -> None:
    compiled, steps, held = compile_step(chip, tensor, weights, "decode")
    found = inspect(compiled, steps)
    module = parse(compiled.as_text() or "")
    assert found.aliased >= bytes_per_device(steps.state)
    # Scales of small groups may be copied: on an H200, the 3 MiB of a qkv are.
    assert not find_copies(module, held, set())
    assert not list(widened_weights(module, held))
    if weights in NAMES:
        multiplied = list(product_dtypes(module, held))
        assert len(multiplied) >= 4 * SPEC.num_layers and set(multiplied) == {(NAMES[weights],) * 2}
    # Bytes of the largest weight in bfloat16. With w8a8, a v6e fetches the next weights into its
    # VMEM, three at a time.
    assert found.temporaries < (4 if weights in NAMES else 2) * max(held)
    logical = bytes_per_device(steps.params) + bytes_per_device(steps.state)
    assert found.arguments == pytest.approx(logical, rel=0.02)


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "tensor", "weights", "kind"), list(cases_of_groups()))
def test_every_product_of_groups_is_a_kernel_s(
    chip: str, tensor: int, weights: str, kind: str
) -> None:
    """No weight is copied, and none is written in bfloat16."""
    compiled, _, held = compile_step(chip, tensor, weights, kind)
    module = parse(compiled.as_text() or "")
    assert pallas_calls(module)["quantized_matmul"] == 4 * SPEC.num_layers
    assert not find_copies(module, held, set()) and not list(widened_weights(module, held))


def compile_step(
    chip: str, tensor: int, weights: str, kind: str
) -> tuple[jax.stages.Compiled, Lowering, set[int]]:
    """Compile a step; return it with its lowering and the sizes of quantized weights.

    Sizes are numbers of elements on one device. Skips the test where the compiler is not installed.
    """
    platform = CHIPS[chip].platform
    if importlib.util.find_spec(COMPILERS[platform]) is None:
        pytest.skip(f"needs {COMPILERS[platform]} (make deviceless)")
    mesh = MeshSpec(tensor=tensor).build(absent.devices(chip, tensor))
    params = abstract_params(SPEC, jnp.dtype(jnp.bfloat16), mesh, SCHEMES[weights])
    options = EngineOptions(max_batch=ROWS, step_tokens=TOKENS, page_size=64, cache_tokens=CACHE)
    steps = Lowering(
        SPEC, params, resolve(options, max_positions=8192, lanes=1, affordable_tokens=CACHE), mesh
    )
    bucket = Bucket("decode", ROWS, ROWS) if kind == "decode" else Bucket("prefill", ROWS, TOKENS)
    return steps.step(bucket).compile(), steps, shard_sizes(params)


def shard_sizes(params: Any) -> set[int]:
    """Return the numbers of elements of all quantized weights on one device."""
    held = [
        leaf.values for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)
    ]
    return {math.prod(values.sharding.shard_shape(values.shape)) for values in held}


def widened_weights(module: Module, sizes: set[int]) -> Iterator[str]:
    """Yield instructions outside of fusions that write a quantized weight in more than 8 bits.

    sizes: numbers of elements, by which weights are known.
    """
    fused = {
        name
        for body in module.values()
        for i in body.values()
        if i.op == "fusion"
        for name in called_computations(i.rest)
    }
    for name, body in module.items():
        if name not in fused:
            yield from (
                i.name
                for i in body.values()
                if i.makes_arrays and sizes & set(i.sizes) and is_wide(i.result)
            )


def product_dtypes(module: Module, sizes: set[int]) -> Iterator[tuple[str, ...]]:
    """Yield the dtypes of both operands of each product with a quantized weight."""
    for body in module.values():
        for one in (i for i in body.values() if i.op in ("dot", "convolution")):
            sides = [body[name] for name in one.operands]
            if any(sizes & set(side.sizes) for side in sides):
                yield tuple(side.result.partition("[")[0] for side in sides)


def called_computations(rest: str) -> list[str]:
    return [part.split(",")[0].lstrip("%") for part in rest.split("calls=")[1:]]


def is_wide(result: str) -> bool:
    return any(dtype in result for dtype in ("bf16[", "f32[", "f16["))
