"""Jobs whose engine, of an earlier release, died while it published: this release ends each once, with one version."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.jobs import JobState
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from tests.fixtures.upgrade import HERE, load
from tests.integration.beside_engine import Start, pod, start, until
from tests.integration.jobs import read_events, silence

__all__ = ["pod", "start"]
RELEASE = "v0.1-publishing"


@pytest.fixture
def trainer_fields() -> dict[str, Any]:
    return {"job_reclaim_seconds": 30.0}


async def test_each_ends_once(
    settings: CommonSettings,
    queue: JobQueue,
    store: ObjectStore,
    registry: AdapterRegistry,
    raw: redis.Redis,
    start: Start,
) -> None:
    load(RELEASE, settings.redis_url.get_secret_value(), store)
    jobs: dict[str, str] = json.loads((HERE / RELEASE / "jobs.json").read_text())
    existed = {str(one.ref): one.digest for name in jobs for one in registry.versions(name)}
    assert set(existed) == {"manifest@1", "pointer@1"}
    files = {key: store.get(key).data for key in store.list("adapters/files/versions/") if "adapter_" in key}
    silence(raw, 3600)
    start()
    for name, job_id in jobs.items():
        job = await until(queue, job_id, lambda now: now.state.terminal)
        assert (job.state, job.attempts, job.result_adapter) == (JobState.SUCCEEDED, 2, f"{name}@1"), job
        ends = [event for event in await read_events(queue, job_id) if event.data.get("state") == "succeeded"]
        assert len(ends) == 1
        (version,) = registry.versions(name)
        assert (version.job_id, registry.current(name)) == (job_id, AdapterVersion(name, 1))
        assert existed.get(f"{name}@1", version.digest) == version.digest, "a version is what it was"
    # What lay there of the first attempt was not overwritten: somebody may have described it in a manifest.
    assert {key: store.get(key).data for key in files} == files
    assert set(registry.files(AdapterVersion("files", 1))) == {"adapter_config.json", "adapter_model.safetensors"}
