"""Stores of a fleet: Valkey and the object store as `temper up` starts them, without the rest of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

from cli.local.ports import claim_ports
from cli.local.store_processes import LocalServer, s3_server, valkey_server
from services.common.settings import CommonSettings
from tests.stack import TINY

_PASSWORD, _ACCESS, _SECRET = "chaos-password", "chaos-access", "chaos-secret"
_READY_SECONDS = 60.0


class Stores:
    """Valkey and SeaweedFS in a directory of their own; the model is the tiny one."""

    model = TINY
    served_model_name = "qwen3.5"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        redis, s3 = claim_ports(2)
        self._servers: dict[str, LocalServer] = {
            "redis": valkey_server(directory / "valkey", redis, password=_PASSWORD),
            "s3": s3_server(directory / "s3", s3, access_key=_ACCESS, secret_key=_SECRET),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.settings = CommonSettings.model_validate(
            {
                "redis_url": f"redis://:{_PASSWORD}@{self._servers['redis'].address}/0",
                "s3_endpoint": self._servers["s3"].address,
                "s3_access_key": _ACCESS,
                "s3_secret_key": _SECRET,
                "served_model_name": self.served_model_name,
            }
        )

    def __enter__(self) -> Self:
        try:
            for name in self._servers:
                self._spawn(name)
            until = time.monotonic() + _READY_SECONDS
            while not all(server.is_ready() for server in self._servers.values()):
                if time.monotonic() > until:
                    raise RuntimeError(f"the stores in {self._directory} did not get ready in {_READY_SECONDS:.0f} s")
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name, process in self._processes.items():
            process.kill()
            process.wait()
            self._servers[name].remove_leftovers()
        for server in self._servers.values():
            for claim in server.claims:
                claim.release()

    def pid(self, name: str) -> int | None:
        """Of a store, as of now; None: it has ended."""
        process = self._processes[name]
        return process.pid if process.poll() is None else None

    def kill(self, name: str, number: signal.Signals) -> None:
        """Signals a store."""
        if (pid := self.pid(name)) is not None:
            os.kill(pid, number)

    def start_what_ended(self, gone: str | None) -> None:
        """Starts stores again that have ended, but not this one."""
        for name in self._servers:
            if name != gone and self.pid(name) is None:
                self._servers[name].remove_leftovers()
                self._spawn(name)

    def _spawn(self, name: str) -> None:
        server = self._servers[name]
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                server.argv, env=dict(server.env), cwd=server.cwd, stdout=log, stderr=log
            )
