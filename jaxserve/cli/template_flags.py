"""Options of a conversation's answers, of the flags that generate and the client have in common."""

from collections.abc import Mapping
from typing import Any, cast

from jaxserve.chat import TemplateFields, TemplateOptions
from jaxserve.config.option import flag_of
from jaxserve.errors import RequestError


def template_fields(given: Mapping[str, Any], is_chat: bool) -> TemplateFields:
    """Return the fields of TemplateOptions whose flags are given.

    RequestError for wrong values, and for flags where there is no conversation.

    Args:
        given: Values of the flags that were given, by field (see `given_options`).
    """
    if given and not is_chat:
        raise RequestError(flag_of(next(iter(given))), "is for a conversation (add --chat)")
    try:
        TemplateOptions(**given)
    except RequestError as error:
        name, dot, variable = error.field.partition(".")
        raise RequestError(f"{flag_of(name)}{dot}{variable}", error.problem) from None
    return cast(TemplateFields, given)
