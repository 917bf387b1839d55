"""Versions, pointers and attachment in a real S3 server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.common.adapters.manifest import DRAFTER_CONFIG, DRAFTER_WEIGHTS
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry
from services.common.errors import AdapterRejected, Conflict, InvalidRequest, ModelNotFound, NotFound, Unavailable
from services.common.storage.object_store import ObjectStore

BASE = "b" * 64


def files(tag: str = "x") -> dict[str, bytes]:
    return {WEIGHTS: f"weights {tag}".encode(), CONFIG: json.dumps({"r": 8, "tag": tag}).encode()}


class _Died(Exception):
    """Stands for a kill -9 at that point."""


def _die() -> None:
    raise _Died


def test_publish_and_read(registry: AdapterRegistry) -> None:
    assert registry.names() == []
    with pytest.raises(ModelNotFound):
        registry.current("math")
    first = registry.publish("math", files("1"), base_digest=BASE, metrics={"loss": 0.5}, parent=None)
    second = registry.publish("math", files("2"), base_digest=BASE, parent="math@1")
    assert (str(first.ref), str(second.ref)) == ("math@1", "math@2")
    assert first.rank == 8
    assert first.digest != second.digest
    assert registry.names() == ["math"]
    assert registry.current("math") == second.ref
    assert [m.version for m in registry.versions("math")] == [1, 2]
    assert registry.manifest(first.ref) == first
    assert registry.files(first.ref) == files("1")
    with pytest.raises(ModelNotFound):
        registry.files(AdapterVersion("math", 3))
    assert registry.versions("none") == []


def test_a_drafter_is_a_version_of_another_kind(registry: AdapterRegistry) -> None:
    drafter = {DRAFTER_WEIGHTS: b"weights", DRAFTER_CONFIG: b"{}"}
    registry.publish("math", files("1"), base_digest=BASE)
    first = registry.publish("sharp", drafter, base_digest=BASE)
    candidate = registry.publish("sharp", {**drafter, DRAFTER_CONFIG: b"{ }"}, base_digest=BASE, current=False)
    assert (first.kind, first.rank, registry.kind("sharp"), registry.kind("math")) == (
        "drafter",
        None,
        "drafter",
        "adapter",
    )
    assert registry.kind("none") is None
    registry.set_current(candidate.ref)
    pointers = registry.pointers()
    assert (pointers.drafters, pointers.adapters, pointers.current) == ({"sharp"}, {"math": 1}, {"math": 1, "sharp": 2})
    for name, other in (("sharp", files()), ("math", drafter)):
        with pytest.raises(InvalidRequest, match=f"{name} is the name of a"):
            registry.publish(name, other, base_digest=BASE)
    with pytest.raises(InvalidRequest, match="sharp@1 is a drafter"):
        registry.attach(first.ref)
    assert registry.attached() is None


def test_equal_files_have_equal_digests(registry: AdapterRegistry) -> None:
    assert (
        registry.publish("a", files(), base_digest=BASE).digest
        == registry.publish("b", files(), base_digest=BASE).digest
    )


def test_malformed_files_are_refused(registry: AdapterRegistry) -> None:
    for bad in (
        {WEIGHTS: b"x"},
        {**files(), "extra": b""},
        {WEIGHTS: b"x", CONFIG: b"{"},
        {WEIGHTS: b"", CONFIG: b"[]"},
    ):
        with pytest.raises(AdapterRejected):
            registry.publish("math", bad, base_digest=BASE)
    with pytest.raises(InvalidRequest):
        registry.publish("../evil", files(), base_digest=BASE)
    assert registry.names() == []


def test_publish_is_idempotent_per_job(registry: AdapterRegistry) -> None:
    first = registry.publish("math", files("1"), base_digest=BASE, job_id="job-1")
    again = registry.publish("math", files("other bytes"), base_digest=BASE, job_id="job-1")
    assert again == first
    assert registry.files(first.ref) == files("1")
    assert registry.published("math", "job-1") == first
    assert registry.published("math", "job-2") is None
    other = registry.publish("math", files("2"), base_digest=BASE, job_id="job-2")
    assert other.version == 2
    registry.set_current(first.ref)
    assert registry.publish("math", files("2"), base_digest=BASE, job_id="job-2") == other
    assert registry.current("math") == first.ref, "a repeated publish must not undo a rollback"


def test_publish_survives_death_before_the_manifest(registry: AdapterRegistry, store: ObjectStore) -> None:
    with pytest.raises(_Died):
        registry.publish("math", files("1"), base_digest=BASE, job_id="job-1", fence=_die)
    assert registry.versions("math") == []
    with pytest.raises(ModelNotFound):
        registry.current("math")
    # The second attempt may have other bytes (a GPU is not bitwise reproducible): what is stored wins, untorn.
    done = registry.publish("math", files("2"), base_digest=BASE, job_id="job-1")
    assert done.version == 1
    assert registry.files(done.ref) == files("1")
    assert [key for key in store.list("adapters/math/") if key.endswith("manifest.json")] == [
        "adapters/math/versions/00000001/manifest.json"
    ]


def test_publish_survives_death_before_the_pointer(registry: AdapterRegistry) -> None:
    calls = iter([None, _Died()])

    def fence() -> None:
        error = next(calls)
        if error is not None:
            raise error

    with pytest.raises(_Died):
        registry.publish("math", files("1"), base_digest=BASE, job_id="job-1", fence=fence)
    assert registry.names() == []
    done = registry.publish("math", files("1"), base_digest=BASE, job_id="job-1")
    assert registry.current("math") == done.ref
    assert len(registry.versions("math")) == 1


def test_concurrent_publishers_get_distinct_versions(registry: AdapterRegistry) -> None:
    with ThreadPoolExecutor(6) as pool:
        jobs = [f"job-{n % 6}" for n in range(12)]  # each job twice, as after a redelivery to a second owner
        published = list(pool.map(lambda j: registry.publish("m", files(j), base_digest=BASE, job_id=j), jobs))
    by_job = {manifest.job_id: manifest.version for manifest in published}
    assert len(set(by_job.values())) == 6
    versions = registry.versions("m")
    assert {m.job_id: m.version for m in versions} == by_job
    assert len(versions) == 6
    assert registry.current("m").version == max(by_job.values())
    for manifest in versions:
        assert registry.files(manifest.ref) == files(manifest.job_id or "")


def test_rollback_and_forward(registry: AdapterRegistry) -> None:
    for tag in ("1", "2"):
        registry.publish("m", files(tag), base_digest=BASE)
    registry.set_current(AdapterVersion("m", 1))
    assert registry.current("m").version == 1
    with pytest.raises(ModelNotFound):
        registry.set_current(AdapterVersion("m", 9))
    registry.publish("m", files("3"), base_digest=BASE)
    assert registry.current("m").version == 3


def test_a_repeated_end_of_a_job_does_not_attach_backwards(registry: AdapterRegistry) -> None:
    old, new = (registry.publish("m", files(tag), base_digest=BASE).ref for tag in ("1", "2"))
    assert registry.attach(new) == new
    assert registry.attach(old, forward_only=True) == new
    assert registry.attached() == new
    assert registry.attach(old) == old


def test_a_newer_version_that_is_attached_meanwhile_stays(
    registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (registry.publish("m", files(tag), base_digest=BASE).ref for tag in ("1", "2"))
    read = registry._read_json
    twin = iter([new])

    def read_before_the_twin(key: str) -> object:
        found = read(key)
        if key.startswith("attached/"):
            for version in twin:
                registry.attach(version)
        return found

    monkeypatch.setattr(registry, "_read_json", read_before_the_twin)
    assert registry.attach(old, forward_only=True) == new
    assert registry.attached() == new


def test_a_record_that_is_there_and_not_found_is_a_store_that_is_away(
    registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = registry.publish("m", files("1"), base_digest=BASE, job_id="job-1")
    assert registry.publish("m", files("1"), base_digest=BASE, job_id="job-1").ref == first.ref
    monkeypatch.setattr(registry, "_read_json", lambda key: None)
    with pytest.raises(Unavailable, match="does not find it"):
        registry.publish("m", files("1"), base_digest=BASE, job_id="job-1")


def test_attachment_and_pointers(registry: AdapterRegistry, store: ObjectStore) -> None:
    empty = registry.pointers()
    assert empty.attached is None
    assert empty.current == {}
    version = registry.publish("m", files("1"), base_digest=BASE).ref
    published = registry.pointers()
    assert published.current == {"m": 1}
    assert published.fingerprint != empty.fingerprint
    assert registry.pointers() == published
    with pytest.raises(ModelNotFound):
        registry.attach(AdapterVersion("m", 2))
    registry.attach(version)
    assert registry.attached() == version == registry.pointers().attached
    assert registry.pointers().fingerprint != published.fingerprint
    assert AdapterRegistry(store, "some/other model").attached() is None
    AdapterRegistry(store, "some/other model").attach(version)
    assert registry.detach("other") == version == registry.detach("m", 2)
    assert registry.attached() == version
    assert registry.detach("m", 1) is None
    assert registry.attached() is None
    assert registry.detach("m") is None
    assert AdapterRegistry(store, "some/other model").attached() == version
    assert registry.pointers().fingerprint == published.fingerprint


def test_delete(registry: AdapterRegistry, store: ObjectStore) -> None:
    registry.publish("m", files("1"), base_digest=BASE, job_id="job-1")
    version = registry.publish("m", files("2"), base_digest=BASE).ref
    registry.publish("other", files("2"), base_digest=BASE)
    registry.attach(version)
    with pytest.raises(Conflict, match="detach"):
        registry.delete("m")
    registry.detach("m")
    registry.delete("m")
    with pytest.raises(NotFound):
        registry.delete("m")
    assert registry.names() == ["other"]
    assert store.list("adapters/m/") == []
    assert registry.publish("m", files("3"), base_digest=BASE).version == 3, "a number never means other weights"


def test_corrupt_file_is_refused(registry: AdapterRegistry, store: ObjectStore) -> None:
    version = registry.publish("m", files("1"), base_digest=BASE).ref
    key = f"adapters/m/versions/00000001/{WEIGHTS}"
    store.put(key, b"flipped")
    with pytest.raises(AdapterRejected, match=WEIGHTS):
        registry.files(version)
    store.delete(key)
    with pytest.raises(AdapterRejected, match="missing"):
        registry.files(version)
