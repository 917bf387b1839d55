"""Lease in Redis: at most one process holds it, and each holder after another has a greater number, its fence.

Keys:
    temper:lease:{name}          the holder and its fence; expires
    temper:lease:{name}:fence    the last fence that was given; stays

A holder that was stopped for longer than its lease does not know that it lost it. So what it writes to Redis carries
its fence, and a script refuses it once there is a later one (`FENCED`). The script compares for equality: where Redis
has lost everything, old fences count for nothing either.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import redis.asyncio

from services.common.errors import Conflict
from services.common.storage.redis import call_async

_ROOT: Final = "temper:lease:"
_HOLD = """
-- KEYS lease, fence; ARGV holder, milliseconds
local held = redis.call('GET', KEYS[1])
if held then
  local holder, fence = string.match(held, '^(%S+) (%d+)$')
  if holder ~= ARGV[1] then return 0 end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return tonumber(fence)
end
local fence = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. fence, 'PX', ARGV[2])
return fence
"""
_RELEASE = """
-- KEYS lease; ARGV holder
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^(%S+) ') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
FENCED: Final = """
local function fenced(key, fence) return redis.call('GET', key) ~= tostring(fence) end
"""
"""Function for scripts: true where a write with this fence comes too late. Its key is `fence_key`."""


class LeaseLost(Conflict):
    """Somebody else holds the lease now: what its former holder wanted to write was not written."""


def lease_key(name: str) -> str:
    """Key that is there while somebody holds the lease."""
    return _ROOT + name


def fence_key(name: str) -> str:
    """Key with the fence of the last holder."""
    return f"{_ROOT}{name}:fence"


class Lease:
    """A wish to hold the lease of this name. For one asyncio loop; every method may raise Unavailable.

    Args:
        client: of Redis.
        name: what one process at a time may do.
        seconds: after which a holder that does not renew it has lost it.
        holder: name without blanks of who wants it; None: a random one.
    """

    def __init__(self, client: redis.asyncio.Redis, name: str, *, seconds: float, holder: str | None = None) -> None:
        self.name = name
        self._holder = secrets.token_hex(8) if holder is None else holder
        self._milliseconds = round(seconds * 1000)
        self._hold, self._release = client.register_script(_HOLD), client.register_script(_RELEASE)

    async def hold(self) -> int | None:
        """Takes or renews the lease. Its fence, which stays the same as long as it is renewed in time; None: somebody
        else holds it."""
        keys = [lease_key(self.name), fence_key(self.name)]
        args: list[str | int] = [self._holder, self._milliseconds]
        fence: Any = await call_async(lambda: self._hold(keys=keys, args=args))
        return int(fence) or None

    async def release(self) -> None:
        """Lets the next one have it at once."""
        await call_async(lambda: self._release(keys=[lease_key(self.name)], args=[self._holder]))
