"""A store that fails is not asked for a while: a backoff."""

from __future__ import annotations

import math

import pytest

from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.object_store import StoreObjects
from services.engine.kv_offload.worker import CopyFailed
from tests.unit.engine.kv_offload.toy_device import LAYOUT, Bench, chain, limits
from tests.unit.engine.kv_offload.toy_store import ToyStore


def test_it_is_asked_again_ever_later_and_at_once_when_it_answers() -> None:
    store, now = ToyStore(), 100.0
    objects = StoreObjects(store, LAYOUT, clock=lambda: now)  # type: ignore[arg-type]
    store.away = True
    pauses = []
    for _ in range(8):
        with pytest.raises(CopyFailed):
            objects.listing()
        pauses.append(objects.pause)
        asked = store.asked
        for early in (0.0, objects.pause - 0.1):
            now += early
            with pytest.raises(CopyFailed, match="not asked for"):
                objects.listing()
            objects.failed()  # another one that was under way
        assert store.asked == asked
        now += 0.2
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60])
    store.away = False
    assert objects.listing() == {}
    store.away = True
    with pytest.raises(CopyFailed):
        objects.listing()
    assert objects.pause == pytest.approx(1)
    objects.close()


def test_what_is_not_there_is_no_failure_of_the_store() -> None:
    objects = StoreObjects(ToyStore(), LAYOUT)  # type: ignore[arg-type]
    with pytest.raises(CopyFailed) as caught:
        objects.header(chain(1)[0].key, 10_000)
    assert caught.value.reason == "missing"
    assert not objects.pause
    objects.close()


def test_nothing_is_expected_of_it_meanwhile() -> None:
    with Bench(limits(store=True), ToyStore()) as bench:
        bench.settle()
        assert bench.manager.seconds(Tier.STORE, 1000) < 1
        bench.manager._objects.failed()
        assert bench.manager.seconds(Tier.STORE, 1000) == math.inf
