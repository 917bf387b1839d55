"""Which versions have slots, who waits for one, and who gives way."""

from __future__ import annotations

import pytest

from services.common.adapters.names import AdapterVersion
from services.engine.adapters.slot_table import Resident, SlotTable
from services.engine.requests.adapter import AdapterChoice


def named(name: str, version: int | None = None) -> AdapterChoice:
    return AdapterChoice(name=name, version=version)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def loaded_table(slots: int, clock: Clock) -> tuple[SlotTable, dict[str, Resident]]:
    """A table whose slots are all taken, each by a version with one request."""
    table = SlotTable(slots, drain_seconds=2.0, turn_seconds=1.0, clock=clock)
    residents = {}
    for name in "abcdefgh"[:slots]:
        version = AdapterVersion(name, 1)
        slot = table.take(named(name), version, ())
        assert slot is not None
        residents[name] = table.put(version, "digest", slot)
        table.acquire(residents[name])
    return table, residents


def test_the_least_recently_asked_for_gives_way_once_it_had_its_turn() -> None:
    clock = Clock()
    table, residents = loaded_table(4, clock)
    assert table.take(named("x"), AdapterVersion("x", 1), ()) is None

    def closed() -> str:
        return "".join(name for name, one in residents.items() if not table.takes_requests(one, ()))

    assert closed() == ""  # it had no turn yet
    clock.now = 1.0
    assert closed() == "a"
    table.acquire(residents["b"])
    assert closed() == "a"
    # Its request takes long: another one gives way, too, the least recently asked for.
    clock.now = 3.0
    assert closed() == "ac"
    # Who drains first gives up its slot, whoever was asked first; the other goes on.
    table.release(residents["c"].pin)
    assert closed() == "c"
    assert table.take(named("x"), AdapterVersion("x", 1), ()) == residents["c"].pin.slot
    assert closed() == ""


def test_at_most_half_of_the_versions_give_way_at_once_and_none_for_the_same_version_twice() -> None:
    clock = Clock()
    table, residents = loaded_table(4, clock)
    clock.now = 1.0
    for claim in (named("x"), named("x", 1)):
        assert table.take(claim, AdapterVersion("x", 1), ()) is None
    assert [table.takes_requests(one, ()) for one in residents.values()] == [False, True, True, True]
    for name in "yzw":
        assert table.take(named(name), AdapterVersion(name, 1), ()) is None
    assert [table.takes_requests(one, ()) for one in residents.values()] == [False, False, True, True]
    table.retain({named("x")})
    assert [table.takes_requests(one, ()) for one in residents.values()] == [False, True, True, True]


def test_what_is_kept_never_gives_way() -> None:
    clock = Clock()
    table, residents = loaded_table(2, clock)
    assert table.take(named("x"), AdapterVersion("x", 1), ()) is None
    clock.now = 100.0
    kept = {AdapterVersion("a", 1), AdapterVersion("b", 1)}
    assert all(table.takes_requests(one, kept) for one in residents.values())


def test_releasing_what_is_not_pinned_is_a_bug() -> None:
    table = SlotTable(2, drain_seconds=1.0, turn_seconds=1.0)
    a, b = named("a", 1), AdapterVersion("b", 1)
    slot = table.take(a, AdapterVersion("a", 1), ())
    assert slot == 1
    resident = table.put(AdapterVersion("a", 1), "d", slot)
    with pytest.raises(ValueError, match="not pinned"):
        table.release(resident.pin)
    table.acquire(resident)
    assert table.take(named("b"), b, ()) == 2
    assert table.take(named("b"), b, ()) is None
    table.give_back(2)
    assert table.release(resident.pin)
    assert table.take(named("b"), b, (resident.version,)) == 2
    assert table.take(named("b"), b, (resident.version,)) is None
    assert table.take(named("b"), b, ()) == 1
