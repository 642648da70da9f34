"""Hosts of an engine that a Ray cluster reserves, with an actor on each."""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import SlicePlacementGroup, slice_placement_group

from jaxserve.errors import ConfigError
from jaxserve.ray.host_process import HostProcess
from jaxserve.ray.reservations import AbandonedReservations, new_name

POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0  # between two looks for hosts that are reserved for nobody
HEAD_SECONDS = 5.0  # for one try to reserve the first host of a TPU slice
ANSWER_SECONDS = 10.0  # in which an actor that lives answers


class NotWantedError(Exception):
    """Nobody wants the hosts any more that were asked for."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Hosts that an engine needs.

    Attributes:
        hosts: Number of hosts; with a TPU slice that of the slice, which need not be given.
        resources: What each of them needs, by Ray's names: {"CPU": 8, "GPU": 8}, {"TPU": 4}. Where
            two of them fit on one node, both may be put there.
        tpu_slice: Topology and generation of a TPU slice that the hosts are, all of them: ("4x4",
            "v6e").
        seconds: Time until the cluster has to have them, in which it may grow.

    Raises:
        ConfigError: There are fewer hosts than one, or both a number and a slice.
    """

    hosts: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    tpu_slice: tuple[str, str] | None = None
    seconds: float = 1800.0

    def __post_init__(self) -> None:
        if self.hosts < 1:
            raise ConfigError(f"hosts is {self.hosts}; it must be at least 1")
        if self.tpu_slice and self.hosts != 1:
            raise ConfigError(f"hosts is {self.hosts}, but tpu_slice has its own number of hosts")

    @property
    def wanted(self) -> str:
        """Words for the hosts, for errors."""
        if self.tpu_slice:
            topology, version = self.tpu_slice
            return f"a TPU slice {version} of topology {topology}"
        each = ", ".join(f"{name} {number:g}" for name, number in self.resources.items())
        return f"{self.hosts} host{'s' * (self.hosts > 1)} with {each or 'no resources'}"


class PlacedHosts:
    """Hosts that the cluster has reserved, with an actor on each, in the order of their numbers.

    Attributes:
        actors: Handles of HostProcess.
        addresses: Addresses of the hosts within the cluster.

    Args:
        place: Hosts to ask the cluster for.
        until: Time of time.monotonic() at which the cluster has to have them.
        closing: Event after which nobody wants them any more.

    Raises:
        ConfigError: The cluster did not have the hosts in time.
        NotWantedError: The event came first.
        RayError: A host was lost meanwhile.
    """

    def __init__(self, place: Place, until: float, closing: threading.Event):
        self._place = place
        self._closing = closing
        self._until = until
        self._slice: SlicePlacementGroup | None = None
        self.actors: list[Any] = []
        self.addresses: list[str] = []
        self._next_look = 0.0
        self._abandoned = AbandonedReservations()
        name = new_name()
        self._group = self._reserve(name)
        try:
            self._start_actors(name)
            self._wait([self._group.ready()])
            if self._slice:
                self._order_slice(self._slice)
            self.addresses = self._wait([actor.address.remote() for actor in self.actors])
        except BaseException:
            self.free()
            raise

    def _reserve(self, name: str) -> PlacementGroup:
        if self._place.tpu_slice:
            self._slice = self._reserve_slice(name, *self._place.tpu_slice)
            assert self._slice.placement_group
            return self._slice.placement_group
        bundles = [{"CPU": 1.0, **self._place.resources}] * self._place.hosts
        return placement_group(bundles, strategy="SPREAD", name=name)

    def _reserve_slice(self, name: str, topology: str, version: str) -> SlicePlacementGroup:
        """Reserve a TPU slice by its first host, for which Ray waits by itself."""
        while True:
            try:
                return slice_placement_group(
                    topology,
                    version,
                    {**self._place.resources} or None,
                    strategy="STRICT_SPREAD",
                    name=name,
                    head_reservation_timeout_s=HEAD_SECONDS,
                )
            except TimeoutError:
                self._check_wanted()
            except (ValueError, RuntimeError) as error:
                raise ConfigError(f"tpu_slice is {self._place.tpu_slice}: {error}") from None

    def _check_wanted(self) -> None:
        """Raise an error when nobody wants the hosts any more, or the cluster has had its time.

        Until then, now and then, give back what is reserved for nobody.
        """
        if self._closing.is_set():
            raise NotWantedError
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + LOOK_SECONDS
            with suppress(RayError):  # the next look finds them
                self._abandoned.give_back()
        if now > self._until:
            raise ConfigError(
                f"the cluster does not have {self._place.wanted} after {self._place.seconds:g} s "
                f"(`ray status` shows what is free)"
            )

    def _wait(self, references: list[Any]) -> list[Any]:
        """Wait for what the cluster is asked, and return it."""
        count = len(references)
        while len(ray.wait(references, num_returns=count, timeout=POLL_SECONDS)[0]) < count:
            self._check_wanted()
        return ray.get(references)

    def _start_actors(self, name: str) -> None:
        """Start an actor for every host; the first gets the name of the reservation."""
        for number, bundle in enumerate(self._group.bundle_specs):
            self.actors.append(self._start(None if number else name, number, dict(bundle)))

    def _start(self, name: str | None, number: int, resources: dict[str, float]) -> Any:
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        return HostProcess.options(
            name=name,
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            memory=resources.pop("memory", None),
            resources=resources,
            scheduling_strategy=where,
        ).remote()

    def _order_slice(self, placed: SlicePlacementGroup) -> None:
        """Order the actors of a slice by the numbers by which its chips find each other."""
        placed.release_head_pgs()  # the reservation of the first host alone, until all were there
        workers = self._wait([actor.tpu_worker.remote() for actor in self.actors])
        self.actors = [self.actors[workers.index(n)] for n in range(len(workers))]

    @property
    def alive(self) -> bool:
        """Return whether every actor answers."""
        try:
            ray.get([actor.address.remote() for actor in self.actors], timeout=ANSWER_SECONDS)
        except (RayActorError, GetTimeoutError):
            return False
        return True

    def free(self) -> None:
        """End the actors, with the programs that they run, and give the hosts back.

        Without Ray there is nothing to do, and every call would start a cluster.
        """
        if not ray.is_initialized():
            return
        for actor in self.actors:
            with suppress(RayError):
                ray.kill(actor)
        if self._slice:
            self._slice.shutdown()
        else:
            remove_placement_group(self._group)
