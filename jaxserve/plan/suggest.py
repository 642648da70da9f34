"""Ranking of meshes and precisions for a model on given devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp

from jaxserve.errors import ConfigError, MemoryLimitError, ModelError
from jaxserve.flag_errors import flag_error
from jaxserve.models.quant import QuantScheme
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.plan.compile import Progress, asking, compile_steps
from jaxserve.plan.deployment import Target, deploy
from jaxserve.plan.estimate import Batch, Estimate
from jaxserve.plan.topology import Limits
from jaxserve.sharding.errors import ShardingError
from jaxserve.sharding.mesh import MeshSpec


class Precision(NamedTuple):
    """Formats of weights and pages."""

    dtype: jnp.dtype  # of weights that are not quantized
    scheme: QuantScheme | None  # of weights that are quantized
    kv: str  # what pages hold, as --kv names it

    @property
    def weights(self) -> str:
        return str(self.scheme or self.dtype)

    def of(self, target: Target) -> Target:
        """Return the target with pages in this precision."""
        return replace(target, options=replace(target.options, kv=self.kv))


@dataclass(frozen=True)
class Choice:
    """A mesh and a precision, with the estimate of both."""

    axes: MeshSpec
    precision: Precision
    estimate: Estimate | None
    missing: int = 0  # bytes that one device lacks, where there is no estimate

    @property
    def fits(self) -> bool:
        """True if the model fits and the cache holds a sequence of the context."""
        return self.estimate is not None and self.estimate.fits and self.estimate.held_rows() > 0


@dataclass(frozen=True)
class Ranked:
    """A choice that fits.

    Times are floors plus what devices must send: a ranking by floors alone would always split every
    layer.
    """

    choice: Choice
    estimate: Estimate
    batch: Batch  # the largest that the cache holds
    lone: Batch  # one row in a lane

    @property
    def tpot(self) -> float:
        return self.lone.tpot + self.lone.exchange

    @property
    def tokens_per_second(self) -> float:
        return self.batch.streams / (self.batch.tpot + self.batch.exchange)


def meshes(devices: int) -> Iterator[MeshSpec]:
    """Yield all meshes of this many devices."""
    for data in range(1, devices + 1):
        for expert in range(1, devices // data + 1):
            if devices % (data * expert) == 0:
                yield MeshSpec(data, expert, devices // (data * expert))


def choices(
    target: Target, precisions: Sequence[Precision], context: int, price: float | None
) -> list[Choice]:
    """Return all meshes and precisions that divide the model, counted without a compiler.

    Raises the error of the last one that was tried if none does.
    """
    found: list[Choice] = []
    refusal: Exception = flag_error("--topology", target.topology.name, "it has no mesh")
    for axes in meshes(target.topology.count):
        if axes.expert > 1 and target.spec.mixture is None:
            continue  # without experts that axis does what data does
        for kept in precisions:
            try:
                asked = kept.of(target)
                deployment = deploy(asked, axes, kept.dtype, footprint=None, scheme=kept.scheme)
                estimate = Estimate(deployment, context, target.topology.limits, price)
                found.append(Choice(axes, kept, estimate))
            except MemoryLimitError as error:
                found.append(Choice(axes, kept, None, error.missing))
            except (ShardingError, KernelError, ConfigError, ModelError) as error:
                refusal = error
    if not found:
        raise refusal
    return found


def confirmed(ranked: Ranked, progress: Progress) -> Choice:
    """Return a choice whose largest steps were compiled; ChipError without a compiler."""
    choice = ranked.choice
    kept = choice.precision
    estimate = ranked.estimate
    target = estimate.deployment.target
    try:
        deployment = deploy(target, choice.axes, kept.dtype, asking(progress), kept.scheme)
        steps = compile_steps(deployment, deployment.largest(), progress)
    except MemoryLimitError as error:
        return replace(choice, estimate=None, missing=error.missing)
    return replace(choice, estimate=replace(estimate, deployment=deployment, steps=steps))


def rank(choices: Sequence[Choice], limits: Limits, prefer: str) -> list[Ranked]:
    """Return the choices that fit, the best first.

    By the time of a lone stream for --prefer latency, otherwise by tokens per second.
    """
    found = [
        Ranked(choice, choice.estimate, *_batches(choice.estimate, limits))
        for choice in choices
        if choice.estimate and choice.fits
    ]
    return sorted(found, key=lambda r: r.tpot if prefer == "latency" else -r.tokens_per_second)


def _batches(estimate: Estimate, limits: Limits) -> tuple[Batch, Batch]:
    """Return the largest batch that the cache holds, and the smallest one."""
    smallest, *larger = estimate.batches(limits)
    held = [smallest, *(batch for batch in larger if batch.held)]
    return held[-1], smallest
