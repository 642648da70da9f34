"""Models of the hub by name, fetched from a hub of our own."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.checkpoints.hub.files import _fetch_all, fetch
from jaxserve.checkpoints.hub.lookup import HubFile, Snapshot, find
from jaxserve.checkpoints.hub.names import HubModel, display_name, hub_model, model_of_flag
from jaxserve.checkpoints.hub.watched import StoppedError
from tests.fake_hub import FakeHub, HubRepo, fake_hub

ROOT = Path(__file__).parents[2]
BUNDLED = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat"
NAME = "some/tiny-chat"
TOKEN = "hf_a_secret"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def nothing(done: int, total: int, what: str) -> None:
    pass


def fetched(name: str = NAME, report: Callable[[int, int, str], None] = nothing) -> Path:
    model = hub_model(name)
    assert model is not None
    return fetch(find(model), report)


def refused(name: str) -> str:
    with pytest.raises(CheckpointError) as error:
        fetched(name)
    text = str(error.value)
    assert text.startswith((f"{name}: ", f"{name}@")) and "\n" not in text
    return text


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two tries
    with fake_hub(cache) as hub:
        yield hub


@pytest.fixture
def tiny(hub: FakeHub) -> HubRepo:
    repo = hub.add(NAME, BUNDLED, modeling_tiny__py=b"import os", pytorch_model__bin=b"pickle")
    del repo.files["tokenizer.json"]  # so that no model is whole without its tokenizer.model
    return repo


@pytest.fixture
def sharded(hub: FakeHub, tmp_path: Path) -> HubRepo:
    """Add a model in three shards, with one more file that no index names."""
    folder = tmp_path / "sharded"
    shutil.copytree(BUNDLED, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SHARDS[at % 3] for at, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        part = {name: tensors[name] for name in tensors if weight_map[name] == shard}
        save_file(part, folder / shard)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    save_file({"twice": np.zeros(1)}, folder / "consolidated.safetensors")
    return hub.add(NAME, folder)


# ---- names


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ("Qwen/Qwen3-8B", HubModel("Qwen/Qwen3-8B")),
        ("a/b@main", HubModel("a/b", "main")),
        ("a/b.c_d@refs/pr/4", HubModel("a/b.c_d", "refs/pr/4")),
        ("tiny-chat", None),
        ("./a/b", None),
        ("../b", None),
        ("/a/b", None),
        ("~/b", None),
        ("a/b/c", None),
        ("a/b c", None),
        ("gs://a/b", None),
        ("a/b@", None),
        ("a/b/", None),
        ("https://huggingface.co/a/b", HubModel("a/b")),
        ("https://huggingface.co/a/b/tree/v1", HubModel("a/b", "v1")),
        ("https://huggingface.co/a/b/tree/refs/pr/1/", HubModel("a/b", "refs/pr/1")),
        ("https://hf.co/a/b/?library=x", HubModel("a/b")),
        ("hf://a/b@v1", HubModel("a/b", "v1")),
        ("https://elsewhere.com/a/b", None),
    ],
)
def test_names(given: str, model: HubModel | None) -> None:
    assert hub_model(given) == model
    # A flag's "./a/b" stays a path: as a Path it would be a/b.
    assert model_of_flag(given) == (model or Path(given).expanduser())
    if model:
        assert hub_model(str(model)) == hub_model(model) == model
        assert display_name(given) == display_name(model) == model.repo


def test_a_path_that_exists_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "link").symlink_to("nowhere")
    assert hub_model("org/name") is None and display_name("org/name") == "name"
    assert hub_model("org/link") is None and model_of_flag("org/name") == Path("org/name")
    assert hub_model("org/other") == HubModel("org/other")
    assert hub_model(Path("org/other")) is None


def test_the_name_of_a_folder_whose_bytes_are_not_utf_8(tmp_path: Path) -> None:
    """Such as one of another encoding; messages of gRPC and JSON hold UTF-8 alone."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8le"))
    assert display_name(folder) == "mod\N{REPLACEMENT CHARACTER}le"
    assert display_name(tmp_path / "mod\u00e8le") == "mod\u00e8le"


# ---- what is fetched


def test_the_config_comes_alone(hub: FakeHub, tiny: HubRepo) -> None:
    snapshot = find(HubModel(NAME))
    assert snapshot.model == HubModel(NAME, tiny.commit)
    assert (snapshot.folder / "config.json").read_bytes() == tiny.files["config.json"]
    assert set(hub.fetched("HEAD", "GET")) == {"config.json"}


def test_what_a_model_needs_and_nothing_else(hub: FakeHub, tiny: HubRepo) -> None:
    seen: list[tuple[int, int]] = []
    folder = fetched(report=lambda done, total, what: seen.append((done, total)))
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "tokenizer.model", "tokenizer_config.json"),
        "model.safetensors",
    }
    for name in names:
        assert (folder / name).read_bytes() == tiny.files[name]
    size = sum(len(tiny.files[name]) for name in names - {"config.json"})
    assert seen == sorted(seen) and seen[-1] == (size, size)
    assert not any(request.path.endswith((".py", ".bin")) for request in hub.requests)


def test_an_index_says_which_weights(hub: FakeHub, sharded: HubRepo) -> None:
    folder = fetched()
    names = {path.name for path in folder.glob("*.safetensors*")}
    assert names == {*SHARDS, "model.safetensors.index.json"}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_single_file_beside_an_index(sharded: HubRepo, is_whole: bool) -> None:
    sharded.files["model.safetensors"] = sharded.files[SHARDS[0]]
    if not is_whole:
        del sharded.files[SHARDS[1]]
    folder = fetched()
    weights = {path.name for path in folder.glob("*.safetensors")}
    assert weights == (set(SHARDS) if is_whole else {"model.safetensors"})
    tensors = HFCheckpoint.open(folder).tensors
    whole = {*load_file(BUNDLED / "model.safetensors")}
    assert (tensors.keys() == whole) == is_whole


def test_modules_of_an_embedding_model(hub: FakeHub, tmp_path: Path) -> None:
    repo = hub.add(NAME, BUNDLED, modules__json=b"[]")
    repo.files |= {"1_Pooling/config.json": b"{}", "onnx/config.json": b"{}"}
    folder = fetched()
    assert (folder / "1_Pooling" / "config.json").exists() and (folder / "modules.json").exists()
    assert not (folder / "onnx").exists()


def test_the_second_time_nothing_is_fetched(hub: FakeHub, tiny: HubRepo) -> None:
    folder = fetched()
    hub.requests.clear()
    assert fetched() == folder and hub.fetched("GET", "HEAD") == []
    assert [request.path for request in hub.requests if request.server == "cdn"] == []


def test_a_revision(hub: FakeHub, tiny: HubRepo) -> None:
    tiny.refs["v1.0"] = tiny.commit
    assert fetched(f"{NAME}@v1.0") == fetched() == fetched(f"{NAME}@{tiny.commit}")


def test_a_new_commit_is_a_new_folder(hub: FakeHub, tiny: HubRepo) -> None:
    before = fetched()
    hub.add(NAME, BUNDLED, generation_config__json=b"{}")
    after = fetched()
    assert after != before and (after / "generation_config.json").read_bytes() == b"{}"


# ---- interruptions


def test_a_connection_that_is_cut_goes_on_where_it_was(
    hub: FakeHub, tiny: HubRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.faults.cut["model.safetensors"] = [1_000_000, 500_000]
    folder = fetched()
    assert (folder / "model.safetensors").read_bytes() == tiny.files["model.safetensors"]
    ranges = [
        request.headers.get("range")
        for request in hub.requests
        if request.server == "cdn" and request.path.endswith("model.safetensors")
    ]
    assert ranges[0] is None and len(ranges) == 3
    starts = [int(text.removeprefix("bytes=").rstrip("-")) for text in ranges[1:] if text]
    assert 0 < starts[0] <= 1_000_000 < starts[1] <= 1_500_000


def test_an_interrupted_download_goes_on_with_the_missing_files(
    hub: FakeHub, sharded: HubRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.checkpoints.hub.files.AT_ONCE", 1)
    hub.faults.statuses[SHARDS[1]] = [(403, {})] * 2
    refused(NAME)
    hub.requests.clear()
    hub.faults.statuses.clear()
    folder = fetched()
    assert {request.path.rpartition("/")[2] for request in hub.requests} >= set(SHARDS[1:])
    assert not any(request.path.endswith(SHARDS[0]) for request in hub.requests)
    for shard in SHARDS:
        assert (folder / shard).read_bytes() == sharded.files[shard]


def test_one_failure_stops_the_other_downloads(
    hub: FakeHub, sharded: HubRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Barrier(len(SHARDS), timeout=60)
    stopped: SimpleQueue[str] = SimpleQueue()

    def download(model: HubModel, file: str, bar: type) -> Path:
        shown = bar()
        begun.wait()
        if file == SHARDS[0]:
            raise CheckpointError("the first shard fails")
        while True:
            try:
                shown.update(1)
            except StoppedError:
                stopped.put(file)
                raise

    snapshot = find(HubModel(NAME))
    files = [(snapshot.files or {})[shard] for shard in SHARDS]
    monkeypatch.setattr("jaxserve.checkpoints.hub.files.download", download)
    with pytest.raises(CheckpointError, match="the first shard fails"):
        _fetch_all(snapshot, files, nothing)
    assert {stopped.get(timeout=60) for _ in SHARDS[1:]} == set(SHARDS[1:])


def test_too_many_requests_are_tried_again(hub: FakeHub, tiny: HubRepo) -> None:
    hub.faults.statuses["cdn"] = [(429, {"Retry-After": "0"})]
    assert (fetched() / "model.safetensors").exists()


# ---- secrets


def test_the_token_reaches_the_endpoint_alone(
    hub: FakeHub, tiny: HubRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.reader = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetched()
    assert hub.tokens() == {"hub": {f"Bearer {TOKEN}"}, "cdn": {None}}


# ---- what cannot be fetched


def test_a_misspelt_name(hub: FakeHub, tiny: HubRepo) -> None:
    assert "did you mean some/tiny-chat?" in refused("some/tiny-chad")
    assert "did you mean some/tiny-chat?" in refused("Some/Tiny-Chat")
    assert "did you mean some/tiny-chat?" in refused("sone/tiny-chat")
    text = refused("some/thing-else")
    assert "no such folder" in text and hub.endpoint in text and "did you mean" not in text


def test_a_misspelt_revision(hub: FakeHub, tiny: HubRepo) -> None:
    assert "no such revision; did you mean main?" in refused(f"{NAME}@mian")


def test_a_gated_model(hub: FakeHub, tiny: HubRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.reader = TOKEN
    tiny.gated = True
    assert f"is gated: accept its terms at {hub.endpoint}/{NAME}" in refused(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert "is gated" in refused(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetched()


def test_a_private_model(hub: FakeHub, tiny: HubRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.reader = TOKEN
    assert "private (give HF_TOKEN)" in refused(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert "your token (HF_TOKEN, or hf auth login) may not read it" in refused(NAME)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "your token (HF_TOKEN, or hf auth login) is not valid"),
        (403, "your token (HF_TOKEN, or hf auth login) may not read it"),
        (429, "too many requests"),
        (418, "refuses with status 418"),
    ],
)
def test_refusals(hub: FakeHub, tiny: HubRepo, status: int, words: str) -> None:
    hub.faults.statuses["model.safetensors"] = [
        (status, {"X-Error-Message": "Invalid credentials in Authorization header"})
    ] * 20
    assert words in refused(NAME)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def test_no_hub(hub: FakeHub, tiny: HubRepo, no_hub: Callable[[], None]) -> None:
    folder = fetched()
    no_hub()
    assert fetched() == fetched(f"{NAME}@{tiny.commit}") == folder
    text = refused("some/other")
    assert "no such folder, and http://127.0.0.1:9 cannot be reached" in text


def test_a_commit_that_is_whole_asks_nobody(hub: FakeHub, tiny: HubRepo) -> None:
    folder = fetched()
    hub.requests.clear()
    assert fetched(f"{NAME}@{tiny.commit}") == folder and hub.requests == []


def test_a_silent_hub(hub: FakeHub, tiny: HubRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetched()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr("jaxserve.checkpoints.hub.lookup.TIMEOUT", 0.2)
        assert fetched() == folder
        assert f"{address} does not answer to the end" in refused("some/other")


def test_offline(hub: FakeHub, tiny: HubRepo, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE forbids to fetch it" in refused(NAME)
    folder = fetched()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert fetched() == folder and hub.requests == []
    (folder / "tokenizer.model").unlink()
    assert "HF_HUB_OFFLINE forbids to fetch it" in refused(NAME)


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.model"])
def test_a_cache_that_another_program_filled(
    hub: FakeHub, tiny: HubRepo, cache: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    folder = fetched()
    shutil.rmtree(next(cache.glob("models--*")) / "jaxserve")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched() == folder
    (folder / lost).unlink()
    assert "does not have all of its files, and HF_HUB_OFFLINE is set" in refused(NAME)


def test_a_cache_that_cannot_be_written(
    hub: FakeHub, tiny: HubRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetched()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("jaxserve.checkpoints.hub.lookup._write", refuse)
    assert fetched() == folder


def test_a_hub_that_is_down_or_busy(hub: FakeHub, tiny: HubRepo) -> None:
    folder = fetched()
    for status in (503, 429):
        hub.faults.statuses["hub"] = [(status, {})]
        assert fetched() == folder and hub.faults.statuses["hub"] == []


def test_a_server_that_is_no_hub(hub: FakeHub, tiny: HubRepo) -> None:
    hub.faults.statuses["hub"] = [(404, {})]
    assert "is it a hub? (HF_ENDPOINT)" in refused(NAME)
    hub.faults.statuses["hub"] = [(200, {"Content-Type": "text/html"})]
    assert "cannot be fetched: JSONDecodeError" in refused(NAME)


def test_a_hash_that_was_not_compared_is_compared_later(
    hub: FakeHub, tiny: HubRepo, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny.files["model.safetensors"]
    hub.faults.swapped["model.safetensors"] = whole[:-1] + bytes([whole[-1] ^ 1])

    def killed(snapshot: Snapshot, file: HubFile, path: Path) -> None:
        if file.path == "model.safetensors":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jaxserve.checkpoints.hub.files._check_hash", killed)
        with pytest.raises(KeyboardInterrupt):
            fetched()
    assert list(cache.rglob("model.safetensors"))
    assert "has come with the sha256" in refused(NAME)
    hub.faults.swapped.clear()
    assert (fetched() / "model.safetensors").read_bytes() == whole
    assert not list(cache.rglob("*.unchecked"))


def test_a_commit_with_the_same_weights_fetches_none(
    hub: FakeHub, tiny: HubRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched()
    commit = hub.add(NAME, BUNDLED, generation_config__json=b"{}")
    del commit.files["tokenizer.json"]
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    seen: list[tuple[int, int]] = []
    hub.requests.clear()
    fetched(report=lambda done, total, what: seen.append((done, total)))
    assert seen[-1] == (2, 2) and not any(request.server == "cdn" for request in hub.requests)


def test_parts_that_an_ended_process_left_are_removed(hub: FakeHub, tiny: HubRepo) -> None:
    fetched()  # so that no file is missing the next time
    blobs = find(HubModel(NAME)).cache / "blobs"
    old = blobs / "a.1.incomplete"
    new = blobs / "a.2.incomplete"
    for path in (old, new):
        path.write_text("part")
    os.utime(old, (0, 0))
    fetched()
    assert new.exists() and not old.exists()


# ---- Xet


def fetching(hub: FakeHub, home: Path) -> "subprocess.Popen[str]":
    """Start a process that fetches the model; hf_xet leaves threads and open files behind."""
    script = (
        "import sys; from jaxserve.checkpoints.hub import names, lookup, files; "
        "from jaxserve.cli.exits import exit_code; "
        "work = lambda: files.fetch(lookup.find(names.hub_model(sys.argv[1])), lambda *told: None);"
        "sys.exit(exit_code(work))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, NAME]
    return subprocess.Popen(command, env=kept | variables, stderr=subprocess.PIPE, text=True)


@pytest.mark.system
def test_errors_of_xet_are_one_line(hub: FakeHub, tiny: HubRepo, tmp_path: Path) -> None:
    hub.faults.xet = hub.cdn  # which is no such server
    process = fetching(hub, tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in said
    assert "cannot be fetched: RuntimeError: " in said


@pytest.mark.system
def test_an_interrupt_ends_a_download(hub: FakeHub, tiny: HubRepo, tmp_path: Path) -> None:
    """Xet's server is silent, and its threads see no signal."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub.faults.xet = f"http://127.0.0.1:{silent.getsockname()[1]}"
        silent.settimeout(60)
        process = fetching(hub, tmp_path)
        connection, _ = silent.accept()
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            connection.close()
    assert process.returncode == 130, said


def test_other_bytes_than_were_published(hub: FakeHub, tiny: HubRepo, cache: Path) -> None:
    whole = tiny.files["model.safetensors"]
    hub.faults.swapped["model.safetensors"] = whole[:-1] + bytes([whole[-1] ^ 1])
    assert "model.safetensors has come with the sha256" in refused(NAME)
    assert not list(cache.rglob("model.safetensors"))
    hub.faults.swapped.clear()
    assert (fetched() / "model.safetensors").read_bytes() == whole


def test_a_disk_that_is_full(hub: FakeHub, tiny: HubRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    find(HubModel(NAME))
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        assert "still to be fetched" in refused(NAME)
    assert "model.safetensors" not in hub.fetched("HEAD", "GET")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert "No space left on device" in refused(NAME)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"README.md": b""}, "has no config.json"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "no weights in safetensors"),
        ({"config.json": b"{}", "model.gguf": b""}, "it has config.json, model.gguf"),
        (
            {
                "config.json": b"{}",
                "model.safetensors.index.json": b'{"weight_map": {"a": "lost.safetensors"}}',
            },
            "names 'lost.safetensors', which it does not have",
        ),
    ],
)
def test_models_that_are_not_whole(hub: FakeHub, files: dict[str, bytes], words: str) -> None:
    hub.repos[NAME] = HubRepo(files)
    model = hub_model(NAME)
    assert model is not None
    with pytest.raises(CheckpointError, match=words):
        fetch(find(model), nothing)


def test_a_snapshot_names_its_commit(hub: FakeHub, tiny: HubRepo) -> None:
    snapshot = find(HubModel(NAME, "main"))
    assert str(snapshot.model) == f"{NAME}@{tiny.commit}"
    assert find(snapshot.model) == Snapshot(snapshot.model, snapshot.folder, snapshot.files)
