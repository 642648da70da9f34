"""Reports of the real compilers of TPUs and of an H200 on the steps of published models.

Nothing runs on a device.

    python -m benchmarks.deviceless [--model NAME ...] [--chip NAME ...] --out FILE.json

In an environment with these compilers (`make deviceless-full`). For each model and chip, at the
smallest tensor parallelism at which weights leave a quarter of the memory for pages: a decode step
of 64 rows and a prefill step of 1,536 tokens, bfloat16. What is in FILE already is not compiled
again, so that it can be stopped and go on: remove the file when kernels or steps have changed. A
table goes beside it, as FILE.md.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from benchmarks.device import versions
from benchmarks.models import NAMES, spec_of
from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.lowering import Lowering, abstract_params
from jaxserve.engine.device.memory import bytes_per_device, state_sizes
from jaxserve.plan.hlo.inspection import inspect
from jaxserve.sharding.aot_devices import ENVIRONMENT, devices
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.errors import ChipError
from jaxserve.sharding.mesh import MeshSpec

MODELS = ("llama3.1-8b", "qwen3-8b", "gemma3-27b", "llama3.1-70b", "qwen3.5-27b")
# Sizes that no weight has by chance: 1.5 * 2^10 tokens, a prime number of pages.
ROWS = 64
TOKENS = 1536
CONTEXT = 8192
PAGES = 1031
STEPS = (Bucket("decode", ROWS, ROWS), Bucket("prefill", ROWS, TOKENS))
BF16 = jnp.dtype(jnp.bfloat16)
MEBI = 2**20


@dataclass(frozen=True)
class Row:
    """A compiled step, and the versions that compiled it.

    MiB are of one device; seconds are those of the compiler.
    """

    commit: str
    jax: str
    compiler: str
    model: str
    chip: str
    tensor: int
    step: str
    weights: int
    state: int
    in_place: bool
    temporaries: int
    copies: list[str]
    kernels_per_layer: float
    collectives: dict[str, int]
    seconds: float


def fitting(model: str, chip: str) -> int | None:
    """Return the smallest tensor parallelism at which a model leaves room for pages, or None.

    Its share of the weights takes three quarters of a device at most.
    """
    spec = spec_of(model)
    for tensor in (1, 2, 4, 8):
        mesh = MeshSpec(tensor=tensor).build(devices(chip, tensor))
        if bytes_per_device(abstract_params(spec, BF16, mesh)) < 0.75 * CHIPS[chip].memory:
            return tensor
    return None


def lowering_of(model: str, chip: str, tensor: int) -> Lowering:
    """Return the lowering of a model's steps on devices of a chip."""
    spec = spec_of(model)
    mesh = MeshSpec(tensor=tensor).build(devices(chip, tensor))
    options = EngineOptions(
        max_batch=ROWS,
        step_tokens=TOKENS,
        max_context=CONTEXT,
        page_size=64,
        cache_tokens=64 * PAGES,
    )
    windows = [group.window for group in spec.page_groups()]
    config = resolve(
        options,
        max_positions=CONTEXT,
        lanes=1,
        affordable_tokens=2**20,
        windows=windows,
        states=state_sizes(spec),
        weights=str(BF16),
    )
    return Lowering(spec, abstract_params(spec, BF16, mesh), config, mesh)


def compile_step(model: str, chip: str, tensor: int, bucket: Bucket) -> Row:
    lowering = lowering_of(model, chip, tensor)
    began = time.monotonic()
    found = inspect(lowering.step(bucket).compile(), lowering)
    return Row(
        *(versions()["commit"], version("jax"), compiler_of(chip)),
        *(model, chip, tensor, str(bucket)),
        weights=bytes_per_device(lowering.params) // MEBI,
        state=bytes_per_device(lowering.state) // MEBI,
        in_place=found.aliased >= bytes_per_device(lowering.state),
        temporaries=found.temporaries // MEBI,
        copies=list(found.copies),
        kernels_per_layer=round(found.kernels / lowering.spec.num_layers, 1),
        collectives=found.collectives,
        seconds=round(time.monotonic() - began, 1),
    )


def cases(models: list[str], chips: list[str]) -> Iterator[tuple[str, str, int, Bucket]]:
    for model in models:
        for chip in chips:
            tensor = fitting(model, chip)
            if tensor is None:
                print(f"{model} in bfloat16 fits no slice of {chip} with up to 8 devices")
                continue
            yield from ((model, chip, tensor, bucket) for bucket in STEPS)


def compiler_of(chip: str) -> str:
    package = "libtpu" if CHIPS[chip].platform == "tpu" else "jax-cuda13-pjrt"
    return f"{package} {version(package)}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table, behind lines that say what compiled them."""
    about = sorted({f"{row['commit']} with jax {row['jax']} and {row['compiler']}" for row in rows})
    head = (
        "model",
        "chip x tensor",
        "step",
        "weights",
        "state",
        "updated in place",
        "temporaries",
        "copies",
    )
    head += ("kernels per layer", "collectives")
    lines = [
        "# Steps compiled for chips that are not here\n",
        f"By `make deviceless-full`, at {'; '.join(about)}. MiB per device; nothing was run or "
        f"timed.",
        "A model is left out on a chip of which eight do not hold its weights and pages beside "
        "them.\n",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for row in sorted(
        rows,
        key=lambda row: (MODELS.index(row["model"]), list(CHIPS).index(row["chip"]), row["step"]),
    ):
        cells = (
            *(
                row["model"],
                f"{row['chip']} x {row['tensor']}",
                row["step"],
                f"{row['weights']:,}",
                f"{row['state']:,}",
            ),
            *(
                "yes" if row["in_place"] else "NO",
                f"{row['temporaries']:,}",
                str(len(row["copies"]) or "none"),
            ),
            *(
                str(row["kernels_per_layer"]),
                ", ".join(f"{n} {op}" for op, n in row["collectives"].items()) or "none",
            ),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deviceless", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--model", action="append", choices=NAMES, help=f"default: {', '.join(MODELS)}"
    )
    parser.add_argument("--chip", action="append", choices=list(CHIPS), help="default: all")
    parser.add_argument(
        "--out", type=Path, required=True, help="results as JSON; goes on from what is in it"
    )
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    rows: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else []
    done = {(row["model"], row["chip"], row["step"]) for row in rows}
    try:
        for model, chip, tensor, bucket in cases(
            args.model or list(MODELS), args.chip or list(CHIPS)
        ):
            if (model, chip, str(bucket)) not in done:
                row = compile_step(model, chip, tensor, bucket)
                rows.append(asdict(row))
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
                args.out.with_suffix(".md").write_text(markdown(rows))
                Console().print(row)
                jax.clear_caches()
    except ChipError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
