"""`python -m services.pod` as a process: ready, serving, refusing a second one on its port, draining."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
from tests.stack import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
RECONNECTING = [("grpc.max_reconnect_backoff_ms", 200)]


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


@pytest.mark.thorough
def test_a_pod_serves_and_drains(pod: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{environment['TEMPER_GRPC_PORT']}", RECONNECTING) as channel:
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


@pytest.mark.thorough
def test_a_pod_sleeps_and_wakes(pod: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
    """What runs ends first; then the process is a small one with the same id and port, until it is woken."""
    with grpc.insecure_channel(f"127.0.0.1:{environment['TEMPER_GRPC_PORT']}", RECONNECTING) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        stub.GetModel(pb.GetModelRequest(), wait_for_ready=True, timeout=PATIENCE)
        awake = _resident_bytes(pod.pid)
        running = stub.Generate(request(max_tokens=200))
        tokens = list(next(iter(running)).token_ids)
        assert not stub.Sleep(pb.SleepRequest()).asleep
        for update in running:
            tokens.extend(update.token_ids)
        assert len(tokens) == 200

        _until(lambda: stub.GetStatus(pb.GetStatusRequest(), wait_for_ready=True, timeout=PATIENCE).asleep)
        assert _resident_bytes(pod.pid) < awake / 2
        assert stub.Sleep(pb.SleepRequest()).asleep
        for call in (lambda: stub.GetModel(pb.GetModelRequest()), lambda: next(iter(stub.Generate(request())))):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "POST /v1/engine/wake" in refused.value.details()
        health = health_pb2_grpc.HealthStub(channel)
        said = {name: health.Check(health_pb2.HealthCheckRequest(service=name)).status for name in ("", "engine")}
        assert said == {
            "": health_pb2.HealthCheckResponse.SERVING,
            "engine": health_pb2.HealthCheckResponse.NOT_SERVING,
        }

        assert stub.Wake(pb.WakeRequest()).asleep
        _until(lambda: not stub.GetStatus(pb.GetStatusRequest(), wait_for_ready=True, timeout=PATIENCE).asleep)
        again = [token for update in stub.Generate(request(max_tokens=200)) for token in update.token_ids]
        assert again == tokens
        assert not stub.Wake(pb.WakeRequest()).asleep
        stub.Sleep(pb.SleepRequest())
        _until(lambda: stub.GetStatus(pb.GetStatusRequest(), wait_for_ready=True, timeout=PATIENCE).asleep)
        pod.send_signal(signal.SIGTERM)
    assert pod.wait(PATIENCE) == 0


def test_a_pod_that_gives_its_caches_back_stays_the_same_process(
    pod: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    """It wakes with its model loaded, also a second time, and says the same as before."""
    with grpc.insecure_channel(f"127.0.0.1:{environment['TEMPER_GRPC_PORT']}", RECONNECTING) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        stub.GetModel(pb.GetModelRequest(), wait_for_ready=True, timeout=PATIENCE)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Sleep(pb.SleepRequest(level="weights"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "its levels are cache, process" in refused.value.details()
        prompts = [request(list(range(7 + number, 207 + number)), max_tokens=20) for number in range(4)]

        def answers() -> list[list[int]]:
            return [[token for update in stub.Generate(one) for token in update.token_ids] for one in prompts]

        first, began = answers(), _began(pod.pid)
        for _ in range(2):
            filled = _resident_bytes(pod.pid)
            stub.Sleep(pb.SleepRequest(level="cache"))
            _until(lambda: stub.GetStatus(pb.GetStatusRequest(), wait_for_ready=True, timeout=PATIENCE).asleep)
            assert stub.GetStatus(pb.GetStatusRequest()).sleep_level == "cache"
            assert _resident_bytes(pod.pid) < filled
            with pytest.raises(grpc.RpcError) as asleep:
                next(iter(stub.Generate(request())))
            assert asleep.value.code() is grpc.StatusCode.UNAVAILABLE
            assert stub.Wake(pb.WakeRequest()).asleep
            _until(lambda: not stub.GetStatus(pb.GetStatusRequest(), wait_for_ready=True, timeout=PATIENCE).asleep)
            assert stub.GetStatus(pb.GetStatusRequest()).blocks_cached == 0
            assert answers() == first
        assert _began(pod.pid) == began
        stub.Sleep(pb.SleepRequest(level="cache"))
        _until(lambda: stub.GetStatus(pb.GetStatusRequest(), wait_for_ready=True, timeout=PATIENCE).asleep)
        pod.send_signal(signal.SIGTERM)
    assert pod.wait(PATIENCE) == 0


def _began(pid: int) -> str:
    """Address of its stack, which is another one after an execv."""
    return next(line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.endswith("[stack]"))


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _until(condition: Callable[[], bool]) -> None:
    """Waits for something that the process of the moment says; it is another one at times."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(grpc.RpcError):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)
