"""What both clients hold."""

import math
from operator import attrgetter
from types import ModuleType
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxserve.client.channel import OPTIONS, TLS, metadata_of
from jaxserve.client.requests import Ask
from jaxserve.client.retrying import Attempts
from jaxserve.errors import ConfigError, RequestError
from jaxserve.v1 import inference_pb2
from jaxserve.v1.admin_pb2_grpc import AdminServiceStub
from jaxserve.v1.inference_pb2_grpc import InferenceServiceStub

ADDRESS = "127.0.0.1:50051"
RETRIES = 4
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
READY = health_pb2.HealthCheckRequest(service=SERVICE)


class Connection:
    """A channel of `library` (grpc or grpc.aio), and how calls are made over it."""

    def __init__(
        self,
        library: ModuleType,
        address: str,
        token: str | None,
        tls: TLS | None,
        timeout: float | None,
        retries: int,
    ):
        if retries < 0:
            raise ConfigError(f"retries is {retries}; it must be 0 (none) or more")
        self.address = address
        self._metadata = metadata_of(token)
        self._timeout, self._retries = timeout, retries
        self.channel = (
            library.secure_channel(address, tls.credentials(), options=OPTIONS)
            if tls
            else library.insecure_channel(address, options=OPTIONS)
        )
        self.inference = InferenceServiceStub(self.channel)
        self.admin = AdminServiceStub(self.channel)
        self.health = HealthStub(self.channel)

    def attempts(self, ask: Ask[Any], timeout: float | None) -> Attempts:
        """timeout: of the call, in seconds; None is the client's, infinity none. RequestError for
        one without time.
        """
        seconds = self._timeout if timeout is None else timeout
        if seconds is not None and not seconds > 0:
            raise RequestError("timeout", f"is {seconds}; it must be more than 0 seconds")
        return Attempts(
            self._retries if ask.repeatable else 0, None if seconds == math.inf else seconds
        )

    def call(self, ask: Ask[Any], attempts: Attempts) -> Any:
        """What the library gives: an answer, something to await, or a stream."""
        method = attrgetter(ask.method)(self)
        return method(ask.message, timeout=attempts.timeout, metadata=self._metadata)

    def check(self, timeout: float) -> Any:
        """The same of the question whether the server is ready."""
        return self.health.Check(READY, timeout=timeout)  # type: ignore[attr-defined]
