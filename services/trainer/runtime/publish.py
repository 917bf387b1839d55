"""The end of a job: its adapter becomes a version, is attached, and is served. Every step may be repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.common.adapters.events import AdapterEvents
from services.common.adapters.events import EventKind as Nudge
from services.common.adapters.evidence import GateEvidence
from services.common.adapters.manifest import DatasetOrigin, Lineage
from services.common.adapters.names import AdapterVersion
from services.common.adapters.receipts import Receipt
from services.common.adapters.registry import AdapterRegistry, Manifest
from services.common.adapters.retention import RetentionPolicy, prune
from services.common.errors import Overloaded, TemperError, Unavailable
from services.common.queue.consumer import JobConsumer
from services.common.queue.records import finite
from services.trainer.host.policy_host import PolicyHost
from services.trainer.settings import TrainerSettings


class Publisher:
    """Publishes the results of jobs for one engine's base model.

    Args:
        sync_seconds: time for which a version may take to be served.
        key: signs receipts; None: they are not signed.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        events: AdapterEvents,
        host: PolicyHost,
        sync_seconds: float,
        key: Ed25519PrivateKey | None = None,
    ) -> None:
        self._registry = registry
        self._events = events
        self._host = host
        self._sync_seconds = sync_seconds
        self._key = key
        self._log = structlog.get_logger("trainer")

    def publish(
        self,
        adapter: str,
        job_id: str | None,
        files: Mapping[str, bytes],
        *,
        parent: AdapterVersion | None,
        lineage: Lineage | None = None,
        metrics: Mapping[str, float],
        gates: Sequence[GateEvidence] = (),
        dataset: DatasetOrigin | None = None,
        step: int | None = None,
        current: bool = True,
        receipt: Callable[[Manifest], Mapping[str, Any]] | None = None,
        fence: Callable[[], None],
    ) -> Manifest:
        """Makes the version; a repeated call returns the first one's. Raises Unavailable, and what ``fence`` raises.

        Args:
            receipt: makes the content of its receipt, which is signed here.
        """
        return self._registry.publish(
            adapter,
            files,
            base_digest=self._host.base_digest,
            job_id=job_id,
            parent=str(parent) if parent is not None else None,
            lineage=lineage,
            metrics=finite(metrics),
            gates=gates,
            dataset=dataset,
            step=step,
            current=current,
            receipt=None if receipt is None else lambda manifest: Receipt.sign(receipt(manifest), self._key),
            fence=fence,
        )

    def complete(self, manifest: Manifest, fence: Callable[[], None]) -> None:
        """Ends a publish that may have died between the manifest and the pointer. Raises like publish."""
        fence()
        self._registry.advance(manifest)

    def serve(self, manifest: Manifest, *, attach: bool, fence: Callable[[], None]) -> bool:
        """Attaches the version if asked and waits until the engine beside serves it; returns whether it is attached.

        Raises:
            Unavailable: the object store is away.
            AdapterRejected: the engine refuses the adapter.
        """
        version, attached = manifest.ref, False
        if attach:
            fence()
            attached = self._registry.attach(version, forward_only=True) == version
        self._nudge("attached" if attached else "published", version)
        try:
            # A drafter takes no slot: an engine that follows its name has it once the pointers are live.
            self._host.sync_adapters(version if manifest.kind == "adapter" else None, self._sync_seconds)
        except (Overloaded, Unavailable) as error:
            # The version is safe in the store and every engine polls: slow, or no free slot yet, is not lost.
            self._log.warning("adapter.sync_slow", adapter=str(version), error=str(error))
        return attached

    def _nudge(self, kind: Nudge, version: AdapterVersion) -> None:
        try:
            self._events.publish(kind, version)
        except TemperError as error:
            self._log.warning("adapter.nudge_failed", adapter=str(version), error=error.message)


class VersionRetention:
    """Applies the settings' retention policy. What fails is tried again after the next publish."""

    def __init__(self, settings: TrainerSettings, registry: AdapterRegistry, consumer: JobConsumer) -> None:
        keep, days = settings.adapter_versions_kept, settings.adapter_days_kept
        self._policy = None if keep is None and days is None else RetentionPolicy(keep, days)
        self._registry = registry
        self._consumer = consumer
        self._log = structlog.get_logger("trainer")

    def after_publish(self, adapter: str) -> list[str]:
        """Removes what the policy does not keep; returns the versions removed."""
        if self._policy is None:
            return []
        try:
            needed = self._consumer.versions_needed()
            pruned = prune(self._registry, adapter, self._policy, in_use=needed)
        except TemperError as error:
            self._log.warning("retention.skipped", adapter=adapter, error=error.message)
            return []
        return [str(manifest.ref) for manifest in pruned.removed]
