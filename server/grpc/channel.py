"""Opens the connection to an engine's process; knows no call."""

from pathlib import Path

import grpc

from jaxserve.errors import ConfigError
from server.config import SecuritySection

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # An engine that comes back is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def open_channel(address: str, authority: str | None, security: SecuritySection) -> grpc.aio.Channel:
    """Args: authority: PEM file of who signed the engine's certificate; None speaks without TLS.

    With TLS this side shows `security.tls_certificate`, where it has one, for engines that ask their clients for it.
    """
    if authority is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    has_own = security.tls_certificate is not None and security.tls_key is not None
    credentials = grpc.ssl_channel_credentials(
        root_certificates=read_pem(authority),
        private_key=read_pem(str(security.tls_key)) if has_own else None,
        certificate_chain=read_pem(str(security.tls_certificate)) if has_own else None,
    )
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


def read_pem(path: str) -> bytes:
    """Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror} (a TLS file)") from None
