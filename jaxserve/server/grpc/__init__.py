"""gRPC of the server: jaxserve.v1, and the services that routers speak."""
