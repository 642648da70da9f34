"""Metrics, compared with prometheus_client's histogram and with the clients' own counts."""

import asyncio
import random
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server.observe.histogram import Histogram
from jaxserve.server.observe.metrics import LONG, Metrics
from tests.jaxserve.server.harness import running
from tests.jaxserve.server.http.harness import Http, serving
from tests.jaxserve.server.test_endings import TOKENS, outcome, start


def values(text: bytes) -> dict[str, float]:
    """Return samples by name and labels, without the times of their creation."""
    families = text_string_to_metric_families(text.decode())
    samples = (sample for family in families for sample in family.samples)
    return {f"{s.name}{s.labels}": s.value for s in samples if not s.name.endswith("_created")}


def test_the_histogram_is_prometheus_s() -> None:
    dice = random.Random(0)
    ours = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.CollectorRegistry()
    cheap = Histogram("x:seconds", "what", LONG, ours)
    dear = prometheus_client.Histogram("x:seconds", "what", registry=theirs, buckets=LONG)
    for value in [0.0, *LONG, 1e9, *(dice.expovariate(1) for _ in range(1000))]:
        cheap.observe(value)
        dear.observe(value)
    found, expected = (
        values(prometheus_client.generate_latest(registry)) for registry in (ours, theirs)
    )
    assert len(found) == len(LONG) + 3 and found == expected


def test_what_the_clients_got(tmp_path: Path) -> None:
    async def main() -> None:
        metrics = Metrics(lambda: 0)
        async with running(tmp_path, observers=(metrics,), seconds=0.001) as server:
            for kind in ("unary", "stream", "n=4") * 2:
                call = start(server, kind)
                assert await outcome(call, kind) == "OK"
            await server.at_rest()
            found = values(metrics.render())
            again = values(metrics.render())
        assert found == again
        choices = 2 * (1 + 1 + 4)
        finished = {name: value for name, value in found.items() if "request_success_total" in name}
        assert sum(finished.values()) == choices
        for name in (
            "time_to_first_token",
            "e2e_request_latency",
            "request_prefill_time",
            "request_decode_time",
        ):
            assert found[f"jaxserve:{name}_seconds_count{{}}"] == choices, name
        assert found["jaxserve:generation_tokens_total{}"] == choices * TOKENS
        between = found["jaxserve:inter_token_latency_seconds_count{}"]
        assert between == choices * (TOKENS - 1)  # one token a step
        assert (
            found["jaxserve:num_requests_running{}"] == found["jaxserve:kv_cache_usage_perc{}"] == 0
        )

    asyncio.run(main())


async def say_made_up_things(http: Http, name: str) -> None:
    """Let a name stand for everything that a client may name."""
    completions = "/v1/completions"
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 1}
    assert (await http.post(completions, body | {"request_id": name})).status_code == 200
    assert (await http.post(completions, body | {"model": name})).status_code == 404
    assert (await http.post(completions, body | {name: 1})).status_code == 400
    assert (await http.raw.get(f"/{name}", headers={name: name})).status_code == 404
    headers = {"x-request-id": name, "user-agent": name}
    assert (await http.raw.get(f"/v1/models/{name}", headers=headers)).status_code == 404
    too_long = body | {"prompt": "x" * 600, "request_id": f"long-{name}"}
    assert (await http.post(completions, too_long)).status_code == 400


def test_clients_cannot_add_series(tmp_path: Path) -> None:
    """Each would stay in memory, here and where the metrics are collected."""

    async def main() -> None:
        metrics = Metrics(lambda: 0)
        async with serving(tmp_path, metrics=metrics) as http:
            canary = await http.canary()
            await say_made_up_things(http, "first")  # a reason is a label, once it was met
            before = values(metrics.render()).keys()
            for number in range(20):
                await say_made_up_things(http, f"made-up-{number}")
            assert values(metrics.render()).keys() == before
            assert await http.canary() == canary
            await http.server.at_rest()

    asyncio.run(main())
