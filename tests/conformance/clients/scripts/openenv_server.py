"""A server made with openenv-core's own classes: counts, and says what it was told. Its first line is its port."""

import socket
import sys

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id, step_count=0)
        self._seed = seed
        return Heard(text=f"seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.message == "raise":
            raise ZeroDivisionError("as asked")
        count = self._state.step_count
        return Heard(text=f"{count}: {action.message}", reward=count / 2, done=action.message == "end")

    @property
    def state(self):
        return self._state


app = FastAPI()
HTTPEnvServer(Echo, Say, Heard, max_concurrent_envs=4).register_routes(app)
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
sys.exit(0)
