"""Keys of files that users write, keep or hand on.

Files of tokens, addresses and prompts are lines without names.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_type_hints

from jaxserve.bench.traces import AZURE, read_trace
from jaxserve.checkpoints import orbax_store
from jaxserve.config import EngineConfig, Pool
from jaxserve.errors import ConfigError
from jaxserve.plan import bundle
from jaxserve.server.grpc.tokenizer_bundle import JSON_FILE, SETTINGS, TEMPLATE_FILE
from jaxserve.sharding.mesh import AXES
from tests.public_names import shown

ONE = 1  # token
ARRIVAL = {"timestamp": 0, "input_length": ONE, "output_length": ONE, "hash_ids": [0]}


def keys() -> dict[str, str]:
    return dict((*_bundle(), *_converted(), *_traces(), *_tokenizers()))


def _bundle() -> Iterator[tuple[str, str]]:
    """What plan --out writes and serve --bundle reads."""
    yield f"bundle/{bundle.CACHE}/", "folder"
    manifest, hints = f"bundle/{bundle.MANIFEST}", get_type_hints(bundle.Manifest)
    yield manifest, f"file, format {bundle.FORMAT}"
    for field in fields(bundle.Manifest):
        yield f"{manifest} {field.name}", shown.annotation(hints[field.name])
    yield from ((f"{manifest} mesh.{axis}", "key") for axis in AXES)
    yield from ((f"{manifest} engine.{field.name}", "key") for field in fields(EngineConfig))
    yield from ((f"{manifest} engine.pools[].{field.name}", "key") for field in fields(Pool))


def _converted() -> Iterator[tuple[str, str]]:
    """The manifest that jaxserve convert writes of a folder with one file."""
    with TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text("{}")
        orbax_store.write_manifest(folder, {"a tensor": "float32"})
        told = json.loads((folder / orbax_store.MANIFEST).read_text())
    yield f"converted/{orbax_store.WEIGHTS}/", "folder"
    yield f"converted/{orbax_store.MANIFEST}", f"file, format {told['format']}"
    for key in told:
        yield f"converted/{orbax_store.MANIFEST} {key}", "key"
    for key in told["files"]["config.json"]:
        yield f"converted/{orbax_store.MANIFEST} files.*.{key}", "key"


def _traces() -> Iterator[tuple[str, str]]:
    """bench serve --trace: columns of one format, and the keys that the other cannot be without."""
    yield from ((f"trace.csv {column}", "column") for column in AZURE)
    assert _is_trace(ARRIVAL), "ARRIVAL has to have all keys of a line"
    for key in ARRIVAL:
        if not _is_trace({other: value for other, value in ARRIVAL.items() if other != key}):
            yield f"trace.jsonl {key}", "key"


def _is_trace(line: Mapping[str, Any]) -> bool:
    with TemporaryDirectory() as made:
        path = Path(made) / "trace.jsonl"
        path.write_text(json.dumps(line) + "\n")
        try:
            return bool(read_trace(path, None))
        except ConfigError:
            return False


def _tokenizers() -> Iterator[tuple[str, str]]:
    """What the archive holds that routers ask for."""
    for name in (JSON_FILE, *SETTINGS, TEMPLATE_FILE):
        yield f"tokenizer.zip {name}", "file"
