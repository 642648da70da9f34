"""Descriptions of a loaded model and its engine: for clients, operators and other servers."""

from importlib.metadata import version

from jaxserve.cluster.compatibility import facts_of_model
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.config import EngineConfig
from jaxserve.engine.device.memory import state_sizes
from jaxserve.engine.device.page_io import accepted_dtypes
from jaxserve.engine.device.weight_report import describe_rounding, describe_weights, weight_sizes
from jaxserve.errors import JaxserveError
from jaxserve.llm import LLM
from jaxserve.models.precision import XLA
from jaxserve.models.quant import scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.server.serving_state import EngineCard, ModelCard, StatesCard, StepUse
from jaxserve.sharding.mesh import device_kind

PACKAGES = ("jaxserve", "jax", "jaxlib", "grpcio")  # whose versions operators see


def model_card(llm: LLM, name: str) -> ModelCard:
    """Describe the model for clients, who call it `name`."""
    spec = llm.model.spec
    dtype = llm.model.dtype
    return ModelCard(
        name=name,
        architecture=spec.family,
        parameters=llm.model.parameters,
        dtype=dtype,
        weights=str(scheme_in(llm.model.params) or dtype),
        sizes=weight_sizes(llm.model.params),
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
    """Describe the engine for operators."""
    config = llm.runner.config
    return EngineCard(
        versions={package: version(package) for package in PACKAGES},
        mesh=dict(llm.model.mesh.shape),
        device_kind=device_kind(llm.model.mesh),
        buckets=[str(bucket) for bucket in llm.runner.buckets.buckets],
        max_batch=config.max_batch,
        step_tokens=config.step_tokens,
        page_size=config.page_size,
        cache_tokens=config.lanes
        * max(pool.pages for pool in config.page_pools)
        * config.page_size,
        kv_copies=llm.model.spec.kv_copies,
        lanes=config.lanes,
        kv=config.kv,
        product=llm.model.product_text,
        states=states_card(llm.model.spec, config),
    )


def states_card(spec: ModelSpec, config: EngineConfig) -> StatesCard | None:
    """Describe the memory of recurrent states; None for a model without any."""
    if config.states is None:
        return None
    (size,) = state_sizes(spec)
    return StatesCard(
        snapshots=config.slots - config.max_batch,
        interval=config.states.interval,
        slot_bytes=size.slot_bytes,
        slot_tokens=size.tokens(config.kv),
    )


def step_use(llm: LLM) -> list[StepUse]:
    """Return how often each compiled step was launched, and for how many tokens.

    The engine's thread counts meanwhile: one number may be a launch ahead of the others.
    """
    return [
        StepUse(
            bucket.kind,
            bucket.rows,
            bucket.tokens,
            bucket.steps,
            use.launches,
            use.live_tokens,
            use.computed_tokens,
        )
        for bucket, use in list(llm.runner.padding.items())
    ]


def handshake_of(llm: LLM) -> Handshake | None:
    """Describe the KV pages for other servers; None where the engine exchanges no pages."""
    model = llm.model
    config = llm.runner.config
    if not config.page_exchange:
        return None
    assert llm.digests, "the loader asks for digests where pages are exchanged"
    facts = facts_of_model(model.spec.single, model.dtype, model.weights)
    if model.spec.state:  # a state is sent of a page's end, and of no other token
        facts |= {"the tokens of a page (--page-size)": str(config.page_size)}
    dtypes = accepted_dtypes(config.page_dtype, model.dtype)
    return Handshake(facts, llm.digests, config.page_dtype, dtypes)


def summary(model: ModelCard, engine: EngineCard) -> list[str]:
    """Return the lines that an operator sees when the model is loaded."""
    what = f"{model.name} ({model.architecture}), {model.parameters / 1e6:,.1f} M parameters"
    embeds = ""
    if model.embedding_dimensions:
        embeds = f", embeddings of {model.embedding_dimensions} numbers"
    weights = [describe_weights(model.sizes)]
    if engine.product != XLA and (hint := describe_rounding(model.sizes)):  # with the CPU's kernel
        weights.append(hint)
    return [
        f"model    {what}, {model.weights}{embeds}",
        *(f"weights  {line}" for line in weights),
        f"mesh     {mesh_text(engine)}",
        f"engine   {engine.max_batch} rows, {engine.step_tokens} tokens a step, context "
        f"{model.max_context}, products by {engine.product}",
        f"cache    {cache_text(engine)}",
        *([f"states   {states_text(engine, engine.states)}"] if engine.states else []),
    ]


def mesh_text(engine: EngineCard) -> str:
    """Return the mesh, its devices, and how often each KV head is stored, in words."""
    axes = " x ".join(f"{axis} {size}" for axis, size in engine.mesh.items())
    copies = f", every kv head on {engine.kv_copies} devices" if engine.kv_copies > 1 else ""
    return f"{axes} on {engine.device_kind}{copies}"


def states_text(engine: EngineCard, states: StatesCard) -> str:
    """Return how many sequences and snapshots there is room for, and what each takes, in words."""
    lanes = " a lane" if engine.lanes > 1 else ""
    every = ""
    if states.snapshots:
        every = f", one behind every {states.interval:,} tokens of a prompt"
    return (
        f"{engine.max_batch:,} sequences and {states.snapshots:,} snapshots{lanes}{every}; each "
        f"takes {states.slot_bytes / 1e6:,.1f} MB on all of its devices together, as the pages of "
        f"{states.slot_tokens:,} tokens do"
    )


def cache_text(engine: EngineCard) -> str:
    """Return size and dtype of the KV cache in words."""
    return f"{engine.cache_tokens:,} tokens in pages of {engine.page_size}, {engine.kv}"
