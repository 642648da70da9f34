"""Server on a device that takes exactly so long for a step, for what clients see of the host alone.

    python -m benchmarks.steady_server [--rows 16] [--step-ms 20] [--prompt-token-us 20]
                                       [--port 50051] [--http-port 8000]

gRPC, HTTP, service and engine are those of serve; the tokens are made up. Give the server a core
(`taskset -c 0`), and the load another one; Ctrl-C ends the server:

    python -m jaxserve.bench overload --target grpc://127.0.0.1:50051 --clients ROWS
                                      --tokenizer checkpoints/bundled/tiny-chat
"""

import argparse
import asyncio
import contextlib

import uvloop

from benchmarks.steady_device import SteadyDevice, steady_service
from jaxserve.config import EngineOptions, resolve
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.inference import InferenceServicer
from jaxserve.server.grpc.server import Health, bind, new_server
from jaxserve.server.http.app import new_app
from jaxserve.server.http.server import HttpServer
from jaxserve.server.security.auth import BearerTokens

HOST = "127.0.0.1"


async def serve(args: argparse.Namespace) -> None:
    """Serve until cancelled."""
    options = EngineOptions(max_batch=args.rows, step_tokens=512, max_context=2048)
    config = resolve(options, max_positions=4096, lanes=1, affordable_tokens=2**40)
    device = SteadyDevice(config, args.step_ms * 1e-3, args.prompt_token_us * 1e-6)
    steady = steady_service(config, device)
    limits = Limits()
    tokens = BearerTokens()
    grpc = new_server(
        limits, tokens, Health(), InferenceServicer(steady.readiness, tokens), admin=None
    )
    bind(grpc, HOST, args.port, None, "--port")
    await grpc.start()
    http = HttpServer(
        new_app(steady.readiness, tokens, limits, no_metrics), HOST, args.http_port, None, limits
    )
    http.start(failed=print)
    steady.open()
    print(f"ready: gRPC {HOST}:{args.port}, HTTP {HOST}:{args.http_port}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await http.stop(0)
        await grpc.stop(0)
        steady.thread.close()


async def no_metrics() -> bytes:
    """Return an empty page in the place of /metrics."""
    return b""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steady_server", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--prompt-token-us", type=float, default=20.0)
    parser.add_argument("--port", type=int, default=50051)
    parser.add_argument("--http-port", type=int, default=8000)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()), loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    main()
