"""Weights that are read from a hub by ranges: the bytes of the file, and no others."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hub import ranges, remote_file
from jaxserve.checkpoints.hub.lookup import Snapshot, find
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.checkpoints.hub.ranges import RemoteTensor, remote_tensors
from tests.fake_hub import FakeHub, HubRepo, fake_hub

NAME = "some/model"
FILE = "model.safetensors"
TOKEN = "hf_a_secret"
KIB = 2**10


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a.norm": rng.standard_normal(100).astype(np.float32),
        "b.weight": rng.standard_normal((64, 300)).astype(ml_dtypes.bfloat16),
        "c.experts": rng.standard_normal((4, 32, 200)).astype(np.float32),
        "d.bias": rng.standard_normal((2, 3)).astype(np.float16),
        "e.scalar": np.array(3, np.float32),
        "f.empty": np.zeros((0, 7), np.float32),
        "g.weight": rng.integers(0, 255, (500, 200), np.uint8),
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two tries
    monkeypatch.setattr(ranges, "SMALL", KIB)
    monkeypatch.setattr(ranges, "GAP", KIB)
    monkeypatch.setattr(remote_file, "PART", 16 * KIB)
    monkeypatch.setattr(ranges, "HEADER_GUESS", 64)
    with fake_hub(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def repo(hub: FakeHub, tensors: dict[str, np.ndarray], tmp_path: Path) -> HubRepo:
    save_file(tensors, tmp_path / FILE)
    hub.repos[NAME] = HubRepo({FILE: (tmp_path / FILE).read_bytes(), "config.json": b"{}"})
    return hub.repos[NAME]


def opened() -> dict[str, Any]:
    return remote_tensors(find(HubModel(NAME)))


def test_every_tensor(hub: FakeHub, repo: HubRepo, tensors: dict[str, np.ndarray]) -> None:
    found = opened()
    assert found.keys() == tensors.keys()
    for name, wanted in tensors.items():
        assert found[name].shape == wanted.shape and found[name].dtype == wanted.dtype
        assert found[name].ndim == wanted.ndim and found[name].size == wanted.size
        everything = found[name][()] if not wanted.shape else found[name][:]
        np.testing.assert_array_equal(everything, wanted)
    big = {name for name, tensor in found.items() if isinstance(tensor, RemoteTensor)}
    assert big == {"b.weight", "c.experts", "g.weight"}


@pytest.mark.parametrize(
    "index",
    [
        (slice(3, 9),),
        (slice(3, 9), slice(100, 120)),
        (slice(None), slice(1, 2)),
        (slice(60, 1000), slice(None)),
        (slice(5, 5), slice(None)),
        (slice(9, 3), slice(None)),
        (7, slice(2, 30)),
        (-1,),
        (np.int64(2), slice(None)),
        (slice(1, 3), slice(4, 9), slice(100, 150)),
        (3, slice(4, 9), slice(100, 150)),
    ],
    ids=str,
)
def test_indices(
    hub: FakeHub, repo: HubRepo, tensors: dict[str, np.ndarray], index: tuple[Any, ...]
) -> None:
    name = "c.experts" if len(index) == 3 else "b.weight"
    found = opened()[name][index]
    np.testing.assert_array_equal(found, tensors[name][index])
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0


def test_rows_alone_are_read(hub: FakeHub, repo: HubRepo) -> None:
    tensor = opened()["g.weight"]
    hub.requests.clear()
    tensor[100:300]
    assert hub.bytes_of(FILE) == 200 * 200
    tensor[100:300, :1]  # rows that are kept
    assert hub.bytes_of(FILE) == 200 * 200
    tensor[300:301]
    assert hub.bytes_of(FILE) == 201 * 200
    tensor[:]
    tensor[17:200]
    assert hub.bytes_of(FILE) == 701 * 200


def test_kept_rows_have_a_bound(
    hub: FakeHub, repo: HubRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "KEPT", 100 * KIB)
    found = opened()
    hub.requests.clear()
    for name in ("g.weight", "c.experts", "g.weight"):  # 98, 100 and again 98 KiB
        found[name][:]
    assert hub.bytes_of(FILE) == 2 * 100_000 + 4 * 32 * 200 * 4


def test_each_row_is_read_once_by_several_devices(hub: FakeHub, repo: HubRepo) -> None:
    tensor = opened()["g.weight"]
    hub.requests.clear()
    for _ in range(2):  # scales are found first, then the values are read again
        for start in range(0, 500, 125):
            tensor[start : start + 125]
    assert hub.bytes_of(FILE) == 500 * 200


def test_a_step_is_refused(hub: FakeHub, repo: HubRepo) -> None:
    with pytest.raises(TypeError, match="must be 1"):
        opened()["b.weight"][::2]


def test_shards_and_their_index(
    hub: FakeHub, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    shards = {"one.safetensors": ["a.norm", "b.weight"], "two.safetensors": ["g.weight"]}
    files = {"config.json": b"{}"}
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    files["model.safetensors.index.json"] = (
        repr({"weight_map": weight_map}).replace("'", '"').encode()
    )
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / shard)
        files[shard] = (tmp_path / shard).read_bytes()
    hub.repos[NAME] = HubRepo(files)
    found = opened()
    assert found.keys() == weight_map.keys()
    for name in weight_map:
        np.testing.assert_array_equal(found[name][:], tensors[name])


def test_the_token_reaches_the_endpoint_alone(
    hub: FakeHub, repo: HubRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.reader = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    opened()["b.weight"][:]
    assert hub.tokens() == {"hub": {f"Bearer {TOKEN}"}, "cdn": {None}}


# ---- faults


def test_faults_that_pass(hub: FakeHub, repo: HubRepo, tensors: dict[str, np.ndarray]) -> None:
    tensor = opened()["g.weight"]
    # Five in all: one of the requests that run at once may meet all of them, and tries six times.
    hub.faults.cut[FILE] = [0, 5000]
    hub.faults.statuses["cdn"] = [(429, {"Retry-After": "0"}), (503, {})]
    hub.faults.statuses["hub"] = [(500, {})]
    np.testing.assert_array_equal(tensor[:], tensors["g.weight"])


@pytest.mark.parametrize("status", [401, 403])
def test_an_address_that_expires_is_renewed(
    hub: FakeHub,
    repo: HubRepo,
    tensors: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    repo.reader = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    tensor = opened()["g.weight"]
    hub.requests.clear()
    hub.faults.expired = [status]
    np.testing.assert_array_equal(tensor[:50], tensors["g.weight"][:50])
    assert [request.server for request in hub.requests] == ["hub", "cdn"] * 2
    assert hub.tokens() == {"hub": {f"Bearer {TOKEN}"}, "cdn": {None}}


@pytest.mark.parametrize("host", ["127.0.0.1", "LocalHost"])
def test_a_refusal_of_the_endpoint_is_not_tried_again(
    hub: FakeHub, repo: HubRepo, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """However the endpoint is spelt."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint.replace("127.0.0.1", host))
    tensor = opened()["g.weight"]
    forbidden(hub, repo)
    repo.reader = "another"
    hub.requests.clear()
    with pytest.raises(CheckpointError, match="is gated"):
        tensor[:50]
    assert [request.server for request in hub.requests] == ["hub"]


def test_addresses_that_are_always_refused(hub: FakeHub, repo: HubRepo) -> None:
    tensor = opened()["g.weight"]
    hub.requests.clear()
    hub.faults.expired = [403] * 100
    wanted = f"{NAME}@{repo.commit}: {FILE}: {hub.cdn} has refused 4 addresses that {hub.endpoint}"
    with pytest.raises(CheckpointError, match=re.escape(wanted)):
        tensor[:50]
    assert [request.server for request in hub.requests] == ["hub", "cdn"] * 4


def cut(hub: FakeHub, repo: HubRepo) -> None:
    hub.faults.cut[FILE] = [10] * 100


def expired(hub: FakeHub, repo: HubRepo) -> None:
    hub.faults.expired = [403] * 100


def forbidden(hub: FakeHub, repo: HubRepo) -> None:
    repo.reader = TOKEN
    repo.gated = True


def without_ranges(hub: FakeHub, repo: HubRepo) -> None:
    hub.faults.ignores_ranges = True


def other_content(hub: FakeHub, repo: HubRepo) -> None:
    repo.files[FILE] = repo.files[FILE][:-1] + b"x"


def other_commit(hub: FakeHub, repo: HubRepo) -> None:
    hub.faults.told_commit = "0" * 40


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (cut, "does not answer to the end"),
        (expired, "had just signed, the last with status 403"),
        (forbidden, "is gated"),
        (without_ranges, "has come with status 200"),
        (other_content, "has come of other content"),
        (other_commit, "has come of the commits"),
    ],
)
def test_faults_that_stay(
    hub: FakeHub, repo: HubRepo, fault: Callable[[FakeHub, HubRepo], None], words: str
) -> None:
    tensor = opened()["g.weight"]
    fault(hub, repo)
    with pytest.raises(CheckpointError, match=words) as error:
        tensor[:]
    assert str(error.value).startswith(NAME) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 8 + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (90).to_bytes(8, "little")
        + b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 15]}}'.ljust(90)
        + bytes(15),
    ],
    ids=["empty", "short", "header beyond the file", "header is a list", "sizes differ"],
)
def test_files_that_are_no_safetensors(hub: FakeHub, content: bytes) -> None:
    hub.repos[NAME] = HubRepo({FILE: content, "config.json": b"{}"})
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{NAME}/{FILE}')}"):
        opened()


def test_without_the_hub(hub: FakeHub, repo: HubRepo) -> None:
    snapshot: Snapshot = replace(find(HubModel(NAME)), files=None)
    with pytest.raises(CheckpointError, match="several hosts read their parts"):
        remote_tensors(snapshot)
