"""Makes a job on a data set self-contained: the version is named, and its rows are written in as the job's examples."""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import ValidationError
from pydantic_core import to_json

from services.common.errors import InvalidRequest, NotFound
from services.common.jobs import DpoJob, DraftJob, ExampleJob, GrpoJob, KtoJob, SftJob, TrainingSpec
from services.common.jobs.kinds.kto import LEAST_COMPARED
from services.common.validation.errors import problem
from services.gateway.api.training.validation import TrainingServices
from services.gateway.auth.caller import sees
from services.gateway.core.file_store import StoreThreads
from services.learning.datasets.convert import ExampleKind, examples_of
from services.learning.datasets.spec import Split
from services.learning.datasets.store import DatasetManifest, DatasetStore, parse_dataset_ref

_Learning: TypeAlias = SftJob | DpoJob | KtoJob | GrpoJob | DraftJob
_TEACHES: dict[ExampleKind, str] = {
    "sft": "corrections, and answers and trajectories that were not rated badly",
    "dpo": "corrections, preferences, and prompts whose answers were rated differently",
    "kto": "rated answers",
    "grpo": "prompts whose answers were rated differently and are logged with their token ids, and trajectories that "
    "began alike and were rated differently",
}


async def readable(datasets: DatasetStore, threads: StoreThreads, ref: str) -> DatasetManifest:
    """The version that "name@n" or "name" means now. Raises NotFound: there is none, or it is another API key's."""
    manifest = await threads.run(datasets.get, *parse_dataset_ref(ref))
    if not sees(manifest.key_id):
        raise NotFound(f"dataset {ref!r} does not exist", param="dataset")
    return manifest


async def with_rows(training: TrainingServices, spec: TrainingSpec) -> TrainingSpec:
    """The job with examples of its data set's training rows, and of the validation rows those to evaluate on. Another
    job stays as it is.

    Raises:
        NotFound: there is no such data set, or it is another API key's.
        InvalidRequest: it has no rows that teach such a job, too many, or ones that the job cannot have.
    """
    if not isinstance(spec, SftJob | DpoJob | KtoJob | GrpoJob | DraftJob):
        return spec
    if spec.dataset_digest is not None:
        raise InvalidRequest("dataset_digest is written by the gateway: leave it out", param="dataset_digest")
    if spec.dataset is None:
        return spec
    manifest = await readable(training.datasets, training.threads, spec.dataset)
    return await training.threads.run(_written_in, training, spec, manifest)


def _written_in(training: TrainingServices, spec: _Learning, manifest: DatasetManifest) -> TrainingSpec:
    """Blocking, in a thread that does not know the caller."""
    kind: ExampleKind = "sft" if isinstance(spec, DraftJob) else spec.kind

    def examples(split: Split) -> list[dict[str, Any]]:
        rows = training.datasets.rows(manifest, split)
        return examples_of(kind, (row.last_turn for row in rows) if isinstance(spec, DraftJob) else rows)

    learnt = examples("train")
    if not learnt:
        raise InvalidRequest(
            f"dataset: none of the {manifest.rows['train']} training rows of {manifest.ref} teaches a job of kind "
            f"{kind}, which learns from {_TEACHES[kind]}: choose another kind, or another data set",
            param="dataset",
        )
    written: dict[str, Any] = {spec.own_data: learnt, "dataset": manifest.ref, "dataset_digest": manifest.digest}
    if isinstance(spec, ExampleJob) and not spec.eval_examples and spec.eval_fraction == 0:
        held_out = examples("validation")
        if not isinstance(spec, KtoJob) or len(held_out) >= LEAST_COMPARED:
            written["eval_examples"] = held_out
    limit, size = training.settings.max_body_bytes, len(to_json(written))
    if size > limit:
        raise InvalidRequest(
            f"dataset: {manifest.ref} makes {len(learnt)} {spec.own_data} of {size} bytes with those to evaluate on, "
            f"and a job takes {limit} (TEMPER_MAX_BODY_BYTES): make a version of fewer rows (max_rows, filter.since)",
            param="dataset",
        )
    body = {**spec.model_dump(mode="json", exclude_unset=True), **written}
    try:
        return type(spec).model_validate(body)
    except ValidationError as error:
        reason = problem(error, type(spec), body)
        raise InvalidRequest(f"dataset: {manifest.ref}: {reason}", param="dataset") from error
