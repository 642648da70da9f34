"""python docs/make_figures.py speed | overload | session: draws the .svg of this name in docs/.

The first two are drawn from benchmarks/results, and a test compares them. The third is a real run
of its commands: draw it on a machine that has nothing else to do.
"""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from jaxserve.plan.plot import Chart, Line, picture

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OVERLOAD = RESULTS / "overload_cpu_2026-12-01.json"
CPU = RESULTS / "offline_cpu_zen5_2026-11-29.json"
OURS, PEER = "#2563eb", "#9ca3af"
COUNTED = {"h200": "url(#hatched)", "v6e": "url(#hatched-amber)"}  # by chip
DECODE = "Llama-3.1-8B, 64 rows; counted, not timed; grey: weights and live pages once"
SIDES = {"jaxserve": OURS, "transformers": PEER, "llama.cpp": "#f59e0b"}  # by program
SHOWN = ("both", "mixed")  # loads
BAR, GAP, TOP = 22, 14, 64  # pixels: height of a bar, space between groups, first group
LEFT, WIDTH = 150, 250  # of a panel: where its bars begin, and the longest
PANEL = 490
COMMANDS = (
    "jaxserve generate --prompt 'Once upon a time' --max-tokens 40 --temperature 0",
    "jaxserve plan qwen3-8b --topology v6e:2x2 --tensor 4 --no-compile | grep -A 10 'It fits'",
    "jaxserve doctor | tail -n 6",
)
COLUMNS = 110


class Group(NamedTuple):
    """Bars that stand together: a label, and each bar's length, colour and text."""

    label: str
    bars: list[tuple[float, str, str]]


def speed() -> str:
    """Return the chart: tokens per second on a CPU, and bytes over the floor on two chips."""
    cpu, chips = list(_beside_others()), list(_over_the_floor())
    height = TOP + max(map(_height, (cpu, chips))) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * PANEL} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="#374151">',
        '<pattern id="hatched" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="7" height="7" fill="#dbeafe"/>'
        f'<rect width="3" height="7" fill="{OURS}"/></pattern>',
        '<pattern id="hatched-amber" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(135)"><rect width="7" height="7" fill="#fef3c7"/>'
        '<rect width="3" height="7" fill="#f59e0b"/></pattern>',
        f'<rect width="{2 * PANEL}" height="{height}" fill="white"/>',
        *_panel(0, "CPU, 2 cores: output tokens per second, measured", cpu),
        _text(8, 42, "0.5 B, bfloat16; blue: jaxserve, grey: transformers, amber: llama.cpp"),
        *_panel(PANEL, "H200 and v6e: bytes of a decode step, over its floor", chips),
        _text(PANEL + 8, 42, DECODE),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _beside_others() -> Iterator[Group]:
    """Yield the loads, each with the output tokens per second of every side in bfloat16."""
    results = [r for r in json.loads(CPU.read_text())["results"] if r["precision"] == "bfloat16"]
    longest = 1.1 * max(r["median"] for r in results if r["load"] in SHOWN)
    for load, streams in [("both", 1), ("both", 4), ("both", 16), ("mixed", 16)]:
        found = {
            r["program"]: r["median"]
            for r in results
            if (r["load"], r["streams"]) == (load, streams)
        }
        bars = [
            (found[name] / longest, colour, f"{found[name]:.0f}")
            for name, colour in SIDES.items()
            if name in found
        ]
        many = f"{streams} streams" if streams > 1 else "1 stream"
        yield Group(f"{many}, mixed" if load == "mixed" else many, bars)


def _over_the_floor() -> Iterator[Group]:
    """Yield the contexts, each with the counted bytes of a step of every chip, and the floor."""
    counted = json.loads((RESULTS / "decode_bytes.json").read_text())
    longest = 1.1 * max(entry["over_floor"] for entry in counted)
    for context in dict.fromkeys(entry["context"] for entry in counted):
        bars = [
            (entry["over_floor"] / longest, COUNTED[entry["chip"]], _of_chip(entry))
            for entry in counted
            if entry["context"] == context
        ]
        yield Group(f"{context:,} tokens", [*bars, (1 / longest, PEER, "1")])


def _of_chip(entry: dict[str, Any]) -> str:
    return f"{entry['over_floor']:.2f} {entry['chip']}"


def _height(groups: list[Group]) -> int:
    return sum(len(group.bars) * BAR + GAP for group in groups)


def _panel(x: int, title: str, groups: list[Group]) -> Iterator[str]:
    yield _text(x + 8, 22, title, 'font-weight="600" font-size="14"')
    y = TOP
    for group in groups:
        middle = y + len(group.bars) * BAR / 2 + 4
        yield _text(x + LEFT - 10, middle, group.label, 'text-anchor="end"')
        for share, colour, value in group.bars:
            length = share * WIDTH
            yield (
                f'<rect x="{x + LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 3}" '
                f'fill="{colour}"/>'
            )
            yield _text(x + LEFT + length + 6, y + 14, value)
            y += BAR
        y += GAP


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'


def overload() -> str:
    """Return the chart: goodput against offered load, before requests were refused and since."""
    found = json.loads(OVERLOAD.read_text())
    lines = []
    for name, result in found.items():
        offered = [each for each in result["results"] if each["offered_per_second"]]
        places = [(each["offered_per_second"], each["goodput"]) for each in offered]
        lines.append(Line(name, name, places))
    return picture([Chart("64 tokens within 2 s", "offered requests/s", "good requests/s", lines)])


def session() -> str:
    """Run the commands, and return what a terminal shows of them, with their seconds."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in COMMANDS:
        began = time.monotonic()
        output = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=ROOT,
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        ).stdout
        seconds = time.monotonic() - began
        console.print(Text(f"$ {command}", style="bold"), Text(f"  # {seconds:.1f} s", style="dim"))
        console.print(Text.from_ansi(output))
    return console.export_svg(title=f"jaxserve, on {os.cpu_count()} cores of a CPU")


DRAWN = {"speed": speed, "overload": overload, "session": session}

if __name__ == "__main__":
    (name,) = sys.argv[1:]
    (ROOT / "docs" / f"{name}.svg").write_text(DRAWN[name]())
