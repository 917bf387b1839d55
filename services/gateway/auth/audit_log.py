"""Audit log: one line for every call that trains or administrates, and for every one that was refused."""

from __future__ import annotations

import json
import logging
import logging.handlers
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from services.common.errors import InvalidRequest
from services.common.telemetry.masking import mask_secrets
from services.gateway.core.metrics import GatewayMetrics

_LIMIT = 200
"""Characters of a value that a client chose."""
log = structlog.get_logger("audit")


class AuditLog:
    """Writes to the log, and to a file of its own if there is one.

    Args:
        path: appended to, one JSON object a line; who rotates it renames it, and the next line opens a new one.
        metrics: lines that could not be written.

    Raises:
        InvalidRequest: the file cannot be opened.
    """

    def __init__(self, path: Path | None, metrics: GatewayMetrics) -> None:
        # Also where the log level is higher: a trail with gaps is none.
        logging.getLogger("audit").setLevel(logging.INFO)
        self._file: _File | None = None
        if path is not None:
            try:
                self._file = _File(path, metrics)
            except OSError as error:
                raise InvalidRequest(f"{path} cannot be written: {error.strerror or type(error).__name__}") from None

    def write(
        self,
        *,
        principal: str | None,
        action: str,
        target: str,
        status: int,
        request_id: str,
        client: str | None,
    ) -> None:
        """One call.

        Args:
            principal: the id of its key; None: nobody's.
            action: the route.
            target: what it was about.
        """
        outcome = "done" if status < 400 else "refused" if status in (401, 403, 429) else "failed"
        fields: dict[str, Any] = {
            "principal": principal,
            "action": action,
            "target": target[:_LIMIT],
            "status": status,
            "outcome": outcome,
            "request_id": request_id,
            "client": client,
        }
        log.info("audit", **fields)
        if self._file is not None:
            line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **mask_secrets(None, "", fields)}
            self._file.put(json.dumps(line))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


class _File(logging.handlers.WatchedFileHandler):
    """Notices that somebody has moved the file. A line that cannot be written must not break a request."""

    def __init__(self, path: Path, metrics: GatewayMetrics) -> None:
        super().__init__(path, encoding="utf-8")
        self._metrics = metrics

    def put(self, line: str) -> None:
        self.handle(logging.makeLogRecord({"msg": line}))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the new file could not be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802
        self._metrics.audit_failures.inc()
        log.error("a line of the audit log could not be written", file=self.baseFilename)
