"""Fetches the files of a model that are needed to run it: never code, never pickles."""

import hashlib
import logging
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from huggingface_hub import constants
from huggingface_hub.utils._xet import abort_xet_session

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import INDEX, MODULES, SINGLE_FILE, read_weight_map
from jaxserve.checkpoints.hub.errors import hub_errors
from jaxserve.checkpoints.hub.lookup import CONFIG, OWN, HubFile, Snapshot, download
from jaxserve.checkpoints.hub.watched import Progress, Report, unwatched, watched

TOKENIZERS = ("tokenizer.json", "tekken.json", "tiktoken.model", "tokenizer.model")
OTHER_FORMS = TOKENIZERS[1:3]  # which are large
# Files beside the weights, as far as a checkpoint has them.
SMALL_FILES = frozenset(
    {
        *(CONFIG, "generation_config.json", *TOKENIZERS, "tokenizer_config.json"),
        *("special_tokens_map.json", "added_tokens.json"),
        *("chat_template.jinja", "chat_template.json"),
        *(MODULES, "sentence_bert_config.json"),
    }
)
# Configurations of sentence-transformers' modules, and the chat template for tools.
FURTHER_FILES = re.compile(r"\d+_\w+/config\.json|additional_chat_templates/tool_use\.jinja")
SAFETENSORS = ".safetensors"
AT_ONCE = 8  # downloads
SHOWN = 5  # names in an error
ABANDONED = 3600.0  # seconds after which nobody writes on a part of a file
LAST_PARTS = 3.0  # seconds for other downloads to end after one has failed, or Ctrl-C
AWAKE = 0.5  # seconds between two looks at signals
PAUSE = 0.02  # seconds between two looks at a thread
log = logging.getLogger(__name__)


def fetch(snapshot: Snapshot, report: Report, weights: bool = True) -> Path:
    """Fetch the files of a model that the cache lacks, and return their folder.

    Files are kept as soon as they are whole, so that a download which was interrupted goes on with
    those that are missing. The sha256 of every large file that is fetched is compared with the
    hub's.

    Args:
        report: Function called with bytes done, bytes in total, and what is done, from several
            threads, never two at once.
        weights: False leaves the weights out, for a host that reads its part of them.

    Raises:
        CheckpointError: There are no safetensors or no tokenizer, a file is damaged, the disk is
            full, or the hub fails; the message is one line.
    """
    files = snapshot.files
    if files is None:
        return _as_cached(snapshot, weights)
    _remove_abandoned(snapshot)
    wanted = set(small_files(files))
    if weights:
        wanted.update(weight_files(snapshot, files))
    if not wanted.intersection(TOKENIZERS):
        raise CheckpointError(f"{snapshot.model}: has none of {', '.join(TOKENIZERS)}")
    work = [files[path] for path in sorted(wanted) if _is_unfinished(snapshot, files[path])]
    if work:
        _check_disk(snapshot, work)
        with hub_errors(snapshot.model):
            _fetch_all(snapshot, work, report)
    return snapshot.folder


def small_files(paths: Iterable[str]) -> list[str]:
    """Return the paths of configurations, tokenizer and chat template.

    Beside a tokenizer.json other forms of it do not count.
    """
    found = [path for path in paths if path in SMALL_FILES or FURTHER_FILES.fullmatch(path)]
    unused = OTHER_FORMS if TOKENIZERS[0] in found else ()
    return [path for path in found if path not in unused]


def weight_files(snapshot: Snapshot, paths: Collection[str]) -> list[str]:
    """Return the paths of the weights, those that HFCheckpoint.open would read, and of their index.

    The index is fetched where there is one. If it names files that the model does not have,
    model.safetensors counts, where there is one. CheckpointError if there are no weights in
    safetensors, or an index names what is none.
    """
    if INDEX in paths:
        named = _indexed(snapshot)
        missing = [path for path in named if path not in paths]
        if not missing:
            return [INDEX, *named]
        if SINGLE_FILE not in paths:
            raise CheckpointError(
                f"{snapshot.model}: its {INDEX} names {missing[0]!r}, which it does not have"
            )
    if SINGLE_FILE in paths:
        return [SINGLE_FILE]
    found = [path for path in paths if path.endswith(SAFETENSORS) and "/" not in path]
    if not found:
        others = sorted(path for path in paths if not path.startswith("."))
        raise CheckpointError(
            f"{snapshot.model}: has no weights in safetensors, and other files are not loaded; it "
            f"has {', '.join(others[:SHOWN])}{', ...' if len(others) > SHOWN else ''}"
        )
    return found


def _indexed(snapshot: Snapshot) -> list[str]:
    """Return the paths that the model's index names."""
    model = snapshot.model
    with hub_errors(model):
        index = download(model, INDEX, unwatched())
    named = sorted(set(read_weight_map(index).values()))
    for path in named:
        if not path.endswith(SAFETENSORS):
            raise CheckpointError(f"{model}: its {INDEX} names {path!r}, no safetensors file")
    return named


def _as_cached(snapshot: Snapshot, weights: bool) -> Path:
    """Return the folder as another program has filled it; CheckpointError if it is not whole."""
    folder = snapshot.folder
    has_tokenizer = any((folder / name).exists() for name in TOKENIZERS)
    if not has_tokenizer or (weights and not _has_weights(folder)):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub does not answer"
        raise CheckpointError(
            f"{snapshot.model}: {folder} does not have all of its files, and {why}"
        )
    return folder


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has all weight files that it names."""
    if (folder / SINGLE_FILE).exists():
        return True
    if (folder / INDEX).exists():
        return all((folder / name).exists() for name in read_weight_map(folder / INDEX).values())
    return any(folder.glob(f"*{SAFETENSORS}"))


# ---- before the download


def _is_unfinished(snapshot: Snapshot, file: HubFile) -> bool:
    """Return whether a file is still to be fetched, or to be checked."""
    return not (snapshot.folder / file.path).exists() or _unchecked(snapshot, file).exists()


def _unchecked(snapshot: Snapshot, file: HubFile) -> Path:
    """Return the mark of a file whose sha256 was not compared when the program ended."""
    return snapshot.cache / OWN / f"{file.content}.unchecked"


def _blob(snapshot: Snapshot, file: HubFile) -> Path:
    """Return where the cache has a content, whichever commits and paths have it."""
    return snapshot.cache / "blobs" / file.content


def _check_disk(snapshot: Snapshot, work: Iterable[HubFile]) -> None:
    needed = sum(file.size for file in work if not _blob(snapshot, file).exists())
    log.info("%s: fetching %.1f GB into %s", snapshot.model, needed / 1e9, snapshot.cache)
    free = shutil.disk_usage(snapshot.folder).free
    if needed > free:
        raise CheckpointError(
            f"{snapshot.model}: {needed / 1e9:.1f} GB are still to be fetched, and "
            f"{constants.HF_HUB_CACHE} has {free / 1e9:.1f} GB free (make room, or let HF_HOME "
            f"name another place)"
        )


def _remove_abandoned(snapshot: Snapshot) -> None:
    """Remove parts of files that ended processes left: huggingface_hub never goes on with them."""
    for path in (snapshot.cache / "blobs").glob("*.incomplete"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - ABANDONED:
                path.unlink()


# ---- the download


def _fetch_all(snapshot: Snapshot, work: Collection[HubFile], report: Report) -> None:
    """Fetch files at the same time; the first error, or Ctrl-C, gives the others up.

    Its threads end with their next part, or with the process: nobody waits for them for long.
    """
    missing = sum(file.size for file in work if not _blob(snapshot, file).exists())
    progress = Progress(missing, report)
    waiting: SimpleQueue[HubFile] = SimpleQueue()
    results: SimpleQueue[BaseException | None] = SimpleQueue()
    for file in work:
        waiting.put(file)

    def run() -> None:
        with suppress(Empty):
            while True:
                file = waiting.get_nowait()
                try:
                    progress.check()
                    _fetch(snapshot, file, progress)
                    results.put(None)
                except BaseException as error:
                    results.put(error)
                    progress.stop()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(AT_ONCE, len(work)))]
    for thread in threads:
        thread.start()
    try:
        for _ in work:
            error = _next(results)
            if error:
                raise error
    except BaseException:
        progress.stop()
        _end(threads)
        raise
    for thread in threads:
        thread.join()
    progress.finish()


def _next(results: "SimpleQueue[BaseException | None]") -> BaseException | None:
    """Wait for a result, and wake now and then.

    A signal that comes just before a thread falls asleep is seen when it wakes, so that without a
    timeout Ctrl-C could be lost.
    """
    while True:
        with suppress(Empty):
            return results.get(timeout=AWAKE)


def _end(threads: Collection[threading.Thread]) -> None:
    """Wait a moment for threads that were stopped.

    Xet's part of them does not see that: its session is aborted, and again, since a thread may have
    been about to take a new one.
    """
    until = time.monotonic() + LAST_PARTS
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
        abort_xet_session()
        for thread in threads:
            thread.join(PAUSE)


def _fetch(snapshot: Snapshot, file: HubFile, progress: Progress) -> None:
    mark = _unchecked(snapshot, file)
    if file.sha256 and not _blob(snapshot, file).exists():
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    path = download(snapshot.model, file.path, watched(file.path, progress))
    if mark.exists():
        progress.add(0, f"sha256 of {file.path}")
        _check_hash(snapshot, file, path)
        mark.unlink(missing_ok=True)


def _check_hash(snapshot: Snapshot, file: HubFile, path: Path) -> None:
    """Raise CheckpointError, and remove the file, if its sha256 is not the one that was listed."""
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found == file.sha256:
        return
    path.resolve().unlink()  # the blob, which the path links to
    path.unlink(missing_ok=True)
    raise CheckpointError(
        f"{snapshot.model}: {file.path} has come with the sha256 {found} instead of {file.sha256}; "
        f"it is removed: fetch it again, and check what lies between here and {constants.ENDPOINT}"
    )
