"""Rolling back and removing versions in a real S3 server, also while others publish and attach."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.common.adapters.keys import manifest_key, removed_key, removing_prefix, version_prefix
from services.common.adapters.manifest import Lineage, LineageParent, Manifest
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.adapters.retention import RetentionPolicy, prune
from services.common.errors import Conflict, InvalidRequest, ModelNotFound, Unavailable
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectNotFound, ObjectStore, StoredObject
from tests.integration.test_registry import BASE, files


def publish(registry: AdapterRegistry, count: int, name: str = "m") -> list[AdapterVersion]:
    return [
        registry.publish(name, files(str(number)), base_digest=BASE, job_id=f"job-{name}-{number}").ref
        for number in range(1, count + 1)
    ]


def numbers(registry: AdapterRegistry, name: str = "m") -> list[int]:
    return [manifest.version for manifest in registry.versions(name)]


def check_whole(registry: AdapterRegistry, name: str = "m") -> None:
    """Whatever can be named can be loaded, and every pointer leads somewhere."""
    for manifest in registry.versions(name):
        registry.files(manifest.ref)
    registry.files(registry.current(name))
    if (attached := registry.attached()) is not None:
        registry.files(attached)


def test_rollback_moves_the_pointer_and_a_newer_attachment(registry: AdapterRegistry) -> None:
    versions = publish(registry, 4)
    registry.attach(versions[3])
    done = registry.rollback("m")
    assert (str(done.before), str(done.after), str(done.attached)) == ("m@4", "m@3", "m@3")
    assert registry.current("m") == versions[2] == registry.attached()
    registry.attach(versions[0])
    done = registry.rollback("m", 2)
    assert (str(done.before), str(done.after)) == ("m@3", "m@2")
    assert registry.attached() == versions[0], "an older one was chosen, and stays"
    moves = registry.moves("m")
    assert [(move["from"], move["to"]) for move in moves] == [(4, 3), (3, 2)]
    assert moves[-1]["at"] == pytest.approx(time.time(), abs=60)
    registry.rollback("m", 1)
    with pytest.raises(Conflict, match="earliest"):
        registry.rollback("m")
    with pytest.raises(ModelNotFound):
        registry.rollback("m", 9)
    with pytest.raises(ModelNotFound):
        registry.rollback("nobody")
    assert registry.publish("m", files("5"), base_digest=BASE).version == 5
    assert registry.current("m").version == 5
    assert len(registry.moves("m")) == 3, "the history outlives a publish"


def test_a_rollback_is_made_once_for_a_request(registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked died behind the pointer's move, before what is attached followed it; the request comes again."""
    versions = publish(registry, 4)
    registry.attach(versions[3])
    with monkeypatch.context() as dying:
        dying.setattr(registry, "attached", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            registry.rollback("m", request="r1")
    assert (registry.current("m"), registry.attached()) == (versions[2], versions[3])
    for _ in range(2):
        done = registry.rollback("m", request="r1")
        assert (str(done.before), str(done.after), str(done.attached)) == ("m@4", "m@3", "m@3")
    assert registry.rollback("m", request="r2").after == versions[1], "another request is another rollback"
    assert [set(move) for move in registry.moves("m")] == [{"from", "to", "at"}] * 2

    later = registry.publish("m", files("5"), base_digest=BASE).ref
    registry.attach(later)
    done = registry.rollback("m", request="r2")
    assert (done.after, done.attached) == (versions[1], later), "what came after it is not undone"
    assert registry.current("m") == later


def test_rollback_leaves_other_adapters_attached(registry: AdapterRegistry) -> None:
    publish(registry, 2)
    other = publish(registry, 1, "other")[0]
    registry.attach(other)
    assert registry.rollback("m").attached is None
    assert registry.attached() == other


def between(monkeypatch: pytest.MonkeyPatch, registry: AdapterRegistry, name: str, action: Callable[[], Any]) -> None:
    """Has ``action`` happen right after the registry's next call of a method."""
    original = getattr(registry, name)
    once = iter([action])

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        for act in once:
            act()
        return answer

    monkeypatch.setattr(registry, name, interrupted)


def test_a_rollback_never_undoes_a_publish_that_it_did_not_see(
    registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "The one before" means before what was looked at: going back from a version that came meanwhile needs a word."""
    publish(registry, 2)
    between(monkeypatch, registry, "versions", lambda: registry.publish("m", files("3"), base_digest=BASE))
    with pytest.raises(Conflict, match="m@3 has become current"):
        registry.rollback("m")
    assert registry.current("m").version == 3
    assert registry.rollback("m", 1).after.version == 1


def test_concurrent_rollbacks_and_publishes_leave_one_pointer(registry: AdapterRegistry) -> None:
    publish(registry, 3)

    def roll(_: int) -> int | None:
        try:
            return registry.rollback("m").after.version
        except Conflict:
            return None

    with ThreadPoolExecutor(6) as pool:
        rolled = pool.map(roll, range(8))
        published = pool.map(lambda n: registry.publish("m", files(f"new {n}"), base_digest=BASE).version, range(6))
        assert sorted(published) == [4, 5, 6, 7, 8, 9]
        list(rolled)
    assert numbers(registry) == list(range(1, 10))
    last = registry.moves("m")[-1] if registry.moves("m") else None
    assert registry.current("m").version in (9, last["to"] if last else 9)
    check_whole(registry)


def test_prune_keeps_the_newest_and_what_is_pointed_at(registry: AdapterRegistry, settings: CommonSettings) -> None:
    versions = publish(registry, 8)
    registry.set_current(versions[1])
    registry.attach(versions[2])
    AdapterRegistry(registry.store, "another/model").attach(versions[3])
    plan = prune(registry, "m", RetentionPolicy(keep=2), in_use={versions[4]}, dry_run=True)
    assert [m.version for m in plan.removed] == [6, 1]
    assert numbers(registry) == list(range(1, 9)), "a dry run removes nothing"
    done = prune(registry, "m", RetentionPolicy(keep=2), in_use={versions[4]})
    assert [m.ref for m in done.removed] == [m.ref for m in plan.removed]
    assert done.kept == plan.kept
    assert done.kept == {
        8: "among the newest 2",
        7: "among the newest 2",
        5: "an unfinished job needs it",
        4: "attached",
        3: "attached",
        2: "current",
    }
    assert done.freed_bytes == sum(len(data) for data in files("1").values()) * 2
    assert numbers(registry) == [2, 3, 4, 5, 7, 8]
    check_whole(registry)
    with pytest.raises(ModelNotFound):
        registry.files(versions[0])
    with pytest.raises(ModelNotFound):
        registry.attach(versions[0])


def test_prune_by_age(registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for days in (10, 5, 1, 0):
        monkeypatch.setattr(time, "time", lambda days=days: now - days * 86400)
        registry.publish("m", files(str(days)), base_digest=BASE)
    monkeypatch.undo()
    assert [m.version for m in prune(registry, "m", RetentionPolicy(keep=3, days=3), dry_run=True).removed] == [1]
    assert [m.version for m in prune(registry, "m", RetentionPolicy(days=3)).removed] == [2, 1]
    assert numbers(registry) == [3, 4]


def test_a_number_is_never_used_twice(registry: AdapterRegistry, store: ObjectStore) -> None:
    versions = publish(registry, 4)
    registry.set_current(versions[0])
    prune(registry, "m", RetentionPolicy(days=0))
    assert numbers(registry) == [1]
    assert store.list(version_prefix(versions[3])) == [removed_key(versions[3])]
    assert registry.published("m", "job-m-4") is None
    again = registry.publish("m", files("other"), base_digest=BASE, job_id="job-m-4")
    assert again.version == 5, "also for the job whose version is gone"
    registry.delete("m")
    assert registry.publish("m", files("x"), base_digest=BASE).version == 6


def test_policies_say_something() -> None:
    for fields in ({}, {"keep": 0}, {"days": -1.0}, {"days": float("nan")}, {"days": float("inf")}):
        with pytest.raises(InvalidRequest):
            RetentionPolicy(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("pointer", ["attach", "set_current"])
def test_a_pointer_that_moves_while_a_version_is_removed_wins(
    registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch, pointer: str
) -> None:
    """It came before the removal looked at the pointers: the version stays, and can be loaded."""
    versions = publish(registry, 3)
    other = AdapterRegistry(registry.store, "qwen3.5")
    twin = AdapterRegistry(registry.store, registry._served_model_name)
    put = registry.store.put
    happened: list[str] = []

    def racing_put(key: str, data: bytes, **conditions: Any) -> str:
        answer = put(key, data, **conditions)
        if key.startswith(removing_prefix(versions[0])) and not happened:
            happened.append("refused")
            with pytest.raises(Conflict, match="being removed"):
                getattr(twin, pointer)(versions[0])
        return answer

    # Whoever comes after the intention is refused and leaves no trace.
    monkeypatch.setattr(registry.store, "put", racing_put)
    assert [m.version for m in prune(registry, "m", RetentionPolicy(keep=2)).removed] == [1]
    assert happened == ["refused"]
    monkeypatch.undo()
    assert registry.current("m") == versions[2]
    assert registry.attached() is None is other.attached()
    check_whole(registry)


def test_a_pointer_and_a_removal_that_see_each_other_both_give_way_or_one_does(
    registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attachment is written between the removal's intention and its look at the pointers, after its own check."""
    versions = publish(registry, 3)
    twin = AdapterRegistry(registry.store, registry._served_model_name)
    checked, announced, attached = threading.Event(), threading.Event(), threading.Event()
    check = twin._check_kept
    calls = iter([True])

    def slow_check(version: AdapterVersion) -> Manifest:
        manifest = check(version)
        for _ in calls:
            checked.set()
            assert announced.wait(20)
        return manifest

    monkeypatch.setattr(twin, "_check_kept", slow_check)
    put = registry.store.put

    def slow_put(key: str, data: bytes, **conditions: Any) -> str:
        answer = put(key, data, **conditions)
        if key.startswith(removing_prefix(versions[0])):
            announced.set()
            assert attached.wait(20)
        return answer

    outcome: list[str] = []

    def attach() -> None:
        try:
            twin.attach(versions[0])
            outcome.append("attached")
        except Conflict:
            outcome.append("refused")
        attached.set()

    thread = threading.Thread(target=attach)
    thread.start()
    assert checked.wait(20)
    monkeypatch.setattr(registry.store, "put", slow_put)
    removed = prune(registry, "m", RetentionPolicy(keep=2)).removed
    thread.join()
    assert outcome == ["refused"]
    assert [m.version for m in removed] == [1]
    assert registry.attached() is None, "what was written is taken back"
    check_whole(registry)


def test_publishing_attaching_rolling_back_and_pruning_at_once(registry: AdapterRegistry) -> None:
    """Nothing that a pointer names is ever missing."""
    publish(registry, 3)
    stop = threading.Event()
    problems: list[str] = []

    def pointers_lead_somewhere() -> None:
        while not stop.is_set():
            for read in (lambda: registry.current("m"), registry.attached):
                version = read()
                if version is None:
                    continue
                try:
                    registry.manifest(version)
                except ModelNotFound:
                    if read() == version:
                        try:
                            registry.manifest(version)
                        except ModelNotFound:
                            problems.append(str(version))

    def publisher(worker: int) -> None:
        for number in range(4):
            ref = registry.publish("m", files(f"{worker} {number}"), base_digest=BASE, job_id=f"{worker}-{number}").ref
            try:
                registry.attach(ref, forward_only=True)
            except (Conflict, ModelNotFound):
                continue

    def roller() -> None:
        for _ in range(5):
            try:
                registry.rollback("m")
            except (Conflict, ModelNotFound):
                continue

    def pruner() -> None:
        for _ in range(5):
            prune(registry, "m", RetentionPolicy(keep=2))

    with ThreadPoolExecutor(7) as pool:
        watcher = pool.submit(pointers_lead_somewhere)
        work = [pool.submit(publisher, 1), pool.submit(publisher, 2), pool.submit(roller)]
        work += [pool.submit(pruner), pool.submit(pruner)]
        for future in work:
            future.result(120)
        stop.set()
        watcher.result(20)
    assert problems == []
    check_whole(registry)
    assert max(m.version for m in registry.versions("m")) == 11


class _Dies(Exception):
    """Stands for a kill -9."""


@pytest.mark.parametrize("at", range(1, 6))
def test_a_removal_that_dies_anywhere_is_finished_by_the_next(
    registry: AdapterRegistry, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    versions = publish(registry, 3)
    delete, put, writes = store.delete, store.put, 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*args: Any, **kwargs: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes > at:
                raise _Dies
            return operation(*args, **kwargs)

        return perform

    monkeypatch.setattr(registry.store, "delete", counted(delete))
    monkeypatch.setattr(registry.store, "put", counted(put))
    with pytest.raises(_Dies):
        prune(registry, "m", RetentionPolicy(keep=2))
    monkeypatch.undo()
    check_whole(registry)
    assert (1 in numbers(registry)) == (store.head(manifest_key(versions[0])) is not None)
    prune(registry, "m", RetentionPolicy(keep=2))
    assert store.list(version_prefix(versions[0])) == [removed_key(versions[0])]
    assert numbers(registry) == [2, 3]


def test_an_intention_of_a_dead_process_is_forgotten(
    registry: AdapterRegistry, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = publish(registry, 1)[0]
    store.put(removing_prefix(version) + "dead", b'{"at": 1.0}')
    store.put(removing_prefix(version) + "young", f'{{"at": {time.time()}}}'.encode())
    with pytest.raises(Conflict):
        registry.attach(version)
    prune(registry, "m", RetentionPolicy(keep=1))
    assert store.list(removing_prefix(version)) == [removing_prefix(version) + "young"]


def test_a_store_that_goes_away_in_the_middle_takes_the_intention_back(
    registry: AdapterRegistry, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = publish(registry, 2)

    def away(*_: Any) -> None:
        raise Unavailable("the store is away")

    monkeypatch.setattr(registry, "attached", away)
    monkeypatch.setattr("services.common.adapters.retention._pointed_at", away)
    with pytest.raises(Unavailable):
        prune(registry, "m", RetentionPolicy(keep=1))
    monkeypatch.undo()
    assert numbers(registry) == [1, 2]
    assert registry.attach(versions[0]) == versions[0]


def test_a_pointer_that_the_store_denies_keeps_what_it_may_hold(
    registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed, and its GET is a 404: for all that is known it holds any of them."""
    versions = publish(registry, 3)
    registry.attach(versions[0])
    get = ObjectStore.get

    def denied(self: ObjectStore, key: str) -> StoredObject:
        if key.startswith("attached/"):
            raise ObjectNotFound(f"no such object (get {key})")
        return get(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "get", denied)
        assert prune(registry, "m", RetentionPolicy(keep=1)).removed == []
    assert [str(one.ref) for one in prune(registry, "m", RetentionPolicy(keep=1)).removed] == ["m@2"]


def test_lineage_lies_in_the_manifest_and_old_manifests_still_load(
    registry: AdapterRegistry, store: ObjectStore
) -> None:
    lineage = Lineage(
        method="ties",
        parents=(LineageParent(version="a@1", weight=0.7, digest="d"),),
        rank=8,
        density=0.2,
        seed=3,
        error_max=0.5,
        error_mean=0.25,
        worst_layer="layers.0.mlp.up_proj",
    )
    merged = registry.publish("m", files("1"), base_digest=BASE, lineage=lineage)
    assert registry.manifest(merged.ref).lineage == lineage
    old = merged.model_dump(mode="json", exclude={"lineage"})
    assert Manifest.model_validate(old).lineage is None
    assert Manifest.model_validate({**old, "of_a_later_release": 1}).version == 1
