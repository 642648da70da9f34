"""Tells whether hosts read the same weights, without reading them."""

import json
import os
from hashlib import sha256
from pathlib import Path

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import INDEX, is_inside, read_weight_map
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.checkpoints.orbax_store import MANIFEST, is_orbax

UNKNOWN = ""  # the same as nothing
BLOCKS = 4  # of a file that are compared
BLOCK = 4096  # bytes


def identity(model: Path | HubModel) -> str:
    """Return a text that two hosts have in common if they read the same weights, and hardly else.

    A converted folder's is its manifest, by which everything that is read is checked; that of a
    model of the hub is its commit. Any other folder's are inode, size, times and some blocks of its
    weight files, and its config.json: they agree on hosts that mount one disk, or clones of one,
    and differ between copies, since programs cannot set the time of a file's last change. UNKNOWN
    where none of that is known.
    """
    if isinstance(model, HubModel):
        return str(model) if model.commit else UNKNOWN
    try:
        if is_orbax(model):
            return sha256((model / MANIFEST).read_bytes()).hexdigest()
        files = _files(model)
        if not all(is_inside(name) and os.path.isfile(model / name) for name in files):
            return UNKNOWN
        seen = [(name, *_seen(model / name)) for name in sorted(files)]
    except (OSError, CheckpointError):  # opened later, with an error that explains it
        return UNKNOWN
    return sha256(json.dumps(seen).encode()).hexdigest()


def _files(folder: Path) -> set[str]:
    """Return the names of all files that decide the weights, which need not be there."""
    files = {"config.json", *(file.name for file in folder.glob("*.safetensors"))}
    if os.path.lexists(folder / INDEX):
        files |= {INDEX, *read_weight_map(folder / INDEX).values()}
    return files


def _seen(file: Path) -> tuple[int | str, ...]:
    """Return what tells a file from others; blocks of it, since some images of disks set times."""
    found = os.stat(file)
    blocks = sha256()
    with file.open("rb") as opened:
        for part in range(BLOCKS):
            opened.seek(found.st_size * part // BLOCKS)
            blocks.update(opened.read(BLOCK))
    times = found.st_mtime_ns, found.st_ctime_ns
    return found.st_ino, found.st_size, *times, blocks.hexdigest()
