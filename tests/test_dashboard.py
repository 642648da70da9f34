"""deploy/grafana.json and deploy/alerts.yaml ask for what the server tells, in a run with all kinds
of traffic.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import promql_parser as promql
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from jaxserve.cluster.transfer.offers import Counts, OfferStore
from jaxserve.engine.engine_thread import ComputeTotals
from jaxserve.server.disaggregation.metrics import DecodeMetrics, PrefillMetrics, ServerMetrics
from jaxserve.server.disaggregation.policy import Decision
from jaxserve.server.disaggregation.prefill_pool import State
from jaxserve.server.observe.expert_load import ExpertLoad
from jaxserve.server.observe.metrics import Metrics
from jaxserve.v1 import inference_pb2
from tests.jaxserve.engine.host.driver import EagerProposer
from tests.jaxserve.server.harness import Running, running
from tests.jaxserve.server.test_endings import outcome, sampling, start

DEPLOY = Path(__file__).parent.parent / "deploy"
SCRAPED = {"instance", "job"}  # labels that Prometheus itself gives
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}
Samples = list[tuple[str, dict[str, str], float]]


async def traffic(server: Running) -> None:
    """Answers, prefix hits, preemption, a client that leaves, a request that is refused, one that
    fails, one with a field without effect.
    """
    server.served.thread._totals = lambda: ComputeTotals(
        3 * server.runner.steps, 4 * server.runner.steps
    )  # the fake has none
    calls = [start(server, "stream", request_id=f"r{i}", text=f"{i} " * 30) for i in range(8)]
    await asyncio.gather(*(outcome(call, "stream") for call in calls))
    for _ in range(2):
        assert await outcome(start(server, "unary", text="the same again " * 5), "unary") == "OK"
    long = inference_pb2.GenerateRequest(text="x" * 600, sampling=sampling(1))
    assert await outcome(server.inference.Generate(long), "unary") == "INVALID_ARGUMENT"
    said = [inference_pb2.ChatMessage(role="user", content="hi")]
    chat = inference_pb2.ChatRequest(messages=said, sampling=sampling(1), verbosity="low")
    assert await outcome(server.inference.Chat(chat), "unary") == "OK"
    call = start(server, "stream")
    await call.read()
    call.cancel()
    await server.at_rest()


def handed_over() -> bytes:
    """What a decode server says of its handovers, and a prefill server of its pieces."""
    decode, prefill = CollectorRegistry(), CollectorRegistry()
    seen = DecodeMetrics(decode)
    ServerMetrics(decode, ByteBudget(1), lambda: Counter((State.READY,)))
    for decision in Decision:
        seen.decided(decision)
    seen.received(1)
    seen.ended(0.1, None)
    seen.ended(0.1, "unavailable")
    offers = OfferStore(1)
    offers.counts = Counts(offered=4, fetched=1, broken=1, expired=1, withdrawn=1, bytes=1)
    PrefillMetrics(prefill, offers)
    return generate_latest(decode) + generate_latest(prefill)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """What /metrics says after it."""
    metrics, experts = Metrics(lambda: 0), CollectorRegistry()
    ExpertLoad(experts, (1, 2)).take(np.array([[1, 3], [2, 2]], np.uint32))

    async def main() -> bytes:
        folder = tmp_path_factory.mktemp("dashboard")
        small: dict[str, int] = {"num_pages": 32, "max_context": 120}
        async with running(
            folder, observers=(metrics,), seconds=0.001, proposer=EagerProposer(), **small
        ) as server:
            await traffic(server)
        return await metrics.text() + generate_latest(experts) + handed_over()

    families = text_string_to_metric_families(asyncio.run(main()).decode())
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


def panels() -> list[dict[str, Any]]:
    found = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def queries() -> Iterator[Any]:
    for panel in panels():
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for rule in rules():
        yield pytest.param(rule["expr"], id=rule["alert"])


def nodes(query: str) -> list[Any]:
    """Of its syntax tree. Raises ValueError for what is no PromQL."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    found: list[Any] = []
    promql.walk(promql.parse(query), lambda node: found.append(node))
    return found


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "MatchOp.Equal": lambda value, wanted: value == wanted,
    "MatchOp.Re": lambda value, wanted: re.fullmatch(wanted, value) is not None,
}


def selected(selector: Any, samples: Samples) -> Samples:
    """The samples that it takes, but for the values of labels that name errors: not all of them
    happened here.
    """

    def taken(labels: dict[str, str]) -> bool:
        return all(
            matcher.name in labels
            and (
                matcher.name == "reason"
                or MATCHES[str(matcher.op)](labels[matcher.name], matcher.value)
            )
            for matcher in selector.matchers.matchers
            if matcher.name not in SCRAPED
        )

    return [sample for sample in samples if sample[0] == selector.name and taken(sample[1])]


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_finds_its_metrics_and_labels(query: str, samples: Samples) -> None:
    tree = nodes(query)
    selectors = [node for node in tree if isinstance(node, promql.VectorSelector)]
    assert selectors
    labels = [
        set[str]().union(*(found[1] for found in selected(s, samples))) | SCRAPED for s in selectors
    ]
    for selector in selectors:
        assert selected(selector, samples), f"{selector} finds nothing"
    for node in tree:
        if isinstance(node, promql.AggregateExpr) and node.modifier:
            assert all(set(node.modifier.labels) <= found for found in labels), node.modifier.labels


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_has_something_to_show(panel: dict[str, Any], samples: Samples) -> None:
    """What counts has counted; every name in a legend is a label that the query keeps."""
    for target in panel["targets"]:
        tree = nodes(target["expr"])
        selectors = [node for node in tree if isinstance(node, promql.VectorSelector)]
        for selector in selectors:
            if selector.name.endswith(("_total", "_bucket")):
                assert any(value for _, _, value in selected(selector, samples)), selector.name
        kept = {
            label
            for node in tree
            if isinstance(node, promql.AggregateExpr) and node.modifier
            for label in node.modifier.labels
        }
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


def test_nothing_that_is_told_is_forgotten(samples: Samples) -> None:
    """Every metric is on the dashboard."""
    shown = {
        node.name
        for panel in panels()
        for t in panel["targets"]
        for node in nodes(t["expr"])
        if isinstance(node, promql.VectorSelector)
    }
    told = {name for name, _, _ in samples if not name.endswith(("_created", "_sum", "_count"))}
    assert told == shown


def test_every_metric_is_explained(samples: Samples) -> None:
    """In docs/operating.md, and nothing that there is not."""
    documented = set(
        re.findall(
            r"`(\w+)(?:{[\w,]+})?`",
            (DEPLOY.parent / "docs/operating.md").read_text().split("## Traces")[0],
        )
    )
    told = {name.removeprefix("jaxserve:").removesuffix("_bucket") for name, _, _ in samples}
    assert documented == {
        name for name in told if not name.endswith(("_created", "_sum", "_count"))
    }


def test_the_dashboard_is_one() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y)
        for b in boxes
        for x in range(b["x"], b["x"] + b["w"])
        for y in range(b["y"], b["y"] + b["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23, "panels overlap"


def test_alerts_are_of_reasons_that_there_are() -> None:
    reasons = {m for rule in rules() for m in re.findall(r'reason=~?"([^"]+)"', rule["expr"])}
    known = set(
        re.findall(
            r"^\| [A-Z_]+ \| \d+ \| ([A-Z_]+) \|", (DEPLOY.parent / "docs/api.md").read_text(), re.M
        )
    )
    assert reasons and {reason for names in reasons for reason in names.split("|")} <= known
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning") and rule[
            "annotations"
        ].keys() == {
            "summary",
            "description",
        }
