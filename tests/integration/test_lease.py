"""Lease on a real Valkey: one holder at a time, fences that only grow, and writes of a former holder refused."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from services.common.settings import CommonSettings
from services.common.storage.lease import FENCED, Lease, fence_key
from services.common.storage.redis import connect_async
from tests.integration.servers import RunningServer
from tests.stack import PATIENCE

WRITE = FENCED + "if fenced(KEYS[1], ARGV[1]) then return 0 end redis.call('RPUSH', KEYS[2], ARGV[1]) return 1"


@pytest.fixture
async def client(valkey: RunningServer, settings: CommonSettings) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect_async(settings)
    yield client
    await client.aclose()


async def test_one_at_a_time(client: redis.asyncio.Redis) -> None:
    first, second = (Lease(client, "toy", seconds=60) for _ in range(2))
    assert [await first.hold(), await first.hold(), await second.hold()] == [1, 1, None]
    await second.release()  # not its own
    assert await second.hold() is None
    await first.release()
    assert [await second.hold(), await first.hold()] == [2, None]
    assert await Lease(client, "other", seconds=60).hold() == 1


@pytest.mark.parametrize("seed", range(4))
async def test_writes_are_in_the_order_of_the_holders(client: redis.asyncio.Redis, seed: int) -> None:
    """Holders that are stopped at any moment, and write on with the fence that they had."""
    chance = random.Random(seed)
    write: Any = client.register_script(WRITE)
    leases = [Lease(client, "toy", seconds=60) for _ in range(3)]
    fences: dict[int, int] = {}
    given: list[int] = []
    for _ in range(200):
        index = chance.randrange(len(leases))
        match chance.randrange(4):
            case 0:
                fence = await leases[index].hold()
                if fence is not None:
                    fences[index] = fence
                    given += [fence] if fence not in given else []
            case 1:
                await client.delete("temper:lease:toy")  # it expires
            case _ if index in fences:
                taken = await write(keys=[fence_key("toy"), "written"], args=[fences[index]])
                assert bool(taken) == (fences[index] == given[-1])
    assert given == sorted(given) == list(range(1, len(given) + 1))
    written = [int(one) for one in await client.lrange("written", 0, -1)]
    assert written == sorted(written)


async def test_old_fences_mean_nothing_to_a_redis_that_lost_everything(client: redis.asyncio.Redis) -> None:
    write: Any = client.register_script(WRITE)
    lease = Lease(client, "toy", seconds=60)
    fence = await lease.hold()
    await client.flushall()
    assert await write(keys=[fence_key("toy"), "written"], args=[fence]) == 0


HOLDS = """
import asyncio, os, signal, sys
from services.common.settings import CommonSettings
from services.common.storage.lease import Lease
from services.common.storage.redis import connect_async

async def main():
    client = connect_async(CommonSettings(redis_url=sys.argv[1]))
    print(await Lease(client, "toy", seconds=0.5).hold(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_killed_holder_is_followed(client: redis.asyncio.Redis, settings: CommonSettings) -> None:
    run = [sys.executable, "-c", HOLDS, settings.redis_url.get_secret_value()]
    died = await asyncio.to_thread(subprocess.run, run, timeout=PATIENCE, check=False, capture_output=True, text=True)
    assert (died.returncode, died.stdout) == (-signal.SIGKILL, "1\n")
    lease = Lease(client, "toy", seconds=60)
    async with asyncio.timeout(PATIENCE):
        while (fence := await lease.hold()) is None:  # noqa: ASYNC110  (in another process)
            await asyncio.sleep(0.02)
    assert fence == 2
