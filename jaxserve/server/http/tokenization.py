"""Serve the tokenizer, as vLLM does: /tokenize, /detokenize and /tokenizer_info."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.chat import Rendered, TemplateOptions
from jaxserve.errors import ChatError, RequestError
from jaxserve.prompts import Prompts
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import Service
from jaxserve.server.http.body import read
from jaxserve.server.http.calls import check_model
from jaxserve.server.http.chat_fields import conversation, offered
from jaxserve.server.http.errors import errors_to_responses
from jaxserve.server.http.ignored import note_also
from jaxserve.server.http.json import MEDIA_TYPE, dumps
from jaxserve.server.http.thinking_fields import template_options, unread_names
from jaxserve.server.http.types import DetokenizeBody, TokenizeBody
from jaxserve.server.readiness import Readiness
from jaxserve.tokenizer import Tokenizer

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenization:
    """Endpoints of the tokenizer."""

    def __init__(self, readiness: Readiness, limits: Limits):
        self._readiness = readiness
        self._limits = limits
        self._info: dict[str, Any] | None = None  # made once, as it may read files

    @errors_to_responses
    async def tokenize(self, request: Request) -> Response:
        served = self._readiness.require_loaded()
        body = await read(request, TokenizeBody, self._limits)
        check_model(body.model, served)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", "is missing; give either prompt or messages")
        if body.messages is None:
            rendered = await _of_prompt(served.service, body)
        else:
            rendered = await _of_messages(served.service, body, body.messages, self._limits)
        note_also(request, unread_names(body, rendered.unread))
        tokenizer = served.service.prompts.tokenizer if body.return_token_strs else None
        render = partial(_tokens, rendered.token_ids, served.model.max_context, tokenizer)
        # There may be millions of tokens, and other requests wait for the event loop.
        content = await served.service.run_in_background(render)
        return Response(content, media_type=MEDIA_TYPE)

    @errors_to_responses
    async def detokenize(self, request: Request) -> Response:
        served = self._readiness.require_loaded()
        body = await read(request, DetokenizeBody, self._limits)
        check_model(body.model, served)
        return _json({"prompt": await served.service.detokenize(body.tokens, "tokens")})

    @errors_to_responses
    async def info(self, request: Request) -> Response:
        """Return what clients need who render conversations themselves, such as lm-eval."""
        served = self._readiness.require_loaded()
        if self._info is None:
            prompts = served.service.prompts
            size = {
                "vocab_size": prompts.vocab_size,
                "model_max_length": served.model.max_context,
            }
            self._info = {**_names(prompts), **_added(prompts.tokenizer), **size}
        return _json(self._info)


async def _of_prompt(service: Service, body: TokenizeBody) -> Rendered:
    if body.tools is not None:
        raise RequestError("tools", "are for messages; leave them out beside a prompt")
    if template_options(body) != TemplateOptions():
        raise RequestError("prompt", "is given with options of a chat template (give messages)")
    special = body.add_special_tokens is not False
    return await service.tokenize(body.prompt or "", "prompt", add_special_tokens=special)


async def _of_messages(
    service: Service, body: TokenizeBody, messages: list[dict[str, Any]], limits: Limits
) -> Rendered:
    if body.add_special_tokens:
        problem = "is true; the chat template writes BOS and EOS where the model has them"
        raise RequestError("add_special_tokens", problem)
    return await service.tokenize(
        conversation(messages),
        "messages",
        tools=offered(body.tools or (), limits),
        options=replace(template_options(body), thinking_budget=None),  # it is of the answer
        add_generation_prompt=body.add_generation_prompt,
    )


def _tokens(ids: Sequence[int], max_context: int, tokenizer: Tokenizer | None) -> bytes:
    """Render the reply of /tokenize, with the text of each token if a tokenizer is given."""
    reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": max_context}
    if tokenizer:
        texts = {id: tokenizer.token_text(id) for id in set(ids)}
        reply["token_strs"] = [texts[id] for id in ids]
    return dumps(reply)


def _added(tokenizer: Tokenizer) -> dict[str, bool]:
    """Return which tokens are put around every text."""
    added = tokenizer.encode("")
    begins = tokenizer.bos_id in added[:1]
    rest = added[1:] if begins else added
    ends = any(id in tokenizer.eos_ids for id in rest)
    return {"add_bos_token": begins, "add_eos_token": ends}


def _names(prompts: Prompts) -> dict[str, str | list[str] | None]:
    """Return the chat template, and the names of the tokens that templates know."""
    tokenizer = prompts.tokenizer
    names = dict[int | None, str]((id, name) for name, id in tokenizer.special_tokens.items())
    eos_id = next(iter(tokenizer.eos_ids), None)
    found: dict[str, str | list[str] | None] = dict.fromkeys(TOKEN_NAMES)
    found |= {"bos_token": names.get(tokenizer.bos_id), "eos_token": names.get(eos_id)}
    try:
        template = prompts.chat.template
    except ChatError:
        return found | {"chat_template": None}
    given = {name: template.tokens[name] for name in TOKEN_NAMES if name in template.tokens}
    return found | given | {"chat_template": template.source}


def _json(value: dict[str, Any]) -> Response:
    return Response(dumps(value), media_type=MEDIA_TYPE)
