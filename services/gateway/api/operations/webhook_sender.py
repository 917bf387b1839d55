"""Sender of webhooks: signed requests in the form of Standard Webhooks, to checked addresses, again and again.

https://www.standardwebhooks.com: `webhook-id` is the same at every attempt, `webhook-timestamp` the attempt's, and
`webhook-signature` has a "v1," and the base64 of HMAC-SHA256 over "{id}.{timestamp}.{body}" for each secret.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from dataclasses import dataclass, field

import httpx
import structlog

from services.common.adapters.registry import AdapterRegistry
from services.common.errors import Unavailable
from services.common.jobs.scorers.allowed_webhooks import webhook_parts
from services.common.security.destinations import Refused, checked_address
from services.common.security.outbound import proxy_for, tls_context
from services.common.security.webhook_signatures import signed_headers
from services.common.shutdown import cancel_and_wait
from services.common.storage.repeated import repeat
from services.gateway.core.file_store import StoreThreads
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.webhook_store import OLDEST_SECONDS, Attempt, Delivery, OutboxEvent, State, WebhookStore
from services.gateway.settings import GatewaySettings

_PAUSE_SECONDS = 1.0
_SWEEP_SECONDS = 10.0
"""Time between two looks at the pointers of adapters, by any gateway: for moves whose maker did not come to tell."""
_AT_ONCE = 32
"""Requests of one gateway at a time."""
_GROWTH, _LONGEST_SECONDS = 4.0, 6 * 3600.0
"""Factor between two pauses, and the longest one."""
log = structlog.get_logger("webhooks")


@dataclass(slots=True)
class WebhookSender:
    """Sends what is due, as long as the gateway runs; gateways share the work."""

    settings: GatewaySettings
    store: WebhookStore
    metrics: GatewayMetrics
    registry: AdapterRegistry
    threads: StoreThreads
    _seen: dict[str, str] = field(default_factory=dict)
    """Etags of the pointers whose moves are told."""
    _tls: ssl.SSLContext | None = field(init=False)
    """Trusted authorities, which take a while to read."""
    _task: asyncio.Task[None] | None = None
    _active: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._tls = tls_context(self.settings) if self.enabled else None

    @property
    def enabled(self) -> bool:
        """Whether this gateway sends anything: it has a secret to sign with, and somewhere to send to."""
        settings = self.settings
        if not settings.webhooks:
            return False
        return bool(settings.webhook_keys and (settings.webhook_endpoints or settings.webhook_prefixes))

    def start(self) -> None:
        """Begins, if it is enabled."""
        if self.enabled:
            self._task = asyncio.create_task(repeat(self.once, _PAUSE_SECONDS, log, "webhooks"))

    async def stop(self) -> None:
        """Ends at once. What is under way is sent again by another gateway."""
        for task in [task for task in (self._task, *self._active) if task is not None]:
            await cancel_and_wait(task)

    async def once(self) -> None:
        """Makes deliveries of what has happened, and begins to send those that are due. Raises Unavailable."""
        if await self.store.sweeps(_SWEEP_SECONDS):
            changes, etags = await self.threads.run(self.registry.changes, self._seen)
            await self.store.tell(changes)
            self._seen |= etags
        for event in await self.store.events(100):
            await self.store.make(event, self._urls(event))
        room = _AT_ONCE - len(self._active)
        if room <= 0:
            return
        # The lease outlives the attempt: nobody else sends it meanwhile.
        for delivery in await self.store.claim(room, 3 * self.settings.webhook_timeout_seconds + 10):
            task = asyncio.create_task(self._deliver(delivery))
            self._active.add(task)
            task.add_done_callback(self._active.discard)

    def _urls(self, event: OutboxEvent) -> list[str]:
        if time.time() - event.time > OLDEST_SECONDS:
            return []
        urls = dict.fromkeys(self.settings.webhook_endpoints)
        if event.url and self.settings.allows_webhook(event.url):
            urls[event.url] = None
        return list(urls)

    async def _deliver(self, delivery: Delivery) -> None:
        began, started = time.time(), time.monotonic()
        status, error, again = None, None, 0.0
        try:
            async with asyncio.timeout(self.settings.webhook_timeout_seconds):
                status, again = await self._send(delivery, int(began))
            if not 200 <= status < 300:
                error = f"answered with status {status}" + (
                    ", and redirects are not followed" if 300 <= status < 400 else ""
                )
        except TimeoutError:
            error = f"no answer within {self.settings.webhook_timeout_seconds:g} s"
        except (Refused, httpx.HTTPError, ValueError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"[:500]
        state: State = "delivered" if error is None else "pending"
        if state == "pending" and (status == 410 or delivery.attempts + 1 >= self.settings.webhook_attempts):
            state = "failed"
        took = round(time.monotonic() - started, 3)
        attempt = Attempt(at=round(began, 3), status=status, error=error, seconds=took)
        outcome = {"delivered": "delivered", "pending": "retried", "failed": "failed"}[state]
        self.metrics.webhook_deliveries.labels(outcome).inc()
        write = log.info if error is None else log.warning
        write(f"webhook.{outcome}", delivery=delivery.id, type=delivery.type, url=delivery.url, error=error)
        try:
            await self.store.settle(delivery.id, state, attempt, max(again, self._pause(delivery.attempts)))
        except Unavailable as failure:  # it is sent once more when the claim has run out
            log.warning("webhook.unsettled", delivery=delivery.id, error=failure.message)

    async def _send(self, delivery: Delivery, timestamp: int) -> tuple[int, float]:
        """Status of the answer, and the pause in seconds that it asks for."""
        settings, url = self.settings, delivery.url
        scheme, host, port, _ = webhook_parts(url)
        address = await checked_address(host, port, private=settings.webhook_private)
        body = delivery.body.encode()
        headers = {
            **signed_headers(settings.webhook_keys, delivery.event, timestamp, body),
            "content-type": "application/json",
            "user-agent": "temper",
        }
        proxy = proxy_for(settings, url)
        target = httpx.URL(url)
        if proxy is None:
            # To the address that was checked; the name stays in Host and in TLS.
            headers["host"] = target.netloc.decode()
            target = target.copy_with(scheme=scheme, host=address, port=port)
        # trust_env: proxies and .netrc of the environment are nobody's choice for this.
        async with (
            httpx.AsyncClient(
                follow_redirects=False,
                trust_env=False,
                verify=self._tls or True,
                proxy=proxy,
                timeout=settings.webhook_timeout_seconds,
            ) as client,
            # Of the answer only the head is read.
            client.stream("POST", target, content=body, headers=headers, extensions={"sni_hostname": host}) as answer,
        ):
            asked = answer.headers.get("retry-after", "")
            wait = min(float(asked), _LONGEST_SECONDS) if asked.isascii() and asked.isdigit() else 0.0
            return answer.status_code, wait

    def _pause(self, attempts: int) -> float:
        longest = min(self.settings.webhook_retry_seconds * _GROWTH**attempts, _LONGEST_SECONDS)
        return longest * random.uniform(0.75, 1.0)
