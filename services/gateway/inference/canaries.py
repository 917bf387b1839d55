"""Canaries as one gateway knows them: which requests take part, and what it has counted of their answers.

What runs is read several times a second, so that a begin, a promotion and a rollback hold everywhere within one. While
Redis is away, or nobody looks at a canary, all requests get the current version: without guardrails no candidates.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from services.common.adapters.names import BASE
from services.common.errors import TemperError, Unavailable
from services.common.shutdown import cancel_and_wait
from services.common.storage.repeated import repeat
from services.gateway.auth.caller import owner
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.inference.engine_request import policy_ref
from services.gateway.protocol.fields.sampling import SamplingFields
from services.learning.canaries.answers import Counts, counts_json
from services.learning.canaries.enrolment import Enrolment, enrol
from services.learning.canaries.record import CanaryRecord
from services.learning.canaries.store import UNWATCHED_SECONDS, CanaryStore, Route

_POLL_SECONDS = 0.2
_COUNTS_SECONDS = 0.5
_SESSIONS = 100_000
"""Sessions of a canary that one gateway remembers to have told."""
_AWAY_SECONDS = 3.0
"""Time without news after which all requests get the current version."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KnownAs:
    """The id that clients know an answer by, where it is another than the generation's, and the arm that it tells."""

    id: str
    enrolment: Enrolment | None


class Canaries:
    """Canaries of one gateway. Used from its event loop only.

    Args:
        store: where they are kept.
        served_model_name: the base model's name.
        metrics: all series.
    """

    def __init__(self, store: CanaryStore, served_model_name: str, metrics: GatewayMetrics) -> None:
        self._store = store
        self._served_model_name = served_model_name
        self._metrics = metrics
        self._gateway = secrets.token_hex(8)
        self._routes: Mapping[str, Route] = {}
        """Adapter → its canary."""
        self._of_base: Route | None = None
        """Canary that requests for the base model's name take part in."""
        self._heard = 0.0
        self._told = time.monotonic()
        self._counts: dict[str, dict[str, Counts]] = {}
        """Canary → arm → what was counted here since the gateway began."""
        self._sessions: dict[str, set[str]] = {}
        """Canary → marks of sessions that had an answer here, as far as they are remembered here."""
        self._new_sessions: dict[str, set[str]] = {}
        """Those that are not told yet."""
        self._untold: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to follow what runs."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Tells the last counts, too."""
        if self._task is not None:
            await cancel_and_wait(self._task, again_seconds=1.0)
        await self._tell()

    def enrol(self, body: SamplingFields, session: str | None) -> Enrolment | None:
        """Part of a request in a canary; None: it has none, as no composition of adapters has: what its answers say of
        one member is not known. Raises nothing: what is wrong with a request is told elsewhere."""
        if not self._routes or time.monotonic() - self._heard > _AWAY_SECONDS:
            return None
        try:
            ref = policy_ref(body, served_model_name=self._served_model_name)
        except TemperError:
            return None
        route = None
        if ref.attached:
            route = self._of_base
        elif ref.HasField("named") and not ref.named.version:
            route = self._routes.get(ref.named.name)
            if route is not None and route.current == BASE:  # without a version of its own the name answers nobody
                route = None
        return None if route is None else enrol(route, owner(), session, body.user)

    def count(self, enrolment: Enrolment, outcome: str, counts: Counts) -> None:
        """Counts an answer.

        Args:
            outcome: finish reason, or "error".
        """
        route, arm = enrolment.route, enrolment.arm
        self._metrics.canary_answers.labels(route.adapter, arm, outcome).inc()
        self._counts.setdefault(route.id, {}).setdefault(arm, Counts()).add(counts)
        self._untold.add(route.id)
        if enrolment.session is not None and outcome != "error":
            known = self._sessions.setdefault(route.id, set())
            if enrolment.session not in known:
                if len(known) < _SESSIONS:
                    known.add(enrolment.session)
                self._new_sessions.setdefault(route.id, set()).add(enrolment.session)

    def ended(self, record: CanaryRecord) -> None:
        """Counts the end of a canary."""
        reason = "" if record.decision is None else record.decision.reason
        self._metrics.canaries_ended.labels(record.state, reason).inc()

    async def _follow(self) -> None:
        await repeat(self._once, _POLL_SECONDS, log, "canaries")

    async def _once(self) -> None:
        await self._poll()
        if self._untold and time.monotonic() - self._told > _COUNTS_SECONDS:
            self._told = time.monotonic()
            await self._tell()

    async def _poll(self) -> None:
        asked = time.monotonic()
        try:
            ages = await self._store.routes()
        except Unavailable as error:
            if self._routes:
                log.warning("canaries are not known: all requests get the current version", error=error.message)
            self._take({})
            return
        self._heard = asked
        self._metrics.canaries.set(len(ages))
        self._metrics.canary_look_age.set(max(ages.values(), default=0.0))
        self._take({route.adapter: route for route, age in ages.items() if age < UNWATCHED_SECONDS})
        running = {route.id for route in ages}
        for gone in self._counts.keys() - running - self._untold:
            del self._counts[gone]
            self._sessions.pop(gone, None)

    def _take(self, routes: Mapping[str, Route]) -> None:
        self._of_base = next((route for route in routes.values() if route.attached), None)
        self._routes = routes

    async def _tell(self) -> None:
        """Keeps what was counted, as sums since the gateway began: told twice, it is the same."""
        for canary_id in tuple(self._untold):
            self._untold.discard(canary_id)
            sessions = self._new_sessions.pop(canary_id, set())
            try:
                await self._store.answered(canary_id, list(sessions))
                await self._store.count(canary_id, self._gateway, counts_json(self._counts[canary_id]))
            except Unavailable as error:
                self._untold.add(canary_id)
                self._new_sessions.setdefault(canary_id, set()).update(sessions)
                log.warning("counts of a canary wait", canary=canary_id, error=error.message)
                return
