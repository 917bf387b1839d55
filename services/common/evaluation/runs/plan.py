"""Plan of a run: what a job names is looked up, and every name becomes a version. The gateway refuses by it what cannot
run, and the runner begins with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from services.common.adapters.composition import Composition, parse_composition
from services.common.adapters.manifest import Manifest
from services.common.adapters.names import BASE, AdapterVersion, parse_adapter_ref
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import AdapterRejected, InvalidRequest, TemperError
from services.common.evaluation.runs.records import RunRecord, RunSuite, RunTarget
from services.common.evaluation.suites.manifest import SuiteManifest
from services.common.evaluation.suites.names import parse_suite_ref
from services.common.evaluation.suites.spec import SuiteSampling, SuiteSettings
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs.kinds.evaluate import EvalJob, EvalSampling, RemoteTarget, Target
from services.common.jobs.scorers.allowed_webhooks import check_covered
from services.common.jobs.scorers.grants import Granted
from services.common.jobs.scorers.judge import JudgeSpec
from services.common.jobs.scorers.of_suites.likelihood import ChoiceSpec, PerplexitySpec


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A job with everything that it names."""

    job: EvalJob
    """The job with a version in place of every name."""
    suites: Sequence[SuiteManifest]
    adapters: Sequence[Sequence[Manifest]]
    """Manifests of each target, of a composition one for each member; none: the base, or a model of another server."""

    @property
    def versions(self) -> list[AdapterVersion]:
        """Versions of adapters that are targets, or members of one."""
        return list(dict.fromkeys(manifest.ref for manifests in self.adapters for manifest in manifests))

    def check_allowed(self, granted: Granted) -> None:
        """Checks what the run uses against what an engine allows.

        Raises:
            InvalidRequest: the engine may not send there, or not run programs.
        """
        for place, suite in enumerate(self.suites):
            suite.settings.scorer.check_allowed(f"suites[{place}].scorer", granted)
        for place, target in enumerate(self.job.targets):
            if isinstance(target, RemoteTarget):
                check_covered(target.url, f"targets[{place}]", granted.prefixes)

    def record(
        self,
        run: str,
        base_digest: str,
        *,
        key_id: str,
        created_at: float,
        job: str | None = None,
        more: Sequence[RunTarget] = (),
    ) -> RunRecord:
        """Record of the run.

        Args:
            job: see RunRecord.
            more: targets behind those of the plan.
        """
        suites = [
            RunSuite(
                suite=str(suite.ref),
                digest=suite.digest,
                items=suite.items,
                scorer=suite.settings.scorer.name,
                better=suite.settings.scorer.better,
                sampling=sampling_of(suite.settings, self.job.sampling),
            )
            for suite in self.suites
        ]
        targets = [
            RunTarget(name=str(target), digest=_digest(str(target), manifests))
            for target, manifests in zip(self.job.targets, self.adapters, strict=True)
        ]
        return RunRecord(
            id=run,
            suites=tuple(suites),
            targets=(*targets, *more),
            seed=self.job.seed,
            base_digest=base_digest,
            metadata=self.job.metadata,
            job=job,
            key_id=key_id,
            created_at=created_at,
        )


def plan_run(job: EvalJob, suites: SuiteStore, registry: AdapterRegistry, base_digest: str) -> RunPlan:
    """Looks up what a job names. Blocking.

    Raises:
        NotFound, ModelNotFound: a suite, a version or a judge does not exist; ``param`` names the field.
        AdapterRejected: a version belongs to another base model than ``base_digest``.
        InvalidRequest: a suite cannot be sampled as the job says, or needs what a target does not give.
        Unavailable: the object store is away.
    """
    manifests = []
    for place, ref in enumerate(job.suites):
        field = f"suites[{place}]"
        try:
            manifests.append(suites.get(*parse_suite_ref(ref)))
        except TemperError as error:
            error.param = field
            raise
        _check_suite(job, manifests[-1], field)
        scorer = manifests[-1].settings.scorer
        if isinstance(scorer, JudgeSpec):
            resolved(scorer.judge, registry, base_digest, field)
    targets: list[Target] = []
    adapters: list[Sequence[Manifest]] = []
    for place, target in enumerate(job.targets):
        if isinstance(target, RemoteTarget):
            targets.append(target)
            adapters.append(())
            continue
        name, found = resolved(target, registry, base_digest, f"targets[{place}]")
        targets.append(name)
        adapters.append(found)
    pinned = job.model_copy(
        update={
            "suites": [str(manifest.ref) for manifest in manifests],
            "targets": targets,
        }
    )
    _check_twins(pinned)
    return RunPlan(pinned, manifests, adapters)


def _check_twins(job: EvalJob) -> None:
    """Two names may be one version."""
    for field, names in (("suites", job.suites), ("targets", [str(target) for target in job.targets])):
        for name in names:
            if names.count(name) > 1:
                raise InvalidRequest(f"{name} is among the {field} more than once: leave it out", param=field)


def sampling_of(settings: SuiteSettings, changes: EvalSampling) -> SuiteSampling:
    """Sampling of a suite's answers in a run. Raises InvalidRequest: the changes do not go with the suite's scores."""
    if isinstance(settings.scorer, ChoiceSpec | PerplexitySpec):
        return settings.sampling
    given = {name: value for name, value in changes.model_dump().items() if value is not None}
    try:
        return SuiteSampling.model_validate(settings.sampling.model_dump() | given)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"sampling: {reason}", param="sampling") from error


def _check_suite(job: EvalJob, suite: SuiteManifest, field: str) -> None:
    sampling_of(suite.settings, job.sampling)
    if isinstance(suite.settings.scorer, ChoiceSpec | PerplexitySpec) and suite.settings.prompt_format == "chat":
        for target in job.targets:
            if isinstance(target, RemoteTarget):
                raise InvalidRequest(
                    f"{field}: {suite.ref} is scored by log-likelihoods behind conversations, and how {target} writes "
                    'those is not known: run it on targets of this server, or make a suite with prompt_format "raw"',
                    param=field,
                )


def resolved(text: str, registry: AdapterRegistry, base_digest: str, field: str) -> tuple[str, Sequence[Manifest]]:
    """What may answer ("base", a version, or several together) with versions in place of its names, and their manifests
    in the order of its members. Blocking.

    Raises:
        ModelNotFound: a version does not exist; ``param`` is ``field``.
        AdapterRejected: one belongs to another base model than ``base_digest``.
        Unavailable: the object store is away.
    """
    if text == BASE:
        return text, ()
    members = parse_composition(text).members
    found = {one: _adapter(one.ref, registry, base_digest, field) for one in members}
    fixed = Composition(tuple(replace(one, version=manifest.version) for one, manifest in found.items()))
    manifests = {manifest.ref: manifest for manifest in found.values()}
    return str(fixed), [manifests[version] for version in fixed.versions]


def _digest(target: str, manifests: Sequence[Manifest]) -> str | None:
    if not manifests:
        return None
    composition = parse_composition(target)
    digests = [manifest.digest for manifest in manifests]
    return composition.digest(digests) if composition.single is None else digests[0]


def _adapter(ref: str, registry: AdapterRegistry, base_digest: str, field: str) -> Manifest:
    try:
        name, number = parse_adapter_ref(ref)
        version = registry.current(name) if number is None else AdapterVersion(name, number)
        manifest = registry.manifest(version)
        manifest.check_adapter()
    except TemperError as error:
        error.param = field
        raise
    if manifest.base_digest and manifest.base_digest != base_digest:
        raise AdapterRejected(
            f"{field}: {manifest.ref} belongs to base model {manifest.base_digest[:12]}, the engines serve "
            f"{base_digest[:12]}",
            param=field,
        )
    return manifest
