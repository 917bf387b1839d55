"""The end of a job: what may still go wrong once its version is in the store."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import Manifest
from services.common.errors import AdapterRejected, Overloaded, TemperError, Unavailable
from services.trainer.runtime.publish import Publisher

MANIFEST = Manifest(name="math", version=2, digest="d", base_digest="b", files={}, created_at=0.0)


class _World:
    """Registry, events and host of a publisher; the host answers a sync with ``outcome``."""

    base_digest = "b"

    def __init__(self, outcome: TemperError | None) -> None:
        self.outcome = outcome
        self.calls: list[str] = []

    def attach(self, version: AdapterVersion, *, forward_only: bool) -> AdapterVersion:
        self.calls.append(f"attach {version}")
        return version

    def publish(self, kind: str, version: AdapterVersion) -> None:
        self.calls.append(f"{kind} {version}")

    def sync_adapters(self, version: AdapterVersion, timeout: float) -> None:
        self.calls.append(f"sync {version}")
        if self.outcome is not None:
            raise self.outcome

    def serve(self) -> bool:
        me = cast(Any, self)
        return Publisher(me, me, me, 1.0).serve(MANIFEST, attach=True, fence=lambda: self.calls.append("fence"))


@pytest.mark.parametrize("outcome", [None, Overloaded("all slots are in use"), Unavailable("the store is away")])
def test_an_engine_that_serves_it_later_is_no_failure(outcome: TemperError | None) -> None:
    world = _World(outcome)
    assert world.serve()
    assert world.calls == ["fence", "attach math@2", "attached math@2", "sync math@2"]


def test_an_engine_that_refuses_it_is_one() -> None:
    with pytest.raises(AdapterRejected):
        _World(AdapterRejected("tensor x")).serve()
