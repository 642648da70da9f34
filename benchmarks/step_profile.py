"""Device time of each kernel in a compiled step, by jax's profiler.

    python -m benchmarks.step_profile [--model llama3.1-8b] [--layers 4] [--rows 64] [--kind decode]
    [--top 20] [--out FILE]

Random weights are made on the device. A decode step has `rows` rows at `context` positions; a
prefill step computes `--tokens` tokens of new prompts. A decode step is launched --repeats
times under the profiler, a prefill step once; kernels of the same name without its number are added
up. Busy is the time in which a kernel runs, wall the time from the start of the first kernel to the
end of the last. Only the kernels and busy hold outside the profiler: under it, XLA:GPU launches the
kernels of a graph one by one. With --decode-steps a step is a launch of several decodes. On a CPU
the profiler reports XLA's operations of all threads.
"""

import argparse
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData
from rich.console import Console
from rich.table import Table

from benchmarks.device import about
from benchmarks.models import NAMES, spec_of
from benchmarks.steps import Steps
from jaxserve.loading.product import choose_product
from jaxserve.models.decoder import param_specs
from jaxserve.models.precision import AUTO
from jaxserve.models.quant import parse_scheme
from jaxserve.plan.roofline import Case
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import random_params

NUMBER = re.compile(r"([._]\d+)+$")  # what tells kernels of the same kind apart
# Lines of a trace that have kernels: those of a GPU, of a TPU and of XLA:CPU's threads.
LINES = ("Stream", "XLA Ops", "tf_XLAEigen", "tf_XLATfrtCpuClient")
# Events of XLA:CPU that stand around others, or mark an end.
AROUND = ("ThunkExecutor::", "SlinkyThreadPool::", "end: ")


@dataclass(frozen=True)
class Kernel:
    """Kernels of one name in one step."""

    name: str
    launches: float
    microseconds: float  # all of them


@dataclass(frozen=True)
class Profile:
    """Times of one step, in microseconds."""

    wall: float
    busy: float
    kernels: list[Kernel]  # the longest first


@dataclass(frozen=True)
class Event:
    """A kernel on the device; times in nanoseconds."""

    name: str
    start: float
    end: float


def profile(steps: Steps, repeats: int) -> Profile:
    """Launch the step under the profiler; compiled and warm before."""
    steps.rewind()
    for _ in range(2):
        jax.block_until_ready(steps.launch())
    steps.rewind()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                output = steps.launch()
            jax.block_until_ready(output)
        (file,) = Path(folder).rglob("*.xplane.pb")
        events = sorted(_kernels(ProfileData.from_file(str(file))), key=lambda event: event.start)
    return _summary(events, repeats)


def _kernels(data: Any) -> Iterator[Event]:
    """Yield the kernels of the first device in a ProfileData."""
    for plane in data.planes:
        if plane.name not in ("/device:GPU:0", "/device:TPU:0", "/host:CPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith(LINES):
                continue
            for event in line.events:
                if not event.name.startswith(AROUND):
                    yield Event(event.name, event.start_ns, event.start_ns + event.duration_ns)


def _summary(events: list[Event], repeats: int) -> Profile:
    """Add up the events of `repeats` launches, which begin in order."""
    if not events:
        raise SystemExit("the profiler reports no kernel on this device")
    times: dict[str, list[float]] = defaultdict(list)
    busy = 0.0
    end = events[0].start
    for event in events:
        times[NUMBER.sub("", event.name)].append(event.end - event.start)
        busy += max(event.end - max(event.start, end), 0)
        end = max(end, event.end)
    kernels = [
        Kernel(name, len(each) / repeats, round(sum(each) / repeats / 1e3, 2))
        for name, each in times.items()
    ]
    kernels.sort(key=lambda kernel: -kernel.microseconds)
    wall = (end - events[0].start) / repeats / 1e3
    return Profile(round(wall, 1), round(busy / repeats / 1e3, 1), kernels)


def show(found: Profile, title: str, top: int) -> None:
    """Print the longest kernels and the sum of the others."""
    table = Table("kernel", "launches", "us", "of busy", title=title)
    rest = found.kernels[top:]
    others = Kernel(
        f"{len(rest)} others",
        sum(kernel.launches for kernel in rest),
        sum(kernel.microseconds for kernel in rest),
    )
    for kernel in [*found.kernels[:top], *([others] if rest else [])]:
        share = kernel.microseconds / found.busy
        figures = (f"{kernel.launches:.1f}", f"{kernel.microseconds:.1f}", f"{share:.1%}")
        table.add_row(kernel.name[:90], *figures)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_profile", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", choices=NAMES, default="llama3.1-8b")
    parser.add_argument("--layers", type=int, help="only so many of the model's (default: all)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="auto", help="as of jaxserve.serve")
    parser.add_argument("--kv", default="auto", help="as of jaxserve.serve")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048, help="positions of a decoding row")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prefill step")
    parser.add_argument("--kind", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--decode-steps", type=int, default=1, help="decodes per launch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--top", type=int, default=20, help="kernels shown by name")
    parser.add_argument("--out", type=Path, help="write the profile as JSON")
    args = parser.parse_args()
    spec = spec_of(args.model, args.layers)
    dtype = jnp.dtype(args.dtype)
    mesh = MeshSpec().build(jax.devices()[:1])
    declared = param_specs(spec, dtype, parse_scheme(args.weights), choose_product(AUTO, mesh))
    params = random_params(declared, mesh)
    decode = args.kind == "decode"
    case = Case(
        args.kind,
        args.rows,
        args.context if decode else 0,
        args.rows if decode else args.tokens,
        args.decode_steps if decode else 1,
    )
    steps = Steps(spec, params, case, args.repeats if decode else 1, args.kv)
    found = profile(steps, args.repeats if decode else 1)
    what = f"{args.kind} of {case.rows} rows, {case.tokens} tokens, context {case.context}"
    show(found, f"{what}: {found.wall:,.0f} us, busy {found.busy:,.0f} us a step", args.top)
    if args.out:
        shape = {"model": args.model, "layers": spec.num_layers, "dtype": args.dtype}
        account = about() | shape | {"weights": args.weights, "kv": args.kv}
        args.out.write_text(
            json.dumps(account | {"case": asdict(case)} | asdict(found), indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
