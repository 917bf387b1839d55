"""Tests whose machine lacks something: elsewhere they are skipped; in CI they fail, or nobody would know."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from services.common.security.sandbox.shut_in import SandboxUnavailable


def missing(reason: str) -> NoReturn:
    """Ends the test: it fails where CI is "true", and is skipped elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def any_sandbox() -> Iterator[None]:
    """Ends the test, as `missing` does, if no level of the sandbox works here."""
    try:
        yield
    except SandboxUnavailable as error:
        missing(error.message)


@contextmanager
def sandbox_level() -> Iterator[None]:
    """Skips the test if the level of the sandbox that is tried inside does not work here: kernels differ in which they
    have. That none works is told by test_a_sandbox_works_here (tests/unit/common/security/test_sandbox.py)."""
    try:
        yield
    except SandboxUnavailable as error:
        pytest.skip(error.message)
