"""Parents of a job's result: the version to continue, or the versions to merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.common.adapters.names import BASE, AdapterVersion, parse_adapter_ref, parse_adapter_version
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import AdapterRejected, InvalidRequest, ModelNotFound
from services.common.jobs import GrpoJob, MergeJob, PublishingSpec
from services.common.queue.consumer import ClaimedJob, JobConsumer

T = TypeVar("T")
_NAMED = 5
"""Versions that a message lists."""


class Retry(Protocol):
    """Repeats an operation while a store is away."""

    def __call__(self, operation: Callable[[], T], /) -> T: ...


@dataclass(frozen=True, slots=True)
class ParentVersion:
    """One version that a job starts from."""

    version: AdapterVersion
    digest: str
    """Digest of its weights."""
    files: Mapping[str, bytes]


class ParentVersions:
    """Decides what a job starts from at its first attempt, keeps to it at every later one, and reads the files."""

    def __init__(self, registry: AdapterRegistry, consumer: JobConsumer, base_digest: str) -> None:
        self._registry = registry
        self._consumer = consumer
        self._base_digest = base_digest

    def read(self, claimed: ClaimedJob, spec: PublishingSpec, retry: Retry) -> list[ParentVersion]:
        """Reads what the job starts from, in the order of a merge's sources; none for a new adapter.

        Raises:
            ModelNotFound, InvalidRequest: the job names a version that does not exist or is malformed.
            AdapterRejected: it is corrupt, or belongs to another base model.
        """
        return [self._read(version, spec, retry) for version in self._resolve(claimed, spec, retry)]

    def _resolve(self, claimed: ClaimedJob, spec: PublishingSpec, retry: Retry) -> list[AdapterVersion]:
        recorded, refs = retry(lambda: self._consumer.recorded_parent(claimed))
        if not recorded:
            found = retry(lambda: resolve(spec, self._registry))
            text = ",".join(str(version) for version in found)
            refs = retry(lambda: self._consumer.resolve_parent(claimed, text or None))
        return [parse_adapter_version(ref) for ref in (refs or "").split(",") if ref]

    def _read(self, version: AdapterVersion, spec: PublishingSpec, retry: Retry) -> ParentVersion:
        manifest = retry(lambda: self._registry.manifest(version))
        manifest.check_kind(spec.makes, "sources" if isinstance(spec, MergeJob) else "start_from")
        if manifest.base_digest != self._base_digest:
            merge = isinstance(spec, MergeJob)
            way_out = "merge versions of one base model" if merge else 'give start_from: "base" to start afresh'
            raise AdapterRejected(
                f"cannot {'merge' if merge else 'continue from'} {version}: it belongs to base model "
                f"{manifest.base_digest[:12]}, this engine serves {self._base_digest[:12]}; {way_out}",
                param="sources" if merge else "start_from",
            )
        return ParentVersion(version, manifest.digest, retry(lambda: self._registry.files(version)))


def resolve(spec: PublishingSpec, registry: AdapterRegistry) -> list[AdapterVersion]:
    """The versions that a job names, as they are now.

    Raises:
        ModelNotFound: one of them does not exist, or a version that rollouts name never did.
        InvalidRequest: a name is malformed, or two sources of a merge are the same version.
    """
    if isinstance(spec, MergeJob):
        versions = [_existing(source.adapter, registry) for source in spec.sources]
        for version in versions:
            if versions.count(version) > 1:
                raise InvalidRequest(
                    f"{version} is among the sources more than once: add its weights up", param="sources"
                )
        return versions
    if isinstance(spec, GrpoJob):
        # Those that were deleted since the job was submitted are let pass: their log-probabilities are in the job.
        for version, field in spec.sampled_by.items():
            if not registry.was_published(version):
                raise ModelNotFound(f"{field}: {version} was never published", param=field)
    if spec.start_from is None:
        try:
            return [registry.current(spec.adapter)]
        except ModelNotFound:
            return []
    return [] if spec.start_from == BASE else [_existing(spec.start_from, registry)]


def _existing(ref: str, registry: AdapterRegistry) -> AdapterVersion:
    name, number = parse_adapter_ref(ref)
    return registry.current(name) if number is None else registry.manifest(AdapterVersion(name, number)).ref


def continued(spec: PublishingSpec, parents: Sequence[ParentVersion]) -> str | None:
    """Note of a job that continues a version without having named it; None: it begins a new adapter, or names it."""
    if isinstance(spec, MergeJob) or spec.start_from is not None or not parents:
        return None
    return (
        f"goes on from {parents[0].version}, the current version of {spec.adapter}; for a fresh start give another "
        'adapter name, or start_from "base"'
    )


def sampled_elsewhere(spec: PublishingSpec, parents: Sequence[ParentVersion]) -> str | None:
    """Note of a job some of whose rollouts were sampled by another policy than the one it continues; None: there are
    none, or the rollouts do not say who sampled them."""
    if not isinstance(spec, GrpoJob):
        return None
    start = str(parents[0].version) if parents else BASE
    named = [name for group in spec.groups or () for _, name in group.samplers]
    others = sorted({name for name in named if name != start})
    if not others:
        return None
    count = sum(name != start for name in named)
    listed = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
    return (
        f"{count} of {len(named)} rollouts that say who sampled them come from {listed}, and the job continues {start}"
    )
