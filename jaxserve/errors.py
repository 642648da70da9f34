"""The errors of jaxserve, each with its gRPC code, HTTP status and reason.

JaxserveError
├── RequestError            INVALID_ARGUMENT     400  the client can mend it; `field` is the path in the request
│   ├── ContextLengthError                            prompt and max_tokens exceed the context
│   ├── CapacityError                                 can never fit the page pool
│   └── ChatError                                     the chat template refuses the messages, or cannot render them
├── RequestIdInUseError     ALREADY_EXISTS       409
├── ConfigError             FAILED_PRECONDITION  400  the operator can mend it: a flag, a mesh, a size
│   └── ModelError                                    the checkpoint is not one this runtime understands
└── EngineError             INTERNAL             500
    └── NonFiniteLogitsError                          one row's logits are NaN or Inf; only that request ends
"""


class JaxserveError(Exception):
    """Base of all. The text is one line with what was asked, the limit, and the knob."""

    code = "INTERNAL"
    http_status = 500
    reason = "INTERNAL"


class RequestError(JaxserveError, ValueError):
    code, http_status, reason = "INVALID_ARGUMENT", 400, "INVALID_FIELD"

    def __init__(self, field: str, problem: str):
        super().__init__(f"{field}: {problem}")
        self.field = field


class ContextLengthError(RequestError):
    reason = "CONTEXT_LENGTH_EXCEEDED"


class CapacityError(RequestError):
    reason = "EXCEEDS_KV_CAPACITY"


class ChatError(RequestError):
    reason = "CHAT_TEMPLATE"

    def __init__(self, problem: str, field: str = "messages"):
        super().__init__(field, problem)


class RequestIdInUseError(JaxserveError):
    code, http_status, reason = "ALREADY_EXISTS", 409, "REQUEST_ID_IN_USE"


class ConfigError(JaxserveError, ValueError):
    code, http_status, reason = "FAILED_PRECONDITION", 400, "CONFIG"


class ModelError(ConfigError):
    reason = "MODEL"


class EngineError(JaxserveError, RuntimeError):
    pass


class NonFiniteLogitsError(EngineError):
    reason = "NON_FINITE_LOGITS"
