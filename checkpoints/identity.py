"""Tells whether hosts read the same weights, without reading them."""

import json
import os
from hashlib import sha256
from pathlib import Path

from jaxserve.checkpoints.hf import INDEX
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.checkpoints.orbax_store import MANIFEST, is_orbax

UNKNOWN = ""  # the same as nothing


def identity(model: Path | HubModel) -> str:
    """Return a text that two hosts have in common only if they read the same weights.

    A converted folder's is its manifest, by which everything that is read is checked; that of a
    model of the hub is its commit. Any other folder's are inode, size and times of its weight
    files: they agree on hosts that mount one disk, or clones of one, and differ between copies,
    since no program can set the time of a file's last change. UNKNOWN where none of that is known.
    """
    if isinstance(model, HubModel):
        return str(model) if model.commit else UNKNOWN
    try:
        if is_orbax(model):
            return sha256((model / MANIFEST).read_bytes()).hexdigest()
        files = sorted([*model.glob("*.safetensors"), *model.glob(INDEX)])
        seen = [(file.name, _seen(file)) for file in files]
    except OSError:  # the checkpoint is opened later, with an error that explains it
        return UNKNOWN
    return sha256(json.dumps(seen).encode()).hexdigest() if seen else UNKNOWN


def _seen(file: Path) -> tuple[int, ...]:
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
