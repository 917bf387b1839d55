"""Lua scripts of those who look after jobs from outside: cancel, pause, resume, and what unfinished jobs name.

A paused job is queued and only in its adapter's line, where those behind it wait. Whatever hands a job back puts it
aside instead while it is asked to pause (services/common/queue/scripts.py), so a pause also holds when its owner dies.
"""

from __future__ import annotations

from services.common.queue.scripts import PRELUDE

CANCEL = (
    PRELUDE
    + """
-- KEYS job events stream; ARGV group settled_by_owner reason
-- With a reason, which the job ends with, its spec leaves at once: its owner has read it, and nobody else begins it.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 'MISSING' end
if newer(KEYS[1]) then return 'NEWER' end
if (state == 'queued' or state == 'running') and redis.call('HGET', KEYS[1], 'publishing') == '1' then
  return 'LATE'
end
if (state == 'queued' or state == 'running') and (ARGV[3] or '') ~= '' then
  redis.call('HSET', KEYS[1], 'cancel_reason', ARGV[3])
  redis.call('HDEL', KEYS[1], 'spec')
end
local kept = ARGV[2] == '1' and redis.call('HEXISTS', KEYS[1], 'started_at') == 1
if state == 'queued' and not kept then
  finish(KEYS[1], KEYS[2], KEYS[3], ARGV[1], 'cancelled', 'cancelled before it started', '')
elseif (state == 'queued' or state == 'running') and redis.call('HGET', KEYS[1], 'cancel') ~= '1' then
  redis.call('HSET', KEYS[1], 'cancel', '1', 'cancel_at', now())
  emit(KEYS[2], 'log', '{"message":"cancellation requested"}')
end
return 'OK'
"""
)

PAUSE = (
    PRELUDE
    + """
-- KEYS job events stream; ARGV group
local job = redis.call('HMGET', KEYS[1], 'state', 'publishing', 'cancel', 'pause')
if not job[1] then return 'MISSING' end
if newer(KEYS[1]) then return 'NEWER' end
if job[1] ~= 'queued' and job[1] ~= 'running' then return 'ENDED' end
if job[2] == '1' then return 'LATE' end
if job[3] == '1' then return 'CANCELLED' end
if job[4] == '1' then return 'OK' end
redis.call('HSET', KEYS[1], 'pause', '1')
if job[1] == 'queued' then
  put_aside(KEYS[1], KEYS[2], KEYS[3], ARGV[1])
else
  emit(KEYS[2], 'log', '{"message":"pause requested"}')
end
return 'OK'
"""
)

RESUME = (
    PRELUDE
    + """
-- KEYS job events stream. A job that goes on at once, or behind those of its adapter that came before it.
local job = redis.call('HMGET', KEYS[1], 'state', 'pause', 'id', 'adapter', 'entry')
if not job[1] then return 'MISSING' end
if newer(KEYS[1]) then return 'NEWER' end
if job[1] ~= 'queued' and job[1] ~= 'running' then return 'ENDED' end
if job[2] ~= '1' then return 'OK' end
redis.call('HDEL', KEYS[1], 'pause')
if job[1] == 'queued' then
  local first = head(LINES .. job[4])
  if job[5] == '' and (not first or first == job[3]) then
    redis.call('HSET', KEYS[1], 'entry', redis.call('XADD', KEYS[3], '*', 'job', job[3]))
  end
  emit(KEYS[2], 'state', '{"state":"queued"}')
else
  emit(KEYS[2], 'log', '{"message":"pause withdrawn"}')
end
return 'OK'
"""
)

TELL = PRELUDE + "-- KEYS events; ARGV data\nemit(KEYS[1], 'log', ARGV[1])\nreturn 'OK'\n"

UNFINISHED = """
-- KEYS index. Spec and parent ('' where there is none) of every queued or running job, flat; only "id schema" of one of
-- a later release, if there is any: nobody here knows what it needs.
local found = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local job = redis.call('HMGET', JOBS .. id, 'state', 'spec', 'parent', 'schema')
  if (tonumber(job[4] or '1') or 0) > SCHEMA then return {id .. ' ' .. job[4]} end
  if job[1] == 'queued' or job[1] == 'running' then
    table.insert(found, job[2] or '')
    table.insert(found, job[3] or '')
  end
end
return found
"""
