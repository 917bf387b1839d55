"""Engines, asleep ones too, follow their certificates for as long as they run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType

import pytest

from services.common.security.tls import Certificates
from services.pod import asleep, serve
from tests.stack import PATIENCE


class Refusing:
    """Certificates whose first look fails for nothing that they could help."""

    def __init__(self, seen: Callable[[], object]) -> None:
        self._seen = seen
        self._looks = 0

    def refresh(self) -> bool:
        self._looks += 1
        if self._looks == 1:
            raise RuntimeError("can't start new thread")
        self._seen()
        return True


@pytest.mark.parametrize("engine", [serve, asleep])
async def test_certificates_are_followed_behind_an_error(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "FOLLOW_SECONDS", 0.001)
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    follow: Callable[[Certificates], Awaitable[None]] = engine._follow
    following = asyncio.ensure_future(follow(Refusing(lambda: loop.call_soon_threadsafe(seen.set))))  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(seen.wait())
    await asyncio.wait((following, waiting), timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    assert seen.is_set(), following
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
