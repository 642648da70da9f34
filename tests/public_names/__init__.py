"""Everything that users call by name, asked of the code; `python -m tests.public_names` prints it.

A listing is surface -> name -> what it is, in plain strings. Names are those that users write, so
modules and private names can move without a change of it: where they are only this package knows.
"""

import json
from collections.abc import Callable, Mapping

from tests.public_names import requests, responses
from tests.public_names.environment import variables
from tests.public_names.errors import errors
from tests.public_names.exports import exports
from tests.public_names.files import keys
from tests.public_names.metrics import metrics
from tests.public_names.programs import exit_codes, flag_values, flags

Listing = Mapping[str, Mapping[str, str]]

SURFACES: Mapping[str, Callable[[], dict[str, str]]] = {
    "environment variables": variables,
    "errors": errors,
    "exit codes": exit_codes,
    "files": keys,
    "flag values": flag_values,
    "flags": flags,
    "http headers": requests.headers,
    "http request fields": requests.fields,
    "http response fields": responses.fields,
    "http routes": requests.routes,
    "metrics": metrics,
    "python": exports,
}


def public_names() -> Listing:
    return {surface: found() for surface, found in SURFACES.items()}


def written(listing: Listing) -> str:
    """The text of the committed file: a name a line, sorted."""
    return json.dumps(listing, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def differences(listed: Listing, found: Listing) -> str:
    """Names that vanished, that changed and that are new; nothing where there are none."""
    old, new = _flat(listed), _flat(found)
    changed = sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
    told = {
        "vanished": [f"{key} ({old[key]})" for key in sorted(old.keys() - new.keys())],
        "changed": [f"{key}: was ({old[key]}), is ({new[key]})" for key in changed],
        "are new": [f"{key} ({new[key]})" for key in sorted(new.keys() - old.keys())],
    }
    parts = ((f"names that {what}:", *lines) for what, lines in told.items() if lines)
    return "\n".join("\n  ".join(part) for part in parts)


def _flat(listing: Listing) -> dict[str, str]:
    return {f"{at}: {name}": what for at, names in listing.items() for name, what in names.items()}
