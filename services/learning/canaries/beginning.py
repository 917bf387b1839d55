"""Beginning of a canary: what it would be compared with, and whether it can be at all."""

from __future__ import annotations

import asyncio

from services.common.adapters.names import BASE, AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import AdapterRejected, Conflict, ModelNotFound, NotFound
from services.learning.canaries.policy import CanaryPolicy
from services.learning.canaries.record import CanaryRecord, NewCanary, new_canary_id
from services.learning.canaries.store import CanaryStore


async def begin_canary(
    store: CanaryStore,
    registry: AdapterRegistry,
    candidate: AdapterVersion,
    policy: CanaryPolicy,
    *,
    canary_id: str | None = None,
    owner: str = "",
    origin: str = "",
    base_digest: str = "",
) -> CanaryRecord:
    """Begins a canary of a version against the adapter's current one, or of its first version against the base model.

    Args:
        canary_id: by which beginning it again returns the same; None: a new one.
        owner: id of the API key.
        origin: learner that begins it.
        base_digest: of the model that the engines serve; empty: not known.

    Raises:
        ModelNotFound: there is no such version.
        AdapterRejected: it belongs to another base model.
        Conflict: it is current, the adapter has a canary already, or no request would take part.
        Unavailable: Redis or the object store is away.
    """
    if canary_id is not None:
        try:
            return await store.get(canary_id)
        except NotFound:
            pass
    new = await asyncio.to_thread(_compared, registry, candidate, policy, base_digest)
    named = {"id": canary_id or new_canary_id(), "owner": owner, "origin": origin}
    return await store.begin(new.model_copy(update=named))


def _compared(
    registry: AdapterRegistry, candidate: AdapterVersion, policy: CanaryPolicy, base_digest: str
) -> NewCanary:
    manifest = registry.manifest(candidate)
    manifest.check_adapter("version")
    if base_digest and manifest.base_digest and manifest.base_digest != base_digest:
        raise AdapterRejected(
            f"{candidate} belongs to base model {manifest.base_digest[:12]}, the engines serve {base_digest[:12]}",
            param="version",
        )
    current = current_version(registry, candidate.name)
    if candidate == current:
        raise Conflict(
            f"{candidate} is current already: publish a candidate with `candidate: true` in its job, or roll the "
            "adapter back first",
            param="version",
        )
    attached = registry.attached()
    if current is None and attached is not None:
        raise Conflict(
            f"{candidate.name} has no current version, and {attached} is attached to the base model: no request would "
            "take part",
            param="adapter",
        )
    return NewCanary(
        id="",
        adapter=candidate.name,
        current=BASE if current is None else str(current),
        candidate=str(candidate),
        attached=attached == current,
        policy=policy,
    )


def current_version(registry: AdapterRegistry, name: str) -> AdapterVersion | None:
    """The adapter's current version; None: it has none yet."""
    try:
        return registry.current(name)
    except ModelNotFound:
        return None
