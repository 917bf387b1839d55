"""The local servers: S3 at its end, and Valkey when it is full."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest
import redis
from minio import Minio

from cli.local.ports import claim_ports
from cli.local.store_processes import LocalServer, s3_server
from services.common.telemetry.process import machine_bytes
from tests.integration.conftest import ACCESS_KEY, SECRET_KEY
from tests.integration.servers import RunningServer


def _port(server: LocalServer, name: str) -> int:
    (option,) = [argument for argument in server.argv if argument.startswith(f"-{name}=")]
    return int(option.partition("=")[2])


def test_it_stops_in_time_with_a_connection_that_nobody_used(tmp_path: Path) -> None:
    """Its own clients leave such behind after requests side by side: of 54 stops after those, 6 took 30 seconds."""
    server = RunningServer(s3_server(tmp_path, claim_ports(1)[0], access_key=ACCESS_KEY, secret_key=SECRET_KEY))
    server.start()
    client = Minio(server.address, ACCESS_KEY, SECRET_KEY, secure=False, region="us-east-1")
    client.make_bucket("kept")
    client.put_object("kept", "object", io.BytesIO(b"x" * 100_000), 100_000)
    with socket.create_connection(("127.0.0.1", _port(server.server, "volume.port"))):
        assert server.stop() == 0
    server.start()
    with client.get_object("kept", "object") as response:
        assert response.data == b"x" * 100_000
    assert server.stop() == 0


def test_a_full_valkey_refuses_writes_before_the_machine_is_full(valkey: RunningServer) -> None:
    with redis.Redis.from_url(f"redis://{valkey.address}/0") as client:
        (limit,) = client.config_get("maxmemory").values()
        assert 0 < int(limit) <= machine_bytes() // 2
        client.set("kept", "x")
        try:
            client.config_set("maxmemory", 1)
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("more", "x")
            assert client.get("kept") == b"x", "nothing is given up for it"
        finally:
            client.config_set("maxmemory", limit)
