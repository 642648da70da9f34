"""Metrics of the load of every expert, read from the device between two steps."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.errors import JaxserveError

log = logging.getLogger("jaxserve.server")
PREFIX = "jaxserve:"
INTERVAL = 10.0  # seconds; often enough, since the device's uint32 counters wrap around


class ExpertLoad(Collector):
    """Counts tokens by layer and expert, and says how unevenly they are spread.

    expert_tokens: tokens that the expert has answered. expert_imbalance: tokens of the layer's
    busiest expert divided by the mean over its experts, of the latest reading that had any tokens.
    1 is even. Where every expert has a device of its own, the layer takes this many times as long
    as with an even load.

    Args:
        layers: Numbers of the layers that have experts.
    """

    def __init__(self, registry: CollectorRegistry, layers: Sequence[int]):
        self._layers = layers
        self._last_reading: np.ndarray | None = None
        # Sums of all readings, and the latest one. Replaced as a pair, since `collect` may run on
        # another thread.
        self._totals: tuple[np.ndarray, np.ndarray] | None = None
        registry.register(self)

    def take(self, load: np.ndarray) -> None:
        """Take in a reading: uint32 [layers, experts], tokens since the start, modulo 2^32."""
        before = 0 if self._last_reading is None else self._last_reading
        # In uint32 the difference is right even when a counter has wrapped around in between.
        new = (load - before).astype(np.uint32).astype(np.int64)
        total, latest = self._totals or (np.zeros_like(new), new)
        self._last_reading = load
        self._totals = (total + new, new if new.any() else latest)

    def collect(self) -> Iterator[Metric]:
        """Yield both metrics, for the registry."""
        if self._totals is None:
            return
        tokens = CounterMetricFamily(
            PREFIX + "expert_tokens",
            "tokens that an expert has answered",
            labels=("layer", "expert"),
        )
        for layer, total in zip(self._layers, self._totals[0], strict=True):
            for expert, count in enumerate(total.tolist()):
                tokens.add_metric((str(layer), str(expert)), count)
        yield tokens
        yield from self.imbalance()

    def imbalance(self) -> Iterator[Metric]:
        """Yield expert_imbalance alone, which has one number for each layer."""
        if self._totals is None:
            return
        imbalance = GaugeMetricFamily(
            PREFIX + "expert_imbalance",
            "tokens of a layer's busiest expert divided by the mean over its experts",
            labels=("layer",),
        )
        for layer, latest in zip(self._layers, self._totals[1], strict=True):
            imbalance.add_metric((str(layer),), float(latest.max() / max(latest.mean(), 1e-9)))
        yield imbalance

    async def watch(
        self, thread: EngineThread, read: Callable[[], np.ndarray], interval: float = INTERVAL
    ) -> None:
        """Take a reading every `interval` seconds until the engine ends.

        Args:
            read: Function that reads the device's counters; it runs on the engine's thread, between
                two steps.
        """
        while True:
            await asyncio.sleep(interval)
            try:
                self.take(await asyncio.wrap_future(thread.call(lambda engine: read())))
            except JaxserveError:
                return
            except Exception:
                log.exception("the load of the experts could not be read; it is not read again")
                return
