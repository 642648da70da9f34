"""Writer of converted folders: what it keeps in memory."""

from pathlib import Path

import numpy as np

from jaxserve.checkpoints.orbax_writer import Writer

NUMBERS = np.ones((2, 3), np.float32)


def test_only_the_parameters_of_a_layer_wait(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    waiting = []
    for path in (("embed",), ("head",), ("layers", 0, "o"), ("layers", 0, "qkv"), ("norm",)):
        writer.add(path, "NH", NUMBERS)
        waiting.append(list(writer._waiting))
    writer.finish()
    assert waiting == [[], [], ["layers"], ["layers"], []]
    stored = {
        path.name for path in (tmp_path / "orbax").rglob("*") if (path / "zarr.json").exists()
    }
    assert stored == {"embed", "head", "layers.0.o", "layers.0.qkv", "norm"}
