"""Calls that are JSON objects as a whole, told while they are written."""

from collections.abc import Collection

from jaxserve.chat.answers.events import Parse
from jaxserve.chat.answers.incremental import NAME, SPACES, IncomingText


def tell_call(text: IncomingText, names: Collection[str], *keys: str) -> Parse[bool]:
    """Tell {"name": "add", key: {...}} as a call of one of the names, if that is certain.

    The result is false, and nothing is read, where calls may be malformed, and where the object
    does not begin with the name and then the arguments. Its other members are not looked at.

    Args:
        keys: Names that the member with the arguments may have.
    """
    if not text.certain:
        return False
    name = yield from text.attempt(_read_head(text, names, keys))
    if not name:
        return False
    yield from text.begin_call(name)
    yield from text.tell_object()
    yield from text.read_rest_of_object()
    return True


def _read_head(text: IncomingText, names: Collection[str], keys: Collection[str]) -> Parse[str]:
    """Read a call up to its arguments and return its name; empty where it begins otherwise."""
    for token in ("{", '"name"', ":", '"'):
        if not (yield from _read_token(text, token)):
            return ""
    name = yield from text.read_while(NAME)
    if name not in names or not (yield from text.read_literal('"')):
        return ""
    if not (yield from _read_token(text, ",")):
        return ""
    for key in keys:
        if (yield from _read_token(text, f'"{key}"')):
            break
    else:
        return ""
    if not (yield from _read_token(text, ":")):
        return ""
    yield from text.read_while(SPACES)
    return name if (yield from text.peek()) == "{" else ""


def _read_token(text: IncomingText, token: str) -> Parse[bool]:
    """Read a token behind any white space and return true if it comes next."""
    yield from text.read_while(SPACES)
    return (yield from text.read_literal(token))
