"""The limits of a caller in Redis, and the Lua scripts that change them.

Keys:
    temper:quota:{caller}           hash: level and time of the two buckets
    (services/gateway/rate_limits/token_bucket.py)
    temper:quota:{caller}:leases    sorted set of requests that run, by the time at which each counts as lost

Both expire by themselves. Times are Redis's own clock in microseconds, so that gateways need not agree.
"""

from __future__ import annotations

from services.gateway.rate_limits.memory_limiter import BUSY_WAIT
from services.gateway.rate_limits.token_bucket import MINUTE

LEASE_SECONDS = 30
"""A request whose gateway has not renewed its lease for so long does not count any more."""
CLOCK = """local function clock()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end"""


def bucket_key(caller: str) -> str:
    return f"temper:quota:{caller}"


def leases_key(caller: str) -> str:
    return f"temper:quota:{caller}:leases"


_PRELUDE = f"""
{CLOCK}
local function text(number) return string.format('%.0f', number) end
local function level(key, name, limit, now)
  local state = redis.call('HMGET', key, name, name .. ':at')
  return math.max(0, tonumber(state[1] or '0') - math.max(0, now - tonumber(state[2] or '0')) * limit)
end
local function keep(key, name, value, limit, now)
  redis.call('HSET', key, name, text(value), name .. ':at', text(now))
  local ttl = math.ceil(value / limit / 1000) + 60000
  if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, text(ttl)) end
end
local function wait(value, limit, cost)
  return math.max(0, math.ceil((value + (cost - limit) * {MINUTE}) / limit))
end
local function answer(by, waits, requests, rate, tokens, budget)
  local function remaining(value, limit)
    return limit > 0 and math.floor(math.max(0, limit * {MINUTE} - value) / {MINUTE}) or 0
  end
  local function empty(value, limit) return limit > 0 and math.ceil(value / limit) or 0 end
  return {{by, waits, remaining(requests, rate), empty(requests, rate), remaining(tokens, budget),
    empty(tokens, budget)}}
end
"""

ACQUIRE = (
    _PRELUDE
    + f"""
-- KEYS buckets leases; ARGV requests-a-minute tokens-a-minute concurrent lease. Counts a request, or does nothing.
local rate, budget, most, now = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), clock()
local requests, tokens = level(KEYS[1], 'requests', rate, now), level(KEYS[1], 'tokens', budget, now)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', text(now))
local by, waits = '', 0
if most > 0 and redis.call('ZCARD', KEYS[2]) >= most then by, waits = 'concurrency', {BUSY_WAIT} end
if by == '' and rate > 0 then
  waits = wait(requests, rate, 1)
  if waits > 0 then by = 'requests' end
end
if by == '' and budget > 0 then
  waits = wait(tokens, budget, 1)
  if waits > 0 then by = 'tokens' end
end
if by == '' then
  if rate > 0 then
    requests = requests + {MINUTE}
    keep(KEYS[1], 'requests', requests, rate, now)
  end
  if most > 0 then
    redis.call('ZADD', KEYS[2], text(now + {LEASE_SECONDS}000000), ARGV[4])
    redis.call('EXPIRE', KEYS[2], {LEASE_SECONDS * 2})
  end
end
return answer(by, waits, requests, rate, tokens, budget)
"""
)

TAKE = (
    _PRELUDE
    + f"""
-- KEYS buckets; ARGV tokens-a-minute tokens force. Reserves tokens, or does nothing. With force, a correction: more
-- than fits, or a negative number.
local budget, cost, now = tonumber(ARGV[1]), tonumber(ARGV[2]), clock()
local tokens = level(KEYS[1], 'tokens', budget, now)
local waits = ARGV[3] == '1' and 0 or wait(tokens, budget, cost)
if waits == 0 then
  tokens = math.max(0, tokens + cost * {MINUTE})
  keep(KEYS[1], 'tokens', tokens, budget, now)
end
return answer(waits > 0 and 'tokens' or '', waits, 0, 0, tokens, budget)
"""
)

RELEASE = """
-- KEYS leases; ARGV lease
return redis.call('ZREM', KEYS[1], ARGV[1])
"""

RENEW = (
    _PRELUDE
    + f"""
-- KEYS leases; ARGV lease ... Also brings back leases that Redis has lost.
local expires = text(clock() + {LEASE_SECONDS}000000)
for _, lease in ipairs(ARGV) do redis.call('ZADD', KEYS[1], expires, lease) end
redis.call('EXPIRE', KEYS[1], {LEASE_SECONDS * 2})
return #ARGV
"""
)
