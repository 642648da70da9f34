"""Limits that decide whether a request can ever run, and how many tokens it may generate."""

from jaxserve.config import EngineConfig
from jaxserve.errors import CapacityError, ContextLengthError, RequestError
from jaxserve.request import Request


def max_new_tokens(config: EngineConfig, request: Request, field: str = "prompt") -> int:
    """Return how many tokens each choice of the request may generate.

    That is `max_tokens` of the request, or all that context and page pool leave if it is not set;
    0 for a model that embeds. Raises RequestError naming `field` if the prompt is empty,
    ContextLengthError if prompt and output exceed the context, and CapacityError if they exceed the
    page pool.
    """
    prompt = len(request.prompt)
    asked = request.params.max_tokens
    # A prompt that generates needs room for one token at least.
    output = 0 if config.embeds else asked or 1
    if prompt == 0:
        raise RequestError(field, "has no tokens")
    # max_tokens is named only where a smaller one would fit.
    if output and asked and prompt < min(config.max_context, config.capacity):
        what = f"{prompt} tokens and max_tokens {output}"
        remedy = "shorten the prompt, lower max_tokens"
    else:
        what = f"{prompt} tokens" + (" and one of the answer" if output else "")
        remedy = "shorten the prompt"
    if prompt + output > config.max_context:
        raise ContextLengthError(
            field,
            f"{what} exceed the context of {config.max_context} "
            f"({remedy}, or raise --max-context as far as the model allows)",
        )
    if prompt + output > config.capacity:
        raise CapacityError(
            field,
            f"{what} can never fit the page pool of {config.capacity} tokens "
            f"({remedy}, or raise --cache-tokens)",
        )
    if config.embeds:
        return 0
    return asked or min(config.max_context, config.capacity) - prompt
