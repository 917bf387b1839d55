"""/v1/webhook_deliveries: what was sent to webhooks, and how each attempt went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Query

from services.gateway.api.base.routing import Routes, provided
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.auth.route_permissions import ADMIN, Permission
from services.gateway.core.webhook_store import Delivery, State, WebhookStore
from services.gateway.protocol.fields.listing import Listing

routes = Routes("webhooks")


@dataclass(frozen=True, slots=True)
class WebhookServices:
    """Store of deliveries."""

    store: WebhookStore


Webhooks = Annotated[WebhookServices, provided(WebhookServices)]


class DeliveryList(Listing):
    """A page of deliveries, newest first."""

    object: Literal["list"] = "list"
    data: list[Delivery]
    has_more: bool


@routes.get("/v1/webhook_deliveries", Permission(ADMIN))
async def list_deliveries(
    webhooks: Webhooks,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=64)] = None,
    state: State | None = None,
) -> DeliveryList:
    """Deliveries, newest first; `after` is the last id of the page before."""
    unreadable = Unreadable()
    found = await webhooks.store.list(limit=limit + 1, after=after, state=state, pass_over=unreadable)
    return DeliveryList(data=found[:limit], has_more=len(found) > limit, unreadable=unreadable)


@routes.get("/v1/webhook_deliveries/{delivery_id}", Permission(ADMIN))
async def get_delivery(delivery_id: str, webhooks: Webhooks) -> Delivery:
    """One delivery with its attempts."""
    return await webhooks.store.get(delivery_id)


@routes.post("/v1/webhook_deliveries/{delivery_id}/resend", Permission(ADMIN, audited=True))
async def resend_delivery(delivery_id: str, webhooks: Webhooks) -> Delivery:
    """Sends an event once more, as the same event, beginning at once."""
    return await webhooks.store.resend(delivery_id)
