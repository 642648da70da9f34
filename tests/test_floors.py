"""The floors of the house: rooms by height, drawn from their imports into architecture.md.

A room stands one floor above the highest room that it imports from, so that a reader who begins at
the bottom needs nothing that comes later. Rooms that import each other have no floor.
"""

import ast
from functools import cache
from textwrap import TextWrapper

from tests.test_imports import ROOT, SOURCES, is_under, project_imports

# Name in the drawing -> modules and folders; the longest that a module lies under decides.
ROOMS: dict[str, tuple[str, ...]] = {
    "sharding": ("sharding",),
    "pallas_kernels": ("pallas_kernels",),
    "checkpoints": ("checkpoints",),
    "cpu_kernels": ("jaxserve.cpu_kernels",),
    "errors": ("jaxserve.errors", "jaxserve.flag_errors"),
    "names elsewhere": ("jaxserve.names_elsewhere",),
    "request": ("jaxserve.request", "jaxserve.request_values", "jaxserve.sampling_params"),
    "processes": ("jaxserve.interrupts", "jaxserve.sandbox_process", "jaxserve.sigint"),
    "machine": ("jaxserve.backends", "jaxserve.host_memory"),
    "config": ("jaxserve.config",),
    "structure": ("jaxserve.structure",),
    "tokenizer": ("jaxserve.tokenizer",),
    "models": ("jaxserve.models",),
    "engine's plain data": (
        *("jaxserve.engine.plan", "jaxserve.engine.row_fields", "jaxserve.engine.events"),
        *("jaxserve.engine.request_limits", "jaxserve.engine.kv_segment"),
        *("jaxserve.engine.buckets", "jaxserve.engine.empty_step"),
    ),
    "engine/host": ("jaxserve.engine.host",),
    "engine/device": ("jaxserve.engine.device",),
    "engine": ("jaxserve.engine",),
    "cluster": ("jaxserve.cluster",),
    "loading": ("jaxserve.loading",),
    "chat": ("jaxserve.chat",),
    "completion": ("jaxserve.completion", "jaxserve.completion_html"),
    "prompts": ("jaxserve.prompts", "jaxserve.open_choices"),
    "cli": ("jaxserve.cli",),
    "compilation cache": ("jaxserve.compilation_cache", "jaxserve.cache_folders"),
    "precision": ("jaxserve.models.precision",),
    "connections": ("jaxserve.addresses", "jaxserve.tls_files"),
    "hosts": ("jaxserve.cluster.hosts",),
    "progress": ("jaxserve.progress",),
    "llm": (
        *("jaxserve.llm", "jaxserve.async_llm", "jaxserve.loaded_llm", "jaxserve.llm_arguments"),
        *("jaxserve.llm_folder", "jaxserve.llm_requests", "jaxserve.llm_warm_up"),
        *("jaxserve.delta_streams", "jaxserve.async_calls", "jaxserve.call_guard"),
    ),
    "generate": ("jaxserve.generate",),
    "plan": ("jaxserve.plan",),
    "bench": ("jaxserve.bench",),
    "v1": ("jaxserve.v1",),
    "client": ("jaxserve.client",),
    "server/core": ("jaxserve.server.core",),
    "server's options": ("jaxserve.server.options",),
    "server's state": ("jaxserve.server.readiness", "jaxserve.server.serving_state"),
    "server/grpc": ("jaxserve.server.grpc",),
    "server/http": ("jaxserve.server.http",),
    "server/observe": ("jaxserve.server.observe",),
    "server/security": ("jaxserve.server.security",),
    "server/disaggregation": ("jaxserve.server.disaggregation",),
    "server": ("jaxserve.server",),
    "serve": ("jaxserve.serve",),
    "ray": ("jaxserve.ray",),
    "convert": ("jaxserve.convert",),
    "doctor": ("jaxserve.doctor",),
    "jaxserve": ("jaxserve.__main__", "jaxserve.programs"),
}
# The package itself only lists names; the converter's entry point imports the loader when it runs.
LEFT_OUT = ("jaxserve", "checkpoints.convert")
DRAWN = [m for m in SOURCES if m not in LEFT_OUT and not is_under(m, "training")]


def room_of(module: str) -> str:
    places = [(prefix, room) for room, prefixes in ROOMS.items() for prefix in prefixes]
    found = [place for place in places if is_under(module, place[0])]
    assert found, f"{module} is in no room"
    return max(found, key=lambda place: len(place[0]))[1]


def imported_rooms() -> dict[str, set[str]]:
    """Return the rooms that each room imports from."""
    arrows: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module in DRAWN:
        for name in project_imports(ast.parse(SOURCES[module].read_text())):
            targets = [other for other in DRAWN if is_under(name, other)]
            if targets:
                arrows[room_of(module)].add(room_of(max(targets, key=len)))
    return {room: others - {room} for room, others in arrows.items()}


def floors() -> dict[str, int]:
    """Return the height of each room; AssertionError where rooms import each other."""
    arrows = imported_rooms()
    climbing: list[str] = []

    @cache
    def height(room: str) -> int:
        assert room not in climbing, f"rooms in a circle: {climbing} -> {room}"
        climbing.append(room)
        found = 1 + max((height(other) for other in sorted(arrows[room])), default=-1)
        climbing.pop()
        return found

    return {room: height(room) for room in ROOMS}


def drawing() -> str:
    """Return the rooms floor by floor, the highest first."""
    heights = floors()
    lines = []
    for floor in range(max(heights.values()), -1, -1):
        rooms = ", ".join(room for room in ROOMS if heights[room] == floor)
        lines += TextWrapper(115, initial_indent=f"{floor:2}  ", subsequent_indent="    ").wrap(
            rooms
        )
    return "\n".join(lines)


def test_the_floors_are_drawn() -> None:
    """No two rooms import each other, and the drawing is that of the code."""
    path = ROOT / "docs" / "architecture.md"
    assert drawing() in path.read_text(), f"put this into {path.name}:\n{drawing()}"
