"""Which ports are free, and those that are kept for servers which do not listen yet."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from cli.local import ports
from cli.local.ports import LOOPBACK, ClaimedPort, claim_ports, free_ports, port_is_free
from services.common.errors import Unavailable

holding = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing holds a port")


@holding
def test_nobody_else_is_given_a_claimed_port() -> None:
    (claim,) = claim_ports(1)
    with pytest.raises(OSError):
        ClaimedPort(claim.number)
    other = f"from cli.local.ports import ClaimedPort; ClaimedPort({claim.number})"
    result = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
    assert "Address already in use" in result.stderr
    claim.release()
    ClaimedPort(claim.number).release()


@holding
def test_many_choosers_at_once_never_choose_the_same() -> None:
    code = """
from cli.local.ports import claim_ports
claimed = claim_ports(400)
print(*(port.number for port in claimed), flush=True)
input()
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    chosen: list[str] = []
    for process in processes:
        assert process.stdout is not None
        chosen += process.stdout.readline().split()
    for process in processes:
        process.communicate("\n")
    assert len(set(chosen)) == len(chosen) == 1600


@holding
def test_a_server_listens_on_its_claimed_port_as_often_as_it_starts() -> None:
    (claim,) = claim_ports(1)
    for _ in range(2):  # the second time connections of the first linger
        with socket.create_server((LOOPBACK, claim.number)) as server:
            with socket.create_connection((LOOPBACK, claim.number)) as client:
                accepted, _ = server.accept()
                accepted.close()
                assert client.recv(1) == b""
            with pytest.raises(OSError):
                socket.create_server((LOOPBACK, claim.number))
    with pytest.raises(OSError):
        ClaimedPort(claim.number)
    again = ClaimedPort(claim.number, again=True)
    assert again.number == claim.number


@holding
def test_no_port_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    (claim,) = claim_ports(1)
    monkeypatch.setattr(ports, "_SERVER_PORTS", range(claim.number, claim.number + 1))
    with pytest.raises(Unavailable, match="no 1 free ports"):
        free_ports(1)
    claim.release()
    assert free_ports(1) == [claim.number]
    with pytest.raises(Unavailable):
        free_ports(1, avoid={claim.number})


def test_port_is_free_sees_listeners() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
    assert port_is_free("127.0.0.1", port)
    assert not port_is_free("no.such.host.invalid", 1)
