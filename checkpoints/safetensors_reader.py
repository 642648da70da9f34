"""Reads .safetensors files as memory-mapped arrays, of which only the parts used are read.

The format (github.com/huggingface/safetensors) is a little-endian uint64 N, N bytes of JSON with
each tensor's dtype, shape and data_offsets, then the tensors' bytes. The safetensors library
validates a file when it is opened. The mapping is done here because the library (0.8) accepts two
entries with the same name, accepts an entry written as a list, and returns slices as copies,
without float8.
"""

import json
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.checkpoints.errors import CheckpointError, unreadable

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "U16": np.dtype(np.uint16),
        "I16": np.dtype(np.int16),
        "U32": np.dtype(np.uint32),
        "I32": np.dtype(np.int32),
        "U64": np.dtype(np.uint64),
        "I64": np.dtype(np.int64),
        "F16": np.dtype(np.float16),
        "F32": np.dtype(np.float32),
        "F64": np.dtype(np.float64),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    }
)

# Bits that are all ones in NaN and Inf and in no other value: the exponent; in e4m3fn, which has no
# Inf, all bits but the sign; in e8m0fnu, which has nothing but an exponent, every bit.
NON_FINITE_BITS: Mapping[np.dtype, np.unsignedinteger] = MappingProxyType(
    {
        DTYPES["F16"]: np.uint16(0x7C00),
        DTYPES["BF16"]: np.uint16(0x7F80),
        DTYPES["F32"]: np.uint32(0x7F80_0000),
        DTYPES["F64"]: np.uint64(0x7FF0_0000_0000_0000),
        DTYPES["F8_E4M3"]: np.uint8(0x7F),
        DTYPES["F8_E5M2"]: np.uint8(0x7C),
        DTYPES["F8_E8M0"]: np.uint8(0xFF),
    }
)

# Elements of a chunk of the finite check: at most 8 MiB of float64 and its mask. Larger chunks do
# not fit in the cache.
FINITE_CHECK_ELEMENTS = 1 << 20


class Shard(Mapping[str, Any]):
    """Tensors of one .safetensors file by name, wherever it lies."""

    path: Path  # of the file, for errors
    _tensors: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class SafetensorsFile(Shard):
    """Tensors of one .safetensors file by name: read-only arrays over the memory-mapped file.

    Opening reads the header alone. An array has the header's dtype (bfloat16 and float8 from
    ml_dtypes) and shape. Its bytes are read when it is sliced, so that a host which holds a shard
    reads only its slice. The arrays stay valid after this object is gone. As with every memory map,
    the file must not be shortened while an array lives.

    Raises CheckpointError if the file is missing, unreadable, not valid safetensors (truncated,
    header beyond the file or over 100 MB, offsets that overlap, leave holes or disagree with shape
    and dtype), names a key twice, or holds a dtype that is not in DTYPES.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not os.path.isfile(self.path):
            problem = "leads to no file" if os.path.islink(self.path) else "there is no such file"
            raise CheckpointError(
                f"{path}: {problem}; download the checkpoint again or correct the path"
            )
        try:
            _validate(self.path)
            self._tensors = _map_tensors(self.path)
        except OSError as error:
            raise unreadable(path, error) from error


def check_finite(name: str, array: np.ndarray) -> None:
    """Raise CheckpointError, with the tensor's name and the count, for NaN or Inf in an array.

    The check works on the raw bits of any shape and layout, in chunks, at about the speed of
    memory: for bfloat16 it is six times as fast as np.isfinite. Integers and bools pass. TypeError
    for a dtype whose NaN is unknown.
    """
    if array.dtype.kind in "biu":
        return
    if array.dtype not in NON_FINITE_BITS:
        raise TypeError(
            f"tensor {name!r}: no finite check for dtype {array.dtype}; it must be one of DTYPES"
        )
    ones = NON_FINITE_BITS[array.dtype]
    bits = array.view(ones.dtype)
    count = sum(np.count_nonzero((chunk & ones) == ones) for chunk in _chunks(bits))
    if count:
        raise CheckpointError(
            f"tensor {name!r}: {count:,} of {array.size:,} values are NaN or infinite as "
            f"{array.dtype} (a damaged file or a faulty conversion); download or convert the "
            f"checkpoint again"
        )


def parse_json_object(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse `raw`, the contents of `path` or its header; CheckpointError if it is no object."""
    value = parse_json(raw, path)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a JSON {type(value).__name__}, not an object; download the file again"
        )
    return value


def parse_json(raw: bytes, path: Path) -> Any:
    """Parse `raw`, the contents of `path`.

    CheckpointError if it is not JSON, or if an object has a key twice, which readers resolve
    differently.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(
                f"{path}: duplicate key {twice!r} in its JSON; keep the right one only"
            )
        return keys

    try:
        return json.loads(raw, object_pairs_hook=unique_keys)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not valid JSON ({error}); download the file again"
        ) from error


def _validate(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a valid safetensors file ({error}; the file has "
            f"{path.stat().st_size:,} bytes); download it again (cut short, or cloned without "
            f"git-lfs?) or convert the checkpoint again"
        ) from error


def _map_tensors(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    entries = parse_json_object(data[8:start], path)
    entries.pop("__metadata__", None)
    return {name: _map_tensor(path, data, start, name, entry) for name, entry in entries.items()}


def _map_tensor(path: Path, data: mmap.mmap, start: int, name: str, entry: Any) -> np.ndarray:
    if not isinstance(entry, dict):  # the library also takes a bare list of the three values
        raise CheckpointError(
            f"{path}: the entry of tensor {name!r} is not a JSON object; convert the file again"
        )
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {entry['dtype']}, which is not supported; "
            f"convert it to one of {', '.join(DTYPES)}"
        )
    try:
        offset = start + entry["data_offsets"][0]
        return np.ndarray(entry["shape"], DTYPES[entry["dtype"]], buffer=data, offset=offset)
    except (ValueError, TypeError) as error:
        # The format allows shapes that NumPy does not, such as one of 65 dimensions.
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {entry['shape']}, which is not usable ({error}); "
            "convert the checkpoint again"
        ) from error


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield one-dimensional chunks in memory order; views where the array is dense."""
    for chunk in np.nditer(
        array,
        ["external_loop", "buffered", "zerosize_ok"],
        order="K",
        buffersize=FINITE_CHECK_ELEMENTS,
    ):
        # With one operand a chunk is an array already; NumPy's stubs say a tuple.
        yield np.asarray(chunk)
