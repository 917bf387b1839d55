"""Files that settings name, opened when a gateway starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.errors import InvalidRequest
from services.common.security.tls import Certificates, TlsFiles
from services.gateway.auth.api_keys import KeyRing
from services.gateway.auth.audit_log import AuditLog
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.inference.recorder import RequestRecorder
from services.gateway.settings import GatewaySettings
from services.learning.request_log.index import RequestIndex
from services.learning.request_log.parts import Parts
from services.learning.request_log.redaction import Redaction
from services.learning.request_log.spool import Spool
from services.learning.request_log.writer import RequestLogWriter

log = structlog.get_logger(__name__)


class BadSetting(InvalidRequest):
    """``param`` is the setting."""


def open_keys(settings: GatewaySettings, metrics: GatewayMetrics) -> KeyRing | None:
    """API keys; None: there are none. Raises BadSetting."""
    if not settings.api_keys_file:
        log.warning("no API keys: everybody who reaches this gateway may do everything (TEMPER_API_KEYS_FILE)")
        return None
    try:
        return KeyRing(Path(settings.api_keys_file), settings.key_limits, metrics)
    except InvalidRequest as error:
        raise BadSetting(error.message, param="api_keys_file") from None


def open_certificates(settings: GatewaySettings, metrics: GatewayMetrics) -> Certificates | None:
    """Certificates of the connections to engines; None: they have none. Raises BadSetting."""
    files = TlsFiles.of(settings)
    if files is None:
        return None
    try:
        certificates = Certificates(files)
    except InvalidRequest as error:
        raise BadSetting(error.message, param=error.param) from None
    certificates.export(metrics.registry)
    return certificates


@dataclass(frozen=True, slots=True)
class RequestLogging:
    """Settings of the request log, with the spool and the rules that they name."""

    settings: GatewaySettings
    spool: Spool
    redaction: Redaction
    metrics: GatewayMetrics

    @classmethod
    def of(cls, settings: GatewaySettings, metrics: GatewayMetrics) -> RequestLogging | None:
        """None: requests are not logged. Raises BadSetting."""
        if not settings.request_log:
            return None
        rules = settings.request_log_rules
        try:
            spool = Spool(settings.request_log_spool, settings.request_log_spool_bytes)
            return cls(settings, spool, Redaction() if rules is None else Redaction.read(rules), metrics)
        except InvalidRequest as error:
            raise BadSetting(error.message, param=error.param or "request_log_rules") from None

    def recorder(self, parts: Parts, index: RequestIndex) -> RequestRecorder:
        """The recorder of a gateway that begins."""
        writer = RequestLogWriter(
            parts,
            index,
            self.spool,
            self.redaction,
            part_seconds=self.settings.request_log_part_seconds,
            keep_seconds=self.settings.request_log_ttl_seconds,
            written=self.metrics.logged_requests.inc,
            dropped=lambda reason, count: self.metrics.dropped_log_requests.labels(reason).inc(count),
        )
        return RequestRecorder(self.settings.request_log_share, writer)


def open_audit_log(settings: GatewaySettings, metrics: GatewayMetrics) -> AuditLog:
    """Audit log. Raises BadSetting."""
    try:
        return AuditLog(Path(settings.audit_log_file) if settings.audit_log_file else None, metrics)
    except InvalidRequest as error:
        raise BadSetting(error.message, param="audit_log_file") from None
