"""Presets beside each other: what is run, and what is drawn of it."""

import sys

from benchmarks.presets import charts, command


def test_flags_of_the_benchmark_and_of_the_server() -> None:
    run = [sys.executable, "-m", "jaxserve.bench", "serve"]
    last = ["--output", "json", "--", "--prefer", "latency"]
    assert command("latency", ["--rate", "1"]) == [*run, "--rate", "1", *last]
    assert command("latency", ["--rate", "1", "--", "--tensor", "2"]) == [
        *run,
        "--rate",
        "1",
        *last,
        "--tensor",
        "2",
    ]


def test_two_lines_for_each_preset() -> None:
    """A load without samples has no point."""

    def result(*loads: tuple[float, dict | None]) -> dict:
        return {
            "results": [
                {"summary": {"output_tokens_per_second": x, "ttft": y, "tpot": y}} for x, y in loads
            ]
        }

    spread = {"p50": 2.0, "p99": 3.0}
    found = {"latency": result((10.0, spread), (20.0, None)), "throughput": result((30.0, spread))}
    for chart in charts(found):
        assert [(line.name, line.points) for line in chart.lines] == [
            ("latency p50", [(10.0, 2.0)]),
            ("latency p99", [(10.0, 3.0)]),
            ("throughput p50", [(30.0, 2.0)]),
            ("throughput p99", [(30.0, 3.0)]),
        ]
