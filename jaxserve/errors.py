"""The errors of jaxserve, each with its gRPC code, HTTP status and reason.

JaxserveError
├── RequestError            INVALID_ARGUMENT     400  `field` of the request is wrong
│   ├── ContextLengthError                            prompt and max_tokens exceed the context
│   ├── CapacityError                                 can never fit the page pool
│   ├── ChatError                                     the chat template cannot render the messages
│   └── GrammarError                                  the grammar is wrong, or lets no token follow
├── RequestIdInUseError     ALREADY_EXISTS       409  a request with this id has not ended yet
├── ModelNotFoundError      NOT_FOUND            404  another model is served here
├── NotBuiltInError         UNIMPLEMENTED        501  the model or installation lacks this
│   └── PurposeError                             400  it embeds and generates no text, or vice versa
├── CredentialError         UNAUTHENTICATED      401  no token, or a wrong one
├── AdminOnlyError          PERMISSION_DENIED    403  a client's token where an admin's is needed
├── QueueFullError          RESOURCE_EXHAUSTED   429  too much waits before; `retry_after` says when
├── SlowConsumerError       RESOURCE_EXHAUSTED   429  the client reads too slowly
├── RoleError               FAILED_PRECONDITION  421  the server computes prompts for servers only
├── AbortedError            CANCELLED            499  Abort came before the answer began
├── DeadlineError           DEADLINE_EXCEEDED    504  the deadline passed, or cannot be met
├── UnavailableError        UNAVAILABLE          503  not ready; try again after `retry_after`
│   ├── LoadingError                                  the checkpoint is being loaded or compiled
│   ├── DrainingError                                 the server is shutting down
│   ├── RestartingError                               the device died or a step hangs
│   └── ExhaustedError                                the host lacks memory, files or processes
├── ConfigError             FAILED_PRECONDITION  400  a flag, a mesh or a size is wrong
│   ├── ModelError                                    the checkpoint is not understood
│   └── MemoryLimitError                              a device has too little memory
└── EngineError             INTERNAL             500
    └── NonFiniteLogitsError                          a row's logits are NaN or infinite
"""


class JaxserveError(Exception):
    """Base of all errors that jaxserve raises on purpose.

    The text is one line that names what was asked, the limit, and the flag or field to change.

    Attributes:
        code: Name of the gRPC status code.
        http_status: HTTP status code.
        reason: Stable upper-case identifier for programs, the `reason` of google.rpc.ErrorInfo.
        retry_after: Seconds after which a client may try again; None where a retry is pointless.
    """

    code = "INTERNAL"
    http_status = 500
    reason = "INTERNAL"
    retry_after: float | None = None


class RequestError(JaxserveError, ValueError):
    """A field of a request is missing, malformed or out of its bounds.

    The text is field and problem: `temperature is -1.0; it must be between 0.0 and 2.0`.

    Args:
        field: Path of the field in the request, such as `messages[2].role`.
        problem: Text that says what is wrong, with the field as its subject: it begins with a verb.
            Classes that say so take a clause, which stands behind field and colon.
    """

    code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_FIELD"
    _link = " "  # between field and problem

    def __init__(self, field: str, problem: str):
        self.field = field
        self.problem = problem
        super().__init__(f"{field}{self._link}{problem}")

    def under(self, path: str) -> "RequestError":
        """Put `path` before the field, which lies inside that message, and return the error."""
        return self.rename(f"{path}.{self.field}")

    def rename(self, field: str) -> "RequestError":
        """Give the field another path, by which the client knows it, and return the error."""
        self.field = field
        self.args = (f"{field}{self._link}{self.problem}",)
        return self


class ContextLengthError(RequestError):
    """The prompt, alone or with max_tokens, exceeds the context; the problem is a clause.

    Args:
        tokens: Number of tokens of the prompt.
        limit: Most tokens that it could have.
    """

    reason = "CONTEXT_LENGTH_EXCEEDED"
    _link = ": "

    def __init__(self, field: str, problem: str, tokens: int = 0, limit: int = 0):
        super().__init__(field, problem)
        self.tokens = tokens
        self.limit = limit


class CapacityError(RequestError):
    """The prompt and max_tokens can never fit the page pool, not even alone.

    The problem is a clause.
    """

    reason = "EXCEEDS_KV_CAPACITY"
    _link = ": "


class ChatError(RequestError):
    """The chat template is missing, or cannot render the messages.

    Args:
        problem: Clause that says what is wrong.
        field: Path of the field that the template cannot use.
    """

    reason = "CHAT_TEMPLATE"
    _link = ": "

    def __init__(self, problem: str, field: str = "messages"):
        super().__init__(field, problem)


class GrammarError(RequestError):
    """The grammar of a structured output does not compile, or lets no token follow."""

    reason = "GRAMMAR"


class RequestIdInUseError(JaxserveError):
    """A request with this id has not ended yet."""

    code = "ALREADY_EXISTS"
    http_status = 409
    reason = "REQUEST_ID_IN_USE"


class ModelNotFoundError(JaxserveError):
    """The server serves another model than the one asked for."""

    code = "NOT_FOUND"
    http_status = 404
    reason = "MODEL_NOT_FOUND"


class NotBuiltInError(JaxserveError):
    """The model or this installation lacks the feature that was asked for."""

    code = "UNIMPLEMENTED"
    http_status = 501
    reason = "NOT_IMPLEMENTED"


class PurposeError(NotBuiltInError):
    """The model makes embeddings and generates no text, or the other way around."""

    http_status = 400
    reason = "PURPOSE"


class CredentialError(JaxserveError):
    """The call has no token, or a wrong one."""

    code = "UNAUTHENTICATED"
    http_status = 401
    reason = "NO_VALID_TOKEN"


class AdminOnlyError(JaxserveError):
    """The call has a client's token where an admin's is needed."""

    code = "PERMISSION_DENIED"
    http_status = 403
    reason = "ADMIN_ONLY"


class QueueFullError(JaxserveError):
    """The queue of waiting requests is full, or too long for the request's deadline.

    Args:
        problem: Text that names the queue's limit, or the forecast.
        retry_after: Seconds after which a place in the queue is likely to be free.
    """

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "QUEUE_FULL"

    def __init__(self, problem: str, retry_after: float):
        super().__init__(problem)
        self.retry_after = retry_after


class SlowConsumerError(JaxserveError):
    """The client reads its answer more slowly than the server may buffer it."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "SLOW_CONSUMER"


class RoleError(JaxserveError):
    """The server computes prompts for other servers only, and answers no clients."""

    code = "FAILED_PRECONDITION"
    http_status = 421
    reason = "ROLE"


class AbortedError(JaxserveError):
    """An Abort call ended the request before its answer began."""

    code = "CANCELLED"
    http_status = 499
    reason = "ABORTED"


class DeadlineError(JaxserveError):
    """The request's deadline has passed, or cannot be met any more."""

    code = "DEADLINE_EXCEEDED"
    http_status = 504
    reason = "DEADLINE"


class UnavailableError(JaxserveError):
    """The server is not ready; the request may be sent again after `retry_after`."""

    code = "UNAVAILABLE"
    http_status = 503
    reason = "LOADING"
    retry_after = 5.0


class LoadingError(UnavailableError):
    """The server still loads the checkpoint or compiles."""

    reason = "LOADING"


class DrainingError(UnavailableError):
    """The server is shutting down and takes no new requests."""

    reason = "DRAINING"
    retry_after = 1.0  # behind a balancer another server answers


class RestartingError(UnavailableError):
    """The device failed or a step hangs, and the engine restarts."""

    reason = "ENGINE_RESTARTING"


class ExhaustedError(UnavailableError):
    """The machine, or a limit of the server's process, leaves no memory, files or processes."""

    reason = "HOST_EXHAUSTED"
    retry_after = 1.0


class ConfigError(JaxserveError, ValueError):
    """A flag, a mesh or a size of the deployment is wrong."""

    code = "FAILED_PRECONDITION"
    http_status = 400
    reason = "CONFIG"


class ModelError(ConfigError):
    """The checkpoint is damaged, or its model is not supported."""

    reason = "MODEL"


class MemoryLimitError(ConfigError):
    """A device has too little memory for the deployment.

    Args:
        problem: Text that names what is needed, and what the device has.
        missing: Bytes that each device lacks, at the least; 0 where the number is unknown.
    """

    reason = "MEMORY"

    def __init__(self, problem: str, missing: int = 0):
        super().__init__(problem)
        self.missing = missing


class EngineError(JaxserveError, RuntimeError):
    """The engine failed or is closed; the request itself is not at fault."""


class NonFiniteLogitsError(EngineError):
    """The logits of a row are NaN or infinite."""

    reason = "NON_FINITE_LOGITS"
