"""Log lines of every service, run in a process of its own because logging is global."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import logging, structlog
from services.common.settings import CommonSettings
from services.common.telemetry.logging import configure_logging
recent = configure_logging(
    CommonSettings(
        log_level="info",
        log_format="{fmt}",
        redis_url="redis://:hunter2-of-redis@host:1/0",
        s3_secret_key="hunter2-of-s3",
        otlp_headers="authorization=hunter2-of-otlp",
    ),
    service="engine",
)
log = structlog.get_logger("x")
log.debug("hidden")
log.info("store.ready", url="redis://user:hunter2@host:1/0", s3_secret_key="hunter2", size=3)
log.info("request", path="/v1/x/tp-" + "hunter2" * 6 + "a/y")
logging.getLogger("lib").warning("plain %s", "text", extra={{"color_message": "coloured"}})
password = "hunter2"
try:
    raise ValueError("boom: hunter2-of-redis, hunter2-of-s3, hunter2-of-otlp, tp-" + "hunter2" * 6 + "a")
except ValueError:
    log.exception("step.failed", tried=["hunter2-of-s3"])
from services.common.telemetry.recent_logs import LogQuery
kept, _ = recent.find(LogQuery())
assert [line.message for line in kept] == ["store.ready", "request", "plain text", "step.failed"], kept
assert "hunter2-of" not in repr(kept) and "ValueError: boom: ***, ***, ***" in kept[-1].exception, kept
"""


def lines(fmt: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(fmt=fmt)], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "hunter2" not in done.stderr
    assert "hidden" not in done.stderr
    return done.stderr.splitlines()


def test_json_lines() -> None:
    ready, request, plain, failed = (json.loads(line) for line in lines("json"))
    assert request["path"] == "/v1/x/tp-***/y"
    assert (ready["event"], ready["service"], ready["level"], ready["size"]) == ("store.ready", "engine", "info", 3)
    assert ready["url"] == "redis://user:***@host:1/0"
    assert ready["s3_secret_key"] == "***"
    assert "color_message" not in plain
    assert (plain["event"], plain["level"], plain["logger"]) == ("plain text", "warning", "lib")
    assert "ValueError: boom" in failed["exception"]


def test_console_lines() -> None:
    text = "\n".join(lines("console"))
    assert "store.ready" in text
    assert "ValueError: boom" in text
