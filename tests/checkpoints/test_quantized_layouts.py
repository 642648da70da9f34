"""AWQ, GPTQ and compressed-tensors against a packer written from their published layouts."""

import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.quantized import check_method, dequantized
from jaxserve.checkpoints.quantized.packed import Packed

WHOLE = (slice(None), slice(None))
IN = 64
OUT = 32
GROUP = 16
# Which column is in the lowest four bits of a word, in the next four, ...
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

Tensors = dict[str, np.ndarray]


def pack(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Pack codes in int32 words: one long number along the axis, the first code lowest."""
    lines = np.moveaxis(codes, axis, -1)
    numbers = [sum(int(code) << bits * at for at, code in enumerate(line)) for line in lines]
    size = -(-lines.shape[-1] * bits // 32) * 4
    words = np.stack(
        [np.frombuffer(number.to_bytes(size, "little"), np.int32) for number in numbers]
    )
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def codes(rng: np.random.Generator, bits: int, *shape: int) -> np.ndarray:
    return rng.integers(0, 2**bits, shape)


def scales_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.01, 0.1, shape).astype(np.float16)


def config(method: str, **fields: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **fields}}


def awq(**fields: Any) -> dict[str, Any]:
    return config(
        "awq", **{"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True, **fields}
    )


def gptq(**fields: Any) -> dict[str, Any]:
    return config("gptq", **{"bits": 4, "group_size": GROUP, "desc_act": False, **fields})


def compressed(
    stored: str = "pack-quantized", more: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "channel", **weights},
    }
    return config(
        "compressed-tensors", format=stored, config_groups={"group_0": group}, **more or {}
    )


def awq_tensors(seed: int = 0) -> tuple[Tensors, np.ndarray]:
    """Return the tensors of module a, and its weight [O, I]."""
    rng = np.random.default_rng(seed)
    values = codes(rng, 4, IN, OUT)
    zeros = codes(rng, 4, IN // GROUP, OUT)
    scales = scales_of(rng, IN // GROUP, OUT)
    columns = np.arange(OUT).reshape(-1, 8)[:, AWQ_ORDER].ravel()
    tensors = {
        "a.qweight": pack(values[:, columns], 4, 1),
        "a.qzeros": pack(zeros[:, columns], 4, 1),
    }
    spread = np.arange(IN) // GROUP
    return tensors | {"a.scales": scales}, (
        (values - zeros[spread]) * scales[spread].astype(np.float32)
    ).T


def gptq_tensors(
    bits: int, offset: int, order: np.ndarray | None = None
) -> tuple[Tensors, np.ndarray]:
    """Return the tensors of module a, and its weight [O, I].

    offset: subtracted from stored zero points, modulo 2**bits.
    """
    rng = np.random.default_rng(bits)
    values = codes(rng, bits, IN, OUT)
    zeros = codes(rng, bits, IN // GROUP, OUT)
    scales = scales_of(rng, IN // GROUP, OUT)
    zeros[0, :2] = 0, 2**bits - 1
    tensors = {
        "a.qweight": pack(values, bits, 0),
        "a.qzeros": pack((zeros - offset) % 2**bits, bits, 1),
    }
    tensors |= {"a.scales": scales} | ({} if order is None else {"a.g_idx": order})
    spread = np.arange(IN) // GROUP if order is None else order
    return tensors, ((values - zeros[spread]) * scales[spread].astype(np.float32)).T


def packed_tensors(bits: int = 4, groups: int = 1) -> tuple[Tensors, np.ndarray]:
    """Return symmetric tensors of module a in compressed-tensors, and its weight [O, I]."""
    rng = np.random.default_rng(bits)
    values = codes(rng, bits, OUT, IN)
    scales = scales_of(rng, OUT, groups).astype(ml_dtypes.bfloat16)
    tensors = {
        "a.weight_packed": pack(values, bits, 1),
        "a.weight_scale": scales,
        "a.weight_shape": np.array([OUT, IN]),
    }
    spread = scales.astype(np.float32).repeat(IN // groups, axis=1)
    return tensors, (values - 2 ** (bits - 1)) * spread


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    axis=st.sampled_from([0, 1]),
    offset=st.sampled_from([0, 1]),
    ends=st.tuples(*[st.integers(0, 64)] * 4),
)
def test_any_part_of_packed_numbers(
    bits: int, axis: int, offset: int, ends: tuple[int, ...]
) -> None:
    numbers = codes(np.random.default_rng(bits), bits, 64, 64)
    stored = Packed(pack(numbers, bits, axis), bits, axis, 64, offset=offset)
    part = slice(*sorted(ends[:2])), slice(*sorted(ends[2:]))
    assert stored.shape == (64, 64)
    np.testing.assert_array_equal(stored[part], (numbers[part] + offset) % 2**bits)


class Recorded:
    """An array that counts how much of it is read."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.shape = array.shape
        self.read = 0

    def __getitem__(self, index: Any) -> np.ndarray:
        self.read += self.array[index].size
        return self.array[index]


@pytest.mark.parametrize("axis", [0, 1])
def test_only_the_words_of_a_part_are_read(axis: int) -> None:
    words = Recorded(pack(codes(np.random.default_rng(0), 4, 64, 64), 4, axis))
    part = [slice(None), slice(None)]
    part[axis] = slice(17, 32)
    found = Packed(words, 4, axis, 64)[tuple(part)]  # pyright: ignore[reportArgumentType]
    assert found.size == 15 * 64 and words.read == 2 * 64, "16 numbers are in 2 words"


def check(tensors: Tensors, config: dict[str, Any], expected: np.ndarray) -> None:
    found = dequantized({**tensors, "b.weight": np.ones(3, np.float16)}, config)
    assert set(found) == {"a.weight", "b.weight"}
    weight = found["a.weight"]
    assert weight.shape == (OUT, IN) and weight.dtype == ml_dtypes.bfloat16
    assert weight[WHOLE].dtype == np.float32
    np.testing.assert_array_equal(weight[WHOLE], expected)
    for part in (
        (slice(3, 17), slice(None)),
        (slice(None), slice(17, 49)),
        (slice(5, 6), slice(0, 0)),
    ):
        np.testing.assert_array_equal(weight[part], expected[part])


def test_awq() -> None:
    check(awq_tensors()[0], awq(), awq_tensors()[1])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("version", "offset"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq(bits: int, version: str, offset: int, ordered: bool) -> None:
    """Zero points include 0 and 2**bits - 1, which the first version's offset wraps around."""
    order = np.random.default_rng(1).permutation(IN).astype(np.int32) // GROUP if ordered else None
    tensors, expected = gptq_tensors(bits, offset, order)
    check(tensors, gptq(bits=bits, checkpoint_format=version, desc_act=ordered), expected)


def test_an_order_that_desc_act_does_not_tell_of_is_honoured() -> None:
    order = np.random.default_rng(1).permutation(IN).astype(np.int32) // GROUP
    tensors, expected = gptq_tensors(4, 1, order)
    check(tensors, gptq(), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 4])
def test_compressed_tensors_packed(bits: int, groups: int) -> None:
    tensors, expected = packed_tensors(bits, groups)
    fields: dict[str, Any] = {"strategy": "group", "group_size": IN // groups} if groups > 1 else {}
    check(tensors, compressed(num_bits=bits, **fields), expected)


def test_compressed_tensors_fill_the_last_words_up() -> None:
    """30 outputs and 60 inputs of 4 bits leave the last words of both kinds partly filled."""
    rng = np.random.default_rng(0)
    values = codes(rng, 4, 30, 60)
    zeros = codes(rng, 4, 30, 3)
    scales = scales_of(rng, 30, 3)
    tensors = {"a.weight_packed": pack(values, 4, 1), "a.weight_zero_point": pack(zeros, 4, 0)}
    tensors |= {"a.weight_scale": scales, "a.weight_shape": np.array([30, 60])}
    weight = dequantized(tensors, compressed(strategy="group", group_size=20, symmetric=False))[
        "a.weight"
    ]
    expected = (values - zeros.repeat(20, axis=1)) * scales.astype(np.float32).repeat(20, axis=1)
    np.testing.assert_array_equal(weight[WHOLE], expected)
    np.testing.assert_array_equal(weight[27:, 57:], expected[27:, 57:])


def test_what_is_not_finite_is_for_the_reader_to_refuse() -> None:
    tensors = AWQ | {"a.scales": np.full_like(AWQ["a.scales"], np.inf)}
    assert not np.isfinite(dequantized(tensors, awq())["a.weight"][WHOLE]).any()


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_compressed_tensors_in_the_order_of_activations(order: object) -> None:
    tensors, _ = packed_tensors(4, 4)
    groups = np.random.default_rng(1).permutation(IN).astype(np.int32) // (IN // 4)
    values = np.array(
        [
            [word >> 4 * at & 15 for word in row for at in range(8)]
            for row in tensors["a.weight_packed"]
        ]
    )
    expected = (values - 8) * tensors["a.weight_scale"].astype(np.float32)[:, groups]
    fields = compressed(strategy="group", group_size=IN // 4, actorder=order)
    check(tensors | {"a.weight_g_idx": groups}, fields, expected)


@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
def test_compressed_tensors_per_tensor(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal((OUT, IN)).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"a.weight": values, "a.weight_scale": np.full(shape, 0.5, np.float32)}
    fields = compressed("float-quantized", type="float", num_bits=8, strategy="tensor")
    check(tensors, fields, values.astype(np.float32) / 2)


def test_scales_of_activations_are_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    tensors, expected = packed_tensors(8)
    pages = {"b.k_scale": np.ones(1, np.float32), "b.v_scale": np.ones(1, np.float32)}
    with caplog.at_level(logging.WARNING, "jaxserve.checkpoints.quantized.compressed"):
        check(
            tensors | {"a.input_scale": np.ones(1, np.float32)} | pages,
            compressed(num_bits=8),
            expected,
        )
    assert "left out 3 scales of activations" in caplog.text and "a.input_scale" in caplog.text


def test_of_several_schemes_the_name_decides_before_the_pattern_before_the_class() -> None:
    eight, expected = packed_tensors(8)
    four, other = packed_tensors(4)

    def scheme(target: str, bits: int) -> dict[str, Any]:
        return {"targets": [target], "weights": {"num_bits": bits, "strategy": "channel"}}

    def named(module: str, tensors: Tensors) -> Tensors:
        return {name.replace("a.", f"{module}.", 1): tensor for name, tensor in tensors.items()}

    groups = {"x": scheme("Linear", 4), "y": scheme("re:m.*down$", 8), "z": scheme("m.1.down", 4)}
    tensors = named("m.0.down", eight) | named("m.1.down", four) | named("m.0.up", four)
    fields = config("compressed-tensors", format="pack-quantized", config_groups=groups)
    found = {name: weight[WHOLE] for name, weight in dequantized(tensors, fields).items()}
    np.testing.assert_array_equal(found["m.0.down.weight"], expected)
    np.testing.assert_array_equal(found["m.1.down.weight"], other)
    np.testing.assert_array_equal(found["m.0.up.weight"], other)
    groups.pop("x")
    with pytest.raises(
        CheckpointError,
        match=r"m\.0\.up\.weight is quantized, and no target of config_groups names",
    ):
        dequantized(tensors, fields)


PLAIN: dict[str, Any] = {"stored": "int-quantized", "num_bits": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (config("bitsandbytes"), "quant_method 'bitsandbytes' is not implemented"),
        (awq(bits=3), "bits 3 is not implemented"),
        (awq(version="gemv"), "version 'gemv' is not implemented"),
        (awq(zero_point=False), "zero_point False is not implemented"),
        (awq(group_size=0), "group_size 0 is neither a positive integer nor -1"),
        (awq(smooth=1), "smooth 1 is not known"),
        (gptq(bits=5), r"bits 5 is not implemented \(implemented: 2, 3, 4, 8"),
        (gptq(bits=True), "bits True is not implemented"),
        (gptq(dynamic={"+:.*down.*": {"bits": 8}}), "dynamic .* is not implemented"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not implemented"),
        (gptq(checkpoint_format="gptq", format="gptq_v2"), "format 'gptq_v2' is not implemented"),
        (gptq(pack_dtype="int64"), "pack_dtype 'int64' is not implemented"),
        (gptq(desc_act="yes"), "desc_act 'yes' is not implemented"),
        (gptq(is_marlin_format=True), "is_marlin_format True is not implemented"),
        (compressed("marlin-24"), "format 'marlin-24' is not implemented"),
        (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not implemented"),
        (
            compressed(more={"sparsity_config": {"format": "sparse-24-bitmask"}}),
            "sparsity_config .* is not implem",
        ),
        (
            compressed(more={"transform_config": {"config_groups": {"a": {}}}}),
            "transform_config .* is not implemented",
        ),
        (
            compressed(more={"kv_cache_scheme": {"tricks": 1}}),
            "kv_cache_scheme: tricks 1 is not known",
        ),
        (
            compressed(more={"quantization_status": "calibration"}),
            "quantization_status 'calibration' is not",
        ),
        (
            compressed(num_bits=3),
            r"group_0\.weights: num_bits 3 is not implemented \(implemented: 2, 4, 8",
        ),
        (compressed(type="float"), "type 'float' is not implemented"),
        (compressed(dynamic=True), "dynamic True is not implemented"),
        (compressed(strategy="token"), "strategy 'token' is not implemented"),
        (compressed(actorder="sideways"), "actorder 'sideways' is not implemented"),
        (compressed(noise=1), "noise 1 is not known"),
        (compressed("float-quantized", type="float", num_bits=4), "num_bits 4 is not implemented"),
        (
            compressed("float-quantized", type="float", num_bits=8, strategy="block"),
            "must be two positive integers",
        ),
        (
            config("compressed-tensors", format="pack-quantized"),
            "config_groups None is not a set of schemes",
        ),
        (config("fp8"), "weight_block_size is None; it must be two positive integers"),
        (
            config("fp8", weight_block_size=[4, 8], activation_scheme="odd"),
            "activation_scheme 'odd' is not implemen",
        ),
        (config("mxfp4", bits=4), "bits 4 is not known"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        check_method(fields)
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["re:(a+)+$", "re:(", "re:.*.*.*.*.*b"])
def test_patterns_that_could_take_forever_are_refused(target: str) -> None:
    fields = compressed()
    fields["quantization_config"]["config_groups"]["group_0"]["targets"] = [target]
    with pytest.raises(CheckpointError, match="targets 're:"):
        check_method(fields)


def without(tensors: Tensors, name: str) -> Tensors:
    return {each: tensor for each, tensor in tensors.items() if each != name}


AWQ = awq_tensors()[0]
GPTQ = gptq_tensors(4, 1)[0]
PACKED = packed_tensors()[0]
IN_ORDER = {"a.g_idx": np.arange(IN) // GROUP}


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        (without(AWQ, "a.qzeros"), awq(), r"a\.qweight belongs to a\.qzeros, which is missing"),
        (without(AWQ, "a.scales"), awq(), r"a\.qweight belongs to a\.scales, which is missing"),
        (without(AWQ, "a.qweight"), awq(), r"a\.qzeros belongs to a\.qweight, which is missing"),
        (
            AWQ,
            awq(group_size=24),
            r"a\.qweight has 64 inputs, which do not divide into groups of 24",
        ),
        (
            AWQ,
            awq(group_size=32),
            r"a\.qweight .* scales of shape \[4, 32\]; blocks of 32 x 1 make them \[2, 32\]",
        ),
        (
            AWQ | {"a.qzeros": AWQ["a.qzeros"][:2]},
            awq(),
            r"a\.qzeros holds zero points of shape \[2, 32\]",
        ),
        (
            AWQ | {"a.scales": AWQ["a.scales"][:, :24]},
            awq(),
            r"a\.qweight .* holds 32 numbers of 4 bits .* hold 24",
        ),
        (
            AWQ | {"a.qweight": AWQ["a.qweight"].astype(np.int64)},
            awq(),
            r"a\.qweight is int64 \[64, 4\]",
        ),
        (
            AWQ | {"a.scales": AWQ["a.scales"].astype(np.int32)},
            awq(),
            "int32 scales; they must be floating point",
        ),
        (AWQ | {"a.scales": AWQ["a.scales"][0, 0]}, awq(), "it must hold 0, as a.scales says"),
        (GPTQ, gptq(desc_act=True), r"belongs to a\.g_idx, which is missing"),
        (
            GPTQ | {"a.g_idx": IN_ORDER["a.g_idx"] + 1},
            gptq(),
            r"a\.g_idx has groups from 1 to 4; there are 4",
        ),
        (GPTQ | {"a.g_idx": IN_ORDER["a.g_idx"] - 1}, gptq(), r"a\.g_idx has groups from -1 to 2"),
        (
            GPTQ | {"a.g_idx": np.arange(3)},
            gptq(),
            r"a\.g_idx is int64 \[3\]; it must be the group of each of the 64",
        ),
        (GPTQ, gptq(bits=8), r"a\.qzeros .* holds 16 numbers of 8 bits"),
        (GPTQ | {"a.qweight": GPTQ["a.qweight"][0]}, gptq(), r"a\.qweight is int32 \[32\]"),
        (
            {part: tensor[:0] for part, tensor in GPTQ.items()},
            gptq(),
            "has 0 inputs, which do not divide",
        ),
        (
            gptq_tensors(3, 1)[0] | {"a.qweight": np.zeros((5, OUT), np.int32)},
            gptq(bits=3),
            r"a\.qweight of shape \[5, 32\] holds 53.3333 numbers of 3 bits",
        ),
        (
            without(PACKED, "a.weight_shape"),
            compressed(),
            r"belongs to a\.weight_shape, which is missing",
        ),
        (
            without(PACKED, "a.weight_scale"),
            compressed(),
            r"belongs to a\.weight_scale, which is missing",
        ),
        (PACKED, compressed(symmetric=False), r"belongs to a\.weight_zero_point, which is missing"),
        (PACKED, compressed(actorder="group"), r"belongs to a\.weight_g_idx, which is missing"),
        (
            PACKED | {"a.weight_zero_point": np.ones((4, 1), np.int32)},
            compressed(),
            "_zero_point is not zero, and conf",
        ),
        (
            PACKED | {"a.weight_shape": np.array([OUT, 56])},
            compressed(),
            "holds 64 numbers of 4 bits .* must hold 56, as a.weight_shape says",
        ),
        (
            PACKED | {"a.weight_shape": np.array([9, IN])},
            compressed(),
            r"a\.weight_shape is \[9, 64\], for 32 rows",
        ),
        (PACKED, compressed(strategy="group", group_size=48), "do not divide into groups of 48"),
        (PACKED, compressed(**PLAIN), r"belongs to a\.weight, which is missing"),
        (
            {"a.weight": np.zeros((4, 4), np.int8)},
            compressed(**PLAIN),
            r"a\.weight belongs to a\.weight_scale",
        ),
        (
            {
                "a.weight": np.zeros((4, 4), np.float32),
                "a.weight_scale": np.ones((4, 1), np.float32),
            },
            compressed(**PLAIN),
            r"a\.weight is float32; config_groups make it int8",
        ),
        (
            {"a.weight": np.zeros((0, 4), np.int8), "a.weight_scale": np.ones((1, 1), np.float32)},
            compressed("int-quantized", num_bits=8, strategy="tensor"),
            "is quantized, and no matrix",
        ),
        (
            {
                "a.weight": np.zeros((2, 4, 4), np.int8),
                "a.weight_scale": np.ones((4, 1), np.float32),
            },
            compressed(**PLAIN),
            "is quantized, and no matrix",
        ),
    ],
)
def test_tensors_that_are_refused(tensors: Tensors, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        dequantized(tensors, fields)
    assert "tensor a." in str(caught.value) and "\n" not in str(caught.value)
