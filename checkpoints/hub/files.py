"""Fetches the files of a model that are needed to run it: never code, never pickles."""

import hashlib
import re
import shutil
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.hf_api import RepoFile

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import INDEX, MODULES, SINGLE_FILE, read_weight_map
from jaxserve.checkpoints.hub.errors import hub_errors
from jaxserve.checkpoints.hub.lookup import CONFIG, Snapshot, download, listed
from jaxserve.checkpoints.hub.watched import Progress, Report, unwatched, watched

# Files beside the weights, as far as a checkpoint has them.
SMALL_FILES = frozenset(
    {
        *(CONFIG, "generation_config.json"),
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
        *("special_tokens_map.json", "added_tokens.json"),
        *("chat_template.jinja", "chat_template.json"),
        *(MODULES, "sentence_bert_config.json"),
    }
)
# Configurations of sentence-transformers' modules.
MODULE_CONFIG = re.compile(r"\d+_\w+/config\.json")
WEIGHTS = re.compile(r"[^/]+\.safetensors")
AT_ONCE = 8  # downloads
SHOWN = 5  # names in an error


def fetch(snapshot: Snapshot, report: Report, weights: bool = True) -> Path:
    """Fetch the files of a model that the cache lacks, and return their folder.

    Files are kept as soon as they are whole, so that a download which was interrupted goes on with
    those that are missing. The sha256 of a weight file is compared with the hub's. Where the hub
    cannot be asked, the folder is returned as the cache has it.

    report: called with bytes done, bytes in total, and the file's name, from several threads.
    weights: False leaves them out, for a host that reads its part of them. CheckpointError in one
    line: there are no safetensors, a file is damaged, the disk is full, or the hub fails.
    """
    files = listed(snapshot)
    if files is None:
        return snapshot.folder
    wanted = set(small_files(files))
    if weights:
        wanted.update(weight_files(snapshot, files))
    missing = [files[path] for path in sorted(wanted) if not (snapshot.folder / path).exists()]
    _check_disk(snapshot, missing)
    with hub_errors(snapshot.model):
        _fetch_all(snapshot, missing, report)
    return snapshot.folder


def small_files(paths: Iterable[str]) -> list[str]:
    """Return the paths of configurations, tokenizer and chat template."""
    return [path for path in paths if path in SMALL_FILES or MODULE_CONFIG.fullmatch(path)]


def weight_files(snapshot: Snapshot, paths: Collection[str]) -> list[str]:
    """Return the paths of the weights: those that HFCheckpoint.open would read.

    The index is fetched where there is one. CheckpointError if the model has no safetensors, or its
    index names others.
    """
    if SINGLE_FILE in paths:
        return [SINGLE_FILE]
    if INDEX in paths:
        return [INDEX, *_indexed(snapshot, paths)]
    found = [path for path in paths if WEIGHTS.fullmatch(path)]
    if not found:
        others = sorted(path for path in paths if not path.startswith("."))
        raise CheckpointError(
            f"{snapshot.model}: has no weights in safetensors, and other files are not loaded; it "
            f"has {', '.join(others[:SHOWN])}{', ...' if len(others) > SHOWN else ''}"
        )
    return found


def _indexed(snapshot: Snapshot, paths: Collection[str]) -> list[str]:
    model = snapshot.model
    with hub_errors(model):
        index = download(model, INDEX, unwatched())
    named = sorted(set(read_weight_map(index).values()))
    lost = [path for path in named if path not in paths]
    if lost:
        raise CheckpointError(f"{model}: its {INDEX} names {lost[0]!r}, which it does not have")
    return named


def _check_disk(snapshot: Snapshot, missing: Iterable[RepoFile]) -> None:
    needed = sum(file.size for file in missing)
    free = shutil.disk_usage(snapshot.folder).free
    if needed > free:
        raise CheckpointError(
            f"{snapshot.model}: {needed / 1e9:.1f} GB are still to be fetched, and "
            f"{constants.HF_HUB_CACHE} has {free / 1e9:.1f} GB free (make room, or let HF_HOME "
            f"name another place)"
        )


def _fetch_all(snapshot: Snapshot, files: Collection[RepoFile], report: Report) -> None:
    progress = Progress(sum(file.size for file in files), report)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            work = [pool.submit(_fetch, snapshot, file, progress) for file in files]
            for done in as_completed(work):
                done.result()
        except BaseException:  # Ctrl-C as well: leaving the pool waits for its threads
            progress.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch(snapshot: Snapshot, file: RepoFile, progress: Progress) -> None:
    path = download(snapshot.model, file.path, watched(file.path, progress))
    if file.lfs:
        _check_hash(snapshot, file, path)


def _check_hash(snapshot: Snapshot, file: RepoFile, path: Path) -> None:
    """Raise CheckpointError, and remove the file, if its sha256 is not the one that was listed."""
    assert file.lfs is not None
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found == file.lfs.sha256:
        return
    path.resolve().unlink()  # the blob, which the path links to
    path.unlink(missing_ok=True)
    raise CheckpointError(
        f"{snapshot.model}: {file.path} has come with the sha256 {found} instead of "
        f"{file.lfs.sha256}; it is removed: fetch it again, and check what lies between here and "
        f"{constants.ENDPOINT}"
    )
