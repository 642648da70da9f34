"""A soak's figures on the terminal and in a file, and whether they are as they should be."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.soak.samples import BOUNDS
from benchmarks.soak.servers import Server
from benchmarks.soak.soaking import Result


def failures(result: Result, servers: Sequence[Server], deterministic: bool) -> list[str]:
    """Return one line for each thing that is not as it should be, once the servers have ended."""
    found = [f"{server.name}: {name} grows" for server in servers for name in server.samples.grew()]
    for server in servers:
        left = {name: count for name, count in result.left[server.name].items() if count}
        new = result.new_series[server.name]
        found += [f"{server.name}: {left} at rest"] if left else []
        found += [f"{server.name}: new series of metrics {new}"] if new else []
        code = server.process.returncode
        found += [f"{server.name}: exit code {code}"] if code else []
    if result.outcomes.unexpected:
        found.append(f"{result.outcomes.unexpected.total()} unexpected answers")
    if deterministic and result.canary.differed:
        found.append(f"{result.canary.differed} canaries differed")
    return found


def show(result: Result, servers: Sequence[Server], console: Console) -> None:
    """Print tables of the servers' growth, and what came of the actions."""
    outcomes = result.outcomes
    console.print(
        f"{outcomes.actions.total():,} actions of {len(outcomes.actions)} kinds, "
        f"{outcomes.refused:,} requests refused or left on purpose; whole and parsed: "
        f"{dict(outcomes.checked)}"
    )
    for server in servers:
        console.print(_growth(server))
        console.print(
            f"at rest {result.left[server.name]}, {result.series[server.name]} series of metrics, "
            f"new in the second half: {result.new_series[server.name] or 'none'}"
        )
    canary = result.canary
    console.print(
        f"canary: {canary.asked - canary.differed} of {canary.asked} byte-identical, "
        f"{canary.other_texts} other texts, {canary.other_logprobs} other log-probabilities "
        f"(by up to {canary.largest:.1e}), slowest {canary.slowest:.1f} s"
    )
    for kind, count in outcomes.unexpected.most_common():
        console.print(f"unexpected, {count} times: {kind}\n    {outcomes.examples[kind]}")


def _growth(server: Server) -> Table:
    title = f"server of {server.name}"
    table = Table("", "least", "most", "growth per minute", "bound", title=title)
    for name, slope in server.samples.slopes().items():
        values = getattr(server.samples, name)
        table.add_row(
            name, f"{min(values):,.0f}", f"{max(values):,.0f}", f"{slope:+.2f}", f"{BOUNDS[name]:g}"
        )
    return table


def to_json(result: Result, servers: Sequence[Server]) -> dict[str, Any]:
    """Return everything for a file of results."""
    growth = {
        server.name: {"slopes": server.samples.slopes()} | asdict(server.samples)
        for server in servers
    }
    # asdict would take a Counter's items for its keys.
    counts = vars(result.outcomes)
    return vars(result) | {"outcomes": counts, "canary": asdict(result.canary), "servers": growth}
