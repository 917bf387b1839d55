"""The certificate of a service for gRPC between gateway and engine (mTLS), and its renewal without a restart.

Three PEM files: this service's certificate (with its intermediates), its key, and the CA that signed both sides. They
are checked as a whole when they are read, so that what cannot work is said at once and not at the first handshake.
Whoever renews them (cert-manager, a mounted Secret) just replaces the files: servers use the new ones from the next
handshake on, clients connect anew.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from prometheus_client import CollectorRegistry, Gauge

from services.common.errors import InvalidRequest
from services.common.settings import CommonSettings

FOLLOW_SECONDS = 5.0
"""Between two looks at the files."""
_WARNING = timedelta(days=7)
_WARN_EVERY_SECONDS = 3600.0
_LONGEST_CHAIN = 8
_CERT, _KEY, _CA = "grpc_tls_cert", "grpc_tls_key", "grpc_tls_ca"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of certificate, key and CA."""

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, settings: CommonSettings) -> TlsFiles | None:
        """None: the settings name none, and gRPC is plaintext."""
        cert, key, ca = settings.grpc_tls_cert, settings.grpc_tls_key, settings.grpc_tls_ca
        return None if cert is None or key is None or ca is None else cls(cert, key, ca)


@dataclass(frozen=True, slots=True)
class Material:
    """Contents of the files when they were read, checked."""

    cert: bytes
    key: bytes
    ca: bytes
    not_after: datetime
    """End of validity: when the first certificate between this service's and its CA's ends, both included."""

    @property
    def fingerprint(self) -> str:
        """Another one: at least one file has changed."""
        return hashlib.sha256(b"\0".join((self.cert, self.key, self.ca))).hexdigest()


def read_material(files: TlsFiles, now: datetime | None = None) -> Material:
    """Reads and checks the files.

    Args:
        now: default: the present.

    Raises:
        InvalidRequest: one is missing or no PEM, is not valid now, or they do not belong together. ``param`` is the
            setting; the message names the file, and the dates where they are the reason.
    """
    now = now or datetime.now(UTC)
    cert, key, ca = _read(files.cert, _CERT), _read(files.key, _KEY), _read(files.ca, _CA)
    chain, authorities = _certificates(cert, files.cert, _CERT), _certificates(ca, files.ca, _CA)
    leaf = chain[0]
    _check_dates(leaf, files.cert, _CERT, now)
    if _public(_private_key(key, files.key)) != _public_bytes(leaf.public_key()):
        raise InvalidRequest(f"{files.key} is not the key of the certificate in {files.cert}", param=_KEY)
    _check_usage(leaf, files.cert)
    path = _path(leaf, chain[1:], authorities)
    if path is None:
        raise InvalidRequest(
            f"{files.ca} (CA {_names(authorities)}) did not sign {files.cert}, whose issuer is "
            f"{leaf.issuer.rfc4514_string()}: set TEMPER_GRPC_TLS_CA to the CA of both sides, and put intermediate "
            "certificates into the file of TEMPER_GRPC_TLS_CERT",
            param=_CA,
        )
    for issuer in path[1:]:
        _check_dates(issuer, files.ca if issuer in authorities else files.cert, _CA, now)
    return Material(cert, key, ca, min(certificate.not_valid_after_utc for certificate in path))


class Certificates:
    """The material of one service, as it is now. Thread-safe.

    Args:
        files: read at once.

    Raises:
        InvalidRequest: they cannot be used; see read_material.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._current = read_material(files)
        self._refused = ""
        self._warned = float("-inf")
        self._warn()

    @property
    def current(self) -> Material:
        """Material that handshakes use."""
        return self._current

    def refresh(self) -> bool:
        """Looks at the files; True: they have changed and are used from now on. Files that cannot be used change
        nothing, and the log says why."""
        self._warn()
        try:
            found = read_material(self._files)
        except InvalidRequest as error:
            if error.message != self._refused:
                log.warning(
                    "the TLS files cannot be used, the ones from before stay",
                    setting=f"TEMPER_{str(error.param).upper()}",
                    reason=error.message,
                )
            self._refused = error.message
            return False
        self._refused = ""
        if found == self._current:
            return False
        self._current, self._warned = found, float("-inf")
        log.info("the TLS certificate was renewed", valid_until=_time(found.not_after))
        self._warn()
        return True

    def export(self, registry: CollectorRegistry) -> None:
        """Adds the gauge that alerts watch."""
        gauge = Gauge(
            "temper_tls_certificate_expiry_timestamp_seconds",
            "When the certificate for gRPC (or its CA's) ends, unix seconds",
            registry=registry,
        )
        gauge.set_function(lambda: self._current.not_after.timestamp())

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a server that demands a certificate of the CA; each handshake takes what is current."""

        def configuration() -> grpc.ServerCertificateConfiguration:
            now = self._current
            return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], now.ca)

        return grpc.dynamic_ssl_server_credentials(configuration(), configuration, True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a client, with what is current: a channel that is there keeps what it was made with."""
        now = self._current
        return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)

    def _warn(self) -> None:
        left = self._current.not_after - datetime.now(UTC)
        if left > _WARNING or time.monotonic() - self._warned < _WARN_EVERY_SECONDS:
            return
        self._warned = time.monotonic()
        until = _time(self._current.not_after)
        if left > timedelta(0):
            log.warning("the TLS certificate expires soon", file=str(self._files.cert), valid_until=until)
        else:
            log.error("the TLS certificate has expired", file=str(self._files.cert), valid_until=until)


def _read(path: Path, param: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}", param=param) from error


def _certificates(data: bytes, path: Path, param: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise InvalidRequest(f"{path} has no certificates in PEM form", param=param) from error


def _private_key(data: bytes, path: Path) -> object:
    try:
        return serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidRequest(f"{path} is no private key in PEM form without a password", param=_KEY) from error


def _public(key: object) -> bytes:
    return _public_bytes(key.public_key())  # type: ignore[attr-defined] # every kind of private key has one


def _public_bytes(key: object) -> bytes:
    encoded: bytes = key.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded


def _check_dates(certificate: x509.Certificate, path: Path, param: str, now: datetime) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begins <= now < ends:
        return
    wrong = "has expired" if now >= ends else "is not valid yet"
    raise InvalidRequest(
        f"{path}: the certificate of {certificate.subject.rfc4514_string() or 'no name'} {wrong}: it is valid from "
        f"{_time(begins)} to {_time(ends)}, and now it is {_time(now)}; renew it, or set the clock",
        param=param,
    )


def _check_usage(leaf: x509.Certificate, path: Path) -> None:
    """One certificate for both roles: an engine is a server, a gateway a client."""
    try:
        usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    useful = (
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
        ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE,
    )
    if not any(usage in usages for usage in useful):
        raise InvalidRequest(
            f"{path}: the certificate is for neither TLS servers nor clients: an engine's needs the extended key usage "
            "server auth, a gateway's client auth",
            param=_CERT,
        )


def _path(
    leaf: x509.Certificate, intermediates: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> list[x509.Certificate] | None:
    """Chain from the leaf to one of the authorities; None: there is none."""
    path = [leaf]
    while len(path) <= _LONGEST_CHAIN:
        issuer = next((ca for ca in authorities if _issued(path[-1], ca)), None)
        if issuer is not None:
            return [*path, issuer]
        between = next((ca for ca in intermediates if ca not in path and _issued(path[-1], ca)), None)
        if between is None:
            return None
        path.append(between)
    return None


def _issued(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _names(certificates: Sequence[x509.Certificate]) -> str:
    return ", ".join(certificate.subject.rfc4514_string() or "no name" for certificate in certificates)


def _time(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
