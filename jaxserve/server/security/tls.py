"""TLS of gRPC and HTTP."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError
from jaxserve.server.security.files import read_certificates
from jaxserve.tls_files import check_key

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True)
class Tls:
    """PEM files of the server's certificate chain and key."""

    cert: Path
    key: Path
    # Certificate authority that must have signed the certificates of clients; None: clients need
    # no certificate.
    client_ca: Path | None = None

    @staticmethod
    def of(cert: Path | None, key: Path | None, client_ca: Path | None) -> "Tls | None":
        """Return the TLS of these files, None without any of them.

        Raises ConfigError when a file is missing or cannot be used with the others.
        """
        check_tls_flags(cert, key, client_ca)
        if not (cert and key):
            return None
        read_certificates(cert, "--tls-cert")
        check_key("--tls-key", key, cert)
        read_certificates(client_ca, "--tls-client-ca")
        return Tls(cert, key, client_ca)

    def context(self) -> ssl.SSLContext:
        """Return the context for HTTP."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        if self.client_ca:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def credentials(self) -> "grpc.ServerCredentials":
        """Return the credentials for gRPC."""
        import grpc  # late: the program imports this module before it calls silence_grpc

        authority = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.cert.read_bytes())], authority, authority is not None
        )


def check_tls_flags(cert: Path | None, key: Path | None, client_ca: Path | None) -> None:
    """Raise ConfigError where one of these flags is given without another that it needs."""
    if (cert or key or client_ca) and not (cert and key):
        raise ConfigError(
            "--tls-cert and --tls-key go together (and --tls-client-ca only with them)"
        )
