"""How many batches a key may have."""

from __future__ import annotations

from services.common.errors import RateLimited
from services.gateway.api.batches.dependencies import BatchServices


async def check_unfinished(stores: BatchServices, owner: str) -> None:
    """Raises RateLimited: so many batches of an owner, of whatever kind, have not ended that there may be no more."""
    most = stores.settings.batch_max_unfinished
    if await stores.batches.unfinished(owner, most=most) >= most:
        raise RateLimited(
            f"{most} batches have not ended, which is the limit: wait for one, or cancel one", retry_after=30.0
        )
