"""Real certificate authorities and certificates for tests."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.security.tls import TlsFiles

DAY = timedelta(days=1)
_PEM = serialization.Encoding.PEM


class Authority:
    """A CA.

    Args:
        name: its common name.
        parent: who signed it; None: itself.
    """

    def __init__(self, name: str, parent: Authority | None = None) -> None:
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        signer = parent or self
        self.certificate = (
            _builder(self.name, signer.name, self.key, -10 * DAY, 3650 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(signer.key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(_PEM)

    def issue(
        self,
        directory: Path,
        name: str,
        *,
        begins: timedelta = -DAY,
        ends: timedelta = 90 * DAY,
        chain: bytes = b"",
        ca: bytes | None = None,
        usage: x509.ObjectIdentifier | None = None,
    ) -> TlsFiles:
        """Writes tls.crt, tls.key and ca.crt, as a mounted Secret of cert-manager has them, in place of what is there.

        Args:
            begins, ends: from now on.
            chain: intermediates.
            ca: for ca.crt, if not this one.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, self.name, key, begins, ends).add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        kinds = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH) if usage is None else (usage,)
        leaf = builder.add_extension(x509.ExtendedKeyUsage(kinds), critical=False).sign(self.key, hashes.SHA256())
        directory.mkdir(parents=True, exist_ok=True)
        files = TlsFiles(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")
        files.cert.write_bytes(leaf.public_bytes(_PEM) + chain)
        files.key.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        files.ca.write_bytes(self.pem if ca is None else ca)
        return files


def environment(files: TlsFiles) -> dict[str, str]:
    """The variables that name the files."""
    return {f"TEMPER_GRPC_TLS_{part.upper()}": str(getattr(files, part)) for part in ("cert", "key", "ca")}


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begins: timedelta, ends: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
    )
