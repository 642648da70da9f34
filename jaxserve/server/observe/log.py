"""Logs: one line per event, as text or JSON, on standard error. Prompts and completions are never
in them.
"""

import json
import logging
import sys
import time
from typing import Literal

from jaxserve.errors import JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.engine_thread import StepReport
from jaxserve.server.core.incoming_request import IncomingRequest

Format = Literal["text", "json"]
log = logging.getLogger("jaxserve.requests")


class JsonFormatter(logging.Formatter):
    """One object per line; what a call gives as extra={"fields": ...} stands beside message and
    level.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """The same for people: fields as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        shown = (f"{key}={_one_line(value)}" for key, value in fields.items())
        return " ".join([super().formatMessage(record), *shown])


def _one_line(value: object) -> str:
    """Clients choose their ids: nothing of theirs may look like another line."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def configure(format: Format, level: str) -> None:
    """For the server's process: everything of jaxserve, and errors of uvicorn and OpenTelemetry, to
    standard error.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    for name in ("jaxserve", "uvicorn.error", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == "jaxserve" else logging.WARNING)


class RequestLog:
    """An observer of the service: a line for every request that ended, and for every one that was
    refused.
    """

    def refused(self, call: IncomingRequest, error: JaxserveError) -> None:
        log.info("refused", extra={"fields": {"reason": error.reason}})

    def stepped(self, news: StepReport) -> None:
        pass

    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None:
        pass

    def ended(self, answer: Answer, error: JaxserveError | None) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {
            "request_id": answer.id,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": sum(
                len(completion.token_ids) for completion in answer.completions
            ),
        }
        if answer.completions:
            times = answer.completions[0].timings
            fields |= {
                "cached_tokens": times.cached_tokens,
                "ttft": round(times.ttft, 4),
                "total": round(times.total, 4),
            }
        log.info(_outcome(answer, error), extra={"fields": fields})


def _outcome(answer: Answer, error: JaxserveError | None) -> str:
    if error:
        return f"failed: {error.reason}"
    if answer.prefilled:
        return "prefilled"
    if len(answer.completions) < answer.prepared.request.params.n:
        return "cancelled"
    return "finished: " + ",".join(completion.finish_reason for completion in answer.completions)
