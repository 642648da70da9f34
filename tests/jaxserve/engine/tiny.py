"""Random decoders with a vocabulary of 20 tokens, and engines around them.

The reported log-probabilities therefore cover the whole vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig, EngineOptions, resolve
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.drafting import Drafter
from jaxserve.engine.device.memory import state_sizes
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.events import Logprob, TokenEvent
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.speculation import Speculation
from jaxserve.models.decoder import param_specs
from jaxserve.models.layer_kind import ConvState, DeltaState, Latent, LayerKind, windowed
from jaxserve.models.mixture import Mixture
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec
from jaxserve.request import Request
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import map_specs
from jaxserve.sharding.rules import shards
from tests.random_weights import random_weights

SPEC = ModelSpec(
    family="llama",
    vocab_size=MAX_LOGPROBS,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_mlp=48,
    norm_eps=1e-5,
    max_positions=96,
    rope=Rope(10000.0),
)
WINDOWED = replace(SPEC, layers=windowed([7, None]), attn_softcap=3.0)  # two page groups
EXPERTS = replace(
    SPEC, mixture=Mixture(experts=8, taken=3, d_expert=16, layers=(0, 1), d_shared=12)
)
LATENT = replace(
    EXPERTS,
    num_kv_heads=1,
    head_dim=12,
    layers=(LayerKind(latent=Latent(None, rank=16, head=8, rotated=4, value=8)),) * 2,
)
STATE = DeltaState(key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=4)
STATES = replace(
    SPEC,
    num_layers=3,
    layers=(LayerKind(state=STATE), LayerKind(), LayerKind(state=STATE)),
    qk_norm="head",
    attn_gate=True,
)
CONVOLUTION = ConvState(heads=2, channels=16, taps=3)
CONVOLUTIONS = replace(
    STATES,
    layers=(LayerKind(state=CONVOLUTION), LayerKind(), LayerKind(state=CONVOLUTION)),
    attn_gate=False,
)
BASE = EngineOptions(max_batch=4, page_size=4, step_tokens=32, cache_tokens=1024)


NewDrafter = Callable[[EngineConfig, jax.sharding.Mesh], Drafter]


def make_params(
    mesh: jax.sharding.Mesh, dtype: jnp.dtype = jnp.float32, spec: ModelSpec = SPEC, seed: int = 1
) -> dict:
    """Make weights spread so widely that the best two logits are about one apart."""
    louder = map_specs(lambda param: replace(param, std=0.25), param_specs(spec, jnp.dtype(dtype)))
    return random_weights(louder, mesh, seed=seed)


def make_engine(
    options: EngineOptions,
    mesh_spec: MeshSpec | None = None,
    spec: ModelSpec = SPEC,
    dtype: jnp.dtype = jnp.float32,
    speculation: Speculation | None = None,
    new_drafter: NewDrafter | None = None,
) -> tuple[Engine, DeviceRunner]:
    mesh = (mesh_spec or MeshSpec()).build(jax.devices())
    windows = [group.window for group in spec.page_groups()]
    config = resolve(
        options,
        max_positions=spec.max_positions,
        lanes=shards("A", mesh),
        affordable_tokens=10**6,
        windows=windows,
        states=state_sizes(spec),
        embeds=spec.embeds,
        weights=str(jnp.dtype(dtype)),
    )
    return engine_from_config(config, mesh, spec, dtype, speculation, new_drafter)


def engine_from_config(
    config: EngineConfig,
    mesh: jax.sharding.Mesh,
    spec: ModelSpec = SPEC,
    dtype: jnp.dtype = jnp.float32,
    speculation: Speculation | None = None,
    new_drafter: NewDrafter | None = None,
) -> tuple[Engine, DeviceRunner]:
    drafter = new_drafter(config, mesh) if new_drafter else None
    runner = DeviceRunner(spec, make_params(mesh, dtype, spec), config, mesh, drafter)
    return Engine(Scheduler(config, fingerprint="tiny", speculation=speculation), runner), runner


def largest_of_each_kind(runner: DeviceRunner) -> list[Bucket]:
    """Return few buckets to compile that hold any plan, for tests that choose no bucket."""
    ordered = sorted(runner.buckets.buckets)
    return list({(bucket.kind, bucket.steps, bucket.drafts): bucket for bucket in ordered}.values())


class Outcome:
    """Collected events of one choice."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.prompt_logprobs: list[Logprob] = []
        self.last: TokenEvent | None = None

    def add(self, event: TokenEvent) -> None:
        assert self.last is None, "an event after the end"
        self.tokens += event.tokens
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs += event.prompt_logprobs or ()
        if event.finish:
            self.last = event


def run(
    engine: Engine, arrivals: list[tuple[int, Request]], limit: int = 5000
) -> dict[tuple[str, int], Outcome]:
    """Submit each request at its step and run until all have ended.

    Invariants are checked after every step.
    """
    outcomes = {(r.id, i): Outcome() for _, r in arrivals for i in range(r.params.n)}
    waiting = sorted(arrivals, key=lambda a: a[0])
    for step in range(limit):
        while waiting and waiting[0][0] <= step:
            engine.submit(waiting.pop(0)[1])
        for event in engine.step():
            outcomes[event.request_id, event.index].add(event)
        engine.scheduler.check_invariants()
        if not waiting and not engine.has_work:
            return outcomes
    raise AssertionError(f"not done after {limit} steps")


def distribution(entry: Logprob) -> np.ndarray:
    """Return the reported alternatives as log-probabilities by token id, [V]."""
    values = np.empty(SPEC.vocab_size, np.float32)
    for token, logprob in entry.top:
        values[token] = logprob
    return values
