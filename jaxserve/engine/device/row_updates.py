"""Updates of rows on the devices: the fields of sequences that enter, and masks of grammars."""

from collections.abc import Mapping, Sequence
from itertools import batched

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.device.row_packing import (
    allowed_bits,
    pack_admission,
    pack_masks,
    token_counts,
)
from jaxserve.engine.device.state import StateHolder
from jaxserve.engine.plan import Admission
from jaxserve.sampling_params import MAX_BIASES


class RowUpdates:
    """Updates of an engine's rows, by its compiled row writers (see row_writers.py).

    Args:
        masks_shape: Shape of the writer of masks, see Lowering.masks_shape.
        writers: Compiled row writers by name, which may be filled in until the first call.
    """

    def __init__(
        self,
        vocab_size: int,
        config: EngineConfig,
        masks_shape: tuple[int, int, int],
        writers: Mapping[str, jax.stages.Compiled],
        state: StateHolder,
    ):
        self._vocab_size = vocab_size
        self._config = config
        self._masks_shape = masks_shape
        self._writers = writers
        self._state = state

    def admit(self, admission: Admission) -> None:
        """Write a row's fields, before any step that has it."""
        a = admission
        vocab = self._vocab_size
        where = np.array([a.lane, a.row], np.int32)
        self._write("admit_row", pack_admission(a, self._config.pages_per_row))
        if a.history is not None:
            self._write("set_counts", where, token_counts(a, vocab))
        if a.bias:
            ids = np.full(MAX_BIASES, vocab, np.int32)
            values = np.zeros(MAX_BIASES, np.float32)
            ids[: len(a.bias)], values[: len(a.bias)] = zip(*a.bias, strict=True)
            self._write("set_bias", where, ids, values)
        if a.allowed is not None:
            _, slots, _ = self._masks_shape
            # The allowed tokens are the same in every sampling slot, unlike those of a grammar.
            mask = allowed_bits(a.allowed, vocab).tobytes()
            self.write_masks([(a.lane, a.row, slots * mask)])

    def write_masks(self, entries: Sequence[tuple[int, int, bytes]]) -> None:
        """Write masks of allowed tokens.

        Args:
            entries: Lane, row, and masks of the sampling slots.
        """
        rows, slots, words = self._masks_shape
        for some in batched(entries, rows):
            where, masks = pack_masks(some, rows, slots, words, padding_row=self._config.max_batch)
            self._write("set_masks", where, masks)

    def _write(self, name: str, *values: np.ndarray) -> None:
        writer = self._writers[name]
        self._state.current = writer(self._state.current, *values)
