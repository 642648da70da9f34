"""OpenAI's API on Ray Serve: streams while replicas come and go."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.config import AutoscalingContext

from jaxserve import EngineOptions
from jaxserve.errors import ConfigError
from jaxserve.ray import build, openai_app
from jaxserve.ray.serving import LOAD, replicas_by_load
from tests.cluster.simulated import (
    CHIPS,
    MODEL,
    NAME,
    OPTIONS,
    SECONDS,
    SimulatedCluster,
    eventually,
    kill,
    processes,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ENGINE = EngineOptions(max_batch=4, max_context=512)
REPLICA = "ray::ServeReplica:llm"
PORT = 8127
URL = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def serving(cluster: SimulatedCluster) -> Iterator[None]:
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield
    serve.shutdown()


def run(replicas: int, **options: Any) -> None:
    """Serve the model with so many replicas."""
    app = openai_app(
        MODEL,
        replicas=replicas,
        resources=CHIPS,
        options={**OPTIONS, "options": ENGINE},
        **options,
    )
    serve.run(app, name="llm", route_prefix="/")


def running() -> int:
    """Return the number of replicas that run, none of which starts or stops."""
    states = serve.status().applications["llm"].deployments["jaxserve"].replica_states
    return states.get("RUNNING", 0) if set(states) == {"RUNNING"} else 0


def streamed(prompt: str, max_tokens: int, began: threading.Event | None = None) -> tuple[str, str]:
    """Return a streamed text, and the reason why it ended."""
    request = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    text = ""
    reason = ""
    with httpx.stream("POST", f"{URL}/v1/completions", json=request, timeout=SECONDS) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                if began:
                    began.set()
    return text, reason


def test_no_stream_is_lost_while_replicas_end(
    serving: None, texts: Callable[[Sequence[str], int], list[str]]
) -> None:
    run(2)
    assert httpx.get(f"{URL}/v1/models").json()["data"][0]["id"] == NAME
    prompts = [f"Story {i}: once upon a time" for i in range(12)]
    found: dict[str, tuple[str, str]] = {}
    began = [threading.Event() for _ in prompts]
    threads = [
        threading.Thread(target=lambda p=p, b=b: found.update({p: streamed(p, 200, b)}))
        for p, b in zip(prompts, began, strict=True)
    ]
    for thread in threads:
        thread.start()
    assert all(event.wait(SECONDS) for event in began[:4])
    run(1)
    for thread in threads:
        thread.join()
    assert eventually(running) == 1
    assert {reason for _, reason in found.values()} == {"length"}
    with_eos = texts(prompts, 200)
    for prompt, text in zip(prompts, with_eos, strict=True):
        assert found[prompt][0].startswith(text)


def figure(name: str) -> float:
    """Return a figure of the only replica."""
    reply = httpx.get(f"{URL}/metrics", timeout=SECONDS)
    (found,) = [line for line in reply.text.splitlines() if line.startswith(f"jaxserve:{name} ")]
    return float(found.split()[-1])


def test_the_request_of_a_client_that_leaves_is_aborted(serving: None) -> None:
    run(1)
    request = {
        "model": NAME,
        "prompt": "One day",
        "max_tokens": 500,
        "n": 16,  # of which four run at a time: it takes long enough to be aborted
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{URL}/v1/completions", json=request, timeout=SECONDS) as reply:
        next(reply.iter_lines())
    eventually(lambda: figure("num_requests_running") == 0)
    assert figure("generation_tokens_total") < 16 * 500


def test_a_replica_that_dies_is_replaced(serving: None) -> None:
    run(1)
    (replica,) = processes(REPLICA)
    kill(replica)
    eventually(lambda: processes(REPLICA) not in ([], [replica]))
    assert eventually(running) == 1
    assert streamed("One day", 4)[1] == "length"


def test_tokens_are_asked_for(serving: None) -> None:
    run(1, tokens=["secret"])
    assert httpx.get(f"{URL}/v1/models").status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert httpx.get(f"{URL}/v1/models", headers=headers).status_code == 200


def test_a_replica_that_cannot_start_says_why(serving: None) -> None:
    with pytest.raises(RuntimeError, match="Deploying application llm failed"):
        serve.run(openai_app("/not/here"), name="llm", route_prefix="/")
    status = serve.status().applications["llm"].deployments["jaxserve"]
    assert status.status == "DEPLOY_FAILED"
    assert "/not/here: there is no such folder" in status.message
    serve.delete("llm")


def context(loads: dict[str, float]) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="jaxserve",
        app_name="llm",
        current_num_replicas=len(loads),
        target_num_replicas=2,
        running_replicas=[],
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics={LOAD: loads} if loads else {},
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=None,
    )


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [({}, 2), ({"a": 0.0, "b": 0.0}, 0), ({"a": 0.8, "b": 0.7}, 2), ({"a": 3.0, "b": 1.0}, 5)],
)
def test_replicas_by_load(loads: dict[str, float], wanted: int) -> None:
    assert replicas_by_load(context(loads))[0] == wanted


def test_replicas_grow_with_the_load(serving: None) -> None:
    quick = {"upscale_delay_s": 0, "metrics_interval_s": 0.2, "look_back_period_s": 0.5}
    app = openai_app(
        MODEL,
        replicas=(1, 2),
        resources=CHIPS,
        options={**OPTIONS, "options": ENGINE},
        scaling=quick,
    )
    serve.run(app, name="llm", route_prefix="/")
    assert eventually(running) == 1
    prompts = [f"Story {i}" for i in range(24)]
    threads = [threading.Thread(target=streamed, args=(p, 400)) for p in prompts]
    for thread in threads:
        thread.start()
    eventually(lambda: len(processes(REPLICA)) == 2)
    for thread in threads:
        thread.join()


def test_arguments_of_the_command() -> None:
    app = build({"model": MODEL, "replicas": 2, "engine": {"max_batch": 8}})
    assert app is not None
    with pytest.raises(ConfigError, match="model is missing"):
        build({})
    assert build({"model": MODEL, "replicas": "[1, 2]", "tokens": '["a"]', "resources": "{}"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": "two"}, "replicas is 'two', which is no JSON such as 2"),
        ({"replicas": "2.0"}, "replicas is 2.0; give a number, or the least and the most"),
        ({"replicas": "true"}, "replicas is True; give"),
        ({"replicas": [1, 2, 3]}, r"replicas is \[1, 2, 3\]; give"),
        ({"tokens": '"secret"'}, "tokens is no list of texts"),
        ({"tokens": "5"}, "tokens is no list of texts"),
        ({"tokens": "[5]"}, "tokens is no list of texts"),
        ({"resources": "4"}, "resources is 4; give a mapping"),
        ({"engine": "[]"}, r"engine is \[\]; give a mapping"),
        ({"limits": "1"}, "limits is 1; give a mapping"),
        (
            {"allowed_hosts": "example.org"},
            r"allowed_hosts is 'example.org', which is no JSON such",
        ),
    ],
)
def test_arguments_of_another_type(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build({"model": MODEL, **arguments})
