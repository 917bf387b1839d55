"""Lua scripts that change the jobs of a queue. Both faces of the queue use these and nothing else.

A job is in exactly one of these places: unread in the stream (queued), pending for its owner in the consumer group
(running), only in its adapter's line (queued: paused, or delivered while an earlier job of the adapter was unfinished),
or nowhere (terminal, or paused without a line). Jobs of one adapter run one after another, whoever runs them, so that
each starts from what the one before made: only the head of a line may begin, and the end of its job puts the next one
back into the stream. An entry handed back is pending with an old idle time, so that the next claim takes it first.
Scripts are atomic; those of an owner compare the fencing token and answer LOST when it is stale. Every script may be
repeated when its answer got lost: what an owner reports carries a number that grows, and what is not above its last one
(`said`) has been written already.

They are the same for all queues: `Keyspace.lua` puts before one what it has to know of its own. Times are Redis's own
clock in unix seconds, so that hosts need not agree.
"""

from __future__ import annotations

from services.common.storage.outbox import NOTIFY
from services.common.storage.redis import NOW

EVENTS_TTL = 7 * 86400
"""Most seconds that a terminal job's events stay replayable."""
IDEMPOTENCY_TTL = 7 * 86400
EVENTS_LENGTH = 10_000
DEAD_LENGTH = 1_000
LOST = "LOST"


PRELUDE = f"""{NOW}{NOTIFY}
local function emit(events, kind, data)
  redis.call('XADD', events, 'MAXLEN', '~', {EVENTS_LENGTH}, '*', 'kind', kind, 'time', now(), 'data', data)
end
local function owned(job, fence)
  return redis.call('HGET', job, 'fence') == fence and redis.call('HGET', job, 'state') == 'running'
end
local function said(job, fence, number)
  if number == '' then return false end
  local before, last = string.match(redis.call('HGET', job, 'said') or '', '^(%S+) (%S+)$')
  if before == fence and tonumber(last) >= tonumber(number) then return true end
  redis.call('HSET', job, 'said', fence .. ' ' .. number)
  return false
end
local function newer(job)
  return (tonumber(redis.call('HGET', job, 'schema') or '1') or 0) > SCHEMA
end
local function head(line)
  while true do
    local id = redis.call('LINDEX', line, 0)
    if not id then return nil end
    local state = redis.call('HGET', JOBS .. id, 'state')
    if state == 'queued' or state == 'running' or newer(JOBS .. id) then return id end
    redis.call('LPOP', line)
  end
end
local function leave_line(job, stream)
  local line = LINES .. (redis.call('HGET', job, 'adapter') or '')
  redis.call('LREM', line, 0, redis.call('HGET', job, 'id') or '')
  local id = head(line)
  local next = id and redis.call('HMGET', JOBS .. id, 'entry', 'pause')
  if next and next[1] == '' and next[2] ~= '1' then
    redis.call('HSET', JOBS .. id, 'entry', redis.call('XADD', stream, '*', 'job', id))
  end
end
local function put_aside(job, events, stream, group)
  local entry = redis.call('HGET', job, 'entry')
  redis.call('HSET', job, 'state', 'queued', 'owner', '', 'entry', '')
  if entry ~= '' then
    redis.call('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
  end
  emit(events, 'state', cjson.encode({{state = 'queued', paused = true}}))
end
local function tell_end(job, state, reason, result)
  local f = redis.call('HMGET', job, 'id', 'kind', 'adapter', 'fine_tuning', 'webhook')
  local data = {{id = f[1], kind = f[2], state = state}}
  if (f[3] or '') ~= '' then data.adapter = f[3] end
  if reason ~= '' then data.reason = reason end
  if result ~= '' then data.result_adapter = result end
  if not f[4] then return notify('job.' .. state, data, f[5]) end
  data.job = f[1]
  data.id = 'ftjob-' .. string.sub(f[1], 5)
  notify('fine_tuning.job.' .. state, data, f[5])
end
local function finish(job, events, stream, group, state, reason, result)
  local entry = redis.call('HGET', job, 'entry')
  if state == 'cancelled' then reason = redis.call('HGET', job, 'cancel_reason') or reason end
  redis.call('HSET', job, 'state', state, 'reason', reason, 'result_adapter', result, 'finished_at', now())
  -- A failed job's stays, for whoever asks why; that of a data set has rows, which leave with their user.
  if state ~= 'failed' or redis.call('HEXISTS', job, 'dataset') == 1 then redis.call('HDEL', job, 'spec') end
  if entry ~= '' then
    redis.call('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
  end
  leave_line(job, stream)
  local data = {{state = state}}
  if reason ~= '' then data.reason = reason end
  if result ~= '' then data.result_adapter = result end
  emit(events, 'state', cjson.encode(data))
  if TELLS == 1 then tell_end(job, state, reason, result) end
  redis.call('EXPIRE', job, TTL)
  redis.call('EXPIRE', events, math.min(TTL, {EVENTS_TTL}))
end
local function bury(dead, entry, job, reason, spec)
  local fields = {{'entry', entry, 'reason', reason, 'time', now()}}
  if job ~= '' then table.insert(fields, 'job') table.insert(fields, job) end
  if spec ~= '' then table.insert(fields, 'spec') table.insert(fields, spec) end
  redis.call('XADD', dead, 'MAXLEN', '~', {DEAD_LENGTH}, '*', unpack(fields))
end
"""

SUBMIT = (
    PRELUDE
    + f"""
-- KEYS stream index job events idempotency line; ARGV id spec sha kind adapter metadata has_key entry traceparent
-- schema key_id dataset dataset_digest fine_tuning webhook dry_run
-- sha: of the request, which an idempotency key stands for, as long as its job is there. entry: '' to add one, else the
-- id of the stream entry that brought this spec. schema: '' or nothing for the present one.
if ARGV[7] == '1' then
  local known = redis.call('GET', KEYS[5])
  if known then
    local id, sha = string.match(known, '^(%S+) (%S+)$')
    if redis.call('EXISTS', JOBS .. id) == 1 then
      if sha == ARGV[3] then return {{'existing', id}} end
      return {{'conflict', id}}
    end
  end
end
if redis.call('EXISTS', KEYS[3]) == 1 then return {{'existing', ARGV[1]}} end
if ARGV[7] == '1' then redis.call('SET', KEYS[5], ARGV[1] .. ' ' .. ARGV[3], 'EX', {IDEMPOTENCY_TTL}) end
local entry = ARGV[8]
if entry == '' then entry = redis.call('XADD', KEYS[1], '*', 'job', ARGV[1]) end
local created = now()
redis.call('HSET', KEYS[3], 'id', ARGV[1], 'spec', ARGV[2], 'kind', ARGV[4], 'adapter', ARGV[5], 'metadata',
  ARGV[6], 'entry', entry, 'state', 'queued', 'created_at', created, 'attempts', '0', 'fence', '0', 'schema',
  (ARGV[10] or '') ~= '' and ARGV[10] or SCHEMA)
if (ARGV[9] or '') ~= '' then redis.call('HSET', KEYS[3], 'traceparent', ARGV[9]) end
if (ARGV[11] or '') ~= '' then redis.call('HSET', KEYS[3], 'key_id', ARGV[11]) end
if (ARGV[12] or '') ~= '' then redis.call('HSET', KEYS[3], 'dataset', ARGV[12], 'dataset_digest', ARGV[13]) end
if (ARGV[14] or '') ~= '' then redis.call('HSET', KEYS[3], 'fine_tuning', ARGV[14]) end
if (ARGV[15] or '') ~= '' then redis.call('HSET', KEYS[3], 'webhook', ARGV[15]) end
if (ARGV[16] or '') ~= '' then redis.call('HSET', KEYS[3], 'dry_run', ARGV[16]) end
redis.call('ZADD', KEYS[2], created, ARGV[1])
if ARGV[5] ~= '' then redis.call('RPUSH', KEYS[6], ARGV[1]) end
emit(KEYS[4], 'state', '{{"state":"queued"}}')
return {{'created', ARGV[1]}}
"""
)

BEGIN = (
    PRELUDE
    + """
-- KEYS stream job events dead; ARGV group entry id claim owner max_attempts settled_by_owner altogether
local job = redis.call('HMGET', KEYS[2], 'state', 'entry', 'claim', 'cancel', 'attempts', 'fence', 'last_error',
  'adapter', 'schema', 'forgiven')
local state, entry, attempts = job[1], job[2], tonumber(job[5] or '0')
local failures = attempts - tonumber(job[10] or '0')
-- Of a later release: left alone, so that one of those takes it once this delivery has been silent for long enough.
if state and newer(KEYS[2]) then return {'newer', job[9]} end
if not state or entry ~= ARGV[2] or (state ~= 'queued' and state ~= 'running') then
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
  redis.call('XDEL', KEYS[1], ARGV[2])
  return {'dropped'}
end
if state == 'running' and job[3] == ARGV[4] then
  return {'claimed', job[6], job[5], tostring(failures - 1)}
end
if job[4] == '1' and (ARGV[7] ~= '1' or redis.call('HEXISTS', KEYS[2], 'started_at') == 0) then
  finish(KEYS[2], KEYS[3], KEYS[1], ARGV[1], 'cancelled', 'cancelled on request', '')
  return {'ended'}
end
if redis.call('HGET', KEYS[2], 'pause') == '1' then
  put_aside(KEYS[2], KEYS[3], KEYS[1], ARGV[1])
  return {'dropped'}
end
if failures >= tonumber(ARGV[6]) or attempts >= tonumber(ARGV[8]) then
  local why = job[7] or 'its engine died or stopped answering each time'
  local reason = 'given up after ' .. (failures >= tonumber(ARGV[6]) and failures or attempts) .. ' attempts: ' .. why
  bury(KEYS[4], ARGV[2], ARGV[3], reason, '')
  finish(KEYS[2], KEYS[3], KEYS[1], ARGV[1], 'failed', reason, '')
  return {'ended'}
end
local first = head(LINES .. job[8])
if first and first ~= ARGV[3] then
  redis.call('HSET', KEYS[2], 'entry', '')
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
  redis.call('XDEL', KEYS[1], ARGV[2])
  emit(KEYS[3], 'log', cjson.encode({message = 'waits for ' .. first .. ', an earlier job of this adapter'}))
  return {'waits', first}
end
local fence = redis.call('HINCRBY', KEYS[2], 'fence', 1)
attempts = redis.call('HINCRBY', KEYS[2], 'attempts', 1)
redis.call('HSETNX', KEYS[2], 'started_at', now())
redis.call('HSET', KEYS[2], 'state', 'running', 'claim', ARGV[4], 'owner', ARGV[5])
emit(KEYS[3], 'state', cjson.encode({state = 'running', attempt = attempts}))
return {'claimed', tostring(fence), tostring(attempts), tostring(failures)}
"""
)

NEXT_KIND = """
-- KEYS stream; ARGV group. Kind of the job that nobody has been given yet and that is next; '' if there is none.
local last = '0-0'
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local found = {}
  for i = 1, #group, 2 do found[group[i]] = group[i + 1] end
  if found['name'] == ARGV[1] then last = found['last-delivered-id'] end
end
local entry = redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', 1)[1]
if not entry then return '' end
local fields = {}
for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
if fields['job'] then return redis.call('HGET', JOBS .. fields['job'], 'kind') or '' end
local valid, spec = pcall(cjson.decode, fields['spec'] or '')
return valid and type(spec) == 'table' and type(spec['kind']) == 'string' and spec['kind'] or ''
"""

BURY_ENTRY = (
    PRELUDE
    + """
-- KEYS stream dead; ARGV group entry reason spec
bury(KEYS[2], ARGV[2], '', ARGV[3], ARGV[4])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
return 'OK'
"""
)

LEAVE = """
-- KEYS stream; ARGV group owner. In one step: what a deleted consumer has pending is pending for nobody, for ever.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
return 'OK'
"""

HEARTBEAT = (
    PRELUDE
    + f"""
-- KEYS job stream; ARGV fence group owner entry. Inside the fence, or an old owner would steal its entry back.
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
redis.call('XCLAIM', KEYS[2], ARGV[2], ARGV[3], 0, ARGV[4], 'JUSTID')
local asked = redis.call('HMGET', KEYS[1], 'cancel', 'pause')
return asked[1] == '1' and 'CANCEL' or asked[2] == '1' and 'PAUSE' or 'OK'
"""
)

REPORT = (
    PRELUDE
    + f"""
-- KEYS job events; ARGV fence number progress metrics data. number: see said.
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
if said(KEYS[1], ARGV[1], ARGV[2]) then return 'OK' end
local metrics = cjson.decode(redis.call('HGET', KEYS[1], 'metrics') or '{{}}')
for name, value in pairs(cjson.decode(ARGV[4])) do metrics[name] = value end
redis.call('HSET', KEYS[1], 'progress', ARGV[3], 'metrics', cjson.encode(metrics))
emit(KEYS[2], 'progress', ARGV[5])
return 'OK'
"""
)

DESCRIBE = (
    PRELUDE
    + f"""
-- KEYS job; ARGV fence number settings notes metrics evaluation report
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
if said(KEYS[1], ARGV[1], ARGV[2]) then return 'OK' end
local metrics = cjson.decode(redis.call('HGET', KEYS[1], 'metrics') or '{{}}')
for name, value in pairs(cjson.decode(ARGV[5])) do metrics[name] = value end
redis.call('HSET', KEYS[1], 'settings', ARGV[3], 'notes', ARGV[4], 'metrics', cjson.encode(metrics))
if ARGV[6] ~= '' then redis.call('HSET', KEYS[1], 'evaluation', ARGV[6]) end
if ARGV[7] ~= '' then redis.call('HSET', KEYS[1], 'report', ARGV[7]) end
return 'OK'
"""
)

EVENT = (
    PRELUDE
    + f"""
-- KEYS job events; ARGV fence number kind data
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
if said(KEYS[1], ARGV[1], ARGV[2]) then return 'OK' end
emit(KEYS[2], ARGV[3], ARGV[4])
return 'OK'
"""
)

KEPT = (
    PRELUDE
    + f"""
-- KEYS job; ARGV fence. A part of the work is safe: the deliveries before this one were no failures. They stay counted
-- (STAGE, of batches, which bring no engine down, forgets them): a job has a bound of attempts in all.
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
redis.call('HSET', KEYS[1], 'forgiven', redis.call('HGET', KEYS[1], 'attempts') - 1)
return 'OK'
"""
)

PARENT = (
    PRELUDE
    + f"""
-- KEYS job; ARGV fence parent. The first attempt's answer counts for every later one.
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
redis.call('HSETNX', KEYS[1], 'parent', ARGV[2])
return redis.call('HGET', KEYS[1], 'parent')
"""
)

STAGE = (
    PRELUDE
    + f"""
-- KEYS job events; ARGV fence stage progressed field value ... The owner's own fields; '@first' as a value: now, unless
-- there is one already. Progressed: what was made stays, so the deliveries before this one were no failures.
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
local answer = {{redis.call('HGET', KEYS[1], 'cancel') == '1' and 'CANCEL' or 'OK'}}
for i = 4, #ARGV, 2 do
  if ARGV[i + 1] == '@first' then
    redis.call('HSETNX', KEYS[1], ARGV[i], now())
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
  table.insert(answer, redis.call('HGET', KEYS[1], ARGV[i]))
end
if ARGV[3] == '1' then redis.call('HSET', KEYS[1], 'attempts', '1') end
if ARGV[2] ~= (redis.call('HGET', KEYS[1], 'stage') or '') then
  redis.call('HSET', KEYS[1], 'stage', ARGV[2])
  emit(KEYS[2], 'state', cjson.encode({{state = 'running', stage = ARGV[2]}}))
end
return answer
"""
)

PUBLISHING = (
    PRELUDE
    + f"""
-- KEYS job; ARGV fence. From here on the job's version may exist, so it can no longer be cancelled; a cancellation
-- that came first wins. A pause does not: the work is done.
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
if redis.call('HGET', KEYS[1], 'publishing') == '1' then return 'OK' end
if redis.call('HGET', KEYS[1], 'cancel') == '1' then return 'CANCEL' end
redis.call('HSET', KEYS[1], 'publishing', '1')
redis.call('HDEL', KEYS[1], 'pause')
return 'OK'
"""
)

FINISH = (
    PRELUDE
    + f"""
-- KEYS job events stream dead; ARGV fence group state reason result dead id
if redis.call('HGET', KEYS[1], 'fence') == ARGV[1] and redis.call('HGET', KEYS[1], 'state') == ARGV[3] then
  return 'OK'
end
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
if ARGV[6] == '1' then bury(KEYS[4], redis.call('HGET', KEYS[1], 'entry'), ARGV[7], ARGV[4], '') end
finish(KEYS[1], KEYS[2], KEYS[3], ARGV[2], ARGV[3], ARGV[4], ARGV[5])
return 'OK'
"""
)

RELEASE = (
    PRELUDE
    + f"""
-- KEYS job events stream; ARGV fence group owner entry counts reason
-- The entry stays pending but looks long abandoned: the next claim takes it, before anything newer.
if redis.call('HGET', KEYS[1], 'fence') == ARGV[1] and redis.call('HGET', KEYS[1], 'state') == 'queued' then
  return 'OK'
end
if not owned(KEYS[1], ARGV[1]) then return '{LOST}' end
redis.call('HSET', KEYS[1], 'state', 'queued', 'owner', '')
if ARGV[5] == '1' then
  redis.call('HSET', KEYS[1], 'last_error', ARGV[6])
else
  redis.call('HINCRBY', KEYS[1], 'attempts', -1)
end
if redis.call('HGET', KEYS[1], 'pause') == '1' then
  put_aside(KEYS[1], KEYS[2], KEYS[3], ARGV[2])
  return 'OK'
end
redis.call('XCLAIM', KEYS[3], ARGV[2], ARGV[3], 0, ARGV[4], 'IDLE', 864000000, 'JUSTID')
emit(KEYS[2], 'state', cjson.encode({{state = 'queued', reason = ARGV[6]}}))
return 'OK'
"""
)
