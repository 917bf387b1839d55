"""Depth of a queue on Redis for metrics: waiting and running records.

Ended jobs stay visible for weeks, so what is counted is found from the stream of work, which has only those that have
not ended, and from the lines behind them (services/common/queue/scripts.py says where a job can be).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from services.common.queue.keyspace import Keyspace
from services.common.queue.records import job_id_of_entry
from services.common.storage.redis import call_async

_MOST = 1000
"""Entries of the stream, and jobs of one line, that are looked at; what is beyond counts as queued."""

DEPTH = f"""
-- KEYS stream dead. The jobs of the oldest entries ('' for a bare spec, which may be megabytes and stays here).
local found = {{}}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', {_MOST})) do
  local job = ''
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'job' then job = entry[2][i + 1] end
  end
  table.insert(found, entry[1])
  table.insert(found, job)
end
return {{redis.call('TIME')[1], redis.call('XLEN', KEYS[1]), redis.call('XLEN', KEYS[2]), found}}
"""


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """One queue now."""

    queued: int
    running: int
    dead: int
    """Dead letters that are kept."""
    oldest_queued_seconds: float
    """Since the oldest of ``queued`` was submitted; 0 if there is none."""


async def measure(client: redis.asyncio.Redis, keyspace: Keyspace) -> QueueDepth:
    """Asks Redis, in a few short calls; a job that changes its place meanwhile may be counted at its old one.

    Raises:
        Unavailable: Redis does not answer.
    """
    script = client.register_script(DEPTH)
    reply: Any = await call_async(lambda: script(keys=[keyspace.stream, keyspace.dead]))
    now, length, dead, flat = int(reply[0]), int(reply[1]), int(reply[2]), reply[3]
    entries = list(zip(flat[::2], flat[1::2], strict=True))
    jobs = {job or job_id_of_entry(entry) for entry, job in entries}
    records = await _records(client, keyspace, sorted(jobs))
    # A bare spec that no trainer has looked at yet is no job so far.
    unread = len(jobs) - len(records)
    lines = {line for _, _, line in records.values()}
    behind, beyond = await _lines(client, keyspace, sorted(lines))
    records |= await _records(client, keyspace, sorted(behind - jobs))
    waiting = [created for state, created, _ in records.values() if state == "queued"]
    running = sum(state == "running" for state, _, _ in records.values())
    queued = len(waiting) + unread + max(0, length - len(entries)) + beyond
    return QueueDepth(queued, running, dead, max(0.0, now - min(waiting)) if waiting else 0.0)


async def _records(
    client: redis.asyncio.Redis, keyspace: Keyspace, job_ids: Sequence[str]
) -> dict[str, tuple[str, float, str]]:
    """State, creation and line of the jobs that exist; a paused one does not wait for an engine."""

    async def read() -> Any:
        async with client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(keyspace.job_key(job_id), ["state", "created_at", "adapter", "pause"])
            return await pipe.execute()

    answers = await call_async(read) if job_ids else []
    return {
        job_id: ("paused" if state == "queued" and pause == "1" else state, float(created or 0), line or "")
        for job_id, (state, created, line, pause) in zip(job_ids, answers, strict=True)
        if state is not None
    }


async def _lines(client: redis.asyncio.Redis, keyspace: Keyspace, lines: Sequence[str]) -> tuple[set[str], int]:
    """The jobs in these lines, and how many more there are behind those."""

    async def read() -> Any:
        async with client.pipeline(transaction=False) as pipe:
            for line in lines:
                pipe.lrange(keyspace.line_key(line), 0, _MOST - 1)
                pipe.llen(keyspace.line_key(line))
            return await pipe.execute()

    answers = await call_async(read) if lines else []
    found = {str(job) for line in answers[::2] for job in line}
    return found, sum(max(0, length - _MOST) for length in answers[1::2])
