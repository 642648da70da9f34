"""Quantized checkpoints, compared with the formats' descriptions written out in NumPy."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.quantized import check_method, dequantized

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 8]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
WHOLE = slice(None)


def test_fp8_in_blocks_with_parts_of_blocks_at_the_ends() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((10, 19)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((3, 3)).astype(np.float32)
    found = dequantized({"a.weight": values, "a.weight_scale_inv": scales, "b": scales}, FP8)
    assert set(found) == {"a.weight", "b"} and found["b"] is scales
    weight = found["a.weight"]
    expected = np.array(
        [[float(values[r, c]) * scales[r // 4, c // 8] for c in range(19)] for r in range(10)]
    )
    assert weight.shape == (10, 19) and weight.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(weight[WHOLE, WHOLE], expected, rtol=1e-6)
    np.testing.assert_allclose(weight[3:9, 7:18], expected[3:9, 7:18], rtol=1e-6)


STATIC = {
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": None,
        "activation_scheme": "static",
    }
}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_with_one_scale_for_a_matrix(
    shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Static scales of activations are left out, and a line says so."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, 6)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.full(shape, 0.5, ml_dtypes.bfloat16)
    tensors = {"a.weight": values, "a.weight_scale_inv": scale, "a.activation_scale": scale}
    found = dequantized(tensors, STATIC)
    assert set(found) == {"a.weight"}
    expected = values.astype(np.float32) * 0.5
    np.testing.assert_array_equal(found["a.weight"][WHOLE, WHOLE], expected)
    np.testing.assert_array_equal(found["a.weight"][1:4, 2:], expected[1:4, 2:])
    assert "left out 1 scales of activations" in caplog.text


def test_fp8_of_experts_in_one_tensor() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 10, 19)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((3, 3, 3)).astype(np.float32)
    weight = dequantized({"a": values, "a_scale_inv": scales}, FP8)["a"]
    spread = scales.repeat(4, axis=1)[:, :10].repeat(8, axis=2)[:, :, :19]
    expected = values.astype(np.float32) * spread
    assert weight.shape == (3, 10, 19) and weight.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(weight[WHOLE, WHOLE, WHOLE], expected)
    np.testing.assert_array_equal(weight[1:, 3:9, 7:18], expected[1:, 3:9, 7:18])
    assert weight[3:, 1:2, :].shape == (0, 1, 19)

    one_each = dequantized({"a": values, "a_scale_inv": scales[:, 0, 0]}, STATIC)["a"]
    expected = values.astype(np.float32) * scales[:, :1, :1]
    np.testing.assert_array_equal(one_each[WHOLE, WHOLE, WHOLE], expected)


def test_scales_of_activations_are_left_over_where_they_are_not_static() -> None:
    tensors = {"a.activation_scale": np.zeros((), np.float32)}
    assert set(dequantized(tensors, FP8)) == {"a.activation_scale"}


def test_the_text_part_may_be_what_is_quantized() -> None:
    values = np.ones((4, 8), ml_dtypes.float8_e4m3fn)
    tensors = {"a": values, "a_scale_inv": np.full((1, 1), 2.0, np.float32)}
    found = dequantized(tensors, {"text_config": FP8})
    assert (found["a"][WHOLE, WHOLE] == 2).all()
    with pytest.raises(CheckpointError, match="quantization_config and that of text_config differ"):
        check_method({**MXFP4, "text_config": FP8})


def test_every_number_and_power_of_mxfp4() -> None:
    """Numbers are those of OCP Microscaling Formats 1.0.

    e2m1 has a sign, two bits of exponent (biased by 1), and one of mantissa.
    """

    def e2m1(bits: int) -> float:
        exponent = bits >> 1 & 3
        mantissa = bits & 1
        size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        return -size if bits & 8 else size

    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (2, 3, 64))
    codes[0, 0, :16] = range(16)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(2, 3, 2, 16)
    scales = rng.integers(100, 150, (2, 3, 2)).astype(np.uint8)
    weight = dequantized({"w_blocks": blocks, "w_scales": scales}, MXFP4)["w"]
    powers = 2.0 ** (scales.astype(int) - 127)
    expected = np.vectorize(e2m1)(codes) * powers.repeat(32, axis=-1)
    assert weight.shape == (2, 64, 3)
    np.testing.assert_array_equal(weight[WHOLE, WHOLE, WHOLE], expected.transpose(0, 2, 1))
    np.testing.assert_array_equal(weight[1:, 30:50, :2], expected.transpose(0, 2, 1)[1:, 30:50, :2])


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            {},
            {"quantization_config": {"quant_method": "gguf"}},
            "quant_method 'gguf' is not implemented",
        ),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is None"),
        ({}, {"quantization_config": [1]}, "must be an object"),
        ({"a_scale_inv": np.zeros((1, 1), np.float32)}, FP8, "holds scales of a, which is missing"),
        (
            {
                "a": np.zeros((8, 8), ml_dtypes.float8_e4m3fn),
                "a_scale_inv": np.zeros((2, 2), np.float32),
            },
            FP8,
            r"blocks of 4 x 8 make them \[2, 1\]",
        ),
        (
            {
                "a_blocks": np.zeros((1, 2, 1, 8), np.uint8),
                "a_scales": np.zeros((1, 2, 1), np.uint8),
            },
            MXFP4,
            "are not MXFP4",
        ),
        (
            {
                "a": np.zeros((8, 8), ml_dtypes.float8_e4m3fn),
                "a_scale_inv": np.zeros((2, 2), np.float32),
            },
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 8]}},
            "must be two positive integers",
        ),
        (
            {
                "a": np.zeros((8, 8), ml_dtypes.float8_e4m3fn),
                "a_scale_inv": np.zeros(8, np.float32),
            },
            STATIC,
            r"has scales of shape \[8\]; blocks of 8 x 8 make them \[1, 1\]",
        ),
        (
            {
                "a": np.zeros((0, 8), ml_dtypes.float8_e4m3fn),
                "a_scale_inv": np.zeros((), np.float32),
            },
            STATIC,
            r"of shape \[0, 8\] has scales of shape \[1, 1\]",
        ),
        (
            {
                "a.activation_scale": np.zeros((), np.float32),
                "a.activation_scale_scale_inv": np.zeros((), np.float32),
            },
            STATIC,
            "holds scales of a.activation_scale, which is missing",
        ),
        (
            {
                "a": np.zeros((2, 8, 8), ml_dtypes.float8_e4m3fn),
                "a_scale_inv": np.zeros((), np.float32),
            },
            STATIC,
            r"of shape \[2, 8, 8\] has scales of shape \[\]; blocks of 8 x 8 make them \[2, 1, 1\]",
        ),
        (
            {
                "a": np.zeros((2, 8, 8), ml_dtypes.float8_e4m3fn),
                "a_scale_inv": np.zeros((2, 2), np.float32),
            },
            FP8,
            r"blocks of 4 x 8 make them \[2, 2, 1\]",
        ),
        (
            {
                "a": np.zeros(8, ml_dtypes.float8_e4m3fn),
                "a_scale_inv": np.zeros((), np.float32),
            },
            STATIC,
            "is quantized in blocks; it must be a matrix, or matrices of experts",
        ),
        (
            {"a": np.zeros((8, 8), ml_dtypes.float8_e4m3fn)},
            FP8,
            "tensor a is quantized, and its scales, a_scale_inv, are missing",
        ),
        (
            {"a_blocks": np.zeros((1, 2, 1, 16), np.uint8)},
            MXFP4,
            "tensor a_blocks is quantized, and its scales, a_scales, are missing",
        ),
        (
            {
                "a": np.zeros((8, 8), ml_dtypes.float8_e4m3fn),
                "a_scale_inv": np.zeros((2, 1), np.uint8),
            },
            FP8,
            "float8_e4m3fn with uint8 scales is not FP8",
        ),
        (
            {"a": np.zeros((8, 8), np.int8), "a_scale_inv": np.zeros((2, 1), np.float32)},
            FP8,
            "int8 with float32 scales is not FP8",
        ),
    ],
)
def test_what_is_refused(
    tensors: dict[str, np.ndarray], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        dequantized(tensors, config)
    assert "\n" not in str(caught.value)


def test_powers_beyond_float32_are_infinite_without_a_warning() -> None:
    tensors = {
        "w_blocks": np.full((1, 1, 1, 16), 0x77, np.uint8),
        "w_scales": np.full((1, 1, 1), 255, np.uint8),
    }
    weight = dequantized(tensors, MXFP4)["w"]
    assert np.isinf(weight[WHOLE, WHOLE, WHOLE].astype(np.float32)).all()


def test_without_quantization_nothing_changes() -> None:
    assert check_method({}) is None and check_method({"quantization_config": None}) is None
    tensors = {"a_scales": np.zeros(3)}
    assert dequantized(tensors, {}) == tensors
