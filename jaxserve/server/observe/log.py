"""Logs on standard error, one line per event, as text or JSON.

They never contain prompts or completions.
"""

import io
import json
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Literal, TextIO

from jaxserve.engine.engine_thread import StepReport
from jaxserve.errors import JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.ignored_names import listed, nameable
from jaxserve.server.core.incoming_request import IncomingRequest

Format = Literal["text", "json"]
log = logging.getLogger("jaxserve.requests")


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on a line.

    Values that the logging call gives as extra={"fields": ...} become members of the object.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        line = json.dumps(entry, ensure_ascii=False)
        # Clients name some of the values; a terminal obeys some of the characters.
        return line if line.isprintable() else "".join(map(_printable, line))


def _printable(character: str) -> str:
    """Return the character, or its escape of JSON if a terminal might not show it."""
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex(" ", 2).split()
    return "".join(f"\\u{unit}" for unit in units)


class _QuietHandler(logging.StreamHandler[TextIO]):
    """Handler that drops records where standard error cannot be written any more.

    logging would report that on standard error, which leads here again.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class JsonLines(io.TextIOBase):
    """Standard error whose lines become objects, of a handler that formats records as JSON.

    For what libraries and this program print beside the logs: lines of the start, warnings, the
    error that ends the program. What C++ code prints does not pass through here.
    """

    def __init__(self, handler: "logging.StreamHandler[TextIO]"):
        self._handler = handler
        self._begun = threading.local()  # each thread's line that has no end yet

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._handler.stream.encoding

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Return the descriptor of the real standard error, for what dumps stacks there."""
        return self._handler.stream.fileno()

    def flush(self) -> None:
        """Show what was written without the end of its line."""
        if rest := getattr(self._begun, "line", ""):
            self._begun.line = ""
            self._show(rest.rstrip())

    def write(self, text: str) -> int:
        *lines, rest = (getattr(self._begun, "line", "") + text).split("\n")
        self._begun.line = rest
        for line in lines:
            self._show(line.rstrip())
        return len(text)

    def _show(self, line: str) -> None:
        """Write a record of a line, unless it is empty; the level of the logs does not hide it."""
        if not line:
            return
        problem = line.removeprefix("error: ")
        level = logging.INFO if problem == line else logging.ERROR
        record = {"name": "jaxserve.stderr", "levelno": level, "msg": problem}
        record["levelname"] = logging.getLevelName(level)
        self._handler.handle(logging.makeLogRecord(record))


class TextFormatter(logging.Formatter):
    """Formats a record as text, followed by its fields as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        shown = (f"{key}={_one_line(value)}" for key, value in fields.items())
        return " ".join([super().formatMessage(record), *shown])


def _one_line(value: object) -> str:
    """Quote a value with spaces or control characters.

    Clients choose their request ids: none may look like another field or line of the log.
    """
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def configure(format: Format, level: str) -> None:
    """Send logs of jaxserve, and warnings of libraries, to standard error.

    As JSON, so does everything else that Python code writes there.
    """
    handler: logging.StreamHandler[TextIO] = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter())
    if format == "json":
        handler = _log_as_json(sys.stderr)
    for name in ("jaxserve", "uvicorn.error", "opentelemetry", "huggingface_hub"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "jaxserve" else logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of every retry


def silence_grpc() -> None:
    """Keep gRPC's core from writing lines, unless GRPC_VERBOSITY says otherwise.

    It would write one for every malformed call and every failed handshake, as many as clients
    like, and not in the format of the logs. To be called before grpc is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _log_as_json(stderr: TextIO | None) -> "logging.StreamHandler[TextIO]":
    """Replace standard error by JsonLines, unless it was closed; return the handler of the logs."""
    if isinstance(stderr, io.TextIOWrapper):
        stderr.reconfigure(encoding="utf-8", errors="replace")  # as JSON has to be
    handler = _QuietHandler(stderr or io.StringIO())
    handler.setFormatter(JsonFormatter())
    if stderr:
        sys.stderr = JsonLines(handler)
        sys.excepthook = _log_failure
    return handler


def _log_failure(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """Log the exception that ends the program in one record."""
    logging.getLogger("jaxserve").critical("the program ends", exc_info=error)


class RequestLog:
    """Writes a line for every request that ended or was refused; a RequestObserver.

    Args:
        level: Level of these lines, as a number of logging.
    """

    def __init__(self, level: int):
        self._level = level

    def refused(self, incoming: IncomingRequest, error: JaxserveError) -> None:
        log.log(self._level, "refused", extra={"fields": {"reason": error.reason}})

    def stepped(self, report: StepReport) -> None:
        pass

    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None:
        pass

    def ended(self, answer: Answer, error: JaxserveError | None) -> None:
        if not log.isEnabledFor(self._level):
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
        if answer.ignored:
            fields["ignored"] = listed(nameable([field.name for field in answer.ignored]))
        log.log(self._level, _outcome(answer, error), extra={"fields": fields})


def _outcome(answer: Answer, error: JaxserveError | None) -> str:
    if error:
        return f"failed: {error.reason}"
    if answer.prefilled:
        return "prefilled"
    if len(answer.completions) < answer.prepared.request.params.n:
        return "cancelled"
    return "finished: " + ",".join(completion.finish_reason for completion in answer.completions)
