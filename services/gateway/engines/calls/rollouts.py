"""Calls for rollouts: finished completions that engines remember, by their ids or by their conversation sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpc import aio

from services.common.pb import engine_pb2
from services.gateway.engines.client import EngineClient

_CALL_SECONDS = 10.0
_AT_ONCE = 64
"""Most rollouts that are asked for in one call: one may have a whole context of tokens, and an engine limits the size
of a message."""


async def rollouts_by_id(
    clients: Sequence[EngineClient], completion_ids: Sequence[str], *, at_least: int
) -> dict[str, engine_pb2.Rollout]:
    """Rollouts by completion id, from all engines; those that none remembers are absent.

    Args:
        clients: the engines.
        completion_ids: ids to look up; one completion may be asked for under two names.
        at_least: how many a caller needs.

    Raises:
        Unavailable: fewer were found and not every engine could be asked.
    """
    parts = [completion_ids[at : at + _AT_ONCE] for at in range(0, len(completion_ids), _AT_ONCE)]
    asked = [engine_pb2.GetRolloutsRequest(completion_ids=part) for part in parts]
    results = await asyncio.gather(*(_remembered(client, asked) for client in clients), return_exceptions=True)
    found = {one.completion_id: one for some in results if not isinstance(some, BaseException) for one in some}
    failed = next((result for result in results if isinstance(result, BaseException)), None)
    if len(found) < at_least and failed is not None:
        raise failed
    return found


async def rollouts_of_sessions(
    clients: Sequence[EngineClient], sessions: Sequence[engine_pb2.SessionRef]
) -> list[engine_pb2.Rollout]:
    """Rollouts of conversation sessions, from all engines.

    Raises:
        Unavailable: an engine cannot be asked, and may know some.
    """
    asked = [engine_pb2.GetRolloutsRequest(sessions=[session]) for session in sessions]
    parts = await asyncio.gather(*(_remembered(client, asked) for client in clients))
    return [rollout for part in parts for rollout in part]


async def _remembered(client: EngineClient, asked: Sequence[engine_pb2.GetRolloutsRequest]) -> list[engine_pb2.Rollout]:
    """One engine's answers to all questions, one after another. Raises Unavailable."""
    try:
        # Each by the connection of its moment: certificates may be renewed between two.
        answers = [await client.engine_stub().GetRollouts(request, timeout=_CALL_SECONDS) for request in asked]
    except aio.AioRpcError as error:
        raise client.unavailable(error) from error
    return [rollout for answer in answers for rollout in answer.rollouts]
