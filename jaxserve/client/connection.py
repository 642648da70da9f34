"""A connection to one server, and how calls are made over it."""

import math
from operator import attrgetter
from types import ModuleType
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxserve.client.channel import OPTIONS, TLS, metadata_of
from jaxserve.client.requests import RpcRequest
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
    """A channel to one server, with the stubs and the metadata of its calls.

    Args:
        library: Module grpc or grpc.aio; calls then return answers, or awaitables of them.
    """

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
        self._timeout = timeout
        self._retries = retries
        self.channel = (
            library.secure_channel(address, tls.credentials(), options=OPTIONS)
            if tls
            else library.insecure_channel(address, options=OPTIONS)
        )
        self.inference = InferenceServiceStub(self.channel)
        self.admin = AdminServiceStub(self.channel)
        self.health = HealthStub(self.channel)

    def attempts(self, request: RpcRequest[Any], timeout: float | None) -> Attempts:
        """Return the attempts that a request may have.

        Args:
            timeout: Seconds for all attempts; None is the client's timeout, infinity is none.

        Raises:
            RequestError: The timeout is not above 0.
        """
        seconds = self._timeout if timeout is None else timeout
        if seconds is not None and not seconds > 0:
            raise RequestError("timeout", f"is {seconds}; it must be more than 0 seconds")
        retries = self._retries if request.repeatable else 0
        return Attempts(retries, None if seconds == math.inf else seconds)

    def call(self, request: RpcRequest[Any], attempts: Attempts) -> Any:
        """Make a call and return what the library gives: an answer, an awaitable or a stream."""
        method = attrgetter(request.method)(self)
        return method(request.message, timeout=attempts.timeout, metadata=self._metadata)

    def wait(self, request: RpcRequest[Any], attempts: Attempts) -> tuple[Any, Any]:
        """Make a call with the module grpc, and return the answer and the call that has ended."""
        method = attrgetter(request.method)(self)
        return method.with_call(request.message, timeout=attempts.timeout, metadata=self._metadata)

    def check(self, timeout: float) -> Any:
        """Ask whether the server is ready, and return what the library gives."""
        return self.health.Check(READY, timeout=timeout)  # type: ignore[attr-defined]
