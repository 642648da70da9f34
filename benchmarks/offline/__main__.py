"""Throughput of offline generation on a CPU beside transformers.

Machine, model and requests are the same for both.

    python -m benchmarks.offline --peer PYTHON [--streams 16 --streams 4 ...] [--repeats 5] [--out
    FILE]

PYTHON is the interpreter of an environment with torch and transformers. The model is a Llama of 0.5
billion random weights, written to a temporary folder; the requests are 64 prompts of 128 random
tokens with output lengths of the Azure conversation trace of 2023 scaled to 8..128, and the same
with 64 tokens each. Both sides decode greedily, blind to end tokens. jaxserve gets all requests at
once and runs `streams` of them together; transformers runs static batches of `streams`. Both
processes stay up; they take turns, A B A B, after a check that the machine is idle. Tokens per
second count what was asked for, not what a static batch computes beyond it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from jaxserve.bench.environment import IDLE

PROMPT_TOKENS = 128
EQUAL_TOKENS = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
# GeneratedTokens of rows 0, 302, 604, ... of AzureLLMInferenceTrace_conv.csv (Azure public dataset,
# CC-BY-4.0), scaled from 7..1000 to 8..128.
MIXED_LENGTHS = [
    int(length)
    for length in """
    12 15 22 17 13 60 54 56 27 13 24 14 57 56 59 64 22 15 55 12 29 55 54 18 54 20 11 57 18 54
    21 21 14 19 17 18 18 18 14 56 17 23 18 53 18 21 57 20 13 55 54 21 22 31 59 27 61 30 19 59
    18 67 53 59
    """.split()
]


@dataclass(frozen=True)
class Case:
    dtype: str
    threads: int
    streams: int
    lengths: str  # mixed or equal


@dataclass(frozen=True)
class Result:
    """Tokens per second of each turn."""

    case: Case
    ours: list[float]
    peer: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.peer)


# ---- the model


def write_model(folder: Path) -> None:
    """Write random weights in bfloat16, spread as a fresh model's."""
    rng = np.random.default_rng(0)
    d = CONFIG["hidden_size"]
    mlp = CONFIG["intermediate_size"]
    vocab = CONFIG["vocab_size"]
    kv = d // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, d), "lm_head.weight": (vocab, d)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (d, d) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (kv, d) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (mlp, d) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (d, mlp)}
    norms = [name for layer in range(CONFIG["num_hidden_layers"]) for name in _norms(layer)] + [
        "model.norm.weight"
    ]
    tensors = {
        name: rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    tensors |= {name: np.ones(d, ml_dtypes.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _norms(layer: int) -> list[str]:
    return [f"model.layers.{layer}.{name}_layernorm.weight" for name in ("input", "post_attention")]


# ---- our side


def serve_jobs(folder: Path, dtype: str, threads: int) -> None:
    """Run the worker process: the model on the engine, one JSON job per line."""
    os.sched_setaffinity(
        0, sorted(os.sched_getaffinity(0))[:threads]
    )  # before jax counts the cores
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
    from jaxserve.loading.spec import read_architecture
    from jaxserve.sharding.mesh import MeshSpec

    jax.config.update(
        "jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "jaxserve-benchmark-xla")
    )
    checkpoint = HFCheckpoint.open(folder)
    mesh = MeshSpec().build(jax.devices())
    source = read_architecture(checkpoint)
    spec = source.spec
    params = load_params(plan_load(source, mesh, dtype))
    engines: dict[int, tuple[Engine, DeviceRunner]] = {}  # by streams; one at a time

    def engine_for(streams: int) -> Engine:
        if streams not in engines:
            for _, runner in engines.values():
                runner.release_state()
            engines.clear()
            options = EngineOptions(max_batch=streams, max_context=512, prefix_cache=False)
            engines[streams] = _, runner = build_engine(spec, params, mesh, options, "benchmark")
            runner.warm_up(runner.buckets.buckets)
        return engines[streams][0]

    def run(job: dict[str, Any]) -> float:
        engine = engine_for(job["streams"])
        return timed(engine, job["prompts"], job["lengths"], HeldInterrupts())

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": run(json.loads(line))}), flush=True)


# ---- the driver


class Worker:
    """A process that answers jobs, pinned to so many cores."""

    def __init__(self, command: list[str], threads: int):
        cores = sorted(os.sched_getaffinity(0))[:threads]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self._read()

    def seconds(self, job: dict[str, Any]) -> float:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def workers(folder: Path, peer: str, dtype: str, threads: int) -> Iterator[tuple[Worker, Worker]]:
    arguments = [str(folder), dtype, str(threads)]
    ours = [sys.executable, "-m", "benchmarks.offline", "--worker", *arguments]
    # -P: transformers looks for a package called kernels, and must not find this folder's file.
    theirs = [peer, "-P", str(Path(__file__).with_name("offline_peer.py")), *arguments]
    with ExitStack() as stack:
        pair = tuple(Worker(command, threads) for command in (ours, theirs))
        for worker in pair:
            stack.callback(worker.close)
        yield pair[0], pair[1]


def measure(case: Case, pair: tuple[Worker, Worker], requests: int, repeats: int) -> Result:
    """Measure turns of both, after one that is thrown away."""
    rng = np.random.default_rng(1)
    lengths = MIXED_LENGTHS[:requests] if case.lengths == "mixed" else [EQUAL_TOKENS] * requests
    prompts = rng.integers(3, CONFIG["vocab_size"], (len(lengths), PROMPT_TOKENS)).tolist()
    job = {"streams": case.streams, "lengths": lengths, "prompts": prompts}
    warm = {
        "streams": case.streams,
        "lengths": lengths[: case.streams],
        "prompts": prompts[: case.streams],
    }
    for worker in pair:
        worker.seconds(warm)
    turns = [[sum(lengths) / worker.seconds(job) for worker in pair] for _ in range(repeats)]
    ours, peer = (list(column) for column in zip(*turns, strict=True))
    return Result(case, ours, peer)


def check_idle(console: Console, even_if_busy: bool) -> None:
    load = os.getloadavg()[0]
    if load > IDLE and not even_if_busy:
        raise SystemExit(
            f"the machine is busy (load {load:.2f} over the last minute); wait, or give "
            f"--even-if-busy"
        )
    console.print(f"load {load:.2f} over the last minute, {len(os.sched_getaffinity(0))} cores")


def table(results: list[Result]) -> Table:
    columns = (
        "dtype",
        "threads",
        "streams",
        "lengths",
        "jaxserve tok/s",
        "transformers tok/s",
        "ratio",
    )
    shown = Table(*columns, title="median (least to most)")
    for r in results:
        figures = [
            f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in (r.ours, r.peer)
        ]
        c = r.case
        shown.add_row(
            c.dtype, str(c.threads), str(c.streams), c.lengths, *figures, f"{r.ratio:.2f}"
        )
    return shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--peer", metavar="PYTHON", help="interpreter that has torch and transformers"
    )
    parser.add_argument(
        "--dtype", action="append", choices=("float32", "bfloat16"), help="default: both"
    )
    parser.add_argument("--threads", action="append", type=int, help="default: 1 and 2")
    parser.add_argument("--streams", action="append", type=int, help="default: 1, 4 and 16")
    parser.add_argument(
        "--lengths", action="append", choices=("mixed", "equal"), help="default: both"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--even-if-busy", action="store_true")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument(
        "--worker", nargs=3, metavar=("FOLDER", "DTYPE", "THREADS"), help=argparse.SUPPRESS
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console()
    if args.worker:
        return serve_jobs(Path(args.worker[0]), args.worker[1], int(args.worker[2]))
    if not args.peer:
        raise SystemExit(
            "--peer PYTHON is missing: the interpreter of an environment with torch and "
            "transformers"
        )
    check_idle(console, args.even_if_busy)
    results = []
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        for dtype in args.dtype or ("float32", "bfloat16"):
            for threads in args.threads or (1, 2):
                with workers(Path(name), args.peer, dtype, threads) as pair:
                    for streams in args.streams or (1, 4, 16):
                        for lengths in args.lengths or ("mixed", "equal"):
                            case = Case(dtype, threads, streams, lengths)
                            results.append(measure(case, pair, args.requests, args.repeats))
                            console.print(table(results[-1:]))
                            if args.out:
                                args.out.write_text(
                                    json.dumps([asdict(r) for r in results], indent=1) + "\n"
                                )
    console.print(table(results))


if __name__ == "__main__":
    main()
