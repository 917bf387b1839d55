"""GET /v1/status and /v1/requests: the engines, their memory, what has been computed, and what runs now.

Totals count from the start of a process. Who wants a rate asks twice, and takes the difference between two answers of
the same ``gateway.id``, or of the same engine's ``instance``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated

import grpc
from fastapi import Query
from grpc import aio
from prometheus_client.registry import Collector

from services.common.pb import engine_pb2
from services.common.telemetry.process import installed_version
from services.gateway.api.base.routing import Routes
from services.gateway.api.operations.health import Health, HealthServices
from services.gateway.api.operations.status_objects import (
    Blocks,
    Distribution,
    EngineObject,
    GatewayObject,
    LiveRequestObject,
    ModelFacts,
    QueueObject,
    RequestList,
    StatusObject,
    TokenTotals,
)
from services.gateway.auth.caller import sees
from services.gateway.auth.route_permissions import ANY_KEY, Permission
from services.gateway.engines.client import EngineClient

routes = Routes("status")
_PATIENCE_SECONDS = 2.0
"""Longest time that a list of requests waits for one engine."""
_PHASES: Mapping[int, str] = {
    engine_pb2.REQUEST_PHASE_LOADING: "loading",
    engine_pb2.REQUEST_PHASE_WAITING: "waiting",
    engine_pb2.REQUEST_PHASE_PREFILL: "prefill",
    engine_pb2.REQUEST_PHASE_DECODE: "decode",
}


@routes.get("/v1/status", Permission(ANY_KEY))
async def status(health: Health) -> StatusObject:
    """Engines with their memory plan, load and cache; queues; tokens and latencies since the start. Engines and queues
    are everybody's, `gateway`, `tokens`, `first_token` and `between_tokens` are of the gateway that answers."""
    await health.queues.refresh()
    info, metrics = health.inference.engines.info, health.inference.metrics
    return StatusObject(
        time=time.time(),
        gateway=_gateway(health),
        model=None if info is None else ModelFacts.of(health.inference.settings.served_model_name, info),
        engines=[_engine(client) for client in health.inference.engines.clients],
        queues={name: QueueObject.of(depth) for name, depth in health.queues.depths.items()},
        tokens={labels["kind"]: int(value) for labels, value in _totals(metrics.tokens)},
        first_token=_distribution(metrics.ttft),
        between_tokens=_distribution(metrics.itl),
    )


@routes.get("/v1/requests", Permission(ANY_KEY))
async def list_requests(
    health: Health,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> RequestList:
    """The caller's requests that engines have now, oldest first, whichever gateway they came through; everybody's, and
    the rollouts of jobs, for an admin. `unreachable` names engines that did not answer."""
    clients = [client for client in health.inference.engines.clients if client.connected]
    answers = await asyncio.gather(*(_ask(client) for client in clients))
    found = [
        LiveRequestObject.of(live, client.id, _PHASES.get(live.phase, "waiting"))
        for client, answer in zip(clients, answers, strict=True)
        for live in answer or ()
        if sees(live.owner or None)
    ]
    found.sort(key=lambda live: -live.age_seconds)
    return RequestList(
        data=found[:limit],
        total=len(found),
        unreachable=[client.id for client, answer in zip(clients, answers, strict=True) if answer is None],
    )


async def _ask(client: EngineClient) -> Sequence[engine_pb2.LiveRequest] | None:
    """What an engine has; nothing of one of an earlier release, and None of one that does not answer."""
    try:
        answer = await client.engine_stub().GetRequests(engine_pb2.GetRequestsRequest(), timeout=_PATIENCE_SECONDS)
    except aio.AioRpcError as error:
        return [] if error.code() == grpc.StatusCode.UNIMPLEMENTED else None
    return answer.requests


def _gateway(health: HealthServices) -> GatewayObject:
    identity = health.identity
    return GatewayObject(
        id=identity.id,
        version=installed_version(),
        started_at=identity.started,
        ready=health.inference.engines.ready and not health.lifecycle.stopping.is_set(),
        in_flight=health.inference.admission.in_flight,
        max_in_flight=health.inference.settings.max_in_flight,
        background_responses=health.background.running,
    )


def _engine(client: EngineClient) -> EngineObject:
    found = client.status
    told = engine_pb2.EngineStatus() if found is None else found
    return EngineObject(
        id=client.id,
        name=client.name or client.id,
        ready=client.ready,
        breaker=client.breaker.state.name.lower(),
        error=client.last_error if found is None else None,
        instance=told.instance or None,
        draining=told.draining,
        running=told.running,
        waiting=told.waiting,
        max_waiting=told.max_waiting,
        kv_blocks=Blocks(used=told.blocks_used, cached=told.blocks_cached, total=told.blocks_total),
        state_slots=Blocks(used=told.slots_used, cached=told.slots_cached, total=told.slots_total),
        memory_plan={owner: told.memory_plan[owner] for owner in sorted(told.memory_plan)},
        tokens=TokenTotals(decode=told.decode_tokens, prefill=told.prefill_tokens, prompt=told.prompt_tokens),
        cache_hit_tokens=dict(told.cache_hit_tokens),
        job_id=told.job_id or None,
        loaded_adapters=list(told.loaded_adapters),
        attached_adapter=told.attached_adapter or None,
        training_sessions=told.sessions_open,
    )


def _totals(collector: Collector) -> list[tuple[Mapping[str, str], float]]:
    """Totals of a counter by its labels."""
    return [
        (sample.labels, sample.value)
        for family in collector.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    ]


def _distribution(collector: Collector) -> Distribution:
    """Values of a histogram, all its series together."""
    upto: dict[float, float] = {}
    total = 0.0
    for family in collector.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                upto[bound] = upto.get(bound, 0.0) + sample.value
            elif sample.name.endswith("_sum"):
                total += sample.value
    bounds = sorted(upto)
    below = [0.0, *(upto[bound] for bound in bounds)]
    counts = [int(high - low) for low, high in pairwise(below)]
    return Distribution(bounds=bounds[:-1], counts=counts, sum=total)
