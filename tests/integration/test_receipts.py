"""Receipts of jobs: what they tell, whose they are, and jobs that are done again by them, on real stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cli.commands.train import replayed
from services.common.adapters.names import AdapterVersion, parse_adapter_version
from services.common.adapters.receipts import Receipt
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import NotFound
from services.common.jobs import JobState, SftJob, TrainingSpec
from services.common.queue.job_queue import JobQueue
from services.common.queue.records import SPEC
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.trainer.jobs import prepare_run
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from tests.integration.beside_engine import pod, until
from tests.rollout_support import Pod

__all__ = ["pod"]

KEY = Ed25519PrivateKey.generate()
ROWS = [{"prompt": f"{n}+1", "completion": str(n + 1)} for n in range(10)]
JOB: dict[str, Any] = {"adapter": "sums", "examples": ROWS, "epochs": 2, "lora": {"rank": 2, "seed": 5}, "seed": 7}


@pytest.fixture
def worker(
    settings: CommonSettings, store: ObjectStore, registry: AdapterRegistry, pod: Pod, tmp_path: Path
) -> TrainerWorker:
    trainer = TrainerSettings(
        **settings.model_dump(), job_heartbeat_seconds=0.2, checkpoint_dir=tmp_path / "checkpoints"
    )
    return TrainerWorker(pod.host, trainer, store=store, registry=registry, prepare=prepare_run, receipt_key=KEY)


async def published(queue: JobQueue, spec: TrainingSpec) -> AdapterVersion:
    done = await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    assert done.state is JobState.SUCCEEDED, done.reason
    return parse_adapter_version(str(done.result_adapter))


async def test_a_job_that_is_done_again_by_its_receipt_has_the_same_weights(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    worker.start()
    try:
        first = await published(queue, SftJob.model_validate(JOB))
        second = await published(queue, SftJob.model_validate({**JOB, "seed": 8}))
        receipts = []
        for version in (first, second):
            receipt = Receipt.read(registry.receipt(version))
            receipt.check(KEY.public_key())
            manifest = registry.manifest(version)
            assert receipt.content["version"] == str(version)
            assert receipt.content["digest"] == manifest.digest
            assert receipt.content["files"] == {name: entry.sha256 for name, entry in manifest.files.items()}
            assert receipt.content["job"]["id"] == manifest.job_id
            receipts.append(dict(receipt.content))
        before, after = receipts
        assert before["parents"] == []
        assert after["parents"] == [{"version": "sums@1", "digest": before["digest"]}]
        assert before["data"] == after["data"]
        assert (before["seeds"], after["seeds"]) == ({"job": 7, "lora": 5}, {"job": 8, "lora": 5})
        assert "completion" not in str(before["job"])

        for receipt, of in zip(receipts, (first, second), strict=True):
            spec = SPEC.validate_python(replayed(receipt, rows))
            again = await published(queue, spec)
            assert again.version > second.version
            assert registry.manifest(again).digest == registry.manifest(of).digest
        assert registry.current("sums") == second

        spec = SPEC.validate_python(replayed({**before, "job": {"spec": {**before["job"]["spec"], "seed": 9}}}, rows))
        assert registry.manifest(await published(queue, spec)).digest != registry.manifest(first).digest
    finally:
        worker.drain()


def test_an_uploaded_version_has_none(registry: AdapterRegistry, pod: Pod) -> None:
    files = prepare_run(SftJob.model_validate(JOB), pod.host, None).files("")
    version = registry.publish("sums", files, base_digest=pod.engine.base_digest).ref
    with pytest.raises(NotFound, match="sums@1 has no receipt"):
        registry.receipt(version)
