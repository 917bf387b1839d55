"""Training jobs and their events in the form of OpenAI's fine-tuning jobs."""

from __future__ import annotations

from typing import Any, Literal

from services.common.adapters.manifest import Manifest
from services.common.errors import NotFound
from services.common.jobs import Job, JobEvent, JobState
from services.common.jobs.fine_tuning import FineTuning
from services.gateway.protocol.training.fine_tuning import (
    AUTO,
    FineTuningCheckpoint,
    FineTuningError,
    FineTuningEvent,
    FineTuningJob,
)

_JOB, _EVENT, _CHECKPOINT = "ftjob-", "ftevent-", "ftckpt-"
_METRICS = {
    "loss": "train_loss",
    "token_accuracy": "train_mean_token_accuracy",
    "eval_loss": "full_valid_loss",
    "eval_token_accuracy": "full_valid_mean_token_accuracy",
}
"""Names of metrics at OpenAI; others have those of training jobs."""
_SAID = {
    "loss": "training loss",
    "reward_mean": "mean reward",
    "eval_loss": "validation loss",
    "eval_reward": "validation reward",
}
_STATES = {
    "queued": "The job waits for an engine",
    "running": "The job has started",
    "succeeded": "The job has successfully completed",
    "failed": "The job has failed",
    "cancelled": "The job was cancelled",
}


def fine_tuning_id(job_id: str) -> str:
    """Id of a training job among fine-tuning jobs."""
    return _JOB + job_id.removeprefix("job-")


def job_id_of(fine_tuning: str, param: str = "fine_tuning_job_id") -> str:
    """Id of the training job. Raises NotFound: it is no fine-tuning job's."""
    if not fine_tuning.startswith(_JOB):
        raise missing(fine_tuning, param)
    return "job-" + fine_tuning.removeprefix(_JOB)


def missing(fine_tuning: str, param: str = "fine_tuning_job_id") -> NotFound:
    """Error for an id that no fine-tuning job has."""
    return NotFound(f"no such fine-tuning job: {fine_tuning[:80]!r}", param=param)


def job_object(job: Job, request: FineTuning, now: float) -> FineTuningJob:
    """A job in OpenAI's form."""
    kind = str(request.method["type"])
    method = {**request.method, kind: {**request.method[kind]}}
    used = method[kind]["hyperparameters"] = dict(method[kind]["hyperparameters"])
    if used["n_epochs"] == AUTO and "epochs" in job.settings:
        used["n_epochs"] = int(job.settings["epochs"])
    eta = job.progress.eta_seconds
    failed = job.state is JobState.FAILED
    return FineTuningJob(
        id=fine_tuning_id(job.id),
        created_at=int(job.created_at),
        finished_at=None if job.finished_at is None else int(job.finished_at),
        estimated_finish=None if job.state is not JobState.RUNNING or eta is None else int(now + eta),
        status="paused" if job.state is JobState.QUEUED and job.paused else job.state.value,
        error=FineTuningError(code="job_failed", message=job.reason or "no reason was given") if failed else None,
        model=request.model,
        fine_tuned_model=job.result_adapter,
        organization_id="temper",
        training_file=request.training_file,
        validation_file=request.validation_file,
        result_files=[],
        hyperparameters=used if kind == "supervised" else {},
        method=method,
        seed=request.seed,
        trained_tokens=int(job.metrics.get("num_tokens", 0)) if job.state is JobState.SUCCEEDED else None,
        integrations=[],
        metadata=job.metadata or None,
    )


def checkpoint_object(manifest: Manifest, job: Job) -> FineTuningCheckpoint:
    """A version that a job made, in OpenAI's form."""
    step = job.progress.total_steps if manifest.step is None else manifest.step
    metrics = {_METRICS.get(name, name): value for name, value in manifest.metrics.items()}
    return FineTuningCheckpoint(
        id=f"{_CHECKPOINT}{job.id.removeprefix('job-')}-{step}",
        created_at=int(manifest.created_at),
        fine_tuned_model_checkpoint=str(manifest.ref),
        fine_tuning_job_id=fine_tuning_id(job.id),
        metrics={**metrics, "step": step},
        step_number=step,
    )


def event_id(event: JobEvent, job_id: str) -> str:
    """Id of an event of a job."""
    return f"{_EVENT}{job_id.removeprefix('job-')}-{event.id}"


def place_of(event: str, job_id: str) -> str:
    """Place of an event in its job's stream. Raises NotFound: it is no event of this job."""
    prefix = f"{_EVENT}{job_id.removeprefix('job-')}-"
    place = event.removeprefix(prefix)
    if place == event or not all(part.isascii() and part.isdigit() for part in place.split("-")):
        raise NotFound(f"no such event of this job: {event[:120]!r}", param="after")
    return place


def event_object(event: JobEvent, job_id: str) -> FineTuningEvent:
    """An event in OpenAI's form."""
    values, level, message = event.data, "info", ""
    kind: Literal["message", "metrics"] = "message"
    match event.kind:
        case "state":
            level, message = ("error" if values.get("state") == "failed" else "info"), _state(values)
        case "progress" | "eval":
            kind, message = "metrics", _metrics(values)
            values = {_METRICS.get(name, name): value for name, value in values.items()}
        case "checkpoint":
            message = f"Checkpoint saved after step {values.get('step')}"
        case "published":
            message = f"New fine-tuned model created: {values.get('adapter')}"
        case "log":
            level, message = ("warn" if values.get("note") else "info"), str(values.get("message", ""))
    return FineTuningEvent.model_validate(
        {
            "id": event_id(event, job_id),
            "created_at": int(event.time),
            "level": level,
            "message": message,
            "type": kind,
            "data": values,
        }
    )


def _state(values: dict[str, Any]) -> str:
    if values.get("paused"):
        return "The job is paused"
    said = _STATES.get(str(values.get("state")), str(values.get("state")))
    return f"{said}: {values['reason']}" if values.get("reason") else said


def _metrics(values: dict[str, Any]) -> str:
    total = f"/{values['total_steps']}" if "total_steps" in values else ""
    numbers = [f"{said}={values[name]:.4g}" for name, said in _SAID.items() if name in values]
    return f"Step {values.get('step')}{total}" + (": " if numbers else "") + ", ".join(numbers)
