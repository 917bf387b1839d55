"""A whole Temper for tests: a real `temper up` or `temper serve` in a directory of its own, on free ports, with the
tiny model."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import httpx
import psutil

from cli.local.ports import ClaimedPort, claim_ports
from cli.local.private_tls import PrivateTls
from services.common.settings import CommonSettings

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "models" / "tiny"
PATIENCE = 60.0
"""Seconds that a client of a test waits for an answer: on a machine full of tests httpx's own five are too few
(tests/unit/test_patience.py)."""
START_SECONDS = 300.0
"""Seconds that processes which load torch get to start in: four at once took two minutes at a load of 12 on two cores.
One that ends is told at once."""


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what a developer may have set for Temper, plus ``extra``.

    An engine computes on one core, because others run beside it: threads of one that wait for a thread that does not
    get a core burn the time of the rest.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TEMPER_")}
    return {**kept, "PYTHONPATH": str(ROOT), "TEMPER_TORCH_THREADS": "1", **(extra or {})}


@dataclass(slots=True)
class Stack:
    """One `temper up`, or another command with its options. ``start`` returns when it printed its line; ``stop`` when
    all its processes are gone."""

    data_dir: Path
    port: int = 0
    """Of the gateway; 0: a free one, which no other test gets."""
    model: Path | str = TINY
    """Directory, or s3://bucket/prefix."""
    served_model_name: str = "qwen3.5"
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    command: str = "up"
    process: subprocess.Popen[str] | None = None
    ready_line: str = ""
    seconds_to_ready: float = 0.0
    _claim: ClaimedPort | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.port == 0:
            (self._claim,) = claim_ports(1)
            self.port = self._claim.number

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", "cli", self.command, "--port", str(self.port), "--data-dir", str(self.data_dir)),
            *("--model", str(self.model), "--served-model-name", self.served_model_name, *self.options),
        ]

    @property
    def stderr_file(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + ".stderr")

    def log(self, service: str) -> str:
        """What a service has written so far."""
        file = self.data_dir / "logs" / f"{service}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def log_path(self, service: str) -> Path:
        return self.data_dir / "logs" / f"{service}.log"

    @property
    def state(self) -> dict[str, Any]:
        """url, pid, ports and pids of what runs now."""
        state: dict[str, Any] = json.loads((self.data_dir / "state.json").read_text())
        return state

    def pid(self, service: str) -> int:
        """Of "valkey", "s3", "engine" or "gateway", as of now: a restarted service has another one."""
        return int(self.state["pids"][service])

    def engine_channel(self) -> grpc.Channel:
        """To its engine, as its gateway has one."""
        tls = PrivateTls(self.data_dir / "tls" / "tls.crt", self.data_dir / "tls" / "tls.key")
        return grpc.secure_channel(f"127.0.0.1:{self.state['ports']['engine']}", tls.channel_credentials())

    @property
    def settings(self) -> CommonSettings:
        """How to reach its Redis and S3."""
        secrets = json.loads((self.data_dir / "secrets.json").read_text())
        ports = json.loads((self.data_dir / "ports.json").read_text())
        return CommonSettings.model_validate(
            {
                "redis_url": f"redis://:{secrets['redis_password']}@127.0.0.1:{ports['redis']}/0",
                "s3_endpoint": f"127.0.0.1:{ports['s3']}",
                "s3_access_key": secrets["s3_access_key"],
                "s3_secret_key": secrets["s3_secret_key"],
                "served_model_name": self.served_model_name,
            }
        )

    def start(self, timeout: float = START_SECONDS) -> Self:
        """Starts and waits for the line on standard output."""
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with self.stderr_file.open("a") as stderr:
            self.process = subprocess.Popen(
                self.argv, stdout=subprocess.PIPE, stderr=stderr, text=True, env=clean_environment(self.env), cwd=ROOT
            )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout)
        self.ready_line = self.process.stdout.readline() if readable else ""
        self.seconds_to_ready = time.monotonic() - began
        if not self.ready_line:
            self.stop()
            raise RuntimeError(f"temper {self.command} did not get ready in {timeout} s: {self.describe()}")
        return self

    def detach(self) -> None:
        """Leaves no adapter attached; returns when every engine answers without."""
        if attached := httpx.get(f"{self.url}/v1/adapters", timeout=PATIENCE).raise_for_status().json()["attached"]:
            name = attached.partition("@")[0]
            answer = httpx.post(f"{self.url}/v1/adapters/{name}/detach", timeout=PATIENCE).raise_for_status().json()
            assert answer["engines_serving"] == answer["engines"], answer

    def describe(self) -> str:
        """Standard error and the end of every log."""
        text = self.stderr_file.read_text(errors="replace")[-3000:]
        for file in sorted((self.data_dir / "logs").glob("*.log")):
            text += f"\n--- {file.name}\n{file.read_text(errors='replace')[-3000:]}"
        return text

    def children(self) -> list[psutil.Process]:
        """Every process below the supervisor, now."""
        if self.process is None:
            return []
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 60.0) -> int:
        """Sends a signal and waits; returns the exit status. Processes that survive are killed and reported."""
        if self.process is None:
            return 0
        children = self.children()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"temper {self.command} did not stop in {timeout} s: {self.describe()}") from error
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None
            _, alive = psutil.wait_procs(children, timeout=5.0)
            for process in alive:
                process.kill()
        if alive:
            raise RuntimeError(f"temper {self.command} left processes behind: {alive}")
        return status

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
