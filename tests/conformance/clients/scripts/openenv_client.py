"""openenv-core's client on the server of an environment: plays the guessing game by halves, and says how it went."""

import asyncio
import json
import sys

from openenv.core.generic_client import GenericEnvClient


async def play(url: str) -> None:
    async with GenericEnvClient(base_url=url) as client:
        first = await client.reset(seed=3, episode_id="e-1", lowest=1, numbers=7, guesses=3)
        low, high, told = 1, 7, [first.observation["text"]]
        result = first
        while not result.done:
            middle = (low + high) // 2
            result = await client.step({"message": str(middle)})
            told.append(result.observation["text"])
            low, high = (middle + 1, high) if "higher" in told[-1] else (low, middle - 1)
        state = await client.state()
        try:
            await client.step({"message": "4"})
        except RuntimeError as error:
            refused = str(error)
        print(json.dumps({"told": told, "reward": result.reward, "state": state, "refused": refused}))


asyncio.run(play(sys.argv[1]))
