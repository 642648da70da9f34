"""Throughput of offline generation on a CPU beside transformers and llama.cpp.

Machine, model and requests are the same for all.

    python -m benchmarks.offline --peers PYTHON [--llama-cpp FOLDER] [--streams 16 ...] [--out FILE]

PYTHON is the interpreter of an environment with torch, transformers and gguf; in FOLDER llama.cpp
is built, and left out where that fails. The model is a Llama of 0.5 billion random weights, written
to a temporary folder. Requests are prompts of 128 random tokens, or --prompt-tokens; all sides
decode greedily, blind to end tokens.

- prompts, decode, both: as many requests as streams with 64 tokens each; tokens per second of the
  prompts until all first tokens are there, of the outputs from then on, and of the outputs in the
  whole time.
- mixed: 64 requests with output lengths of the Azure conversation trace of 2023 scaled to 8..128.
  jaxserve gets them all at once and runs `streams` of them together; transformers runs static
  batches of `streams`. Tokens that a static batch computes beyond what was asked for do not count.

The processes of jaxserve and transformers stay up, llama.cpp starts anew; all take turns, A B C A B
C, after a check that the machine is idle. A round of turns in which one side's figures spread over
10 % is run once more, and marked where it stays so. FILE gets the results as JSON, and a table goes
beside it as FILE.md.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.offline.llama_cpp import PRECISIONS, BuildError, LlamaCpp, build
from benchmarks.offline.results import Result, facts, markdown, measure_equal, measure_mixed
from benchmarks.offline.sides import Side, ours, transformers
from benchmarks.offline.workload import MIXED_LENGTHS, PROMPT_TOKENS, write_model
from jaxserve.bench.environment import IDLE

OURS = ("float32", "bfloat16", "w8a8-int8")
DTYPES = ("float32", "bfloat16")
LOADS = ("equal", "mixed")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--peers",
        metavar="PYTHON",
        required=True,
        help="interpreter that has torch, transformers and gguf",
    )
    parser.add_argument(
        "--llama-cpp", metavar="FOLDER", type=Path, help="build llama.cpp there and measure it too"
    )
    parser.add_argument(
        "--precision", action="append", choices=OURS, help="of jaxserve; default: all three"
    )
    parser.add_argument(
        "--peer-precision",
        action="append",
        choices=DTYPES,
        help="of transformers; default: both",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=PROMPT_TOKENS,
        help="of each prompt (default: %(default)s)",
    )
    parser.add_argument("--streams", action="append", type=int, help="default: 1, 4 and 16")
    parser.add_argument("--load", action="append", choices=LOADS, help="default: both")
    parser.add_argument(
        "--requests",
        type=int,
        default=len(MIXED_LENGTHS),
        help="of mixed lengths (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side")
    parser.add_argument("--even-if-busy", action="store_true")
    parser.add_argument("--out", type=Path, help="write the results as JSON, and a table beside it")
    return parser.parse_args()


def check_idle(console: Console, even_if_busy: bool) -> None:
    load = os.getloadavg()[0]
    if load > IDLE and not even_if_busy:
        raise SystemExit(
            f"the machine is busy (load {load:.2f} over the last minute); wait, or give "
            f"--even-if-busy"
        )
    console.print(f"load {load:.2f} over the last minute, {len(os.sched_getaffinity(0))} cores")


def llama_cpp(args: argparse.Namespace, console: Console) -> Path | None:
    """Return the path of llama.cpp's program; None where it is not wanted or cannot be built."""
    if args.llama_cpp is None:
        return None
    try:
        return build(args.llama_cpp)
    except BuildError as error:
        console.print(f"llama.cpp is left out, it cannot be built: {error}")
        return None


def sides(args: argparse.Namespace, folder: Path, program: Path | None) -> Iterator[Side]:
    """Start every side, with its model loaded."""
    cache = Path(tempfile.gettempdir()) / "jaxserve-benchmark-xla"
    length = args.prompt_tokens
    for precision in args.precision or OURS:
        yield ours(folder, precision, length, args.threads, cache)
    for dtype in args.peer_precision or DTYPES:
        yield transformers(args.peers, folder, dtype, length, args.threads)
    if program:
        for precision in PRECISIONS:
            yield LlamaCpp(program, args.peers, folder, precision, length, args.threads)


def measure(args: argparse.Namespace, all_sides: list[Side]) -> Iterator[list[Result]]:
    """Yield the results of each load and number of streams."""
    for load in args.load or LOADS:
        for streams in args.streams or (1, 4, 16):
            if load == "equal":
                yield measure_equal(all_sides, streams, args.repeats)
            else:
                yield measure_mixed(all_sides, streams, args.requests, args.repeats)


def main() -> None:
    args = arguments()
    console = Console()
    program = llama_cpp(args, console)
    check_idle(console, args.even_if_busy)
    about = facts(args.threads) | {"prompt_tokens": args.prompt_tokens}
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_model(folder)
        all_sides: list[Side] = []
        for side in sides(args, folder, program):
            stack.callback(side.close)
            all_sides.append(side)
        for found in measure(args, all_sides):
            results += found
            print(markdown(found, about), flush=True)
            if args.out:
                rows = [result.to_json() for result in results]
                args.out.write_text(json.dumps(about | {"results": rows}, indent=1) + "\n")
                args.out.with_suffix(".md").write_text(markdown(results, about))


if __name__ == "__main__":
    main()
