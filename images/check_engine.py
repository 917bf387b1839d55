"""Both images together: a checkpoint from a real S3 server, the engine, the gateway, a chat, and a quiet end."""

from __future__ import annotations

import io
import json
import urllib.request
from pathlib import Path

from minio import Minio

from cli.local.ports import LOOPBACK, claim_ports
from cli.local.store_processes import s3_server, valkey_server
from images.buildah import ROOT, CheckFailed, Image
from images.container import Container, call, wait_for
from services.engine.models.checkpoint import checkpoint_digest
from tests.integration.servers import RunningServer

_TINY = ROOT / "models" / "tiny"
_KEYS = ("temper", "temper-secret")
_HEALTHY = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service="engine"), timeout=3)
sys.exit(answer.status != health_pb2.HealthCheckResponse.SERVING)
"""


def run_engine(engine: Image, gateway: Image, scratch: Path) -> None:
    """Raises CheckFailed at the first step that goes wrong."""
    ports = claim_ports(4)
    valkey = RunningServer(valkey_server(scratch / "valkey", ports[0]))
    s3 = RunningServer(s3_server(scratch / "s3", ports[1], access_key=_KEYS[0], secret_key=_KEYS[1]))
    valkey.start()
    try:
        s3.start()
        _upload(s3.address)
        volume = scratch / "volume"
        volume.mkdir()
        env = {
            "TEMPER_REDIS_URL": f"redis://{valkey.address}/0",
            "TEMPER_S3_ENDPOINT": s3.address,
            "TEMPER_S3_ACCESS_KEY": _KEYS[0],
            "TEMPER_S3_SECRET_KEY": _KEYS[1],
            "TEMPER_MODEL": "/tmp/volume/model",
            "TEMPER_CACHE_DIR": "/tmp/volume/cache",
        }
        source = {"TEMPER_MODEL_SOURCE": "s3://models/tiny", "TEMPER_MODEL_DIGEST": checkpoint_digest(_TINY)}
        log = scratch / "source.log"
        if call(engine, ["python", "-m", "services.model_source"], env | source, log, [volume]):
            raise CheckFailed(f"the checkpoint was not fetched: {log.read_text()[-2000:]}")
        at = f"{LOOPBACK}:{ports[2].number}"
        env |= {"TEMPER_GRPC_HOST": LOOPBACK, "TEMPER_GRPC_PORT": str(ports[2].number)}
        pod = Container(engine, engine.config["Entrypoint"], env, scratch / "engine.log", [volume])
        try:
            wait_for(pod, engine, ["python", "-c", _HEALTHY, at], {}, 120.0)
            _chat(gateway, env | {"TEMPER_ENGINES": at, "TEMPER_HOST": LOOPBACK}, ports[3].number, scratch)
            status = pod.terminate(60.0)
            if status:
                raise CheckFailed(f"the engine ended with status {status} at SIGTERM: {pod.output()[-2000:]}")
        finally:
            pod.kill()
    finally:
        s3.stop()
        valkey.stop()


def _upload(endpoint: str) -> None:
    client = Minio(endpoint, *_KEYS, secure=False, region="us-east-1")
    client.make_bucket("models")
    for path in _TINY.iterdir():
        if path.is_file():
            data = path.read_bytes()
            client.put_object("models", f"tiny/{path.name}", io.BytesIO(data), len(data))


def _chat(gateway: Image, env: dict[str, str], port: int, scratch: Path) -> None:
    env = env | {"TEMPER_PORT": str(port)}
    container = Container(gateway, gateway.config["Entrypoint"], env, scratch / "gateway-2.log")
    ready = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=3)"
    try:
        wait_for(container, gateway, ["python", "-c", ready, f"http://{LOOPBACK}:{port}/readyz"], {}, 60.0)
        body = {"model": "qwen3.5", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            tokens = json.load(answer)["usage"]["completion_tokens"]
        if not tokens:
            raise CheckFailed("the chat has no tokens")
        status = container.terminate(60.0)
        if status:
            raise CheckFailed(f"the gateway ended with status {status} at SIGTERM: {container.output()[-2000:]}")
    finally:
        container.kill()
