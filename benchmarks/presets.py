"""Latency and throughput of the presets under the same loads, each in a server of its own.

Question: which of the three waits least, and which serves most?

    python -m benchmarks.presets --out presets.json -- --rate 1,2,4,8 --slo ttft=500,tpot=50
    --prompt-tokens 64-192

After the first -- come flags of jaxserve bench serve, which measures them; after a second
one, flags of the servers. JSON goes to --out, latency against throughput beside it as .svg.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxserve.config import PRESETS
from jaxserve.plan.plot import Chart, Line, picture


def command(preset: str, flags: Sequence[str]) -> list[str]:
    """Return the command; flags: of the benchmark, and after a -- of the server."""
    own = list(flags)
    more = list[str]()
    if "--" in own:
        at = own.index("--")
        own, more = own[:at], own[at + 1 :]
    asked = [*own, "--output", "json", "--", "--prefer", preset, *more]
    return [sys.executable, "-m", "jaxserve.bench", "serve", *asked]


def charts(found: dict[str, Any]) -> list[Chart]:
    """Return TTFT and TPOT against throughput; found: the report of bench serve by preset."""
    return [
        Chart(title, "output tokens/s", "ms", list(_lines(found, name)))
        for title, name in (("time to first token", "ttft"), ("time per output token", "tpot"))
    ]


def _lines(found: dict[str, Any], name: str) -> Iterator[Line]:
    """Return two lines for each preset, through its loads in their order."""
    for preset, result in found.items():
        summaries = [point["summary"] for point in result["results"]]
        for quantile in ("p50", "p99"):
            places = [
                (s["output_tokens_per_second"], s[name][quantile]) for s in summaries if s[name]
            ]
            above = [(x, y) for x, y in places if y > 0]  # the scale is logarithmic
            yield Line(f"{preset} {quantile}", preset, above, dashed=quantile == "p99")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.presets", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("flags", nargs="*", metavar="FLAG")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for preset in PRESETS:
        done = subprocess.run(
            command(preset, args.flags), stdout=subprocess.PIPE, text=True, check=True
        )
        found[preset] = json.loads(done.stdout)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".svg").write_text(picture(charts(found)))


if __name__ == "__main__":
    main()
