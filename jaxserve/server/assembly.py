"""From a loaded model to what stands behind the gate."""

import asyncio
from collections.abc import Callable
from importlib.metadata import version

from jaxserve.cluster.compatibility import facts_of_model, facts_of_weights
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.engine.device.page_io import sources
from jaxserve.engine.device.weight_report import sizes_of
from jaxserve.errors import JaxserveError
from jaxserve.llm import LLM
from jaxserve.models.quant import form_in
from jaxserve.server.core.engine_thread import EngineThread, Tally
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import Observer, Service
from jaxserve.server.core.ttft_estimate import Forecast
from jaxserve.server.disaggregation.roles import Role
from jaxserve.server.serving_state import EngineCard, ModelCard, StepUse
from sharding.mesh import device_kind

PACKAGES = ("jaxserve", "jax", "jaxlib", "grpcio")


def assemble(
    llm: LLM,
    limits: Limits,
    observers: tuple[Observer, ...],
    loop: asyncio.AbstractEventLoop,
    failed: Callable[[BaseException], None],
    role: Role,
) -> tuple[Service, EngineThread]:
    """Service and engine thread over a model whose steps are compiled; news and failures reach the
    loop.
    """
    runner, config = llm.runner, llm.runner.config
    service: Service

    def tally() -> Tally:
        return Tally(runner.total.live_tokens, runner.total.computed_tokens, str(runner.collected))

    thread = EngineThread(
        llm.engine,
        lambda news: _tell(loop, lambda: service.take(news)),
        lambda error: _tell(loop, lambda: failed(error)),
        tally,
    )
    forecast, handover = (
        Forecast(config.step_tokens * config.lanes),
        role.remote_prefill(thread, config.page_size),
    )
    service = Service(llm.prompts, thread, forecast, limits, observers, handover, role.for_servers)
    return service, thread


def _tell(loop: asyncio.AbstractEventLoop, job: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(job)


def handshake_of(llm: LLM) -> Handshake | None:
    """None where the engine exchanges no pages with others.

    It compiles a program: before the engine is ready.
    """
    model, config = llm.model, llm.runner.config
    if not config.page_exchange:
        return None
    with llm.runner.preparing():
        facts = facts_of_model(model.spec.single, model.params, model.weights) | facts_of_weights(
            model.params
        )
    dtypes = sources(config.page_dtype, str(model.params["embed"].dtype))
    return Handshake(facts, config.page_dtype, dtypes)


def model_card(llm: LLM, name: str) -> ModelCard:
    spec, dtype = llm.model.spec, str(llm.model.params["embed"].dtype)
    return ModelCard(
        name=name,
        architecture=spec.family,
        parameters=llm.model.parameters,
        dtype=dtype,
        weights=str(form_in(llm.model.params) or dtype),
        sizes=sizes_of(llm.model.params),
        vocab_size=spec.vocab_size,
        max_context=llm.runner.config.max_context,
        eos_ids=llm.model.eos_ids,
        has_chat_template=_has_chat_template(llm),
        embedding_dimensions=spec.d_model if spec.embeds else 0,
    )


def _has_chat_template(llm: LLM) -> bool:
    try:
        return bool(llm.chat_template)
    except JaxserveError:
        return False


def engine_card(llm: LLM) -> EngineCard:
    config = llm.runner.config
    return EngineCard(
        versions={package: version(package) for package in PACKAGES},
        mesh=dict(llm.model.mesh.shape),
        device_kind=device_kind(llm.model.mesh),
        buckets=[str(bucket) for bucket in llm.runner.buckets.buckets],
        max_batch=config.max_batch,
        step_tokens=config.step_tokens,
        page_size=config.page_size,
        cache_tokens=config.lanes * max(pool.pages for pool in config.pools) * config.page_size,
        kv_copies=llm.model.spec.kv_copies,
        lanes=config.lanes,
        kv=config.kv,
    )


def step_use(llm: LLM) -> list[StepUse]:
    """Of every compiled step. The engine's thread counts meanwhile: a number may be a launch ahead
    of the others.
    """
    return [
        StepUse(
            b.kind, b.rows, b.tokens, b.steps, use.launches, use.live_tokens, use.computed_tokens
        )
        for b, use in llm.runner.padding.items()
    ]
