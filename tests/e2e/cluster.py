"""Several engine processes behind one gateway process or more, on the stores of a running Temper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import grpc
import httpx

from cli.local.ports import claim_ports
from services.common.pb import engine_pb2, engine_pb2_grpc
from services.common.settings import CommonSettings
from tests.stack import PATIENCE, ROOT, START_SECONDS, clean_environment


class Ground(Protocol):
    """What a cluster stands on: a `Stack`, or stores alone."""

    served_model_name: str

    @property
    def model(self) -> Path | str: ...

    @property
    def settings(self) -> CommonSettings: ...


class Cluster:
    """Engines, without trainers by default; all start at once.

    Args:
        stack: whose stores and model they use.
        directory: for logs and checkpoints.
        engines: how many.
        engine_env, gateway_env: more settings.
    """

    def __init__(
        self,
        stack: Ground,
        directory: Path,
        engines: int,
        *,
        engine_env: Mapping[str, str],
        gateway_env: Mapping[str, str],
    ) -> None:
        self.model = stack.served_model_name
        self._directory = directory
        self._claims = claim_ports(engines + 1)
        ports = [claim.number for claim in self._claims]
        self.addresses = [f"127.0.0.1:{port}" for port in ports[1:]]
        self.url = f"http://127.0.0.1:{ports[0]}"
        settings = stack.settings
        stores = {
            "TEMPER_REDIS_URL": settings.redis_url.get_secret_value(),
            "TEMPER_S3_ENDPOINT": settings.s3_endpoint,
            "TEMPER_S3_ACCESS_KEY": settings.s3_access_key.get_secret_value(),
            "TEMPER_S3_SECRET_KEY": settings.s3_secret_key.get_secret_value(),
            "TEMPER_SERVED_MODEL_NAME": stack.served_model_name,
        }
        self._engine_env = {
            **stores,
            "TEMPER_MODEL": str(stack.model),
            "TEMPER_DTYPE": "float32",
            "TEMPER_TRAINER": "false",
            "TEMPER_EXIT_WITH_PARENT": "true",
            **engine_env,
        }
        self._gateway_env = {
            **stores,
            "TEMPER_PORT": str(ports[0]),
            "TEMPER_ENGINES": ",".join(self.addresses),
            **gateway_env,
        }
        self._http = httpx.Client(
            verify=False, timeout=PATIENCE
        )  # asked several times a second: no certificates are read for each
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.restarted: str | None = None
        """The engine that was killed and started again; it may still be starting."""

    def __enter__(self) -> Self:
        try:
            for address in self.addresses:
                self.start_engine(address)
            self.processes["gateway"] = self._spawn("gateway", "services.gateway", self._gateway_env)
            self.wait_for(self._all_ready, f"{len(self.addresses)} ready engines", START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Nothing of theirs outlives the test: no reason to wait for a drain.
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._http.close()
        for claim in self._claims:
            claim.release()

    def _spawn(self, name: str, module: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self._log(name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module], env=clean_environment(env), cwd=ROOT, stdout=log, stderr=log
            )

    def _log(self, name: str) -> Path:
        return self._directory / f"{name.replace(':', '-')}.log"

    def start_engine(self, address: str) -> None:
        env = {
            **self._engine_env,
            "TEMPER_GRPC_PORT": address.rpartition(":")[2],
            "TEMPER_CHECKPOINT_DIR": str(self._directory / address.replace(":", "-")),
            "TEMPER_KV_EVENTS_TOPIC": f"kv@{address}@{self.model}",
        }
        self.processes[address] = self._spawn(address, "services.pod", env)

    def restart(self, address: str) -> None:
        """Starts an engine again that was killed, and does not wait for it."""
        self.processes[address].wait()
        self.start_engine(address)
        self.restarted = address

    def signal(self, address: str, number: signal.Signals) -> None:
        os.kill(self.processes[address].pid, number)

    def health(self) -> dict[str, dict[str, Any]]:
        """What the gateway knows of each engine, by address."""
        return {engine["address"]: engine for engine in self.engines_at(self.url)}

    def engines_at(self, url: str) -> list[dict[str, Any]]:
        """What the gateway at this URL knows of its engines."""
        engines: list[dict[str, Any]] = self._http.get(f"{url}/healthz", timeout=10).json()["engines"]
        return engines

    def start_gateway(self, name: str, port: int, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Another gateway of the same engines; it ends with the cluster."""
        self.processes[name] = self._spawn(
            name, "services.gateway", {**self._gateway_env, "TEMPER_PORT": str(port), **(env or {})}
        )
        return self.processes[name]

    def channel(self, address: str) -> grpc.Channel:
        """To an engine, as gateways have one."""
        return grpc.insecure_channel(address)

    def status(self, address: str, *, timeout: float = 10.0) -> engine_pb2.EngineStatus:
        """What an engine says of itself."""
        with self.channel(address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            found: engine_pb2.EngineStatus = stub.GetStatus(engine_pb2.GetStatusRequest(), timeout=timeout)
            return found

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come true in {seconds} s\n{self._logs()}")
            time.sleep(0.05)

    def _logs(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in self._directory.glob("*.log"))

    def _all_ready(self) -> bool:
        if ended := [name for name, process in self.processes.items() if process.poll() is not None]:
            raise RuntimeError(f"{', '.join(ended)} ended\n{self._logs()}")
        return self._ready() >= len(self.addresses)

    def _ready(self) -> int:
        """Engines that the gateway has found ready; 0 while it starts itself."""
        try:
            return sum(bool(engine["ready"]) for engine in self.health().values())
        except httpx.TransportError:
            return 0

    def wait_until_ready(self, engines: int, *, seconds: float = 60.0) -> None:
        self.wait_for(lambda: self._ready() >= engines, f"{engines} ready engines", seconds)
