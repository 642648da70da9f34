"""How many tokens every expert has answered, as metrics: read from the device now and then, between
two steps.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.errors import JaxserveError
from jaxserve.server.core.engine_thread import EngineThread

log = logging.getLogger("jaxserve.server")
PREFIX = "jaxserve:"
EVERY = 10.0  # seconds; a device counts modulo 2^32


class ExpertLoad(Collector):
    """expert_tokens by layer and expert; expert_imbalance by layer: the busiest expert's share of
    the latest tokens, times the experts. 1 is even, and where every expert has a device of its own,
    so many times longer it takes.
    """

    def __init__(self, registry: CollectorRegistry, layers: Sequence[int]):
        self._layers = layers
        self._seen: np.ndarray | None = None  # as the device counts
        self._told: tuple[np.ndarray, np.ndarray] | None = (
            None  # in all, and lately; replaced as one
        )
        registry.register(self)

    def take(self, load: np.ndarray) -> None:
        """load: uint32 [layers, experts], counted by the device since it began."""
        new = (load - (0 if self._seen is None else self._seen)).astype(np.uint32).astype(np.int64)
        total, latest = self._told or (np.zeros_like(new), new)
        self._seen, self._told = load, (total + new, new if new.any() else latest)

    def collect(self) -> Iterator[Metric]:
        if self._told is None:
            return
        tokens = CounterMetricFamily(
            PREFIX + "expert_tokens",
            "tokens that an expert has answered",
            labels=("layer", "expert"),
        )
        for layer, total in zip(self._layers, self._told[0], strict=True):
            for expert, count in enumerate(total.tolist()):
                tokens.add_metric((str(layer), str(expert)), count)
        yield tokens
        yield from self.imbalance()

    def imbalance(self) -> Iterator[Metric]:
        """That alone: a number for each layer."""
        if self._told is None:
            return
        imbalance = GaugeMetricFamily(
            PREFIX + "expert_imbalance",
            "tokens of a layer's busiest expert beside the mean",
            labels=("layer",),
        )
        for layer, latest in zip(self._layers, self._told[1], strict=True):
            imbalance.add_metric((str(layer),), float(latest.max() / max(latest.mean(), 1e-9)))
        yield imbalance

    async def watch(
        self, thread: EngineThread, read: Callable[[], np.ndarray], every: float = EVERY
    ) -> None:
        """Until the engine ends. read: asks the device; it runs between two steps."""
        while True:
            await asyncio.sleep(every)
            try:
                self.take(await asyncio.wrap_future(thread.call(lambda engine: read())))
            except JaxserveError:
                return
            except Exception:
                log.exception("the experts' load could not be read, and is not asked for again")
                return
