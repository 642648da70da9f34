"""Metrics of the load of experts."""

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from jaxserve.server.observe.expert_load import ExpertLoad


def lines(registry: CollectorRegistry) -> dict[str, float]:
    rendered = generate_latest(registry).decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in rendered if line[0] != "#")
    }


def test_nothing_is_said_before_anything_is_known() -> None:
    registry = CollectorRegistry()
    ExpertLoad(registry, (1, 2))
    assert lines(registry) == {}


def test_counts_grow_and_the_latest_say_how_uneven_they_are() -> None:
    registry = CollectorRegistry()
    load = ExpertLoad(registry, (1, 3))
    load.take(np.array([[1, 1], [2, 0]], np.uint32))
    load.take(np.array([[4, 2], [4, 2]], np.uint32))
    found = lines(registry)
    assert found['jaxserve:expert_tokens_total{expert="0",layer="1"}'] == 4
    assert found['jaxserve:expert_tokens_total{expert="1",layer="3"}'] == 2
    assert found['jaxserve:expert_imbalance{layer="1"}'] == 1.5  # 3 and 1 since the time before
    assert found['jaxserve:expert_imbalance{layer="3"}'] == 1.0
    load.take(np.array([[4, 2], [4, 2]], np.uint32))  # an idle server keeps what it said
    assert lines(registry) == found


def test_a_device_that_begins_again_at_zero() -> None:
    registry = CollectorRegistry()
    load = ExpertLoad(registry, (0,))
    load.take(np.array([[2**32 - 1, 5]], np.uint32))
    load.take(np.array([[4, 5]], np.uint32))
    assert lines(registry)['jaxserve:expert_tokens_total{expert="0",layer="0"}'] == 2**32 + 4
