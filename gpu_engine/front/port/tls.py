"""TLS for the public port: the server's certificate, and the authorities whose clients are admitted.

Invariant: a server that is configured for TLS speaks nothing else, and never starts with a certificate and a key that
do not belong together. Renewed files are used from the next handshake on; open connections keep their certificate.

Not responsible for: tokens (see auth.py).
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from gpu_engine.api.config import ServerConfig
from service_runtime.from_files import FromFiles, read_bytes


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """Return credentials that follow the files of `tls_cert`, `tls_key` and `tls_client_ca`.

    With `tls_client_ca` every client needs a certificate that one of its authorities signed. Raises ValueError with the
    setting whose file is missing or wrong.
    """
    files = FromFiles(
        [Path(path) for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path],
        lambda: _read(config),
    )
    in_use = files.get()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # Called on a thread of gRPC, before each handshake; None keeps the configuration in use.
        nonlocal in_use
        latest = files.get()
        if latest is in_use:
            return None
        in_use = latest
        return latest

    return grpc.dynamic_ssl_server_credentials(
        in_use,
        changed,  # type: ignore[arg-type]  # the stub lacks None
        require_client_authentication=bool(config.tls_client_ca),
    )


def _read(config: ServerConfig) -> grpc.ServerCertificateConfiguration:
    cert, key = Path(config.tls_cert), Path(config.tls_key)
    cert_pem, key_pem = read_bytes("tls_cert", cert), read_bytes("tls_key", key)
    ca_pem = read_bytes("tls_client_ca", Path(config.tls_client_ca)) if config.tls_client_ca else None
    # gRPC accepts any bytes and fails at every handshake, so OpenSSL checks them first.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"tls_key: {key} is not the key of {cert} (tls_cert)") from error
        raise ValueError(
            f"tls_cert, tls_key: {cert} and {key} must be a certificate chain and its unencrypted key in PEM "
            f"({error.reason or error})"
        ) from error
    except OSError as error:  # removed since it was read
        raise ValueError(f"tls_cert, tls_key: cannot read {cert} and {key}: {error.strerror}") from error
    if ca_pem is not None:
        try:
            context.load_verify_locations(cadata=ca_pem.decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"tls_client_ca: {config.tls_client_ca} holds no certificates in PEM ({error})") from error
    return grpc.ssl_server_certificate_configuration([(key_pem, cert_pem)], root_certificates=ca_pem)


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted")
