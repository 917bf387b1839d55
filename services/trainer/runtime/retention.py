"""Removes old versions of an adapter after a job has published a new one, if the settings say what to keep."""

from __future__ import annotations

import structlog

from services.common.adapters.registry import AdapterRegistry
from services.common.adapters.retention import RetentionPolicy, prune
from services.common.errors import TemperError
from services.common.queue.consumer import JobConsumer
from services.trainer.settings import TrainerSettings


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
