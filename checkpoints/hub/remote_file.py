"""A file on the hub that is read by ranges.

HfFileSystem of huggingface_hub reads ranges too, and does not show the headers of the answers: here
each answer has to be of the commit and of the content that were listed. A range is asked of the
endpoint, which redirects to an address that is signed for a while. httpx2 sends the token to no
other host, huggingface.co included. Where the other host refuses an address, which then has expired
on the way or in a cache between, the endpoint is asked for a new one.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import httpx2
import numpy as np
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hub.errors import address_of, hub_errors
from jaxserve.checkpoints.hub.lookup import HubFile, Snapshot

PART: Final = 32 * 2**20  # bytes of one request
REQUESTS_AT_ONCE: Final = 8  # requests of one read
ADDRESSES: Final = 4  # addresses that the endpoint is asked for until one is not refused
REASONS: Final = ("X-Error-Code", "X-Error-Message")  # headers of the hub alone
REFUSALS: Final = (401, 403)  # statuses of an address whose signature has expired


@dataclass(frozen=True)
class RemoteFile:
    """A file of a commit on the hub, read by ranges."""

    snapshot: Snapshot
    file: HubFile

    @property
    def size(self) -> int:
        return self.file.size

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read bytes `start` to `stop`: uint8 [stop - start], in several requests at a time."""
        found = np.empty(stop - start, np.uint8)
        begins = range(start, stop, PART)

        def fetch(begin: int) -> None:
            end = min(begin + PART, stop)
            part = np.frombuffer(self._request(begin, end), np.uint8)
            found[begin - start : end - start] = part

        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            for _ in pool.map(fetch, begins):
                pass
        return found

    def _request(self, start: int, stop: int) -> bytes:
        model = self.snapshot.model
        url = hf_hub_url(
            model.repo, self.file.path, revision=model.revision, endpoint=constants.ENDPOINT
        )
        # Without "identity", a server might compress the answer and send another range.
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        with hub_errors(model):
            answer = _ask(url, headers)
            if _refused_elsewhere(answer):
                raise CheckpointError(self._expired(answer))
            hf_raise_for_status(answer)
        self._check(answer, start, stop)
        return answer.content

    def _expired(self, answer: httpx2.Response) -> str:
        host = address_of(str(answer.url))
        return (
            f"{self.snapshot.model}: {self.file.path}: {host} has refused {ADDRESSES} addresses "
            f"that {constants.ENDPOINT} had just signed, the last with status "
            f"{answer.status_code} (fetch the model into a folder, or check what lies between here "
            f"and {host})"
        )

    def _check(self, answer: httpx2.Response, start: int, stop: int) -> None:
        """Raise CheckpointError unless the answer is this range of this content."""
        of_hub = [*answer.history, answer]
        commits = {each.headers.get("X-Repo-Commit") for each in of_hub} - {None}
        contents = {each.headers.get("X-Linked-Etag") for each in of_hub} - {None}
        if not answer.history:
            contents.add(answer.headers.get("ETag"))
        found = {str(content).removeprefix("W/").strip('"') for content in contents}
        model = self.snapshot.model
        wanted = f"bytes {start}-{stop - 1}/{self.size}"
        problem = ""
        if answer.status_code != 206 or len(answer.content) != stop - start:
            problem = f"with status {answer.status_code} and {len(answer.content)} bytes"
        elif answer.headers.get("Content-Range") != wanted:
            problem = f"as {answer.headers.get('Content-Range')}"
        elif commits != {model.revision}:
            problem = f"of the commits {sorted(map(str, commits))}"
        elif found != {self.file.content}:
            problem = f"of other content, {', '.join(sorted(found))} instead of {self.file.content}"
        if problem:
            raise CheckpointError(
                f"{model}: {self.file.path}: {wanted} has come {problem} (fetch the model into a "
                f"folder, or check what lies between here and {constants.ENDPOINT})"
            )


def _ask(url: str, headers: dict[str, str]) -> httpx2.Response:
    """Return the answer for an address of the endpoint, following where it redirects to.

    The endpoint is asked again while the host of the signed address refuses it.
    """
    for _ in range(ADDRESSES):
        answer = http_backoff(
            "GET",
            url,
            headers=build_hf_headers() | headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        )
        if not _refused_elsewhere(answer):
            break
    return answer


def _refused_elsewhere(answer: httpx2.Response) -> bool:
    """Return whether another host than the endpoint refuses, which a new address may help.

    The endpoint, which may have redirected to another name of its own, says why it refuses.
    """
    is_explained = any(name in answer.headers for name in REASONS)
    if answer.status_code not in REFUSALS or is_explained:
        return False
    asked = answer.history[0].url if answer.history else answer.url
    return (asked.host, asked.port) != (answer.url.host, answer.url.port)
