"""The state of a server whose model is loaded: service, engine thread, and their descriptions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.models.precision import XLA
from jaxserve.sampling_params import SamplingFields
from jaxserve.server.core.service import Service

if TYPE_CHECKING:
    from jaxserve.cluster.transfer.handshake import Handshake
    from jaxserve.engine.device.runner import DeviceRunner


@dataclass(frozen=True)
class ModelCard:
    """The model as clients see it."""

    name: str
    architecture: str
    parameters: int
    dtype: str  # of activations
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    has_chat_template: bool
    embedding_dimensions: int = 0  # 0 for a model that generates
    weights: str = ""  # form of the weights, as --weights names it
    # Bytes of weights on one device, by part of the model and dtype.
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineCard:
    """The engine as operators see it."""

    versions: dict[str, str]
    mesh: dict[str, int]
    device_kind: str
    buckets: list[str]
    max_batch: int  # rows of one lane
    step_tokens: int
    page_size: int
    cache_tokens: int
    kv_copies: int = 1  # tensor-parallel devices that hold the same KV head
    lanes: int = 1
    product: str = XLA  # what multiplies by the weights, in words
    kv: str = "float32"  # dtype of the pages, as --kv names it
    states: "StatesCard | None" = None  # of a model whose layers have recurrent states

    @property
    def rows(self) -> int:
        """Number of choices that run at a time."""
        return self.max_batch * self.lanes


@dataclass(frozen=True)
class StatesCard:
    """Memory of an engine's recurrent states as operators see it."""

    snapshots: int  # slots of one lane beside those of its rows
    interval: int  # tokens between the snapshots of a long prompt; 0 where there are none
    slot_bytes: int  # of one sequence, on all devices together
    slot_tokens: int  # tokens whose pages take as much


@dataclass(frozen=True, slots=True)
class StepUse:
    """A compiled step and its use so far."""

    kind: str
    rows: int  # of one lane
    tokens: int  # of one lane
    steps: int  # decode steps that are launched as one
    launches: int
    live_tokens: int
    computed_tokens: int


@dataclass(frozen=True)
class PrefillEngine:
    """An engine that clients do not see: it computes prompts for the engine that answers them."""

    service: Service
    thread: EngineThread
    runner: "DeviceRunner"


@dataclass(frozen=True)
class ServingState:
    """Everything that answers requests once the model is loaded."""

    service: Service
    thread: EngineThread
    model: ModelCard
    engine: EngineCard
    compiles_after_ready: Callable[[], int]  # those that a request has waited for
    background_compiles: Callable[[], int] = lambda: 0  # of steps, while requests are served
    buckets_pending: Callable[[], int] = lambda: 0  # steps that larger ones serve until then
    after_ready: Sequence[Callable[[], None]] = ()  # jobs that begin when requests are taken
    steps: Callable[[], Sequence[StepUse]] = tuple
    handshake: "Handshake | None" = None  # of an engine that exchanges pages with other servers
    prefill: PrefillEngine | None = None  # on another mesh of this process
    # Values of the sampling parameters that a request leaves open.
    defaults: SamplingFields = field(default_factory=SamplingFields)
    ready_since: float = field(default_factory=time.monotonic)  # on the monotonic clock

    @property
    def services(self) -> list[Service]:
        """The services of all engines of this process."""
        return [self.service, *([self.prefill.service] if self.prefill else [])]

    @property
    def threads(self) -> list[EngineThread]:
        """The threads of all engines of this process."""
        return [self.thread, *([self.prefill.thread] if self.prefill else [])]
