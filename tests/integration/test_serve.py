"""`temper serve` on a Valkey and an S3 server that run already, with a model in a bucket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from cli.local.ports import claim_ports
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from tests.integration.model_servers import stored_checkpoint
from tests.integration.servers import RunningServer
from tests.stack import PATIENCE, ROOT, TINY, Stack, clean_environment

NAME = "served"


@pytest.fixture
def stores(
    valkey: RunningServer, s3: RunningServer, store: ObjectStore, settings: CommonSettings, tmp_path: Path
) -> dict[str, str]:
    """Variables of the servers."""
    return {
        "TEMPER_REDIS_URL": settings.redis_url.get_secret_value(),
        "TEMPER_S3_ENDPOINT": settings.s3_endpoint,
        "TEMPER_S3_ACCESS_KEY": settings.s3_access_key.get_secret_value(),
        "TEMPER_S3_SECRET_KEY": settings.s3_secret_key.get_secret_value(),
        "TEMPER_S3_BUCKET": settings.s3_bucket,
        "TEMPER_CACHE_DIR": str(tmp_path / "cache"),
    }


def answers(url: str) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_gateway_and_engine_run_on_them_and_end_in_order(
    stores: dict[str, str], settings: CommonSettings, valkey: RunningServer, s3: RunningServer, tmp_path: Path
) -> None:
    stored_checkpoint(settings, TINY, "models/tiny")
    model = f"s3://{settings.s3_bucket}/models/tiny"
    served = Stack(tmp_path / "data", model=model, served_model_name=NAME, env=stores, command="serve")
    with served:
        assert served.ready_line == f"Temper is ready on http://localhost:{served.port}\n"
        assert set(served.state["pids"]) == {"engine", "gateway"}
        answers(served.url)
        assert served.stop(signal.SIGTERM) == 0  # and nothing is left, or it would raise
    told = served.stderr_file.read_text()
    assert [line.split()[0] for line in told.splitlines() if " stopped" in line] == ["gateway", "engine"]
    assert "killed: it did not stop" not in told
    assert valkey.server.is_ready()
    assert s3.server.is_ready()


@contextmanager
def part(name: str, variables: dict[str, str], *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of the two, in place of the command's process; it ends in order with the block."""
    command = [sys.executable, "-m", "cli", "serve", name, "--served-model-name", NAME, *options]
    process = subprocess.Popen(command, env=clean_environment(variables), cwd=ROOT)
    try:
        yield process
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert not psutil.wait_procs(children, timeout=5)[1]
    finally:
        process.kill()
        process.wait()


@pytest.mark.thorough
def test_each_of_them_alone_is_the_process_of_the_command(stores: dict[str, str], tmp_path: Path) -> None:
    claims = claim_ports(2)
    http, grpc = (claim.number for claim in claims)
    engine = stores | {"TEMPER_GRPC_HOST": "127.0.0.1", "TEMPER_GRPC_PORT": str(grpc), "TEMPER_TRAINER": "false"}
    engine["TEMPER_CHECKPOINT_DIR"] = str(tmp_path / "checkpoints")
    gateway = stores | {"TEMPER_ENGINES": f"127.0.0.1:{grpc}", "TEMPER_DRAIN_DELAY_SECONDS": "0"}
    url = f"http://127.0.0.1:{http}"
    with ExitStack() as running:
        behind = running.enter_context(part("engine", engine, "--model", str(TINY)))
        front = running.enter_context(part("gateway", gateway, "--port", str(http)))
        deadline = time.monotonic() + PATIENCE
        while not _ready(url):
            assert (behind.poll(), front.poll()) == (None, None)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        answers(url)
        assert ["services.pod" in process for process in (_line(behind), _line(front))] == [True, False]


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False


def _line(process: subprocess.Popen[bytes]) -> list[str]:
    return psutil.Process(process.pid).cmdline()
