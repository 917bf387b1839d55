"""Jobs as Redis hashes and stream entries: the conversions that both faces of the queue share."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from services.common.adapters.composition import MAX_TEXT, parse_composition
from services.common.adapters.names import AdapterVersion
from services.common.errors import InvalidRequest
from services.common.jobs import Job, JobBase, JobEvent, JobProgress, JobSpec, PublishingJob, Spec
from services.common.jobs.fields.dataset import OfDataset
from services.common.jobs.fine_tuning import FineTuning
from services.common.queue.keyspace import TRAINING
from services.common.storage.ids import ulid, ulid_of
from services.common.storage.record_versions import JOB

SPEC: TypeAdapter[Spec] = TypeAdapter(JobSpec)
"""Parses and validates a spec of any kind."""

FIELDS = (
    "id",
    "kind",
    "adapter",
    "state",
    "created_at",
    "started_at",
    "finished_at",
    "attempts",
    "reason",
    "progress",
    "cancel",
    "metrics",
    "result_adapter",
    "metadata",
    "parent",
    "settings",
    "notes",
    "evaluation",
    "key_id",
    "dataset",
    "dataset_digest",
    "pause",
    "fine_tuning",
    "dry_run",
    "report",
    "schema",
)
"""Fields that a Job is made of; the spec, which may be megabytes, is read only by its owner."""

_ONCE_EPOCHS = {"sft": 3, "dpo": 1, "kto": 1}
_ONCE_LEARNING_RATE = 1e-4
"""Defaults of the first release, where the trainer chooses now."""


def new_job_id() -> str:
    """`job-` and 26 characters that sort by time (a ULID in lower case)."""
    return "job-" + ulid()


def submission(
    spec: Spec,
    *,
    idempotency_key: str | None,
    request_sha: str | None = None,
    traceparent: str = "",
    key_id: str = "",
    fine_tuning: FineTuning | None = None,
    entry: str = "",
) -> tuple[list[str], list[str]]:
    """Keys and arguments of scripts.SUBMIT for a new job; JobQueue.submit says what they are.

    Args:
        entry: id of the stream entry that brought the spec; empty: one is added.
    """
    job_id = job_id_of_entry(entry) if entry else new_job_id()
    keys = [
        TRAINING.stream,
        TRAINING.index,
        TRAINING.job_key(job_id),
        TRAINING.events_key(job_id),
        TRAINING.idempotency_key(idempotency_key or "", key_id),
        TRAINING.line_key(spec.adapter),
    ]
    args = [job_id, spec_json(spec), request_sha or spec_sha(spec), spec.kind, spec.adapter, json.dumps(spec.metadata)]
    args += ["0" if idempotency_key is None else "1", entry, traceparent, "", key_id]
    learnt = spec.learnt if isinstance(spec, OfDataset) else None
    args += ["", ""] if learnt is None else [learnt.version, learnt.digest]
    args.append("" if fine_tuning is None else fine_tuning.model_dump_json())
    return keys, [*args, _webhook(spec), _dry_run(spec)]


def _webhook(spec: Spec) -> str:
    """URL that is told of a job's end; empty: none of its own."""
    return (spec.webhook or "") if isinstance(spec, PublishingJob) else ""


def _dry_run(spec: Spec) -> str:
    """ "1" for a dry run; empty: a job that is to be done."""
    return "1" if isinstance(spec, JobBase) and spec.dry_run else ""


def job_id_of_entry(entry_id: str) -> str:
    """The id of a job that was added straight to the stream: the same at every delivery."""
    return "job-" + ulid_of(entry_id, int(entry_id.split("-")[0]))


def spec_json(spec: Spec) -> str:
    """Canonical: equal specs give equal text."""
    return _canonical(spec.model_dump(mode="json"))


def _canonical(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def spec_sha(spec: Spec) -> str:
    """Fingerprint that an idempotency key stands for: lower-case hex SHA-256 of the canonical JSON. What the job leaves
    open is in it as the first release wrote it, in numbers, so that a submission from before an upgrade is known
    again."""
    document = spec.model_dump(mode="json")
    if spec.kind in _ONCE_EPOCHS:
        document.setdefault("epochs", _ONCE_EPOCHS[spec.kind])
    if "optimizer" in document:
        document["optimizer"].setdefault("learning_rate", _ONCE_LEARNING_RATE)
    return text_sha(_canonical(document))


def text_sha(text: str) -> str:
    """The same of JSON that is at hand: it may be megabytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def job_from_fields(values: Sequence[str | None]) -> Job | None:
    """A Job from HMGET of FIELDS; None if the hash is gone. Raises NewerSchema."""
    field = dict(zip(FIELDS, values, strict=True))
    if field["id"] is None or field["state"] is None:
        return None
    JOB.check(field["schema"], f"job {field['id']}")
    with JOB.reading(f"job {field['id']}"):
        return Job.model_validate(
            {
                "id": field["id"],
                "kind": field["kind"],
                "adapter": field["adapter"],
                "state": field["state"],
                "created_at": float(field["created_at"] or 0),
                "started_at": _number(field["started_at"]),
                "finished_at": _number(field["finished_at"]),
                "attempts": int(field["attempts"] or 0),
                "reason": field["reason"] or None,
                "progress": _json(field["progress"]) or JobProgress(),
                "cancel_requested": field["cancel"] == "1",
                "metrics": _json(field["metrics"]),
                "result_adapter": field["result_adapter"] or None,
                "metadata": _json(field["metadata"]),
                "parent": field["parent"] or None,
                "settings": _json(field["settings"]),
                "notes": list(_json(field["notes"]).values()),
                "evaluation": field["evaluation"] or None,
                "key_id": field["key_id"] or None,
                "dataset": field["dataset"] or None,
                "dataset_digest": field["dataset_digest"] or None,
                "paused": field["pause"] == "1",
                "fine_tuning": _json(field["fine_tuning"]) or None,
                "dry_run": field["dry_run"] == "1",
                "report": _json(field["report"]) or None,
            }
        )


def event_from_entry(entry_id: str, fields: Mapping[str, str]) -> JobEvent:
    return JobEvent.model_validate(
        {"id": entry_id, "kind": fields["kind"], "time": float(fields["time"]), "data": _json(fields["data"])}
    )


def versions_needed(unfinished: Sequence[str]) -> set[AdapterVersion]:
    """The versions that unfinished jobs name: in their specs (to start from, to merge, to compare with, where their
    rollouts came from), and as what their first attempts resolved. Text that only looks like a version counts, too:
    that keeps one too many.

    Args:
        unfinished: what steering_scripts.UNFINISHED answers.

    Raises:
        NewerSchema: there is a job of a later release.
    """
    if len(unfinished) == 1:
        job_id, schema = unfinished[0].split(" ")
        JOB.check(schema, f"job {job_id}")
    found: set[AdapterVersion] = set()
    for spec, parent in zip(unfinished[::2], unfinished[1::2], strict=True):
        waiting: list[Any] = [parent.split(","), json.loads(spec) if spec else None]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting.extend(value.values())
            elif isinstance(value, list):
                waiting.extend(value)
            elif isinstance(value, str):
                found.update(_versions(value))
    return found


def _versions(text: str) -> tuple[AdapterVersion, ...]:
    if len(text) > MAX_TEXT or "@" not in text:
        return ()
    try:
        return parse_composition(text).versions
    except InvalidRequest:
        return ()


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without NaN and infinity, which JSON does not have."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def _json(text: str | None) -> dict[str, Any]:
    # An empty Lua table encodes as a list or an object alike; only objects are ever stored here.
    return dict(json.loads(text) or {}) if text else {}
