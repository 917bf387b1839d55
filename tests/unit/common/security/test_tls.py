"""The TLS files of a service: what is refused when they are read, and what happens when they change."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from structlog.testing import capture_logs

from services.common.errors import InvalidRequest
from services.common.security.tls import Certificates, TlsFiles, read_material
from services.common.settings import CommonSettings
from tests.certificates import DAY, Authority

GAUGE = "temper_tls_certificate_expiry_timestamp_seconds"


@pytest.fixture(scope="module")
def ca() -> Authority:
    return Authority("temper-ca")


@pytest.fixture(scope="module")
def other() -> Authority:
    return Authority("other-ca")


def test_what_fits_is_read(ca: Authority, tmp_path: Path) -> None:
    material = read_material(ca.issue(tmp_path, "engine", ends=30 * DAY))
    assert abs((material.not_after - datetime.now(UTC) - 30 * DAY).total_seconds()) < 60


def test_an_intermediate_belongs_into_the_file(ca: Authority, tmp_path: Path) -> None:
    between = Authority("intermediate", ca)
    read_material(between.issue(tmp_path / "with", "engine", chain=between.pem, ca=ca.pem))
    with pytest.raises(InvalidRequest, match=r"did not sign.*CN=intermediate.*put intermediate"):
        read_material(between.issue(tmp_path / "without", "engine", ca=ca.pem))


Break = Callable[[TlsFiles, Authority, Authority], TlsFiles]


def _unlink(files: TlsFiles, ca: Authority, other: Authority) -> TlsFiles:
    files.key.unlink()
    return files


def _no_pem(files: TlsFiles, ca: Authority, other: Authority) -> TlsFiles:
    files.ca.write_bytes(b"nothing")
    return files


def _foreign_key(files: TlsFiles, ca: Authority, other: Authority) -> TlsFiles:
    files.key.write_bytes(ca.issue(files.key.parent / "x", "x").key.read_bytes())
    return files


def _expired(files: TlsFiles, ca: Authority, other: Authority) -> TlsFiles:
    return ca.issue(files.cert.parent, "engine", begins=-9 * DAY, ends=-DAY)


def _early(files: TlsFiles, ca: Authority, other: Authority) -> TlsFiles:
    return ca.issue(files.cert.parent, "engine", begins=DAY, ends=9 * DAY)


def _wrong_ca(files: TlsFiles, ca: Authority, other: Authority) -> TlsFiles:
    return ca.issue(files.cert.parent, "engine", ca=other.pem)


def _for_mail(files: TlsFiles, ca: Authority, other: Authority) -> TlsFiles:
    return ca.issue(files.cert.parent, "engine", usage=ExtendedKeyUsageOID.EMAIL_PROTECTION)


@pytest.mark.parametrize(
    ("broken", "param", "says"),
    [
        (_unlink, "grpc_tls_key", r"tls\.key cannot be read: No such file"),
        (_no_pem, "grpc_tls_ca", r"ca\.crt has no certificates in PEM form"),
        (_foreign_key, "grpc_tls_key", r"tls\.key is not the key of the certificate in .*tls\.crt"),
        (_expired, "grpc_tls_cert", r"tls\.crt: .*CN=engine has expired: it is valid from 20.*Z to 20.*Z, and now it"),
        (_early, "grpc_tls_cert", r"tls\.crt: .*CN=engine is not valid yet: it is valid from 20.*Z to 20.*Z"),
        (_wrong_ca, "grpc_tls_ca", r"ca\.crt \(CA CN=other-ca\) did not sign .*tls\.crt, whose issuer is CN=temper-ca"),
        (_for_mail, "grpc_tls_cert", r"neither TLS servers nor clients"),
    ],
)
def test_what_cannot_work_names_setting_and_file(
    broken: Break, param: str, says: str, ca: Authority, other: Authority, tmp_path: Path
) -> None:
    files = broken(ca.issue(tmp_path, "engine"), ca, other)
    with pytest.raises(InvalidRequest) as refused:
        read_material(files)
    assert refused.value.param == param
    assert re.search(says, refused.value.message), refused.value.message


def test_renewed_files_are_taken_and_broken_ones_are_not(ca: Authority, other: Authority, tmp_path: Path) -> None:
    certificates = Certificates(ca.issue(tmp_path, "engine", ends=20 * DAY))
    registry = CollectorRegistry()
    certificates.export(registry)
    before = certificates.current
    assert registry.get_sample_value(GAUGE) == before.not_after.timestamp()
    assert not certificates.refresh()
    _wrong_ca(TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt"), ca, other)
    with capture_logs() as logs:
        assert not certificates.refresh()
        assert not certificates.refresh()
    assert [line["setting"] for line in logs] == ["TEMPER_GRPC_TLS_CA"], "once, however often it is looked at"
    assert certificates.current == before
    ca.issue(tmp_path, "engine", ends=50 * DAY)
    assert certificates.refresh()
    assert certificates.current.fingerprint != before.fingerprint
    assert registry.get_sample_value(GAUGE) == certificates.current.not_after.timestamp()


@pytest.mark.parametrize(("days", "lines"), [(8, 0), (6, 1)])
def test_a_week_before_its_end_a_certificate_is_in_the_log(
    days: int, lines: int, ca: Authority, tmp_path: Path
) -> None:
    with capture_logs() as logs:
        Certificates(ca.issue(tmp_path, "engine", ends=days * DAY)).refresh()
    assert [line["log_level"] for line in logs] == ["warning"] * lines


def test_all_three_files_or_none() -> None:
    with pytest.raises(ValidationError, match="TEMPER_GRPC_TLS_KEY and TEMPER_GRPC_TLS_CA is not set"):
        CommonSettings(grpc_tls_cert="/tls.crt")  # type: ignore[arg-type]
    assert TlsFiles.of(CommonSettings(grpc_tls_cert="")) is None  # type: ignore[arg-type]
