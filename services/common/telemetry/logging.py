"""Logs and metrics, set up the same way in every service.

Logs are structlog events with a service name and an ISO time: JSON for machines, coloured text for a terminal. Nothing
secret is logged: settings hold secrets as SecretStr, and what looks like a credential, or is the value of one, is
masked in all that is written, tracebacks included. The last lines stay in memory, for `GET /v1/logs`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from pydantic_settings import BaseSettings

from services.common.settings import CommonSettings
from services.common.telemetry.masking import MaskValues, mask_secrets
from services.common.telemetry.recent_logs import RecentLogs

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds, for histograms of requests and steps."""


def configure_logging(settings: CommonSettings, *others: BaseSettings, service: str) -> RecentLogs:
    """Sends structlog and the standard library's loggers to stderr in one format. Call once, in main.

    Args:
        others: settings of the process that hold secrets, too.

    Returns:
        Where the last lines are kept from now on.
    """
    recent = RecentLogs(settings.log_lines)
    level = getattr(logging, settings.log_level.upper())
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _ServiceName(service),
        structlog.processors.format_exc_info,
        mask_secrets,
        MaskValues(settings, *others),
        recent,
    ]
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        # Plain, as the exceptions are above; rich's shows local variables, and one of them is a key.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            # Of foreign records only: structlog's own carry their logger object as an extra.
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), _drop_colours],
            processors=[*shared, structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("urllib3", "asyncio", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
    return recent


def _drop_colours(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """uvicorn adds its messages a second time, with terminal codes."""
    event.pop("color_message", None)
    return event


class _ServiceName:
    """Adds the service's name to every event."""

    def __init__(self, service: str) -> None:
        self._service = service

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = self._service
        return event
