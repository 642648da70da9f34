"""Costs of handing prompts over, as a table for people, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from jaxserve.plan.handover import MOST_ADDED, Handover, Trip

COLUMNS = (
    *("prompt", "MB", "transfer,\nms", "prefill,\nms", "hidden", "added,\nms"),
    *("steps\nthere", "slowest,\nms", "spared,\nms", "pays"),
)


def handover_parts(handover: Handover) -> Iterator[RenderableType]:
    """Yield the table and the sentences around it."""
    yield (
        f"\nPrompts handed over to a decode server like this one, at {handover.link / 1e9:,g} "
        f"GB/s, by floors and what devices send each other.\n"
        f"There, {handover.streams} other streams in a lane, at a context of "
        f"{handover.estimate.context}, get a token every {handover.tpot * 1e3:.3f} ms."
    )
    table = Table(box=SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for trip in handover.trips:
        table.add_row(*_cells(trip))
    yield table
    yield _sentence(handover)
    yield (
        "A slower prefill hides more of the transfer, a slower network less; neither is "
        "forecast here."
    )


def _cells(trip: Trip) -> Iterator[str]:
    yield from (f"{trip.tokens:,}", f"{trip.nbytes / 1e6:,.1f}", f"{trip.transfer * 1e3:,.1f}")
    yield from (f"{trip.prefill * 1e3:,.1f}", f"{trip.hidden:.0%}", _added(trip))
    yield from (f"{trip.steps:,}", f"{trip.slowest * 1e3:,.1f}", f"{trip.spared * 1e3:,.1f}")
    yield "yes" if trip.pays else "no"


def _sentence(handover: Handover) -> str:
    """Return the sentence that says from which length on handing over pays, if it does."""
    first = handover.pays_from
    if first is None:
        return f"It does not pay at this link: {_both(handover.trips[-1])}."
    return (
        f"It pays from {first.tokens:,} tokens on: the trip adds at most {MOST_ADDED:.0%} to the "
        f"prefill, and spares others more than it adds; {_both(first)}."
    )


def _both(trip: Trip) -> str:
    return (
        f"at {trip.tokens:,} tokens it adds {_added(trip, ' ms')} and spares each other stream "
        f"{trip.spared * 1e3:,.1f} ms of stall"
    )


def _added(trip: Trip, unit: str = "") -> str:
    return f"{trip.added * 1e3:,.1f}{unit} ({trip.added / trip.prefill:.0%})"


def handover_json(handover: Handover) -> dict[str, Any]:
    """Return the costs in bytes and seconds; shares are 0 to 1."""
    first = handover.pays_from
    return {
        "link": handover.link,
        "streams": handover.streams,
        "tpot": handover.tpot,
        "most_added": MOST_ADDED,
        "pays_from": first and first.tokens,
        "prompts": [_trip_json(trip) for trip in handover.trips],
    }


def _trip_json(trip: Trip) -> dict[str, Any]:
    found = asdict(trip)
    return found | {
        "bytes": found.pop("nbytes"),
        "hidden": trip.hidden,
        "added": trip.added,
        "pays": trip.pays,
    }
