"""jaxserve's side of benchmarks.offline: the model on the engine, without a server.

Reads one JSON job per line and answers each with one JSON line. Precisions are float32, bfloat16,
and the names of --weights, which stand for bfloat16 activations.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from jaxserve.bench.offline import timed
from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.config import EngineOptions
from jaxserve.engine.build import build_engine
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.interrupts import HeldInterrupts
from jaxserve.loading.load_plan import plan_load
from jaxserve.loading.parameters import load_params
from jaxserve.loading.product import choose_product
from jaxserve.loading.spec import read_architecture
from jaxserve.models.precision import AS_STORED, AUTO, DTYPE_NAMES
from jaxserve.sharding.mesh import MeshSpec


class Engines:
    """Engines of one model by their number of streams, one at a time."""

    def __init__(self, folder: Path, precision: str, context: int):
        self._mesh = MeshSpec().build(jax.devices())
        source = read_architecture(HFCheckpoint.open(folder))
        self._spec = source.spec
        is_dtype = precision in DTYPE_NAMES
        dtype = precision if is_dtype else "bfloat16"
        weights = AS_STORED if is_dtype else precision
        product = choose_product(AUTO, self._mesh)
        self._params = load_params(plan_load(source, self._mesh, dtype, weights, product))
        self._context = context
        self._streams = 0
        self._engine: Engine | None = None
        self._runner: DeviceRunner | None = None

    def seconds(self, job: dict[str, Any]) -> float:
        """Return the seconds that all requests of a job take."""
        engine = self._engine_for(job["streams"])
        return timed(engine, job["prompts"], job["lengths"], HeldInterrupts())

    def _engine_for(self, streams: int) -> Engine:
        if self._engine is None or self._streams != streams:
            if self._runner:
                self._runner.release_state()
            options = EngineOptions(
                max_batch=streams, max_context=self._context, prefix_cache=False
            )
            self._engine, self._runner = build_engine(
                self._spec, self._params, self._mesh, options, "benchmark"
            )
            self._runner.warm_up(self._runner.buckets.buckets)
            self._streams = streams
        return self._engine


def main() -> None:
    folder, precision, context, cache = sys.argv[1:]
    jax.config.update("jax_compilation_cache_dir", cache)
    engines = Engines(Path(folder), precision, int(context))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": engines.seconds(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
