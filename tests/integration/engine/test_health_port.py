"""The health port of a real engine process: from before it can serve until after it cannot any more."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.local.ports import ClaimedPort, claim_ports
from services.common.pb import engine_pb2_grpc
from tests.integration.engine.harness import request
from tests.integration.engine.test_pod import ROOT
from tests.integration.engine.test_pod import environment as environment
from tests.integration.engine.test_pod import port as port

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
READINESS = ("readiness", "engine", "temper.v1.Engine", "temper.v1.Adapters", "temper.v1.Sessions")


@pytest.fixture
def health_port() -> Iterator[ClaimedPort]:
    (claim,) = claim_ports(1)
    yield claim
    claim.release()


@pytest.fixture
def stub(health_port: ClaimedPort) -> Iterator[health_pb2_grpc.HealthStub]:
    options = [("grpc.max_reconnect_backoff_ms", 100), ("grpc.initial_reconnect_backoff_ms", 50)]
    with grpc.insecure_channel(f"127.0.0.1:{health_port.number}", options) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def spawn(environment: Mapping[str, str], port: ClaimedPort, **extra: str) -> subprocess.Popen[bytes]:
    env = {**environment, "TEMPER_HEALTH_PORT": str(port.number), **extra}
    return subprocess.Popen([sys.executable, "-m", "services.pod"], env=env, cwd=ROOT, stderr=subprocess.PIPE)


def check(stub: health_pb2_grpc.HealthStub, service: str) -> int:
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True, timeout=20).status)


def statuses(stub: health_pb2_grpc.HealthStub) -> dict[str, int]:
    return {name: check(stub, name) for name in ("liveness", "", *READINESS, "startup")}


def test_from_the_start_of_the_process_to_its_drain(
    environment: dict[str, str], health_port: ClaimedPort, stub: health_pb2_grpc.HealthStub
) -> None:
    process = spawn(environment, health_port, TEMPER_DRAIN_SECONDS="1.5")
    try:
        assert statuses(stub) == {"liveness": SERVING, "": SERVING, "startup": NOT_SERVING} | dict.fromkeys(
            READINESS, NOT_SERVING
        )
        watching = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=120)
        seen = (int(reply.status) for reply in watching)
        assert next(seen) == NOT_SERVING
        asked = 0
        while check(stub, "startup") != SERVING:  # while torch is imported and the model is loaded
            assert check(stub, "liveness") == SERVING
            assert process.poll() is None
            asked += 1
            time.sleep(0.02)
        assert asked > 3
        assert next(seen) == SERVING
        assert set(statuses(stub).values()) == {SERVING}
        with pytest.raises(grpc.RpcError) as unknown:
            check(stub, "temper.v1.Nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert "startup" in unknown.value.details()

        with grpc.insecure_channel(f"127.0.0.1:{environment['TEMPER_GRPC_PORT']}") as channel:
            on_main_port = health_pb2_grpc.HealthStub(channel)
            assert set(statuses(on_main_port).values()) == {SERVING}
            engine = engine_pb2_grpc.EngineStub(channel)
            short, long = (engine.Generate(request(max_tokens=tokens)) for tokens in (20, 4000))
            tokens = len(next(iter(short)).token_ids)
            next(iter(long))
            process.send_signal(signal.SIGTERM)
            assert next(seen) == NOT_SERVING
            # Readiness is off while streams still run; nobody may kill or restart the process for it.
            drained = statuses(stub)
            assert drained == {"liveness": SERVING, "": SERVING, "startup": SERVING} | dict.fromkeys(
                READINESS, NOT_SERVING
            )
            tokens += sum(len(update.token_ids) for update in short)
            assert tokens == 20
            with pytest.raises(grpc.RpcError) as ended:
                list(long)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert ended.value.details() == "the engine is shutting down"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.thorough
def test_a_model_that_cannot_be_loaded_ends_the_process(
    environment: dict[str, str], health_port: ClaimedPort, stub: health_pb2_grpc.HealthStub, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(environment["TEMPER_MODEL"]).iterdir():
        if file.is_file():
            (model / file.name).symlink_to(file)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    process = spawn(environment, health_port, TEMPER_MODEL=str(model))
    assert check(stub, "liveness") == SERVING
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.decode().strip().splitlines()[-1].startswith("temper engine: ")


def test_asked_to_stop_while_it_loads(
    environment: dict[str, str], health_port: ClaimedPort, stub: health_pb2_grpc.HealthStub
) -> None:
    process = spawn(environment, health_port)
    try:
        assert check(stub, "startup") == NOT_SERVING
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_taken_health_port_names_its_variable(environment: dict[str, str], health_port: ClaimedPort) -> None:
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", health_port.number))
        taken.listen()
        process = spawn(environment, health_port)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "TEMPER_HEALTH_PORT" in errors.decode().strip().splitlines()[-1]
