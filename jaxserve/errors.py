"""The errors of jaxserve, each with its gRPC code, HTTP status and reason.

JaxserveError
├── RequestError            INVALID_ARGUMENT     400  `field` is its path in the request
│   ├── ContextLengthError                            prompt and max_tokens exceed the context
│   ├── CapacityError                                 can never fit the page pool
│   ├── ChatError                                     the chat template cannot render the messages
│   └── GrammarError                                  cannot be used, or lets no token follow
├── RequestIdInUseError     ALREADY_EXISTS       409  a request with this id has not ended yet
├── ModelNotFoundError      NOT_FOUND            404  another model is served here
├── NotBuiltInError         UNIMPLEMENTED        501  the model cannot do this at all
├── CredentialError         UNAUTHENTICATED      401  no token, or a wrong one
├── AdminOnlyError          PERMISSION_DENIED    403  a client's token where an admin's is needed
├── QueueFullError          RESOURCE_EXHAUSTED   429  the queue is full; `retry_after` says when
├── SlowConsumerError       RESOURCE_EXHAUSTED   429  the client does not read what was made for it
├── RoleError               FAILED_PRECONDITION  421  the server computes prompts for servers only
├── AbortedError            CANCELLED            499  ended by Abort before its answer began
├── DeadlineError           DEADLINE_EXCEEDED    504  passed, or sure to pass
├── UnavailableError        UNAVAILABLE          503  not ready; try again after `retry_after`
│   ├── LoadingError                                  loading or compiling
│   ├── DrainingError                                 about to end
│   └── RestartingError                               the device died or a step hangs
├── ConfigError             FAILED_PRECONDITION  400  a flag, a mesh or a size is wrong
│   ├── ModelError                                    the checkpoint is not understood
│   └── MemoryLimitError                              a device has too little memory
└── EngineError             INTERNAL             500
    └── NonFiniteLogitsError                          a row's logits are NaN or infinite
"""


class JaxserveError(Exception):
    """Base of all. The text is one line with what was asked, the limit, and the knob."""

    code = "INTERNAL"
    http_status = 500
    reason = "INTERNAL"
    retry_after: float | None = (
        None  # seconds after which a client may try again; None: it need not
    )


class RequestError(JaxserveError, ValueError):
    code, http_status, reason = "INVALID_ARGUMENT", 400, "INVALID_FIELD"

    def __init__(self, field: str, problem: str):
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem

    def under(self, path: str) -> "RequestError":
        """The error itself, whose `field` turns out to lie inside the message at `path`."""
        self.field = f"{path}.{self.field}"
        self.args = (f"{self.field}: {self.problem}",)
        return self


class ContextLengthError(RequestError):
    reason = "CONTEXT_LENGTH_EXCEEDED"


class CapacityError(RequestError):
    reason = "EXCEEDS_KV_CAPACITY"


class ChatError(RequestError):
    reason = "CHAT_TEMPLATE"

    def __init__(self, problem: str, field: str = "messages"):
        super().__init__(field, problem)


class GrammarError(RequestError):
    reason = "GRAMMAR"


class RequestIdInUseError(JaxserveError):
    code, http_status, reason = "ALREADY_EXISTS", 409, "REQUEST_ID_IN_USE"


class ModelNotFoundError(JaxserveError):
    code, http_status, reason = "NOT_FOUND", 404, "MODEL_NOT_FOUND"


class NotBuiltInError(JaxserveError):
    code, http_status, reason = "UNIMPLEMENTED", 501, "NOT_IMPLEMENTED"


class CredentialError(JaxserveError):
    code, http_status, reason = "UNAUTHENTICATED", 401, "NO_VALID_TOKEN"


class AdminOnlyError(JaxserveError):
    code, http_status, reason = "PERMISSION_DENIED", 403, "ADMIN_ONLY"


class QueueFullError(JaxserveError):
    code, http_status, reason = "RESOURCE_EXHAUSTED", 429, "QUEUE_FULL"

    def __init__(self, problem: str, retry_after: float):
        super().__init__(problem)
        self.retry_after = retry_after


class SlowConsumerError(JaxserveError):
    code, http_status, reason = "RESOURCE_EXHAUSTED", 429, "SLOW_CONSUMER"


class RoleError(JaxserveError):
    code, http_status, reason = "FAILED_PRECONDITION", 421, "ROLE"


class AbortedError(JaxserveError):
    code, http_status, reason = "CANCELLED", 499, "ABORTED"


class DeadlineError(JaxserveError):
    code, http_status, reason = "DEADLINE_EXCEEDED", 504, "DEADLINE"


class UnavailableError(JaxserveError):
    code, http_status, reason = "UNAVAILABLE", 503, "LOADING"
    retry_after = 5.0


class LoadingError(UnavailableError):
    reason = "LOADING"


class DrainingError(UnavailableError):
    reason = "DRAINING"


class RestartingError(UnavailableError):
    reason = "ENGINE_RESTARTING"


class ConfigError(JaxserveError, ValueError):
    code, http_status, reason = "FAILED_PRECONDITION", 400, "CONFIG"


class ModelError(ConfigError):
    reason = "MODEL"


class MemoryLimitError(ConfigError):
    """missing: how many bytes more one device would need, at the least; 0 where nobody says."""

    reason = "MEMORY"

    def __init__(self, problem: str, missing: int = 0):
        super().__init__(problem)
        self.missing = missing


class EngineError(JaxserveError, RuntimeError):
    pass


class NonFiniteLogitsError(EngineError):
    reason = "NON_FINITE_LOGITS"
