"""Rows of a weight table that fill part of a head, or whose tensor has one of two layouts."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ModelError
from jaxserve.loading.tensor_reader import TensorReader
from jaxserve.models.families.hf_names import neighbours
from jaxserve.models.families.weight_table import Tensor
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec

# 4 query heads on 2 kv heads of 8 dimensions.
SPEC = ModelSpec("llama", 96, 32, 1, 4, 2, 8, 24, 1e-6, 128)
KEYS = Tensor("k", ("layers", 0, "k"), "(KH)D")


@pytest.mark.parametrize(
    ("rotated", "order"),
    [
        (1.0, [0, 2, 4, 6, 1, 3, 5, 7]),
        (0.5, [0, 2, 1, 3, 4, 5, 6, 7]),
        (0.25, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_rotated_pairs_are_put_in_order(rotated: float, order: list[int]) -> None:
    """First numbers of pairs come before second ones, and dimensions without a rope last."""
    spec = replace(SPEC, rope=Rope(rotated=rotated))
    stored = np.arange(2 * 8 * 32, dtype=np.float32).reshape(2 * 8, 32)
    reader = TensorReader({"k": stored}, spec)
    asked = (range(32), range(2), range(2, 3), range(8))  # the keys of qkv [D, K, Q, H]
    found = reader.read(neighbours(spec, [KEYS]), "DKQH", np.dtype(np.float32), asked)
    expected = stored.reshape(2, 8, 32)[:, order].transpose(2, 0, 1)
    np.testing.assert_array_equal(found[:, :, 0], expected)


DOWN = Tensor("down", ("layers", 0, "down"), "FD", other_axes="DF")


def test_the_layout_is_that_of_the_shape() -> None:
    sizes = SPEC.sizes()
    assert DOWN.as_stored((24, 32), sizes).axes == "FD"
    assert DOWN.as_stored((32, 24), sizes).axes == "DF"
    assert DOWN.as_stored((7, 7), sizes).axes == "FD"  # which reading refuses
    assert KEYS.as_stored((7, 7), sizes) is KEYS


def test_a_shape_of_both_layouts_is_refused() -> None:
    sizes = replace(SPEC, d_mlp=32).sizes()
    with pytest.raises(
        ModelError, match="may have the order FD or DF; sizes that are equal do not"
    ):
        DOWN.as_stored((32, 32), sizes)


@dataclass
class Counted:
    """A stored tensor that counts the numbers that are read of it."""

    array: np.ndarray
    count: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        found = self.array[index]
        self.count += found.size
        return found


@pytest.mark.parametrize("part", range(3))
def test_of_a_tensor_that_holds_several_parts_only_one_is_read(part: int) -> None:
    """Half of the heads: of keys 2 of 4 rows in 4 columns, of values 3 rows for each head."""
    stored = Counted(np.arange(20 * 4, dtype=np.float32).reshape(20, 4))
    sizes = {"k": 4, "r": 3, "d": 1, "v": 1, "D": 4}
    row = Tensor("qkv", ("layers", 0, "it"), "([kd|kd|krv])D", part)
    begin, per_head = ((0, 1), (4, 1), (8, 3))[part]
    found = row.read(stored, sizes, ("Dkd", "Dkd", "Dkrv")[part], {"k": slice(2, 4)})
    expected = stored.array[begin + 2 * per_head : begin + 4 * per_head]
    np.testing.assert_array_equal(found.reshape(4, -1), expected.T)
    assert stored.count == expected.size
