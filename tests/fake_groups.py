"""Groups of the fake model's layers: what each kind keeps of a sequence, as numbers to check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.config import EngineConfig, SlotPool

Slot = tuple[int, int, float]  # position, token, noise of the arithmetic that wrote it


@dataclass(frozen=True)
class FakeGroup:
    """Layers of the fake model that keep the same tokens of a sequence.

    window: tokens that a query sees; None: all before it. slot: the layers keep states of
    sequences, and no pages. heads, key, value: of one token's entry; with `value` 0, it is K alone.
    layers: layers that have entries of their own. readers: windows of the layers that read the
    entries of the last of those and have none.
    """

    window: int | None = None
    slot: bool = False
    layers: int = 1
    heads: int = 1
    key: int = 3
    value: int = 0
    readers: tuple[int | None, ...] = ()

    def arrays(self, slots: Sequence[Slot]) -> dict[str, np.ndarray]:
        """Return what a KV segment holds of these tokens: k, and v unless there is K alone.

        Number j of a key is number j % 3 of the slot; every layer, head and array adds its own. The
        tokens of a state are the numbers of its one head.
        """
        if self.slot:
            return {"k": np.array(slots, np.float32).reshape(1, 1, 1, -1)}
        numbers = np.array(slots, np.float32).reshape(-1, 3)
        place = 10 * np.arange(self.layers)[:, None, None, None]
        place = place + np.arange(self.heads)[:, None]
        k = numbers[None, :, None, np.arange(self.key) % 3] + place
        if not self.value:
            return {"k": k.astype(np.float32)}
        v = numbers[None, :, None, np.arange(self.value) % 3] - place - 1
        return {"k": k.astype(np.float32), "v": v.astype(np.float32)}

    def slots(self, arrays: Mapping[str, np.ndarray]) -> list[Slot]:
        """Return the slots of a segment, after checking every number of it."""
        if self.slot:
            numbers = arrays["k"].reshape(-1, 3).tolist()
            return [(int(position), int(token), noise) for position, token, noise in numbers]
        slots = [
            (int(position), int(token), noise)
            for position, token, noise in arrays["k"][0, :, 0, :3].tolist()
        ]
        expected = self.arrays(slots)
        assert expected.keys() == arrays.keys(), "K alone, or with values where there are none"
        assert all(np.array_equal(expected[name], x, equal_nan=True) for name, x in arrays.items())
        return slots


def groups_of(config: EngineConfig) -> tuple[FakeGroup, ...]:
    """Return the plainest groups that fit a configuration."""
    return tuple(FakeGroup(pool.window, isinstance(pool, SlotPool)) for pool in config.pools)
