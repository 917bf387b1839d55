"""Checks of a training job when it is submitted, so that a bad job never waits in the queue.

The job has to fit the model that the engines serve. What it names outside of its body has to be there, and to fit the
job and the engines. What depends on the kind of job is in its schema (JobBase.check_tokens).

A job may wait behind others that publish what it continues, or in front of engines that are not connected yet: what is
not decided when a job is submitted is left to the trainer, which checks all of it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from services.common.adapters.composition import Published, versions_of
from services.common.adapters.manifest import Kind, Manifest
from services.common.adapters.names import BASE, AdapterVersion, parse_adapter_ref
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import AdapterRejected, InvalidRequest, ModelNotFound, TemperError
from services.common.evaluation.gates.plan import plan_gates
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import DraftJob, GrpoJob, JobBase, JobState, OpdJob, TrainingSpec
from services.common.jobs.base import ServedLimits
from services.common.jobs.dry_runs.guard_rails import check_scale
from services.common.jobs.fields.lora import TARGET_MODULES, check_agrees, stated_shape
from services.common.jobs.scorers.grants import Granted
from services.common.jobs.scorers.judge import JudgeSpec
from services.common.jobs.scorers.of_rewards.tournament import TournamentReward
from services.common.jobs.token_checks import check_free
from services.common.queue.job_queue import JobQueue
from services.gateway.api.base.routing import provided
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.core.admission import Lifecycle
from services.gateway.core.file_store import FileStore, StoreThreads
from services.gateway.engines.pool import EnginePool
from services.gateway.engines.served_model import ServedModel
from services.gateway.inference.prompts import check_template_kwargs
from services.gateway.settings import GatewaySettings
from services.learning.datasets.store import DatasetStore

_CHECKS = 2


@dataclass(frozen=True, slots=True)
class TrainingServices:
    """Job queue, and the services that know what a job may refer to."""

    settings: GatewaySettings
    engines: EnginePool
    queue: JobQueue
    registry: AdapterRegistry
    """Registry of adapters. It blocks, as the suites and data sets do, so they are only called in ``threads``."""
    suites: SuiteStore
    datasets: DatasetStore
    files: FileStore
    """Files that clients upload, and the object store under them. It blocks, too."""
    threads: StoreThreads
    lifecycle: Lifecycle
    checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CHECKS))
    """Semaphore held while a training job is tokenized, because the threads are shared with prompts."""


Training = Annotated[TrainingServices, provided(TrainingServices)]


def check_training_job(served: ServedModel, job: TrainingSpec) -> None:
    """Checks a job by itself, and tokenizes every example of it. Blocking: call it in a thread.

    Raises:
        InvalidRequest: the rank does not fit the engines, the layers are not the model's, or see JobBase.check_used
            and check_tokens.
    """
    info = served.info
    check_template_kwargs(job.chat_template_kwargs)
    highest = info.max_lora_rank
    if highest and "rank" in job.lora.model_fields_set and job.lora.rank > highest:
        raise InvalidRequest(
            f"lora.rank is {job.lora.rank} and the engines take at most {highest} (TEMPER_MAX_LORA_RANK): give a lower "
            "one",
            param="lora.rank",
        )
    check_scale(job.lora)
    _check_layers(served, job)
    check_free("chat_template_kwargs", job.chat_template_kwargs)
    job.check_used()
    job.check_tokens(served_limits(served))


def served_limits(served: ServedModel) -> ServedLimits:
    """What the engines can compute, as checks of training data ask for it."""
    info = served.info
    return ServedLimits(
        codec=served.codec,
        vocab_size=info.vocab_size,
        max_train_tokens=info.max_train_tokens,
        max_model_len=info.max_model_len,
        teacher=info.teacher,
        teacher_vocab_size=info.teacher_vocab_size,
    )


def _check_layers(served: ServedModel, job: JobBase) -> None:
    """Checks that the layers that an adapter is to change are linear layers of this model. Engines of earlier releases
    do not say which there are."""
    layers = set(served.info.linear_layers)
    asked = job.lora.target_modules
    if not layers or asked is None or isinstance(asked, str):
        return
    last = {path.rsplit(".", 1)[1] for path in layers}
    if unknown := sorted({name for name in asked if name not in layers and name not in last}):
        raise InvalidRequest(
            f"lora.target_modules: {', '.join(unknown[:5])} is no linear layer of this model: choose from "
            f"{', '.join(sorted(last))}, from the paths of its layers (such as {min(layers)}), or leave it out for all",
            param="lora.target_modules",
        )


async def check_references(training: TrainingServices, spec: TrainingSpec) -> None:
    """Looks up everything that a job names.

    Raises:
        ModelNotFound: a version does not exist.
        AdapterRejected: one belongs to another base model.
        InvalidRequest: the job contradicts what it continues, has nothing to learn of its teacher, or has samples
            scored where an engine may not send them.
    """
    training.registry.check_new_name(spec.adapter)
    await training.threads.run(training.registry.check_kind, spec.adapter, spec.makes)
    start = await _start(training, spec)
    try:
        await _check_start(training, spec, start)
    except TemperError:
        if await _starts_there(training, spec):
            raise
    _check_webhook(training.settings, spec)
    _check_scorers(training.engines.granted(), spec)
    if isinstance(spec, GrpoJob):
        await _check_samplers(training, spec)
        await _check_judges(training, spec)
    if isinstance(spec, OpdJob):
        await _check_teacher(training, spec, start)
    if isinstance(spec, DraftJob):
        await _of_this_base(training, spec.target_version, "target")


async def with_versions(training: TrainingServices, spec: TrainingSpec) -> TrainingSpec:
    """Looks up what the job's gates name, and puts versions in place of names.

    Raises:
        NotFound, ModelNotFound, AdapterRejected, InvalidRequest: see plan_gates, or a suite's scorer may not run.
    """
    digest = training.engines.served.info.digest
    plan = await training.threads.run(plan_gates, spec, training.suites, training.registry, digest, None)
    if plan is None:
        return spec
    for granted in training.engines.granted():
        plan.run.check_allowed(granted)
    return plan.pinned(spec)


async def _start(training: TrainingServices, spec: TrainingSpec) -> Manifest | None:
    """Manifest of the version that the job continues, as things stand now; None: a new adapter."""
    if spec.start_from == BASE:
        return None
    if spec.start_from is None:
        try:
            version = await training.threads.run(training.registry.current, spec.adapter)
        except ModelNotFound:
            return None
        return await _manifest(training, version, "adapter", spec.makes)
    try:
        name, number = parse_adapter_ref(spec.start_from)
    except InvalidRequest as error:
        raise InvalidRequest(f"start_from: {error.message}", param="start_from") from error
    if number is not None:
        return await _manifest(training, AdapterVersion(name, number), "start_from", spec.makes)
    try:
        version = await training.threads.run(training.registry.current, name)
    except TemperError as error:
        error.param = "start_from"
        raise
    return await _manifest(training, version, "start_from", spec.makes)


async def _check_start(training: TrainingServices, spec: TrainingSpec, start: Manifest | None) -> None:
    """Checks that the adapter to be trained has a shape that the engines serve, and is of their base model."""
    info = training.engines.served.info
    if start is None:
        if isinstance(spec, DraftJob):
            return
        if info.max_lora_rank and spec.lora.rank > info.max_lora_rank:
            default = "" if "rank" in spec.lora.model_fields_set else " by default"
            raise InvalidRequest(
                f"lora.rank is {spec.lora.rank}{default} and the engines take at most {info.max_lora_rank} "
                "(TEMPER_MAX_LORA_RANK): give a lower one",
                param="lora.rank",
            )
        return
    if start.base_digest and start.base_digest != info.digest:
        raise AdapterRejected(
            f"cannot continue from {start.ref}: it belongs to base model {start.base_digest[:12]}, the engines serve "
            f'{info.digest[:12]}; give start_from: "base" to start afresh',
            param="start_from",
        )
    if spec.lora.model_fields_set - {"seed"} and not isinstance(spec, DraftJob):
        config = await training.threads.run(training.registry.config, start.ref)
        names = {path.rsplit(".", 1)[1] for path in info.linear_layers} or TARGET_MODULES
        check_agrees(spec.lora, stated_shape(config), sorted(names))


async def _check_teacher(training: TrainingServices, spec: OpdJob, start: Manifest | None) -> None:
    """Checks that the teacher exists, and is another policy than the one that is to learn from it."""
    members = await _of_this_base(training, spec.teacher_version, "teacher")
    teacher = members[0] if isinstance(spec.teacher_version, AdapterVersion) else None
    same = spec.teacher == BASE if start is None else teacher is not None and start.digest == teacher.digest
    if same and await _starts_there(training, spec):
        raise InvalidRequest(
            f'nothing to learn: the policy that the job starts from is its teacher, "{spec.teacher}"; name another '
            "teacher, or start_from an adapter that is not the teacher",
            param="teacher",
        )


async def _check_judges(training: TrainingServices, spec: GrpoJob) -> None:
    """Checks that the judges of the job's completions exist."""
    for where, scorer in spec.scorers():
        if isinstance(scorer, JudgeSpec | TournamentReward):
            await _of_this_base(training, scorer.version, f"{where}.judge")


async def _of_this_base(training: TrainingServices, policy: Published | None, param: str) -> list[Manifest]:
    """Manifests of the versions of a policy, all of which the engines can answer with."""
    manifests = [await _manifest(training, version, param) for version in versions_of(policy)]
    digest = training.engines.served.info.digest
    for found in manifests:
        if found.base_digest and found.base_digest != digest:
            raise AdapterRejected(
                f"{param}: {found.ref} belongs to base model {found.base_digest[:12]}, the engines serve "
                f"{digest[:12]}: name a version of an adapter of this one",
                param=param,
            )
    return manifests


async def _starts_there(training: TrainingServices, spec: TrainingSpec) -> bool:
    """True if the version that the job continues is decided: the job names it, or no job in front of it publishes
    another one."""
    if spec.start_from is not None and (spec.start_from == BASE or "@" in spec.start_from):
        return True
    adapter = spec.start_from or spec.adapter
    unknown = Unreadable()
    waiting = [
        await training.queue.list(limit=1, state=state, adapter=adapter, pass_over=unknown)
        for state in (JobState.QUEUED, JobState.RUNNING)
    ]
    return not any(waiting) and not unknown


async def _check_samplers(training: TrainingServices, spec: GrpoJob) -> None:
    """Checks that the versions that sampled the rollouts exist."""
    samplers = await asyncio.to_thread(lambda: spec.sampled_by)  # the job may be large
    for version, where in samplers.items():
        try:
            await training.threads.run(training.registry.manifest, version)
        except ModelNotFound as error:
            said = "versions" if ".versions[" in where else "adapter"
            raise ModelNotFound(
                f"{where}: the rollout was sampled by {version}, which was never published or is deleted: sample "
                f"again, or leave `{said}` out",
                param=where,
            ) from error


def _check_webhook(settings: GatewaySettings, spec: TrainingSpec) -> None:
    """Checks that gateways may tell the job's own URL of its end."""
    if spec.webhook is not None and not settings.allows_webhook(spec.webhook):
        raise InvalidRequest(
            f"webhook: {spec.webhook!r} is not covered by TEMPER_WEBHOOK_ALLOW, which lists "
            f"{', '.join(settings.webhook_prefixes) or 'nothing'}: have a prefix of the URL listed there, or leave it "
            "out",
            param="webhook",
        )


def _check_scorers(granted: Sequence[Granted], spec: TrainingSpec) -> None:
    """Checks every scorer of the job against each engine that says what it allows."""
    for where, scorer in spec.scorers():
        for one in granted:
            scorer.check_allowed(where, one)


async def _manifest(
    training: TrainingServices, version: AdapterVersion, param: str, kind: Kind = "adapter"
) -> Manifest:
    """Manifest of a version of this kind."""
    try:
        manifest = await training.threads.run(training.registry.manifest, version)
        manifest.check_kind(kind)
    except TemperError as error:
        error.param = param
        raise
    return manifest
