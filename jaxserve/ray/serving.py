"""OpenAI's API on Ray Serve: each replica is this project's own HTTP application over one model."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from rich.console import Console

from jaxserve.checkpoints.hub.names import display_name
from jaxserve.config import EngineOptions
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.checks import Callers
from jaxserve.server.lifecycle import FAILED
from jaxserve.server.local_server import LocalServer
from jaxserve.server.model_steps import ModelSteps
from jaxserve.server.security.auth import BearerTokens

LOAD = "engine_load"  # choices that run or wait, by rows
TARGET_LOAD = 0.8
# Arguments that are JSON where a command gives them as texts.
PARSED = frozenset({"replicas", "scaling", "resources", "options", "limits", "engine"})
PARSED_LISTS = frozenset({"tokens", "allowed_hosts"})
HEALTH_SECONDS = 5.0  # between two checks
START_TRIES = 3
STEP_SECONDS = 60.0  # after which a step counts as hung
DRAIN_SECONDS = 600.0  # for the answers of a replica that is to end
# Requests beyond the engine's rows wait in its own queue, whose bounds and forecasts answer them.
REQUESTS_PER_REPLICA = 1024


@serve.ingress()
class ModelServer:
    """Replica that serves one model.

    Args:
        model: Folder that all nodes have, or org/name[@revision] of a model on the hub.
        name: Name of the model in requests.
        options: Keyword arguments of LLM.
        limits: Limits on requests.
        tokens: Tokens that callers must send.
        callers: Who may call by which name.
    """

    def __init__(
        self,
        model: str,
        name: str,
        options: Mapping[str, Any],
        limits: Limits,
        tokens: BearerTokens,
        callers: Callers,
    ):
        as_served = {"unknown_fields": "ignore"}  # the default of jaxserve serve
        self._llm = LLM(model, **{**as_served, **options})
        steps = ModelSteps(self._llm, None, bundled=False, console=Console(stderr=True))
        steps.compile()
        self._server = LocalServer(self._llm, name, limits, steps, tokens, callers, STEP_SECONDS)

    async def __serve_build_asgi_app__(self) -> Any:
        """Start the engine, on the event loop that requests come on, and return the application."""
        await self._server.__aenter__()
        return self._server.app

    def check_health(self) -> None:
        """Raise the error that has ended the engine, upon which Serve replaces the replica."""
        if self._server.failure:
            raise self._server.failure

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `replicas_by_load` decides by, and the wait of a new request in seconds."""
        return {LOAD: self._server.load, "queue_seconds": self._server.queue_seconds}

    async def __del__(self) -> None:
        await self._server.__aexit__(None, None, None)
        if self._server.hangs:
            os._exit(FAILED)  # the end of Python would wait for the step
        self._llm.close()


def replicas_by_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return how many replicas the choices that run or wait need, for Serve's autoscaling.

    Serve's own policy counts requests; this one counts rows of the engine, of which a request with
    n choices needs n, and a replica with a larger batch has more.
    """
    loads = context.aggregated_metrics.get(LOAD, {})
    if not loads:  # no replica has reported yet
        return context.target_num_replicas, {}
    return math.ceil(sum(loads.values()) / TARGET_LOAD), {}


def openai_app(
    model: str,
    *,
    name: str | None = None,
    replicas: int | tuple[int, int] = 1,
    scaling: Mapping[str, Any] | None = None,
    resources: Mapping[str, float] | None = None,
    options: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    tokens: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    **deployment: Any,
) -> serve.Application:
    """Return an application for `serve.run`, which answers OpenAI's API.

    Serve's proxy streams what a replica streams. A replica whose engine has failed is replaced; one
    that is to end gets no more requests, and ends when the last of its answers has.

    Args:
        model: Folder that all nodes have, or org/name[@revision] of a model on the hub.
        name: Name of the model in requests; None is org/name of the hub, or that of the folder.
        replicas: Number of replicas; or the least and the most, between which Serve scales by
            `replicas_by_load`.
        scaling: More fields of Serve's AutoscalingConfig, such as {"upscale_delay_s": 5}.
        resources: What each replica needs, by Ray's names: {"TPU": 4}, {"GPU": 8}.
        options: Keyword arguments of LLM.
        limits: Limits on requests, those of each replica; None takes the server's defaults.
        tokens: Tokens of clients, each of which has to send one; without any everybody is answered.
        allowed_hosts: Names by which clients may call Serve's proxy where there are no tokens,
            beside IP addresses and localhost; "*" allows any.
        **deployment: More options of serve.deployment, before those that follow from the others.

    Raises:
        ConfigError: An argument is of another type.
    """
    _check_replicas(replicas)
    _check_texts("tokens", tokens)
    _check_texts("allowed_hosts", allowed_hosts)
    for argument, value in (("scaling", scaling), ("resources", resources), ("options", options)):
        _check_mapping(argument, value)
    needs = dict(resources or {})
    settings: dict[str, Any] = {
        "name": "jaxserve",
        "max_ongoing_requests": REQUESTS_PER_REPLICA,
        "graceful_shutdown_timeout_s": DRAIN_SECONDS,
        "health_check_period_s": HEALTH_SECONDS,
        "max_constructor_retry_count": START_TRIES,
        "ray_actor_options": {
            "num_cpus": needs.pop("CPU", 1),
            "num_gpus": needs.pop("GPU", 0),
            "resources": needs,
        },
    }
    if isinstance(replicas, int):
        settings["num_replicas"] = replicas
    else:
        settings["autoscaling_config"] = scaling_between(*replicas, **scaling or {})
    made = serve.deployment(**{**settings, **deployment})(ModelServer)
    return made.bind(
        model,
        name or display_name(model),
        dict(options or {}),
        limits or Limits(),
        BearerTokens(tuple(tokens)),
        Callers(frozenset(allowed_hosts)),
    )


def _check_replicas(replicas: object) -> None:
    both = replicas if isinstance(replicas, tuple | list) else (replicas, replicas)
    if len(both) != 2 or any(type(each) is not int for each in both):
        raise ConfigError(f"replicas is {replicas!r:.80}; give a number, or the least and the most")


def _check_texts(name: str, texts: object) -> None:
    """Raise ConfigError unless it is a list of texts; the error repeats none, which are secret."""
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not is_list or not all(isinstance(each, str) for each in texts):
        raise ConfigError(f"{name} is no list of texts; give one")


def _check_mapping(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r:.80}; give a mapping of names to values")


def scaling_between(least: int, most: int, **fields: Any) -> AutoscalingConfig:
    """Return Serve's configuration of scaling between two numbers of replicas by their load."""
    policy = AutoscalingPolicy(policy_function=replicas_by_load)
    return AutoscalingConfig(min_replicas=least, max_replicas=most, policy=policy, **fields)


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application for `serve run jaxserve.ray:build model=...` and Serve's YAML files.

    Args:
        arguments: Arguments of `openai_app`, and `engine` and `limits` as mappings: fields of
            EngineOptions and of Limits. Texts, as the command has them, are JSON but for `model`,
            `name` and options of the deployment: replicas=2, resources='{"TPU": 4}'.

    Raises:
        ConfigError: There is no model, or an argument is of another type.
    """
    given = {name: _value(name, value) for name, value in arguments.items()}
    if "model" not in given:
        raise ConfigError("model is missing; give a folder or org/name of a model on the hub")
    engine = given.pop("engine", None)
    limits = given.pop("limits", None)
    for name, value in (("engine", engine), ("limits", limits), ("options", given.get("options"))):
        _check_mapping(name, value)
    if engine:
        given["options"] = {**given.get("options", {}), "options": EngineOptions(**engine)}
    if limits:
        given["limits"] = replace(Limits(), **limits)
    return openai_app(given.pop("model"), **given)


def _value(name: str, value: Any) -> Any:
    """Return the value of an argument, which is text if it comes from a command."""
    if name not in PARSED | PARSED_LISTS or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        example = '["a"]' if name in PARSED_LISTS else "2 or {}"
        raise ConfigError(f"{name} is {value!r:.80}, which is no JSON such as {example}") from None
