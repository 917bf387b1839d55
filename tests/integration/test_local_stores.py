"""The local servers: S3 at its end, and Valkey when it is full."""

from __future__ import annotations

import io
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import redis
import urllib3
from minio import Minio

from cli.local.change_log import PLACE, ChangeLog
from cli.local.ports import claim_ports
from cli.local.private_tls import PrivateTls
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


def test_its_log_of_changes_does_not_grow_for_ever(tmp_path: Path) -> None:
    server = RunningServer(s3_server(tmp_path, claim_ports(1)[0], access_key=ACCESS_KEY, secret_key=SECRET_KEY))
    server.start()
    client = Minio(server.address, ACCESS_KEY, SECRET_KEY, secure=False, region="us-east-1")
    client.make_bucket("kept")
    client.put_object("kept", "object", io.BytesIO(b"x" * 100_000), 100_000)
    port, tls = (
        _port(server.server, "filer.port"),
        PrivateTls(tmp_path / "tls" / "tls.crt", tmp_path / "tls" / "tls.key"),
    )
    ours = {"cert_reqs": "CERT_REQUIRED", "ca_certs": str(tls.certificate)}
    pool = urllib3.PoolManager(cert_file=str(tls.certificate), key_file=str(tls.key), **ours)
    day = f"https://127.0.0.1:{port}{PLACE}/2020-01-01"
    written = pool.request("PUT", f"{day}/00-00.0123abcd", body=b"y" * 9_000)
    assert written.status == 201, written.data

    def there(url: str) -> bool:
        return bool(pool.request("GET", url).status == 200)

    assert server.server.chores is not None
    server.server.chores()
    assert there(f"{day}/00-00.0123abcd"), "it is not old yet"
    for _ in range(2):  # its files, and then itself
        ChangeLog(port, tls, kept=timedelta(0)).tidy()
    assert not there(f"{day}/00-00.0123abcd")
    assert not there(f"{day}/")
    with client.get_object("kept", "object") as response:
        assert response.data == b"x" * 100_000
    assert server.stop() == 0
    ChangeLog(port, tls, kept=timedelta(0)).tidy()  # nobody is there, and nothing is said


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
