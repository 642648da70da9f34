"""Meshes and precisions for a model on some devices, the best first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp

from jaxserve.errors import ConfigError, MemoryLimitError, ModelError
from jaxserve.models.quant import QuantScheme
from jaxserve.plan.compile import Progress, asking, compile_steps
from jaxserve.plan.deployment import Target, deploy
from jaxserve.plan.estimate import Account, Batch
from jaxserve.plan.roofline import Limits
from pallas_kernels.dispatch import KernelError
from sharding.mesh import MeshSpec
from sharding.rules import ShardingError


class Precision(NamedTuple):
    """dtype: of weights that are not quantized. form: of those that are. kv: of pages, as --kv
    names it.
    """

    dtype: jnp.dtype
    form: QuantScheme | None
    kv: str

    @property
    def weights(self) -> str:
        return str(self.form or self.dtype)

    def of(self, target: Target) -> Target:
        return replace(target, options=replace(target.options, kv=self.kv))


@dataclass(frozen=True)
class Choice:
    """A mesh, and what weights and pages are kept in. missing: bytes of one device, why there is no
    account.
    """

    axes: MeshSpec
    precision: Precision
    account: Account | None
    missing: int = 0

    @property
    def fits(self) -> bool:
        """And holds a sequence of the context."""
        return self.account is not None and self.account.fits and self.account.held_rows() > 0


@dataclass(frozen=True)
class Ranked:
    """A choice that fits. batch: the largest that the cache holds. lone: of one row in a lane.

    Times are floors and what is sent beside them, one after the other: a ranking without it would
    always split all.
    """

    choice: Choice
    account: Account
    batch: Batch
    lone: Batch

    @property
    def tpot(self) -> float:
        return self.lone.tpot + self.lone.exchange

    @property
    def tokens_per_second(self) -> float:
        return self.batch.streams / (self.batch.tpot + self.batch.exchange)


def meshes(devices: int) -> Iterator[MeshSpec]:
    """All with so many devices."""
    for data in range(1, devices + 1):
        for expert in range(1, devices // data + 1):
            if devices % (data * expert) == 0:
                yield MeshSpec(data, expert, devices // (data * expert))


def choices(
    target: Target, precisions: Sequence[Precision], context: int, price: float | None
) -> list[Choice]:
    """All that divide the model, counted. ConfigError, of the last that was tried, where none
    does."""
    found: list[Choice] = []
    refusal: Exception = ConfigError(f"--topology {target.topology.name}: has no mesh")
    for axes in meshes(target.topology.count):
        if axes.expert > 1 and target.spec.mixture is None:
            continue  # without experts that axis does what data does
        for kept in precisions:
            try:
                deployment = deploy(
                    kept.of(target), axes, kept.dtype, footprint=None, form=kept.form
                )
                found.append(
                    Choice(axes, kept, Account(deployment, context, target.topology.limits, price))
                )
            except MemoryLimitError as error:
                found.append(Choice(axes, kept, None, error.missing))
            except (ShardingError, KernelError, ConfigError, ModelError) as error:
                refusal = error
    if not found:
        raise refusal
    return found


def confirmed(ranked: Ranked, progress: Progress) -> Choice:
    """The same, with the largest steps compiled. ChipError without a compiler."""
    choice, account = ranked.choice, ranked.account
    try:
        target, kept = account.deployment.target, choice.precision
        deployment = deploy(target, choice.axes, kept.dtype, asking(progress), kept.form)
        steps = compile_steps(deployment, deployment.largest(), progress)
    except MemoryLimitError as error:
        return replace(choice, account=None, missing=error.missing)
    return replace(choice, account=replace(account, deployment=deployment, steps=steps))


def rank(choices: Sequence[Choice], limits: Limits, prefer: str) -> list[Ranked]:
    """Those that fit, the best first: by the time of a lone stream under `latency`, else by tokens
    per second.
    """
    found = [
        Ranked(choice, choice.account, *_batches(choice.account, limits))
        for choice in choices
        if choice.account and choice.fits
    ]
    return sorted(found, key=lambda r: r.tpot if prefer == "latency" else -r.tokens_per_second)


def _batches(account: Account, limits: Limits) -> tuple[Batch, Batch]:
    """The largest that is held, and the smallest."""
    batches = list(account.batches(limits))
    return [batch for batch in batches if batch.held or batch is batches[0]][-1], batches[0]
