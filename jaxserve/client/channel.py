"""Options, certificates and the token of a connection."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error
from jaxserve.tls_files import check_certificates, check_key

MEBI = 2**20
# gRPC ignores misspelt options in silence: tests look at what each of them does.
OPTIONS = (
    ("grpc.max_receive_message_length", 64 * MEBI),  # an answer with many log-probabilities
    ("grpc.max_send_message_length", -1),  # the server has a limit, and says so
    # While a long prompt is computed nothing is sent: pings keep the way through routers open,
    # however long it takes, and notice when it is closed. By default gRPC stops after two pings
    # without data, and holds them back for up to a minute behind one that measures the bandwidth.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    # A server that restarts is found again within seconds, however long it was away.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_retries", 0),  # jaxserve.client.retrying does it
)


@dataclass(frozen=True, kw_only=True)
class TLS:
    """Certificates of a connection: PEM files.

    Attributes:
        ca: Authorities that vouch for the server; None is those that gRPC knows.
        certificate: Certificate of the client, where the server asks for one.
        key: Key of that certificate.
    """

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel.

        Raises:
            ConfigError: A file cannot be read or used, or one of certificate and key is missing.
        """
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                "a TLS certificate goes with its key, and a key with its certificate (give both)"
            )
        ca = _certificates("TLS ca", self.ca)
        certificate = _certificates("TLS certificate", self.certificate)
        return grpc.ssl_channel_credentials(ca, self._key_of_certificate(), certificate)

    def _key_of_certificate(self) -> bytes | None:
        if self.certificate is None or self.key is None:
            return None
        key = Path(self.key)
        certificate = Path(self.certificate)
        pem = _read("TLS key", key)
        if key.is_file() and certificate.is_file():  # a pipe can be read only once
            check_key("TLS key", key, certificate)
        return pem


def _certificates(name: str, file: str | Path | None) -> bytes | None:
    if file is None:
        return None
    path = Path(file)
    pem = _read(name, path)
    check_certificates(name, path, pem)
    return pem


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise flag_error(name, path, f"it cannot be read: {error.strerror}") from None


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that every call carries; ConfigError for a token that cannot be sent."""
    if token is None:
        return ()
    if not (token.isascii() and token.isprintable() and token.strip()):
        raise ConfigError("the token is empty, or has characters that no header can carry")
    return (("authorization", f"Bearer {token}"),)
