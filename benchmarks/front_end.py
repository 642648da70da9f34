"""Cost of the front end beside a perfect device, and its effect on the engine.

    python -m benchmarks.front_end [--streams 256] [--step-ms 50] [--steps 100] [--loop
    asyncio|uvloop]
                                   [--switch-interval-us 5000] [--bare] [--out FILE]

The server runs in a process of its own: the real engine and service, gRPC, the bundled model's
tokenizer, and a device that takes exactly so long for a step and answers with made-up tokens.
Another process reads all streams. Reported are the server's CPU time per message, split by thread;
how late its event loop wakes up; how much longer than the device's a step takes, which is the time
that the engine's thread waits for the host, the interpreter lock among it; and whether every token
that was made arrived. --bare: no engine and no service, only handlers that write a ready message at
every step: what gRPC alone costs.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import numpy as np
from grpc import aio  # type: ignore[attr-defined]
from rich.console import Console
from rich.table import Table

from benchmarks.device import about
from benchmarks.steady_device import SteadyDevice, steady_service
from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.engine_thread import StepReport
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.inference import InferenceServicer
from jaxserve.server.grpc.server import Health, bind, new_server
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import common_pb2, inference_pb2, inference_pb2_grpc

LAG_EVERY = 0.005  # seconds
PROMPT = "Once upon a time"


@dataclass
class Result:
    """Microseconds of CPU per message, milliseconds of lag and of a step beyond the device's."""

    streams: int
    step_ms: float
    loop: str
    switch_interval_us: float
    bare: bool
    messages: int
    tokens_made: int
    tokens_delivered: int
    cpu_us_per_message: float
    loop_us_per_message: float
    engine_us_per_message: float
    lag_p50_ms: float
    lag_p99_ms: float
    step_over_p50_ms: float
    step_over_p99_ms: float


# ---- the server's process


class Bare(inference_pb2_grpc.InferenceServiceServicer):
    """Streams of a ready message, one a step; made: how many were written."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.made = 0
        self._step = asyncio.Event()

    async def GenerateStream(
        self, request: inference_pb2.GenerateStreamRequest, context: aio.ServicerContext
    ) -> None:
        delta = inference_pb2.Delta(text="word", token_ids=[1])
        message = inference_pb2.GenerateStreamResponse(delta=delta)
        for _ in range(request.sampling.max_tokens):
            step = self._step
            await step.wait()
            await context.write(message)
            self.made += 1

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            step = self._step
            self._step = asyncio.Event()
            step.set()


async def serve_bare(seconds: float) -> None:
    server = aio.server()
    bare = Bare(seconds)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(bare, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ticking = asyncio.create_task(bare.tick())
    print(json.dumps({"port": port}), flush=True)
    figures = await watch(lambda: 0.0)
    ticking.cancel()
    print(
        json.dumps(figures | {"made": bare.made, "step_over_p50_ms": 0.0, "step_over_p99_ms": 0.0}),
        flush=True,
    )
    await server.stop(0)


async def watch(engine_cpu: Callable[[], float]) -> dict[str, float]:
    """CPU seconds and lags between two lines from the driver: all streams have begun, and all have
    ended.
    """
    await asyncio.to_thread(sys.stdin.readline)
    lags: list[float] = []
    watching = asyncio.create_task(watch_lag(lags))
    began = time.process_time(), time.thread_time(), engine_cpu()
    await asyncio.to_thread(sys.stdin.readline)
    watching.cancel()
    return {
        "cpu": time.process_time() - began[0],
        "loop": time.thread_time() - began[1],
        "engine": engine_cpu() - began[2],
        "lag_p50_ms": 1e3 * statistics.median(lags),
        "lag_p99_ms": 1e3 * float(np.quantile(lags, 0.99)),
    }


async def serve(streams: int, steps: int, seconds: float) -> None:
    options = EngineOptions(
        max_batch=streams, step_tokens=streams * 16, max_context=steps + 64, prefix_cache=False
    )
    config = resolve(options, max_positions=4096, lanes=1, affordable_tokens=2**40)
    device = SteadyDevice(config, seconds)
    made = 0
    engine_cpu = 0.0

    def observe(report: StepReport) -> None:
        nonlocal made, engine_cpu
        made += sum(len(event.tokens) for event in report.events)
        engine_cpu = time.thread_time()

    steady = steady_service(config, device, observe)
    tokens = BearerTokens()
    inference = InferenceServicer(steady.readiness, tokens)
    server = new_server(Limits(), tokens, Health(), inference, None)
    port = bind(server, "127.0.0.1", 0, None, "--port")
    await server.start()
    steady.open()
    print(json.dumps({"port": port}), flush=True)
    figures = await watch(lambda: engine_cpu)
    ends = device.ends[2:]
    over = [1e3 * (after - before - seconds) for before, after in itertools.pairwise(ends)]
    figures |= {
        "step_over_p50_ms": statistics.median(over),
        "step_over_p99_ms": float(np.quantile(over, 0.99)),
    }
    figures["made"] = made
    print(json.dumps(figures), flush=True)
    await server.stop(0)
    steady.thread.close()


async def watch_lag(lags: list[float]) -> None:
    while True:
        due = time.monotonic() + LAG_EVERY
        await asyncio.sleep(LAG_EVERY)
        lags.append(time.monotonic() - due)


# ---- the driver's process


async def read_all(port: int, streams: int, steps: int, begin: threading.Event) -> tuple[int, int]:
    """Messages after the beginning, and tokens of all streams; begin: set when every one of them
    has begun.
    """
    started = 0
    messages = 0
    tokens = 0

    async def one(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        nonlocal started, messages, tokens
        sampling = common_pb2.SamplingParams(max_tokens=steps, ignore_eos=True, seed=1)
        request = inference_pb2.GenerateStreamRequest(text=PROMPT, sampling=sampling)
        first = True
        async for event in stub.GenerateStream(request):
            if first:
                first = False
                started = started + 1
                if started == streams:
                    begin.set()
            messages += started == streams
            tokens += len(event.delta.token_ids)

    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await asyncio.gather(*(one(stub) for _ in range(streams)))
    return messages, tokens


def drive(args: argparse.Namespace) -> Result:
    command = [sys.executable, "-m", "benchmarks.front_end", "--serve"]
    for name in ("streams", "step_ms", "steps", "loop", "switch_interval_us"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--bare"] if args.bare else []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        port = json.loads(process.stdout.readline())["port"]
        begin = threading.Event()
        stdin = process.stdin

        def tell() -> None:
            stdin.write("begin\n")
            stdin.flush()

        waiting = threading.Thread(target=lambda: (begin.wait(), tell()))
        waiting.start()
        messages, tokens = asyncio.run(read_all(port, args.streams, args.steps, begin))
        waiting.join()
        tell()
        figures = json.loads(process.stdout.readline())
    return Result(
        args.streams,
        args.step_ms,
        args.loop,
        args.switch_interval_us,
        args.bare,
        messages,
        figures.pop("made"),
        tokens,
        *(round(1e6 * figures.pop(part) / messages, 1) for part in ("cpu", "loop", "engine")),
        **{name: round(value, 2) for name, value in figures.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.front_end", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--switch-interval-us", type=float, default=5000.0)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        sys.setswitchinterval(args.switch_interval_us * 1e-6)
        seconds = args.step_ms * 1e-3
        work = serve_bare(seconds) if args.bare else serve(args.streams, args.steps, seconds)
        if args.loop == "uvloop":
            import uvloop

            uvloop.run(work)
        else:
            asyncio.run(work)
        return
    result = drive(args)
    table = Table("", "", title="one front end")
    for name, value in asdict(result).items():
        table.add_row(name, str(value))
    Console().print(table)
    if args.out:
        args.out.write_text(
            json.dumps(about() | {"grpcio": grpc.__version__, "result": asdict(result)}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
