"""Certificates for both servers."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class Tls:
    """PEM files. client_ca: clients have to show a certificate that it signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @staticmethod
    def of(cert: Path | None, key: Path | None, client_ca: Path | None) -> "Tls | None":
        """None without any of them; ConfigError when they do not fit together or cannot be used."""
        if not (cert or key or client_ca):
            return None
        if not (cert and key):
            raise ConfigError(
                "--tls-cert and --tls-key go together (and --tls-client-ca only with them)"
            )
        tls = Tls(cert, key, client_ca)
        try:
            tls.context()
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(path) for path in (cert, key, client_ca) if path)
            raise ConfigError(f"TLS files {files}: {error.strerror or error}") from None
        return tls

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        if self.client_ca:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def credentials(self) -> grpc.ServerCredentials:
        authority = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.cert.read_bytes())], authority, authority is not None
        )
