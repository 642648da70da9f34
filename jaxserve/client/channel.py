"""The connection: its options, its certificates, and the token that goes with every call."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from jaxserve.errors import ConfigError

MEBI = 2**20
# Misspelt options are ignored in silence: tests look at what each of them does.
OPTIONS = (
    ("grpc.max_receive_message_length", 64 * MEBI),  # of an answer with many log-probabilities
    ("grpc.max_send_message_length", -1),  # the server has a limit, and says so
    # While a long prompt is computed nothing is sent: pings keep the way through routers open,
    # however long it takes, and notice when it is closed. gRPC would stop after two of them, and
    # would wait a minute for one that it sent to measure the bandwidth, and keep the others back so
    # long.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    # A server that restarts is found again within seconds, however long it was away.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_retries", 0),  # by jaxserve.client.retrying instead
)


@dataclass(frozen=True, kw_only=True)
class TLS:
    """Files in PEM. ca: who vouches for the server (None: the authorities that gRPC knows).

    certificate and key: of the client, where the server asks for one.
    """

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """ConfigError for a file that cannot be read, and for a certificate without its key."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                "a TLS certificate goes with its key, and a key with its certificate (give both)"
            )
        return grpc.ssl_channel_credentials(
            _read(self.ca), _read(self.key), _read(self.certificate)
        )


def _read(path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS: {path}: {error.strerror}") from None


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries."""
    if token is None:
        return ()
    if not (token.isascii() and token.isprintable() and token.strip()):
        raise ConfigError("the token is empty, or has characters that no header can carry")
    return (("authorization", f"Bearer {token}"),)
