"""openenv-core itself: its client plays in an environment of ours, and ours in one that is made with its server."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.training.environments.serving import serving
from services.common.jobs.kinds.environment import EnvironmentReward, FailureKind
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.environments.guess import Guess
from services.trainer.sampling.answers import ReadAnswer
from services.trainer.sampling.environments.openenv import OpenEnvWorlds
from services.trainer.sampling.environments.world import EnvironmentFailed, Outcome
from tests.conformance.clients.place import HERE, PYTHON
from tests.stack import PATIENCE


@contextmanager
def their_server() -> Iterator[str]:
    process = subprocess.Popen(
        [PYTHON, HERE / "scripts" / "openenv_server.py"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def test_their_client_plays_in_our_environment() -> None:
    with serving(Guess) as url:
        done = subprocess.run(
            [PYTHON, HERE / "scripts" / "openenv_client.py", url], capture_output=True, text=True, timeout=PATIENCE
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["told"][0] == "What number is it, from 1 to 7?"
    assert told["told"][-1] == "Right."
    assert told["reward"] == 1.0
    assert told["state"]["episode_id"] == "e-1"
    assert told["state"]["step_count"] == len(told["told"]) - 1
    assert "reset first (code: VALIDATION_ERROR)" in told["refused"]


def test_our_client_plays_in_their_environment() -> None:
    def said(text: str) -> ReadAnswer:
        return ReadAnswer(text, text, (), broken=False, stopped=False)

    async def episode(url: str, *answers: str) -> tuple[str, list[Outcome]]:
        worlds = OpenEnvWorlds(EnvironmentReward(url=url, timeout_seconds=PATIENCE), Webhooks(allowed=(url,)), "r")
        async with worlds.open(()) as world:
            shown = await world.begin({"seed": 7, "episode_id": "e-1"})
            return shown, [await world.act(said(answer)) for answer in answers]

    with their_server() as url:
        shown, outcomes = asyncio.run(episode(url, "hi", "end"))
        assert shown == "seed 7"
        assert outcomes == [
            Outcome([{"role": "user", "content": "1: hi"}], 0.5),
            Outcome((), 1.0, done=True),
        ]
        with pytest.raises(EnvironmentFailed, match="as asked") as failed:
            asyncio.run(episode(url, "raise"))
        assert failed.value.kind is FailureKind.ERROR
