"""Fixtures of gateways that have API keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import structlog

from services.common.security.api_keys import Scope
from services.common.telemetry.masking import mask_secrets
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.key_file import NO_REDIS, Keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    keys = Keys(tmp_path_factory.mktemp("keys") / "keys.json")
    for scope in Scope:
        keys.add(scope.value, scope)
    return keys


@pytest.fixture(scope="module")
def guarded(keys: Keys) -> Iterator[Running]:
    options: dict[str, Any] = {"api_keys_file": str(keys.path), "api_keys_poll_seconds": 0.05, "redis_url": NO_REDIS}
    options |= {"audit_log_file": str(keys.path.with_name("audit.log")), "metrics_public": False}
    running = Running([FakeEngine()], **options)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def door(guarded: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=PATIENCE, verify=False) as client:
        yield client


@pytest.fixture
def log_lines() -> Iterator[None]:
    """Logs as a service writes them, on standard output."""
    steps = [mask_secrets, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    usual = structlog.get_config()
    structlog.configure(processors=steps)
    yield
    structlog.configure(**usual)
