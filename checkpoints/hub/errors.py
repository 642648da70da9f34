"""Errors of huggingface_hub as one line that says what to do."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
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

SUGGESTIONS = 3
LIKENESS = 0.75  # of a suggestion: twice the letters in common over all letters
LISTED = 1000  # models of an organization that a misspelt name is compared with
RAISED = (
    *(HfHubHTTPError, EntryNotFoundError, RevisionResolutionError, HFValidationError),
    *(httpx2.HTTPError, OSError),
)


@contextmanager
def hub_errors(model: HubModel) -> Iterator[None]:
    """Turn what huggingface_hub raises about a model into a CheckpointError."""
    try:
        yield
    except RAISED as error:
        raise CheckpointError(f"{model}: {_problem(model, error)}") from error


def is_unreachable(error: BaseException) -> bool:
    """Return whether the hub does not answer, is down, or must not be asked."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, (httpx2.TransportError, OfflineModeIsEnabled))


def _problem(model: HubModel, error: BaseException) -> str:
    error = _cause(error)
    match error:
        case GatedRepoError():
            return (
                f"is gated: accept its terms at {constants.ENDPOINT}/{model.repo}, then give the "
                f"token of that account (HF_TOKEN, or hf auth login)"
            )
        case RevisionNotFoundError():
            return f"{constants.ENDPOINT} has no such revision{_similar_revisions(model)}"
        case RemoteEntryNotFoundError():
            return f"a file is missing there: {error.response.url}"
        case RepositoryNotFoundError():
            return _unknown(model)
        case HfHubHTTPError():
            return _refusal(error)
        case OfflineModeIsEnabled():
            return (
                f"it is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to fetch it "
                f"(unset it, or give a folder)"
            )
        case httpx2.ConnectError() | httpx2.ConnectTimeout():
            return (
                f"there is no such folder, and {constants.ENDPOINT} cannot be reached: "
                f"{error or type(error).__name__} (check the network and HF_ENDPOINT)"
            )
        case httpx2.HTTPError():
            return (
                f"{constants.ENDPOINT} does not answer to the end: "
                f"{error or type(error).__name__} (check the network, and try again)"
            )
        case OSError() if error.strerror:
            return f"its files cannot be written: {error} (HF_HOME names another place)"
    return str(error)


def _cause(error: BaseException) -> BaseException:
    """Return the error behind those that only say that the cache does not help either."""
    wrappers = (LocalEntryNotFoundError, RevisionResolutionError)
    while isinstance(error, wrappers) and error.__cause__:
        error = error.__cause__
    return error


def _unknown(model: HubModel) -> str:
    may_be_private = (
        "the token of HF_TOKEN may not read it" if get_token() else "it is private (give HF_TOKEN)"
    )
    return (
        f"there is no such folder, and {constants.ENDPOINT} has no such model, or {may_be_private}"
        f"{_meant(_similar_models(model.repo))}"
    )


def _refusal(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    advice = {
        401: "the token is not valid (HF_TOKEN, or hf auth login)",
        403: "the token may not read it (HF_TOKEN, or hf auth login)",
        429: "too many requests; try again in some minutes, or give HF_TOKEN",
    }
    said = error.response.headers.get("X-Error-Message")
    refused = f"{constants.ENDPOINT} refuses with status {status}{f' ({said})' if said else ''}"
    return f"{refused}: {advice[status]}" if status in advice else refused


def _meant(names: list[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _similar_models(repo: str) -> list[str]:
    """Return names like this one, of its organization and anywhere else; none without an answer."""
    org, name = repo.split("/")
    api = HfApi()
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
