"""`python -m services.pod` as a process: ready, serving, refusing a second one on its port, draining."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.local.ports import ClaimedPort, claim_ports
from services.common.pb import engine_pb2 as pb
from services.common.pb import engine_pb2_grpc
from services.common.settings import CommonSettings
from tests.integration.engine.conftest import TINY
from tests.integration.engine.harness import request
from tests.integration.servers import RunningServer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def port() -> Iterator[ClaimedPort]:
    (claim,) = claim_ports(1)
    yield claim
    claim.release()


@pytest.fixture
def environment(
    s3: RunningServer, valkey: RunningServer, settings: CommonSettings, port: ClaimedPort, tmp_path: Path
) -> dict[str, str]:
    return {
        **os.environ,
        "TEMPER_REDIS_URL": settings.redis_url.get_secret_value(),
        "TEMPER_S3_ENDPOINT": settings.s3_endpoint,
        "TEMPER_S3_ACCESS_KEY": settings.s3_access_key.get_secret_value(),
        "TEMPER_S3_SECRET_KEY": settings.s3_secret_key.get_secret_value(),
        "TEMPER_S3_BUCKET": settings.s3_bucket,
        "TEMPER_MODEL": str(TINY),
        "TEMPER_GRPC_PORT": str(port.number),
        "TEMPER_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "TEMPER_TORCH_THREADS": "1",
        "TEMPER_EXIT_WITH_PARENT": "true",
    }


@pytest.fixture
def pod(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "services.pod"], env=environment, cwd=ROOT)
    yield process
    process.kill()
    process.wait()


def test_a_pod_serves_and_drains(pod: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
    options = [("grpc.max_reconnect_backoff_ms", 200)]
    with grpc.insecure_channel(f"127.0.0.1:{environment['TEMPER_GRPC_PORT']}", options) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        model = stub.GetModel(pb.GetModelRequest(), wait_for_ready=True, timeout=60)
        assert model.device == "cpu"
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "engine"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING

        second = subprocess.run(
            [sys.executable, "-m", "services.pod"], env=environment, cwd=ROOT, capture_output=True, check=False
        )
        assert second.returncode == 1
        lines = second.stderr.decode().strip().splitlines()
        assert len(lines) == 1
        assert environment["TEMPER_GRPC_PORT"] in lines[0]

        running = stub.Generate(request(max_tokens=200))
        tokens = list(next(iter(running)).token_ids)
        pod.send_signal(signal.SIGTERM)
        for update in running:
            tokens.extend(update.token_ids)
        assert len(tokens) == 200
    assert pod.wait(30) == 0
