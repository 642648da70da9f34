"""The decoder over pages of 8 bits: contents, logits, and the distance from transformers."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.eight_bits import GRIDS, rounded
from tests.jaxserve.engine import naive
from tests.jaxserve.models.decoder_harness import Decoder, one_device_mesh
from tests.slow_cases import slow_but

GOLDEN = Path(__file__).parents[2] / "golden"
BOUND = 1e-4
# of a vector's largest number: what float32 may be off, so that the other neighbour is the nearest
TIE = 1e-5
# Of logits that spread by 2, in root mean square. float8_e4m3fn has 4 significant bits, int8 up to
# 7, bfloat16 8.
OFF = {"float8_e4m3fn": 0.5, "int8": 0.12, "bfloat16": 0.03}
FAMILIES = ("llama_gqa", "gemma3_two_ropes", "deepseek_v2_legacy", "gpt_oss_head_dim")
QUICK = [("llama_gqa", "float8_e4m3fn"), ("deepseek_v2_legacy", "int8")]
OTHERS = (
    "mistral_window",
    "qwen2_gqa",
    "qwen3_head_dim",
    "gemma2_caps",
    "phi3_mha_tied",
    "olmo2_mha_tied",
    *("smollm3_windows", "exaone4_legacy", "hunyuan_legacy", "glm4_gqa", "granite_biases"),
    *("ernie4_5_biases", "seed_oss_legacy", "olmo3_legacy", "qwen2_5_vl"),
)


def test_the_grids() -> None:
    """float8_e4m3fn has 8 numbers in each of 16 binades, less NaN, of both signs, and one zero."""
    assert [len(grid) for grid in GRIDS.values()] == [255, 2 * (16 * 8 - 2) + 1]
    assert [grid[-1] for grid in GRIDS.values()] == [127, 448]
    assert rounded(np.array([[127.0, 0.4, -0.6]]), "int8").tolist() == [[127, 0, -1]]
    assert rounded(np.array([[448.0, 17.5, 0.0]]), "float8_e4m3fn").tolist() == [[448, 18, 0]]


class StoredKeysAndValues:
    """Keys and values of one row in the decoder's pages, for the naive decoder to attend to.

    Given the numbers before they were rounded, it checks that the pages hold their nearest
    neighbours.
    """

    def __init__(self, decoder: Decoder, row: int, tokens: int):
        self._found = self._read(decoder, row, tokens)
        self._dtype = str(decoder.stored)

    def _read(self, decoder: Decoder, row: int, tokens: int) -> Iterator[np.ndarray]:
        for group in decoder.spec.page_groups():
            layout = group.layout(decoder.page_size, decoder.stored)
            for layer in group.layers:
                one_lane = jax.tree.map(lambda x: x[0], decoder.kept[layer])
                pages = reference.read(one_lane, decoder.tables[0, row], layout)
                for numbers, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
                    values = (
                        np.asarray(numbers, np.float64) * np.asarray(scale, np.float64)[..., None]
                    )
                    yield values.reshape(-1, *values.shape[2:])[:tokens]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        held = next(self._found)
        nearest = rounded(x, self._dtype)
        slack = TIE * np.abs(x).max(-1, keepdims=True)
        assert (np.abs(held - x) <= np.abs(nearest - x) + slack).all()
        assert np.isclose(held, nearest, rtol=0, atol=slack).mean() > 0.99
        return held


@pytest.mark.parametrize(
    "both",
    slow_but(
        list(product(("llama_gqa", "llama_mqa", "mistral_window"), GRIDS)),
        [("llama_gqa", "int8"), ("mistral_window", "float8_e4m3fn")],
    ),
)
def test_it_is_the_decoder_that_sees_rounded_keys_and_values(both: tuple[str, str]) -> None:
    """Logits in chunks and token by token equal float64 without a cache."""
    case, kv = both
    golden = np.load(GOLDEN / case / "golden.npz")
    tokens = np.concatenate([golden["prompts"], golden["tokens"]], axis=1)
    decoder = Decoder(GOLDEN / case, one_device_mesh(), rows=2, context=64, page_size=8, kv=kv)
    logits = run_in_chunks(decoder, tokens)
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), decoder.params)
    for row in range(2):
        held = StoredKeysAndValues(decoder, row, tokens.shape[1])
        expected = naive.forward(weights, decoder.spec, tokens[row].tolist(), held)
        np.testing.assert_allclose(logits[row], expected, atol=BOUND)


def run_in_chunks(decoder: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Return logits [R, T, V]: of two chunks of one size, then of single tokens."""
    parts = [decoder(tokens[:, :9], 0), decoder(tokens[:, 9:18], 9)]
    return np.concatenate(
        parts + [decoder(tokens[:, i : i + 1], i) for i in range(18, tokens.shape[1])], axis=1
    )


@pytest.mark.parametrize("both", slow_but(list(product((*FAMILIES, *OTHERS), GRIDS)), QUICK))
def test_it_is_near_transformers(both: tuple[str, str]) -> None:
    case, kv = both
    check_near(
        case, kv, Decoder(GOLDEN / case, one_device_mesh(), rows=2, context=64, page_size=8, kv=kv)
    )


@pytest.mark.parametrize(
    "both",
    slow_but(
        list(product(("llama_gqa", "deepseek_v2_legacy"), GRIDS)), [("llama_gqa", "float8_e4m3fn")]
    ),
)
def test_the_same_over_two_devices(both: tuple[str, str]) -> None:
    case, kv = both
    mesh = MeshSpec(tensor=2).build(jax.devices())
    check_near(case, kv, Decoder(GOLDEN / case, mesh, rows=2, context=64, page_size=8, kv=kv))


def check_near(case: str, kv: str, decoder: Decoder) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    tokens = np.concatenate([golden["prompts"], golden["tokens"]], axis=1)[:, :-1]
    expected = np.concatenate([golden["prompt_logits"], golden["decode_logits"]], axis=1)[
        :, : tokens.shape[1]
    ]
    off = np.sqrt(np.mean((run_in_chunks(decoder, tokens) - expected) ** 2))
    assert 1e-3 < off < OFF[kv]


def test_bfloat16_pages_of_float32_weights() -> None:
    decoder = Decoder(
        GOLDEN / "llama_gqa", one_device_mesh(), rows=2, context=64, page_size=8, kv="bfloat16"
    )
    assert decoder.kept[0].k.dtype == jnp.bfloat16 and decoder.kept[0].k_scale is None
    check_near("llama_gqa", "bfloat16", decoder)
