"""All engines: which there are, which are ready, and which one gets a request."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence

import structlog

from services.common.errors import Unavailable
from services.common.jobs.scorers.grants import Granted
from services.common.pb import engine_pb2
from services.common.security.tls import Certificates
from services.common.shutdown import ASLEEP
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.engines.certificate_rotation import CertificateRotation
from services.gateway.engines.channel import Channels
from services.gateway.engines.circuit_breaker import BreakerPolicy
from services.gateway.engines.client import EngineClient
from services.gateway.engines.discovery import Discovery, Resolve, resolve
from services.gateway.engines.load_balancing import Affinity, Route, choose
from services.gateway.engines.request_group import RequestGroup
from services.gateway.engines.served_model import ModelAgreement, ServedModel
from services.gateway.engines.update_queue import FairWaker
from services.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

_REAP_SECONDS = 1.0
"""Between two looks at engines that discovery does not name any more."""


class EnginePool:
    """The engines that the settings name, and those that a name in them stands for now.

    Args:
        settings: addresses, intervals and limits.
        metrics: where routing is counted.
        ask: the resolver.
        certificates: for TLS to the engines; None: plaintext.
        channels: opens connections to engines; None: over gRPC, as settings and certificates say.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        ask: Resolve = resolve,
        certificates: Certificates | None = None,
        channels: Channels | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self.created = int(time.time())
        self.waker = FairWaker()
        self._agreement = ModelAgreement(lambda: self.clients)
        self._breaker = BreakerPolicy(
            settings.breaker_failures,
            settings.breaker_window_seconds,
            settings.breaker_open_seconds,
            settings.breaker_open_max_seconds,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[str, asyncio.Task[None]] = {}
        self._last_ready = float("-inf")
        self._ending: str | None = None
        """Reason why no request is sent any more; None: requests are."""
        self._waiters: set[asyncio.Future[None]] = set()
        self.waiting = 0
        """Requests that wait until an engine has started."""
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        """The address that each client's session (its owner's) is at, least recently used first."""
        self._discovery = Discovery(settings.engine_targets, settings.engines_dns_seconds, self._members, ask)
        self._channels = channels or Channels(
            certificates, settings.grpc_tls_server_name, traced=bool(settings.otlp_endpoint)
        )
        # In the order given: the dictionary keeps it.
        self._clients = {
            target.address: self._new_client(target.address) for target in settings.engine_targets if not target.dns
        }
        self._renewal: CertificateRotation | None = None
        if certificates is not None:
            self._renewal = CertificateRotation(certificates, self._clients, self._connections, self._new_client)

    @property
    def clients(self) -> tuple[EngineClient, ...]:
        """All engines as of now, those that are leaving included."""
        return tuple(self._clients.values())

    @property
    def only(self) -> EngineClient | None:
        """The engine of a gateway whose settings give the address of one, and nothing else."""
        targets = self._settings.engine_targets
        return self._clients[targets[0].address] if len(targets) == 1 and not targets[0].dns else None

    def granted(self) -> list[Granted]:
        """What each engine that says so lets scorers of jobs use: any of them may take a job."""
        said = [client.model.webhooks for client in self.clients if client.model and client.model.HasField("webhooks")]
        return [Granted(webhooks.allowed, webhooks.signed, webhooks.sandbox) for webhooks in said]

    # -- life

    def start(self) -> None:
        """Begins to look for engines and to connect; returns at once."""
        for client in self.clients:
            self._connect(client)
        for work, name in ((self._discovery.run(), "discovery"), (self._reap(), "reaper")):
            self._tasks.add(asyncio.create_task(work, name=name))
        if self._renewal is not None:
            self._tasks.add(asyncio.create_task(self._renewal.run(), name="renewal"))

    async def stop(self) -> None:
        """Closes all connections; requests that still run are aborted by their engines."""
        tasks = [*self._tasks, *self._connections.values()]
        for client in (*self.clients, *(self._renewal.retired if self._renewal is not None else ())):
            client.patience = 0.0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _new_client(self, address: str) -> EngineClient:
        return EngineClient(
            address,
            status_interval=self._settings.status_interval_seconds,
            stale_after=self._settings.status_timeout_seconds,
            prefix_blocks=self._settings.prefix_index_blocks,
            breaker=self._breaker,
            on_model=self._agreement.accept,
            on_change=self._wake,
            channels=self._channels,
        )

    def _connect(self, client: EngineClient) -> None:
        self._connections[client.address] = asyncio.create_task(client.run(), name=f"engine {client.address}")

    def _members(self, addresses: frozenset[str]) -> None:
        """Discovery has found others than before: new ones are connected, missing ones get nothing new."""
        now = asyncio.get_running_loop().time()
        for address in sorted(addresses - self._clients.keys()):
            log.info("engine found", engine=address)
            self._clients[address] = client = self._new_client(address)
            self._connect(client)
        for client in self.clients:
            if client.address in addresses:
                client.leaving_since = None
            elif client.leaving_since is None:
                log.info("engine is not named any more, it gets nothing new", engine=client.address)
                client.leaving_since = now
        self._wake()

    async def _reap(self) -> None:
        """Lets engines go that discovery does not name any more, once nothing of theirs is left to finish."""
        while True:
            await asyncio.sleep(_REAP_SECONDS)
            # One that is back soon keeps its connection, and a training session in it its name.
            before = asyncio.get_running_loop().time() - self._settings.engine_retry_seconds
            for client in self.clients:
                if client.leaving_since is not None and client.leaving_since < before and client.idle:
                    log.info("engine left", engine=client.address)
                    del self._clients[client.address]
                    connection = self._connections.pop(client.address)
                    connection.cancel()
                    await asyncio.wait([connection])

    # -- facts

    @property
    def ready(self) -> bool:
        """True if at least one engine takes requests."""
        return any(client.ready for client in self.clients)

    @property
    def served(self) -> ServedModel:
        """The model.

        Raises:
            Unavailable: no engine has been reached yet.
        """
        if self._agreement.served is None:
            reasons = "; ".join(f"{client.address}: {client.last_error}" for client in self.clients)
            raise Unavailable(
                f"no engine has been reached yet ({reasons or 'TEMPER_ENGINES names none'})", retry_after=2
            )
        return self._agreement.served

    @property
    def info(self) -> engine_pb2.Model | None:
        """The model's facts, if an engine has been reached."""
        return None if self._agreement.served is None else self._agreement.served.info

    @property
    def attached(self) -> str | None:
        """The version attached to the base model's name, as a ready engine reports it."""
        for client in self.clients:
            if client.status is not None:
                return client.status.attached_adapter or None
        return None

    def _wake(self) -> None:
        if self.ready:
            self._last_ready = asyncio.get_running_loop().time()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- requests

    async def pick(
        self, route: Route, affinity: Affinity, *, avoid: frozenset[EngineClient], deadline: float
    ) -> EngineClient:
        """An engine for a request. Waits for one until ``deadline`` (loop time) if one was ready a short while ago.

        Args:
            route: what matters of the request.
            affinity: what its client says.
            avoid: engines that are asked only if there is no other.

        Raises:
            Unavailable: there is none.
        """
        loop = asyncio.get_running_loop()
        while True:
            if self._ending is not None:
                raise Unavailable(self._ending, retry_after=1.0)
            usable = self._usable(composes=route.composed)
            if usable:
                return self._choose([c for c in usable if c not in avoid] or usable, route, affinity)
            if route.composed and self._usable():
                raise Unavailable(
                    "the engines are of an earlier release, which composes no adapters: upgrade them, or name one"
                )
            now = loop.time()
            if now >= deadline or now - self._last_ready > self._settings.engine_retry_seconds:
                why = f": {ASLEEP}" if self._asleep else ""
                raise Unavailable(f"no engine is ready to take requests{why}", retry_after=2.0)
            await self._changed(deadline - now)

    def joined(self, client: EngineClient, route: Route) -> bool:
        """Counts a request that goes where other choices of its prompt are; False: that engine may be given none."""
        if usable := self._ending is None and client in self._usable(composes=route.composed):
            self._metrics.routed.labels("choices").inc()
        return usable

    async def started(self, patience: float) -> None:
        """Returns when an engine is ready, sleeps, the gateway ends, or the request has waited as long as it may.

        Args:
            patience: seconds that a request waits at most.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        self.waiting += 1
        try:
            while not self.ready and not self._asleep and self._ending is None:
                if (left := deadline - loop.time()) <= 0:
                    return
                await self._changed(left)
        finally:
            self.waiting -= 1

    async def _changed(self, seconds: float) -> None:
        """Returns when an engine may have become ready, or when the time is over."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=min(0.5, seconds))
        finally:
            self._waiters.discard(waiter)

    @property
    def _asleep(self) -> bool:
        """All engines sleep, and somebody has to wake one. While another is away, it may be starting."""
        clients = self.clients
        return bool(clients) and all(client.last_error.endswith(ASLEEP) for client in clients)

    def _usable(self, *, composes: bool = False) -> list[EngineClient]:
        """Engines that may be given a request now. If all that are ready fail, the one whose turn comes first.

        Args:
            composes: only those that compose adapters: others would answer with what is attached.
        """
        ready = [client for client in self._clients.values() if client.ready]
        if composes:
            ready = [client for client in ready if client.model is not None and client.model.composes]
        admitted = [client for client in ready if client.breaker.admits]
        return admitted or sorted(ready, key=lambda client: client.breaker.badness)[:1]

    def sticky_engine(self, owner: str, session: str) -> EngineClient | None:
        """The engine that the requests of a client's session go to; None: it has had none here, or that has left."""
        return self._clients.get(self._sessions.get((owner, session), ""))

    def pin_session(self, owner: str, session: str) -> EngineClient:
        """The engine that the requests of a session go to from now on: its own, or the one with least to do.

        Raises:
            Unavailable: there is none.
        """
        usable = self._usable()
        if not usable:
            raise Unavailable("no engine is ready", retry_after=2.0)
        sticky = self.sticky_engine(owner, session)
        client = sticky if sticky in usable else min(usable, key=lambda client: client.load)
        self._remember(owner, session, client)
        return client

    def _remember(self, owner: str, session: str, client: EngineClient) -> None:
        self._sessions[owner, session] = client.address
        self._sessions.move_to_end((owner, session))
        while len(self._sessions) > self._settings.sticky_sessions:
            self._sessions.popitem(last=False)

    def _choose(self, usable: list[EngineClient], route: Route, affinity: Affinity) -> EngineClient:
        session = affinity.session
        sticky = None if session is None else self._sessions.get((affinity.owner, session))
        # Whatever else is to be had elsewhere: what the session has computed is there, and its adapter.
        client = next((client for client in usable if client.address == sticky), None)
        if client is not None:
            self._metrics.routed.labels("session").inc()
        elif len(usable) == 1:
            client = usable[0]
            self._metrics.routed.labels("only").inc()
        else:
            address, reason = choose([c.candidate(route) for c in usable], route, new_session=session)
            client = self._clients[address]
            self._metrics.routed.labels(reason).inc()
        if session is not None:
            self._remember(affinity.owner, session, client)
        return client

    def end_requests(self, reason: str) -> None:
        """Ends all requests with an error that says why, and sends no more: the gateway exits."""
        self._ending = reason
        retired = () if self._renewal is None else self._renewal.retired
        for client in (*self.clients, *retired):
            client.end_requests(reason)
        self._wake()

    def untried(self, tried: frozenset[EngineClient]) -> bool:
        """True if an engine that takes requests is not among ``tried``."""
        return any(client not in tried for client in self._usable())

    def retried(self, reason: str) -> None:
        """Counts a request that is sent again: the engine "refused" it or was "lost"."""
        self._metrics.retries.labels(reason).inc()

    def request_group(
        self,
        requests: Sequence[engine_pb2.GenerateRequest],
        affinity: Affinity | None = None,
        *,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> RequestGroup:
        """All engine requests of one HTTP request.

        Args:
            requests: equally many for each prompt, those of one prompt in a row.
            affinity: what the client says about its engine.
            prompts: their token ids, where a caller has them as lists; None: each request has its own.
        """
        if prompts is None:
            prompts = [request.prompt_token_ids for request in requests]
        return RequestGroup(self, requests, prompts, self._settings, affinity or Affinity())
