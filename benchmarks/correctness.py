"""Correctness of answers on the device at hand, against independent implementations.

To be run before anything is timed.

    python -m benchmarks.correctness [--only attention] [--only engine] [--only logits]

Needs no test runner. Attention: every feature, by every implementation that this device has,
against dense float64 attention. Logits: a tiny model of every family, prompt in two chunks and 32
decode steps, against transformers'. Engine: the tokens of the same prompts, decoded one by one and
eight at a time. The exit status is 1 when something is wrong.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.loading.spec import read_spec
from jaxserve.pallas_kernels.dispatch import CANDIDATES, IMPLEMENTATIONS
from jaxserve.pallas_kernels.paged_attention.api import Demand, KernelError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.loading.loaded import load_params
from tests.jaxserve.models.decoder_harness import Decoder, one_device_mesh
from tests.pallas_kernels.attention_case import (
    BF16_SHAPES,
    BF16_TOLERANCE,
    ROWS,
    SHAPES,
    Case,
    Shape,
    check_decode,
    check_prefill,
)
from tests.pallas_kernels.kernel_checks import chunk_cases, decode_cases

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
MODELS = (
    *("llama_gqa", "mistral_window", "qwen2_gqa", "qwen3_head_dim"),
    *("gemma2_caps", "gemma3_two_ropes", "phi3_window", "olmo2_gqa"),
)
ENGINES = ("llama_gqa", "gemma3_two_ropes")
ATTENTION_BOUND = 5e-5  # a device's own exp; the CPU's is held to 1e-5 by the tests
LOGITS_BOUND = 1e-4
Check = tuple[
    str, Callable[[], str]
]  # what it is about; says "right" or why it does not apply, raises when wrong


def attention_checks() -> Iterator[Check]:
    for name in CANDIDATES[jax.devices()[0].platform]:
        for shape in BF16_SHAPES if name == "gpu" else SHAPES:
            yield (
                f"attention {name} {shape}",
                lambda name=name, shape=shape: check_attention(name, shape),
            )


def check_attention(name: str, shape: Shape) -> str:
    kernel = IMPLEMENTATIONS[name]
    dtype = np.dtype(shape.dtype)
    demand = Demand(shape.heads, ROWS, shape.width, dtype, jax.devices()[0].device_kind)
    bound = ATTENTION_BOUND if shape.dtype == np.float32 else BF16_TOLERANCE
    try:
        for decode in (True, False):
            kernel.check(shape.options(decode=decode), demand)
    except KernelError as error:
        return f"refused: {error}"
    full = min(shape.context, 128)
    decodes = [Case(kernel, shape, [full - 1, 15, 16, 0, 0], [1, 1, 1, 1, 0])]
    chunks = [Case(kernel, shape, [full - 1, 0, 16, full - 20, 0], [1, 33, 17, 20, 0])]
    if shape in BF16_SHAPES:  # of which all have several pages
        decodes = decode_cases(kernel, shape)
        chunks = chunk_cases(kernel, shape)
    for case in decodes:
        check_decode(case, bound)
    for case in chunks:
        check_prefill(case, bound)
    return "right"


def check_logits(model: str) -> str:
    golden = np.load(GOLDEN / model / "golden.npz")
    prompts = golden["prompts"]
    tokens = golden["tokens"]
    decoder = Decoder(GOLDEN / model, one_device_mesh(), rows=2, context=64, page_size=8)
    found = np.concatenate([decoder(prompts[:, :10], 0), decoder(prompts[:, 10:], 10)], axis=1)
    np.testing.assert_allclose(found, golden["prompt_logits"], atol=LOGITS_BOUND)
    for i in range(tokens.shape[1]):
        found = decoder(tokens[:, i : i + 1], prompts.shape[1] + i)[:, 0]
        np.testing.assert_allclose(found, golden["decode_logits"][:, i], atol=LOGITS_BOUND)
    return "right"


def check_engine(model: str, decode_steps: int) -> str:
    golden = np.load(GOLDEN / model / "golden.npz")
    prompts = golden["prompts"].tolist()
    tokens = golden["tokens"].tolist()
    checkpoint = HFCheckpoint.open(GOLDEN / model)
    mesh = MeshSpec().build(jax.devices())
    spec = read_spec(checkpoint.config)[1]
    options = EngineOptions(
        max_batch=4, step_tokens=32, page_size=8, cache_tokens=1024, decode_steps=decode_steps
    )
    windows = [group.window for group in spec.page_groups()]
    config = resolve(options, max_positions=64, lanes=1, affordable_tokens=1024, windows=windows)
    runner = DeviceRunner(spec, load_params(checkpoint, mesh, "float32"), config, mesh)
    requests = [(len(prompts[0]), len(tokens[0]))] * len(prompts)
    runner.warm_up(runner.buckets.reachable(requests, config=config, score=False))
    engine = Engine(Scheduler(config), runner)
    params = SamplingParams(temperature=0.0, max_tokens=len(tokens[0]), ignore_eos=True)
    for row, prompt in enumerate(prompts):
        engine.submit(Request(id=str(row), prompt=tuple(prompt), params=params))
    found: dict[str, list[int]] = {str(row): [] for row in range(len(prompts))}
    while engine.has_work:
        for event in engine.step():
            found[event.request_id] += event.tokens
    engine.close()
    assert list(found.values()) == tokens, f"{found} instead of {tokens}"
    return "right"


def engine_checks() -> Iterator[Check]:
    for model in ENGINES:
        for steps in (1, 8):
            yield (
                f"engine {model}, {steps} at once",
                lambda model=model, steps=steps: check_engine(model, steps),
            )


def logits_checks() -> Iterator[Check]:
    for model in MODELS:
        yield f"logits {model}", lambda model=model: check_logits(model)


CHECKS = {"attention": attention_checks, "engine": engine_checks, "logits": logits_checks}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.correctness", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", action="append", choices=tuple(CHECKS), help="default: all")
    args = parser.parse_args()
    console = Console(soft_wrap=True)
    wrong = 0
    done = 0
    for name, check in chain.from_iterable(CHECKS[kind]() for kind in args.only or CHECKS):
        done += 1
        try:
            console.print(f"{name}: {check()}", markup=False)
        except Exception as error:  # whatever it is, the other checks have their turn
            wrong += 1
            console.print(
                f"{name}: WRONG: {type(error).__name__} {str(error).strip()[:400]}", markup=False
            )
    console.print(f"{wrong} of {done} wrong on {jax.devices()[0].device_kind}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
