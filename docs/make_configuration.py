"""python docs/make_configuration.py: writes docs/configuration.md from the parsers of the programs.

A test compares the file with what this writes.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from jaxserve.programs import PROGRAMS

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "configuration.md"
INTRODUCTION = (
    "# Configuration\n\n"
    "Every flag of every program, and every environment variable that jaxserve itself reads or "
    "sets. Written by\n`python docs/make_configuration.py` from the parsers; "
    "`jaxserve serve --help` and so on print the same texts.\n\n"
    "In Python, flags of the engine are fields of `EngineOptions` (`--max-batch` is `max_batch`) "
    "or\narguments of `LLM`, and flags of sampling are fields of `SamplingParams`. Flags that "
    "contradict\neach other are an error.\n"
)
# Environment variables that the project reads or sets. Others of jax, gRPC and OpenTelemetry are
# described there.
VARIABLES = {
    "GRPC_VERBOSITY": "which lines gRPC's core writes; unless it is set, `serve` sets it to NONE, "
    "since clients could cause any number of lines",
    "JAX_COMPILATION_CACHE_DIR": "folder in which compiled steps are kept, for all programs that "
    "use jax; `--compilation-cache` wins over it, and it wins over `LLM(compilation_cache=...)`",
    "JAX_PLATFORMS": "kind of device that jax uses: `cpu`, `cuda` or `tpu`; `jaxserve doctor` "
    "says where it leaves out a device of the machine",
    "LIBTPU_INIT_ARGS": "flags of the TPU compiler; a bundle is taken only where they are the same",
    "LWS_GROUP_SIZE": "number of hosts, for `--pod`; a LeaderWorkerSet sets it",
    "LWS_LEADER_ADDRESS": "address of host 0, for `--pod`; a LeaderWorkerSet sets it",
    "LWS_WORKER_INDEX": "number of this host, for `--pod`; a LeaderWorkerSet sets it",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "protocol of traces, for `--otel`, with the other variables of "
    "OpenTelemetry's exporters",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "protocol of traces alone; wins over "
    "`OTEL_EXPORTER_OTLP_PROTOCOL`",
    "TPU_WORKER_HOSTNAMES": "hosts of a TPU slice, which jax finds by itself; `--pod` then leaves "
    "the variables of a LeaderWorkerSet alone",
    "XDG_CACHE_HOME": "folder of the user's caches; compiled steps are kept in its `jaxserve/xla`",
    "XLA_FLAGS": "flags of XLA; a bundle is taken only where they are the same; a GPU records a "
    "step's loops in its CUDA graph, unless `--xla_gpu_enable_command_buffer` is here",
}
# Variables that huggingface_hub reads, of those that it documents.
HUB_VARIABLES = {
    "HF_ENDPOINT": "address of the hub that models are fetched from by their names, a mirror for "
    "example",
    "HF_HOME": "folder of the hub's programs; models that were fetched lie in its `hub`",
    "HF_HUB_DISABLE_XET": "1: fetch files over plain HTTP, without Xet",
    "HF_HUB_OFFLINE": "1: take models from the hub's cache alone",
    "HF_TOKEN": "token for models that are gated or private; it is sent to `HF_ENDPOINT`",
}


@dataclass(frozen=True)
class Row:
    """A flag or argument as a table shows it."""

    name: str
    text: str


def document() -> str:
    """Return the text of docs/configuration.md."""
    shared, own = _divided(dict(_programs()))
    parts = [INTRODUCTION]
    for title, rows in shared.items():
        parts.append(f"\n## {title}, of several programs\n\n{_table(rows)}")
    for title, rows in own.items():
        parts.append(f"\n## {title}\n\n{_table({row: '' for row in rows})}")
    variables = "".join(
        f"| `{name}` | {text} |\n" for name, text in sorted((VARIABLES | HUB_VARIABLES).items())
    )
    parts.append(f"\n## Environment variables\n\n| variable | meaning |\n|---|---|\n{variables}")
    return "".join(parts)


def _programs() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the parsers of the programs, and those of their commands, by name."""
    for name, (module, _) in PROGRAMS.items():
        parser = import_module(module).parser()
        commands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not commands:
            yield name, parser
        for command in commands:
            for key, found in command.choices.items():
                yield f"{name} {key}", found


def _divided(
    parsers: dict[str, argparse.ArgumentParser],
) -> tuple[dict[str, dict[Row, str]], dict[str, list[Row]]]:
    """Return rows that several programs have, with the programs, and rows of one program.

    Both by the titles of their groups.
    """
    programs: dict[Row, list[str]] = {}
    titles: dict[Row, str] = {}
    for program, parser in parsers.items():
        for group in parser._action_groups:
            for action in group._group_actions:
                if not isinstance(action, argparse._HelpAction):
                    row = _row(action)
                    programs.setdefault(row, []).append(program)
                    titles.setdefault(row, _title(group))
    shared: dict[str, dict[Row, str]] = {}
    own: dict[str, list[Row]] = {}
    for row, names in programs.items():
        if len(names) > 1:
            shared.setdefault(titles[row], {})[row] = ", ".join(names)
        else:
            own.setdefault(f"jaxserve {names[0]}: {titles[row].lower()}", []).append(row)
    order = sorted(own, key=lambda title: list(parsers).index(title[9:].split(":")[0]))
    return shared, {title: own[title] for title in order}


def _title(group: argparse._ArgumentGroup) -> str:
    """Return the title of a group without what stands behind it, as a heading."""
    title = (group.title or "").split(" (")[0].split(":")[0]
    return {"positional arguments": "Arguments", "options": "General"}.get(
        title, title.capitalize()
    )


def _row(action: argparse.Action) -> Row:
    """Return the row of an action."""
    value = action.metavar or (action.choices and "|".join(map(str, action.choices))) or ""
    if action.option_strings:
        takes_value = action.nargs != 0
        shown = str(value or action.dest.upper()) if takes_value else ""
        name = f"{', '.join(action.option_strings)} {shown}".strip()
    else:
        name = str(value or action.dest)
    text = (action.help or "") % (vars(action) | {"prog": "jaxserve"})
    return Row(name.replace("|", "\\|"), " ".join(text.split()).replace("|", "\\|"))


def _table(rows: dict[Row, str]) -> str:
    """Return a table; with a column of programs if there are any."""
    if not any(rows.values()):
        lines = [f"| `{row.name}` | {row.text} |" for row in rows]
        return "\n".join(["| flag | meaning |", "|---|---|", *lines]) + "\n"
    lines = [f"| `{row.name}` | {row.text} | {programs} |" for row, programs in rows.items()]
    return "\n".join(["| flag | meaning | programs |", "|---|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
