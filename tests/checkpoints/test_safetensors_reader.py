"""The reader against the safetensors library's writer and reader, and against hostile files."""

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.safetensors_reader import (
    DTYPES,
    NON_FINITE_BITS,
    SafetensorsFile,
    check_finite,
)


def entry(dtype: str, shape: Any, start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file_bytes(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """Return a file of the format; `length` is the header length that its first 8 bytes claim."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def write(tmp_path: Path, contents: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    return path


def failure(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    return str(caught.value)


TWO = entry("F32", [2], 0, 8)
ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
TWICE = b'{"a":' + ENTRY + b',"%b":' + ENTRY + b"}"
MALFORMED = {
    "empty file": (b"", "header too small"),
    "file shorter than the length field": (b"\1\2\3", "header too small"),
    "truncated body": (file_bytes({"a": TWO}, bytes(7)), "file not fully covered"),
    "bytes after the last tensor": (file_bytes({"a": TWO}, bytes(9)), "file not fully covered"),
    "truncated header": (file_bytes({"a": TWO}, bytes(8))[:30], "invalid header length"),
    "header longer than the file": (
        file_bytes({"a": TWO}, bytes(8), length=10_000),
        "invalid header length",
    ),
    "header over 100 MB": (
        file_bytes({"a": TWO}, bytes(8), length=100_000_001),
        "header too large",
    ),
    "header length of 2**64 - 1": (
        file_bytes({"a": TWO}, bytes(8), length=2**64 - 1),
        "header too large",
    ),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "cloned without git-lfs",
    ),
    "header not UTF-8": (file_bytes(b"\xff\xfe\xff"), "invalid UTF-8"),
    "header not JSON": (file_bytes(b"weights!"), "invalid JSON"),
    "header a list": (file_bytes(b"[1, 2]"), "invalid JSON"),
    "header nested deeply": (file_bytes(b'{"a":' + b"[" * 100_000), "invalid JSON"),
    "duplicate tensor": (file_bytes(TWICE % b"a", bytes(4)), "duplicate key 'a'"),
    "duplicate tensor, one escaped": (
        file_bytes(TWICE % b"\\u0061", bytes(4)),
        "duplicate key 'a'",
    ),
    "duplicate metadata": (file_bytes(b'{"__metadata__":{"x":"1","x":"2"}}'), "duplicate key 'x'"),
    "duplicate field": (
        file_bytes(b'{"a":{"dtype":"I32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        "duplicate",
    ),
    "entry a list": (
        file_bytes(b'{"a":["F32",[1],[0,4]]}', bytes(4)),
        "tensor 'a' is not a JSON object",
    ),
    "no data_offsets": (
        file_bytes({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        "missing field `data_offsets`",
    ),
    "no shape": (
        file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
        "missing field `shape`",
    ),
    "no dtype": (
        file_bytes({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        "missing field `dtype`",
    ),
    "overlapping offsets": (
        file_bytes({"a": TWO, "b": entry("F32", [2], 4, 12)}, bytes(12)),
        "invalid offset",
    ),
    "hole between offsets": (
        file_bytes({"a": TWO, "b": entry("F32", [2], 12, 20)}, bytes(20)),
        "invalid offset",
    ),
    "offset past the end": (
        file_bytes({"a": TWO, "b": entry("F32", [2], 8, 16)}, bytes(8)),
        "file not fully covered",
    ),
    "offsets reversed": (file_bytes({"a": entry("F32", [2], 8, 0)}, bytes(8)), "invalid offset"),
    "unknown dtype": (
        file_bytes({"a": entry("F33", [2], 0, 8)}, bytes(8)),
        "unknown variant `F33`",
    ),
    "unsupported dtype": (
        file_bytes({"a": entry("F4", [2], 0, 1)}, bytes(1)),
        "dtype F4, which is not supported",
    ),
    "shape larger than its bytes": (
        file_bytes({"a": entry("F32", [3], 0, 8)}, bytes(8)),
        "invalid shape",
    ),
    "negative shape": (file_bytes({"a": entry("F32", [-2], 0, 8)}, bytes(8)), "expected usize"),
    "fractional shape": (file_bytes({"a": entry("F32", [2.0], 0, 8)}, bytes(8)), "expected usize"),
    "shape that overflows": (
        file_bytes({"a": entry("F32", [2**40, 2**40], 0, 8)}, bytes(8)),
        "overflow",
    ),
    "65 dimensions": (file_bytes({"a": entry("F32", [1] * 65, 0, 4)}, bytes(4)), "not usable"),
    "empty with a dimension of 2**63": (
        file_bytes({"a": entry("F32", [0, 2**63], 0, 0)}),
        "not usable",
    ),
    "control characters": (
        file_bytes({"a": entry("F\n\x1b[2J", [2], 0, 8)}, bytes(8)),
        "unknown variant",
    ),
    "a name of a million characters": (
        file_bytes({"n" * 10**6: entry("F4", [2], 0, 1)}, bytes(1)),
        "convert it to one of",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    contents, phrase = MALFORMED[case]
    path = write(tmp_path, contents)
    message = failure(path)
    assert phrase in message
    assert message.startswith(str(path))
    assert message.isprintable() and len(message) < 2100
    assert any(fix in message for fix in ("download", "convert", "keep the right one"))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "no such file" in failure(tmp_path / "model.safetensors")
    assert "no such file" in failure(tmp_path)
    assert "no such file" in failure(tmp_path / ("n" * 5000))


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_comes_back_as_the_library_wrote_it(code: str, tmp_path: Path) -> None:
    dtype = DTYPES[code]
    raw = np.random.default_rng(0).integers(
        0, 2 if code == "BOOL" else 256, 6 * dtype.itemsize, dtype=np.uint8
    )
    written = {
        "a": raw.view(dtype).reshape(2, 3),
        "scalar": raw.view(dtype)[:1].reshape(()),
        "none": np.zeros((0, 3), dtype),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(written, path, metadata={"format": "np"})
    read = SafetensorsFile(path)
    assert sorted(read) == sorted(written) and len(read) == 3
    for name, array in written.items():
        assert read[name].dtype == dtype and read[name].shape == array.shape
        assert read[name].tobytes() == array.tobytes()
    with safetensors.safe_open(path, framework="numpy") as oracle:
        assert oracle.get_slice("a").get_dtype() == code


@pytest.mark.parametrize("code", ["F16", "BF16", "F32", "F64", "I8", "I64", "BOOL"])
def test_slices_equal_the_library_s_slices(code: str, tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(-3, 4, (5, 7)).astype(DTYPES[code])
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": array}, path)
    with safetensors.safe_open(path, framework="numpy") as oracle:
        expected = oracle.get_slice("w")[1:4, 2:]
    np.testing.assert_array_equal(SafetensorsFile(path)["w"][1:4, 2:], expected, strict=True)


def test_arrays_that_begin_at_an_odd_byte_are_read(tmp_path: Path) -> None:
    value = np.arange(3, dtype=ml_dtypes.bfloat16)
    header = {"a": entry("U8", [1], 0, 1), "b": entry("BF16", [3], 1, 7)}
    read = SafetensorsFile(write(tmp_path, file_bytes(header, b"\7" + value.tobytes())))
    np.testing.assert_array_equal(read["b"], value, strict=True)
    check_finite("b", read["b"])


def test_arrays_are_read_only_and_outlive_the_file_object(tmp_path: Path) -> None:
    array = SafetensorsFile(write(tmp_path, file_bytes({"a": TWO}, struct.pack("<2f", 1, 2))))["a"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 3
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    assert array.tolist() == [1, 2]


def test_an_absent_name_is_a_key_error(tmp_path: Path) -> None:
    read = SafetensorsFile(write(tmp_path, file_bytes({"a": TWO}, bytes(8))))
    assert "b" not in read
    with pytest.raises(KeyError):
        read["b"]


def test_a_slice_of_a_file_larger_than_memory_use_is_all_that_is_read(tmp_path: Path) -> None:
    size = 8 << 30  # a sparse file: only the last page exists on disk
    path = write(tmp_path, file_bytes({"w": entry("BF16", [size >> 13, 4096], 0, size)}))
    end = path.stat().st_size + size
    os.truncate(path, end)
    with path.open("r+b") as file:
        file.seek(end - 4)
        file.write(np.array([1.5, -2], ml_dtypes.bfloat16).tobytes())
    tracemalloc.start()
    weight = SafetensorsFile(path)["w"]
    column = np.array(weight[-8:, 2048:])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert column.shape == (8, 2048) and column[-1, -2:].tolist() == [1.5, -2]
    assert peak < 1 << 20


def exhaustive(dtype: np.dtype) -> np.ndarray:
    """Return every value of a dtype of one or two bytes.

    Wider dtypes have the values at the edges and many random patterns.
    """
    bits = NON_FINITE_BITS[dtype].dtype
    if dtype.itemsize <= 2:
        return np.arange(1 << (8 * dtype.itemsize), dtype=bits).view(dtype)
    edges = np.array(
        [0, -0.0, np.finfo(dtype).max, np.finfo(dtype).tiny, np.inf, -np.inf, np.nan, -np.nan],
        dtype,
    )
    random = (
        np.random.default_rng(2)
        .integers(0, np.iinfo(bits).max, 100_000, dtype=bits, endpoint=True)
        .view(dtype)
    )
    return np.concatenate([edges, random])


@pytest.mark.parametrize("dtype", NON_FINITE_BITS, ids=str)
def test_check_finite_counts_what_isfinite_counts(dtype: np.dtype) -> None:
    values = exhaustive(dtype)
    finite = np.isfinite(values)
    bad = int((~finite).sum())
    assert bad > 0
    with pytest.raises(CheckpointError, match=rf"tensor 'w': {bad:,} of {values.size:,} values"):
        check_finite("w", values)
    check_finite("w", values[finite])
    for value in values[~finite][:10]:
        with pytest.raises(CheckpointError, match="1 of 1 values"):
            check_finite("w", np.array(value))


@pytest.mark.parametrize(
    "layout", ["dense", "transposed", "every other", "reversed", "no elements"]
)
def test_check_finite_sees_any_layout(layout: str) -> None:
    array = np.ones((6, 8), ml_dtypes.bfloat16)
    array[2, 4] = np.nan
    array[3, 5] = np.nan
    views = {
        "dense": (array, 2),
        "transposed": (array.T, 2),
        "every other": (array[::2, ::2], 1),
        "reversed": (array[::-1, ::-1], 2),
        "no elements": (array[:0], 0),
    }
    view, bad = views[layout]
    if bad == 0:
        return check_finite("w", view)
    with pytest.raises(CheckpointError, match=f"{bad} of {view.size} values"):
        check_finite("w", view)


def test_check_finite_passes_integers_and_refuses_what_it_does_not_know() -> None:
    check_finite("ids", np.full(4, -1, np.int32))
    check_finite("mask", np.ones(4, np.bool_))
    with pytest.raises(TypeError, match="no finite check for dtype complex64"):
        check_finite("c", np.ones(4, np.complex64))


@pytest.mark.parametrize("step", [1, 2])
def test_check_finite_works_in_chunks(step: int) -> None:
    array = np.ones(40 << 20, np.float16)
    array[-step] = np.inf
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="1 of"):
        check_finite("w", array[::step])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


SMALL = safetensors.numpy.save(
    {
        "embed": np.arange(6, dtype=np.float32).reshape(2, 3),
        "norm": np.ones(4, ml_dtypes.bfloat16),
        "mask": np.ones((2, 2), np.bool_),
        "scale": np.ones((), np.float16),
    }
)


@given(
    edits=st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=4),
    kept=st.integers(0, len(SMALL)) | st.just(len(SMALL)),
    extra=st.binary(max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_a_corrupted_file_is_refused_or_read_as_declared(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], kept: int, extra: bytes
) -> None:
    contents = bytearray(SMALL)
    for position, value in edits:
        contents[position] = value
    path = tmp_path_factory.getbasetemp() / "corrupted.safetensors"
    path.write_bytes(contents[:kept] + extra)
    try:
        read = SafetensorsFile(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    header = json.loads(path.read_bytes()[8 : 8 + struct.unpack("<Q", contents[:8])[0]])
    header.pop("__metadata__", None)
    assert read.keys() == header.keys()
    for name, declared in header.items():
        copy = np.array(read[name])
        assert copy.dtype == DTYPES[declared["dtype"]] and list(copy.shape) == declared["shape"]


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_arbitrary_headers_are_refused_or_hold_nothing(
    tmp_path_factory: pytest.TempPathFactory, header: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.safetensors"
    path.write_bytes(file_bytes(header))
    try:
        assert len(SafetensorsFile(path)) == 0
    except CheckpointError as error:
        assert str(path) in str(error)
