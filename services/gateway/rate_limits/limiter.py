"""The limits of callers: in Redis while it answers, else in this gateway's memory."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

from services.common.errors import InvalidRequest, RateLimited
from services.common.settings import CommonSettings
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.rate_limits.limits import Decision, Dimension, Level, Limits
from services.gateway.rate_limits.memory_limiter import MemoryLimiter
from services.gateway.rate_limits.redis_limiter import RedisLimiter


class RateLimiter:
    """Counts what callers do. For one asyncio loop; `start` before the first call.

    Every request is also counted here, so that without Redis the limits go on from what this gateway has seen.
    """

    def __init__(self, settings: CommonSettings, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._local = MemoryLimiter()
        self._shared = RedisLimiter(settings, metrics, self._local.leases)
        self._replica = uuid.uuid4().hex[:12]
        self._count = 0

    async def start(self) -> None:
        """Connects to Redis, if it is there now."""
        await self._shared.start()

    async def stop(self) -> None:
        await self._shared.stop()

    async def acquire(self, grant: Grant) -> None:
        """Counts a request.

        Raises:
            RateLimited: one of its caller's limits is reached; nothing was counted.
        """
        caller, limits = grant.caller, grant.limits
        decision = await self._shared.acquire(caller, limits, grant.lease)
        decided = decision is not None and decision.by is None
        if decision is None or decided:
            mine = self._local.acquire(caller, limits, grant.lease, _now(), force=decided)
            decision = decision or mine
        grant.seen(decision)
        if decision.by is not None:
            raise self._refusal(grant, decision)

    async def take(self, grant: Grant, tokens: int) -> None:
        """Reserves tokens for a request.

        Raises:
            InvalidRequest: more than its caller gets in a minute.
            RateLimited: not now.
        """
        limits, caller = grant.limits, grant.caller
        if tokens > limits.tokens_per_minute:
            raise InvalidRequest(
                f"prompt and completion may have {tokens} tokens together, and this API key's limit is "
                f"{limits.tokens_per_minute} tokens a minute: shorten the prompt, or lower max_tokens or n",
                param="max_tokens",
            )
        decision = await self._shared.take(caller, limits, tokens)
        taken = decision is not None and decision.by is None
        if decision is None or taken:
            mine = self._local.take(caller, limits, tokens, _now(), force=taken)
            decision = decision or mine
        grant.seen(decision)
        if decision.by is not None:
            raise self._refusal(grant, decision)

    def correct(self, grant: Grant, tokens: int) -> None:
        """Adds to what a request has reserved; negative: gives back."""
        if tokens:
            self._local.correct(grant.caller, grant.limits, tokens, _now())
            self._shared.correct(grant.caller, grant.limits, tokens)

    def release(self, grant: Grant) -> None:
        """A request is over."""
        self._local.release(grant.caller, grant.lease)
        if grant.limits.concurrent_requests:
            self._shared.release(grant.caller, grant.lease)

    def new_lease(self) -> str:
        """A name for a request that no other has."""
        self._count += 1
        return f"{self._replica}:{self._count}"

    def _refusal(self, grant: Grant, decision: Decision) -> RateLimited:
        dimension = decision.by or "requests"
        self._metrics.rate_limited.labels(dimension).inc()
        limits, seconds = grant.limits, decision.wait / 1e6
        what: dict[Dimension, str] = {
            "requests": f"{limits.requests_per_minute} requests a minute",
            "tokens": f"{limits.tokens_per_minute} tokens a minute",
            "concurrency": f"{limits.concurrent_requests} requests at a time",
        }
        return RateLimited(
            f"the limit of this API key is {what[dimension]}: try again in {_duration(decision.wait)}",
            retry_after=seconds,
        )


class Grant:
    """One request as its caller's limits see it. Releasing twice is harmless."""

    __slots__ = ("_held", "_quotas", "_requests", "_tokens", "caller", "lease", "limits")

    def __init__(self, quotas: RateLimiter, caller: str, limits: Limits) -> None:
        self.caller = caller
        self.limits = limits
        self.lease = quotas.new_lease()
        self._quotas = quotas
        self._requests: Level | None = None
        self._tokens: Level | None = None
        self._held = False

    async def acquire(self) -> None:
        """Counts it. Raises RateLimited."""
        if self.limits.any:
            await self._quotas.acquire(self)
            self._held = True

    def seen(self, decision: Decision) -> None:
        """Remembers the newest levels for the headers."""
        self._requests = decision.requests or self._requests
        self._tokens = decision.tokens or self._tokens

    async def take(self, tokens: int) -> None:
        """Reserves tokens. Raises InvalidRequest, RateLimited."""
        await self._quotas.take(self, tokens)

    def correct(self, tokens: int) -> None:
        """Adds to what was reserved; negative: gives back."""
        self._quotas.correct(self, tokens)

    def release(self) -> None:
        """The request is over."""
        if self._held:
            self._held = False
            self._quotas.release(self)

    def headers(self) -> Mapping[str, str]:
        """OpenAI's headers about the limits: https://platform.openai.com/docs/guides/rate-limits"""
        found: dict[str, str] = {}
        levels = (
            ("requests", self.limits.requests_per_minute, self._requests),
            ("tokens", self.limits.tokens_per_minute, self._tokens),
        )
        for name, limit, level in levels:
            if level is not None:
                found[f"x-ratelimit-limit-{name}"] = str(limit)
                found[f"x-ratelimit-remaining-{name}"] = str(level.remaining)
                found[f"x-ratelimit-reset-{name}"] = _duration(level.empty_in)
        return found


def _now() -> int:
    return time.monotonic_ns() // 1000


def _duration(microseconds: int) -> str:
    """Duration as OpenAI writes it: 20ms, 1.5s, 6m0s; rounded up."""
    milliseconds = -(-microseconds // 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
