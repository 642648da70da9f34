"""Checks of PEM files: gRPC takes any bytes for a certificate, and then no connection is made."""

import ssl
from pathlib import Path

from jaxserve.flag_errors import flag_error


def check_certificates(flag: str, path: Path, pem: bytes) -> None:
    """Raise ConfigError unless `pem`, read from the file of a flag, holds certificates in PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # Bundles have comments in other letters, which Python would refuse.
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except ssl.SSLError:
        problem = "it holds no certificate in PEM, or a damaged one"
        raise flag_error(flag, path, problem) from None


def check_key(flag: str, path: Path, certificate: Path) -> None:
    """Raise ConfigError unless the file of a flag holds the private key of a certificate, in PEM.

    A key under a password is refused: nobody is asked for it when a server starts.

    Args:
        certificate: File that holds certificates in PEM.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(certificate, path, password=_no_password)
    except _Encrypted:
        problem = "the key is encrypted (openssl pkey writes it without a password)"
    except (OSError, ssl.SSLError) as error:
        problem = _unread(error) or _misfit(error, certificate)
    else:
        return
    raise flag_error(flag, path, problem)


def _misfit(error: OSError, certificate: Path) -> str:
    """Return what is wrong with a key, by OpenSSL's name of the reason where it has one."""
    reason = getattr(error, "reason", None) or str(error)
    if reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
        return f"it is not the key of the certificate in {certificate}"
    if "PEM lib" in reason:
        return "it holds no private key in PEM"
    return f"OpenSSL cannot use it with the certificate in {certificate}: {reason}"


class _Encrypted(Exception):
    """A password was asked for."""


def _no_password() -> str:
    raise _Encrypted


def _unread(error: OSError) -> str | None:
    """Return why a file could not be read; None for an error of its contents (also an OSError)."""
    return None if isinstance(error, ssl.SSLError) else f"it cannot be read: {error.strerror}"
