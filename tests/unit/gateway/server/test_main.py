"""The process itself: start, a taken port, SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.gateway.__main__ import bind, main
from tests.stack import PATIENCE

ROOT = Path(__file__).resolve().parents[4]


def spawn(**environment: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TEMPER_")}
    return subprocess.Popen(
        [sys.executable, "-m", "services.gateway"],
        env={**inherited, **environment},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = spawn(TEMPER_PORT=str(port))
        _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert errors.strip().splitlines() == [
        f"temper gateway: port {port} on 127.0.0.1 is in use: stop what listens there or set TEMPER_PORT"
    ]


def test_bad_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPER_PORT", "many")
    with pytest.raises(SystemExit) as error:
        main()
    assert str(error.value).startswith("temper gateway: TEMPER_PORT: ")
    assert "\n" not in str(error.value)


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    process = spawn(TEMPER_PORT="0", TEMPER_API_KEYS_FILE=str(tmp_path / "keys.json"))
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert errors.strip().splitlines() == [
        f"temper gateway: TEMPER_API_KEYS_FILE: {tmp_path}/keys.json cannot be read: No such file or directory"
    ]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(**environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A gateway that answers, at its own port if it has one, with neither engines nor stores."""
    environment = {"TEMPER_PORT": str(unused_port())} | environment
    port = environment.get("TEMPER_OWN_PORT", environment["TEMPER_PORT"])
    nowhere = "127.0.0.1:1"
    process = spawn(
        TEMPER_ENGINES=nowhere,
        TEMPER_S3_ENDPOINT=nowhere,
        TEMPER_REDIS_URL=f"redis://{nowhere}/0",
        **environment,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                assert httpx.get(f"{url}/livez", timeout=PATIENCE).status_code == 200
                break
            except httpx.TransportError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.communicate()


def test_starts_without_anything_else_and_stops_on_sigterm() -> None:
    with started() as (url, process):
        assert httpx.get(f"{url}/readyz", timeout=PATIENCE).status_code == 503
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)
        assert process.returncode == 0


def test_gateways_that_share_a_port() -> None:
    """Connections reach both, and the one that is left when the other is killed. None that wants the port for itself
    gets it."""
    shared = unused_port()
    first, second = ({"TEMPER_PORT": str(shared), "TEMPER_OWN_PORT": str(unused_port())} for _ in range(2))

    def reached(most: int) -> set[str]:
        """Start times of the processes behind some connections, up to so many processes."""
        found: set[str] = set()
        for _ in range(40):
            metrics = httpx.get(f"http://127.0.0.1:{shared}/metrics", timeout=PATIENCE).text
            found |= {line for line in metrics.splitlines() if line.startswith("process_start_time_seconds ")}
            if len(found) == most:
                break
        return found

    with started(**first) as (_, process), started(**second) as (url, _):
        assert len(reached(2)) == 2
        with pytest.raises(SystemExit, match=f"port {shared} on 127.0.0.1 is in use"):
            bind("127.0.0.1", shared)
        process.kill()
        process.wait()
        assert len({*reached(1), *reached(1), *reached(1), *reached(1)}) == 1
        assert httpx.get(f"{url}/livez", timeout=PATIENCE).status_code == 200


def test_a_drain_accepts_for_a_while_and_a_second_signal_ends_it() -> None:
    with (
        started(TEMPER_DRAIN_DELAY_SECONDS="600") as (url, process),
        httpx.Client(base_url=url, timeout=PATIENCE) as kept,
    ):
        assert "connection" not in kept.get("/livez").headers
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while (ready := httpx.get(f"{url}/readyz", timeout=PATIENCE)).text != "stopping":
            assert time.monotonic() < deadline
        assert ready.status_code == 503
        for answer in (kept.get("/livez"), kept.get("/livez"), httpx.get(f"{url}/version", timeout=PATIENCE)):
            assert answer.status_code == 200, "new connections are still accepted"
            assert answer.headers["connection"] == "close"
        process.send_signal(signal.SIGINT)  # of a terminal, right behind the first: the same request
        assert httpx.get(f"{url}/livez", timeout=PATIENCE).status_code == 200
        time.sleep(2.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM
