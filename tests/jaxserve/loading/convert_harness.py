"""Shared parts of the tests of conversions."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve.sharding.mesh import MeshSpec

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
BUNDLED = ROOT / "checkpoints" / "bundled" / "tiny-chat-draft"
SMALL_CHUNKS = 1024  # bytes: several to an array


def silent(done: int, total: int, what: str) -> None:
    """Show no progress."""


def mesh(data: int = 1, expert: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    return MeshSpec(data, expert, tensor).build(jax.devices())


def assert_same(found: Any, expected: Any) -> None:
    """Compare structures, dtypes, shardings, and every bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.sharding == other.sharding
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def changed(
    folder: Path,
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    case: str = "llama_tied",
) -> Path:
    """Copy a golden case with its tensors changed."""
    (folder / "source").mkdir()
    shutil.copy(GOLDEN / case / "config.json", folder / "source")
    tensors = change(
        {name: x.copy() for name, x in load_file(GOLDEN / case / "model.safetensors").items()}
    )
    save_file(tensors, folder / "source" / "model.safetensors")
    return folder / "source"


def chunk_of(folder: Path, name: str = "layers.0.qkv") -> Path:
    """Return the first chunk of a stored parameter."""
    return next(path for path in sorted(folder.glob(f"orbax/*/{name}/c/**/*")) if path.is_file())


def flip(path: Path) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
