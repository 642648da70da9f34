"""The response object: what it says of its request, and its state."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import JaxserveError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.http.agents.responses.types import ResponsesBody
from jaxserve.server.http.agents.turns import Usage

Response = Mapping[str, Any]
COMPLETED = "completed"  # states of responses and items
INCOMPLETE = "incomplete"
CANCELLED = "cancelled"
# Codes of errors in responses, as OpenAI has them, by HTTP status; others are server_error.
CODES: Mapping[int, str] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def new_id(prefix: str) -> str:
    """Return an id of 128 random bits, as nobody can guess."""
    return f"{prefix}_{secrets.token_hex(16)}"


def new_response(body: ResponsesBody, params: SamplingParams, model: str) -> Response:
    """Return the response to a request before its answer begins."""
    reasoning = body.reasoning or {}
    text = body.text or {}
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),  # seconds since the epoch
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": body.store,
        "temperature": params.temperature,
        "text": {
            "format": text.get("format") or {"type": "text"},
            "verbosity": text.get("verbosity") or "medium",
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def finished(
    response: Response, output: Sequence[Mapping[str, Any]], status: str, usage: Usage
) -> Response:
    """Return the response with its output."""
    is_cut = status == INCOMPLETE
    return {
        **response,
        "status": status,
        "completed_at": int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(output),
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": usage.thought},
            "total_tokens": usage.prompt + usage.generated,
        },
    }


def failed(
    response: Response, output: Sequence[Mapping[str, Any]], error: JaxserveError
) -> Response:
    """Return the response with the error that ended it."""
    code = CODES.get(error.http_status, "server_error")
    return {
        **response,
        "status": "failed",
        "error": {"code": code, "message": str(error)},
        "output": list(output),
    }
