"""The certificate with which the processes of a local store know each other, and nobody else."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cli.local.ports import LOOPBACK

_VALID = timedelta(days=3650)
"""A server reads its certificate once, when it starts: longer than any of them runs."""
_CLOCK_SKEW = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class PrivateTls:
    """PEM files of a certificate that signed itself: server's, client's and authority's in one. Only their owner reads
    the key."""

    certificate: Path
    key: Path

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials with which a gRPC client reaches a server that has the same files."""
        certificate = self.certificate.read_bytes()
        return grpc.ssl_channel_credentials(certificate, self.key.read_bytes(), certificate)

    @classmethod
    def create(cls, directory: Path) -> PrivateTls:
        """Writes new ones, in place of those of an earlier start."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "temper up")])
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(LOOPBACK))]
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALID)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(key, hashes.SHA256())
        )
        files = cls(directory / "tls.crt", directory / "tls.key")
        files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_private(files.key, pem.decode())
        return files


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
