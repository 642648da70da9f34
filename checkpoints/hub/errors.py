"""Errors of huggingface_hub as one line that says what to do."""

import difflib
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils import get_token

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.checkpoints.hub.watched import StoppedError

SUGGESTIONS = 3
LIKENESS = 0.75  # of a suggestion: difflib's ratio, 0 to 1
LISTED = 1000  # models of an organization that a misspelt name is compared with
NO_FOLDER = "there is no such folder, and "
NOT_WRITABLE = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT)
TOKEN = "your token (HF_TOKEN, or hf auth login)"
TOO_SHORT = "Consistency check failed"  # begins what huggingface_hub says of a file's size


@contextmanager
def hub_errors(model: HubModel) -> Iterator[None]:
    """Turn what a call of huggingface_hub raises about a model into a CheckpointError.

    hf_xet and proxies raise errors of many classes, so every Exception becomes one.
    """
    try:
        yield
    except (CheckpointError, StoppedError):
        raise
    except Exception as error:
        raise CheckpointError(f"{model}: {_problem(model, error)}") from error


def is_unreachable(error: BaseException) -> bool:
    """Return whether the hub does not answer, is down or busy, or must not be asked."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    return isinstance(error, (httpx2.TransportError, OfflineModeIsEnabled))


def _problem(model: HubModel, error: BaseException) -> str:
    error = _cause(error)
    # A commit is known from the hub, so that the model exists there.
    first = "" if model.commit else NO_FOLDER
    match error:
        case GatedRepoError():
            return (
                f"is gated: accept its terms at {constants.ENDPOINT}/{model.repo}, then give the "
                f"token of that account (HF_TOKEN, or hf auth login){_said(error)}"
            )
        case RevisionNotFoundError():
            return f"{constants.ENDPOINT} has no such revision{_similar_revisions(model)}"
        case RemoteEntryNotFoundError():
            return f"a file is missing there: {error.response.url}"
        case RepositoryNotFoundError():
            return _unknown(model)
        case HfHubHTTPError():
            return _refusal(error)
        case HFValidationError():
            return f"{first}the hub has no such names: {_line(error)}"
        case OfflineModeIsEnabled():
            return (
                f"it is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to fetch it "
                f"(unset it, or give a folder)"
            )
        case httpx2.ConnectError() | httpx2.ConnectTimeout() | httpx2.ProxyError():
            return (
                f"{first}{_host(error)} cannot be reached: {_line(error)} (check the network and "
                f"HF_ENDPOINT)"
            )
        case httpx2.HTTPError():
            return (
                f"{_host(error)} does not answer to the end: {_line(error)} (check the network, "
                f"and try again)"
            )
        case OSError() if error.errno in NOT_WRITABLE:
            return f"its files cannot be written: {error} (HF_HOME names another place)"
        case OSError() if str(error).startswith(TOO_SHORT):
            return "a file has come too short; try again"
    return f"cannot be fetched: {type(error).__name__}: {_line(error)}"


def _cause(error: BaseException) -> BaseException:
    """Return the error behind those that only say that the cache does not help either."""
    wrappers = (LocalEntryNotFoundError, RevisionResolutionError)
    while isinstance(error, wrappers) and error.__cause__:
        error = error.__cause__
    return error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _host(error: httpx2.HTTPError) -> str:
    """Return who was asked: the endpoint, or the host that it redirected to."""
    try:
        asked = str(error.request.url)
    except RuntimeError:  # no request is known
        return constants.ENDPOINT
    return address_of(asked)


def address_of(url: str) -> str:
    """Return the scheme, the host and the port of an address."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _said(error: HfHubHTTPError) -> str:
    text = error.response.headers.get("X-Error-Message")
    return f" ({text})" if text else ""


def _unknown(model: HubModel) -> str:
    may_be_private = f"{TOKEN} may not read it" if get_token() else "it is private (give HF_TOKEN)"
    return (
        f"{NO_FOLDER}{constants.ENDPOINT} has no such model, or {may_be_private}"
        f"{_meant(_similar_models(model.repo))}"
    )


def _refusal(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    host = address_of(str(error.response.url))
    refused = f"{host} refuses with status {status}{_said(error)}"
    if host != address_of(constants.ENDPOINT):
        return f"{refused}: try again (the endpoint signs its addresses for a while)"
    advice = {
        401: f"{TOKEN} is not valid",
        403: f"{TOKEN} may not read it",
        404: "is it a hub? (HF_ENDPOINT)",
        429: "too many requests; try again in some minutes, or give HF_TOKEN",
    }
    return f"{refused}: {advice[status]}" if status in advice else refused


def _meant(names: list[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _similar_models(repo: str) -> list[str]:
    """Return names like this one, of its organization and anywhere else; none without an answer.

    No token is sent, since the pages of a long list may lie on another host.
    """
    org, name = repo.split("/")
    api = HfApi(token=False)
    try:
        known = [model.id for model in api.list_models(author=org, limit=LISTED)]
        known += [model.id for model in api.list_models(search=name, limit=LISTED)]
    except (httpx2.HTTPError, OSError):
        return []
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(repo.lower(), by_lower, SUGGESTIONS, LIKENESS)
    return [by_lower[each] for each in close]


def _similar_revisions(model: HubModel) -> str:
    try:
        refs = HfApi().list_repo_refs(model.repo)
    except (httpx2.HTTPError, OSError):
        return ""
    known = [ref.name for ref in (*refs.branches, *refs.tags)]
    return _meant(difflib.get_close_matches(model.revision or "", known, SUGGESTIONS))
