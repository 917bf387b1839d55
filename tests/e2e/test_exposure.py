"""What another user of the machine finds in a running `temper up`, on its ports and in its files: the API alone."""

from __future__ import annotations

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.exposure import readable
from tests.stack import Stack


def listening(stack: Stack) -> dict[int, str]:
    """Ports on which processes of a stack listen, with the service's name."""
    found: dict[int, str] = {}
    for service, pid in stack.state["pids"].items():
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            for connection in each.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip.removeprefix("::ffff:") == "127.0.0.1", (
                        f"{service} listens on {connection.laddr}"
                    )
                    found[connection.laddr.port] = service
    return found


def test_no_port_but_the_apis_answers_a_stranger(stack: Stack) -> None:
    ports = listening(stack)
    assert {"gateway", "engine", "s3", "valkey"} == set(ports.values())
    metrics = int(stack.env["TEMPER_METRICS_PORT"])  # which this stack was asked to open
    api = {stack.port, metrics}
    assert api < set(ports)
    with ThreadPoolExecutor(len(ports)) as pool:
        found = dict(zip(ports, pool.map(readable, ports), strict=True))
    assert all(found[port] for port in api), "this is how something readable is seen"
    assert {(ports[port], *what) for port, what in found.items() if what and port not in api} == set()


def test_the_servers_of_keys_and_objects_ask_for_credentials(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", stack.state["ports"]["redis"]), timeout=5) as valkey:
        for command in (b"KEYS *\r\n", b"GET a\r\n", b"CONFIG GET *\r\n", b'EVAL "return 1" 0\r\n'):
            valkey.sendall(command)
            assert valkey.recv(4096).startswith(b"-NOAUTH"), command


@pytest.mark.parametrize("place", ["files", "sockets"])
def test_files_are_their_users(stack: Stack, place: str) -> None:
    if place == "files":
        found = [stack.data_dir, *stack.data_dir.iterdir()]
    else:
        found = [Path(line) for line in (stack.data_dir / "s3" / "sockets.txt").read_text().splitlines()]
        found = [path for path in found if path.exists()]
    assert found
    for path in found:
        mode = path.stat().st_mode
        assert path.stat().st_uid == os.getuid()
        assert not mode & (stat.S_IRWXG | stat.S_IRWXO), f"{path} is {stat.filemode(mode)}"
