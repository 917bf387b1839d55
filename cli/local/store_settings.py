"""Settings that `temper up` remembers, in the data directory: credentials of the local stores, and ports."""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from cli.local.ports import LOOPBACK, ClaimedPort, claim_ports
from cli.local.private_tls import write_private
from cli.local.store_processes import LocalServer, s3_server, valkey_server
from cli.local.supervisor import RestartPolicy, Service


@dataclass(frozen=True, slots=True)
class Secrets:
    """Credentials of the local stores, made once for a data directory."""

    redis_password: str
    s3_access_key: str
    s3_secret_key: str

    @classmethod
    def load_or_create(cls, path: Path) -> Secrets:
        """Reads the file, or writes a new one that only its owner can read."""
        if path.exists():
            return cls(**json.loads(path.read_text()))
        fresh = cls(secrets.token_urlsafe(24), f"temper{secrets.token_hex(6)}", secrets.token_urlsafe(32))
        write_private(path, json.dumps(asdict(fresh)) + "\n")
        return fresh


@dataclass(frozen=True, slots=True)
class Ports:
    """Internal ports on 127.0.0.1, kept from one start to the next where they are still free."""

    redis: ClaimedPort
    s3: ClaimedPort
    engines: tuple[ClaimedPort, ...]
    gateways: tuple[ClaimedPort, ...] = ()
    """Own ports of gateways that share one; none where there is one gateway."""

    @classmethod
    def load_or_choose(cls, path: Path, *, gateway_port: int, engines: int = 1, gateways: int = 1) -> Ports:
        """The ports of last time if all are free, else new ones; further ones for parts that are more than then."""
        own = map(gateway_name, range(gateways)) if gateways > 1 else ()
        names = ["redis", "s3", *map(engine_name, range(engines)), *own]
        numbers: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        known: list[ClaimedPort] = []
        with contextlib.suppress(OSError):
            known = [ClaimedPort(numbers[name], again=True) for name in names if name in numbers]
        if len(known) < len([name for name in names if name in numbers]):
            numbers, known = {}, []
        avoid = {gateway_port, *numbers.values()}
        claims = known + claim_ports(len(names) - len(known), avoid=avoid)
        numbers |= {name: claim.number for name, claim in zip(names, claims, strict=True)}
        path.write_text(json.dumps(numbers) + "\n")
        return cls(claims[0], claims[1], tuple(claims[2 : 2 + engines]), tuple(claims[2 + engines :]))


def engine_name(index: int) -> str:
    """Name of an engine's process, log and metrics: engine, engine-2, …"""
    return "engine" if index == 0 else f"engine-{index + 1}"


def gateway_name(index: int) -> str:
    """Name of a gateway's process and log: gateway, gateway-2, …"""
    return "gateway" if index == 0 else f"gateway-{index + 1}"


def redis_url(ports: Ports, credentials: Secrets) -> str:
    return f"redis://:{credentials.redis_password}@{LOOPBACK}:{ports.redis.number}/0"


def valkey(data_dir: Path, ports: Ports, credentials: Secrets) -> Service:
    """Valkey with the append-only file on."""
    return _service(valkey_server(data_dir / "valkey", ports.redis, password=credentials.redis_password), data_dir)


def seaweed(data_dir: Path, ports: Ports, credentials: Secrets, *, gateway_port: int) -> Service:
    """SeaweedFS' S3 server."""
    server = s3_server(
        data_dir / "s3",
        ports.s3,
        access_key=credentials.s3_access_key,
        secret_key=credentials.s3_secret_key,
        avoid=(ports.redis.number, *(claim.number for claim in (*ports.engines, *ports.gateways)), gateway_port),
    )
    return _service(server, data_dir)


def _service(server: LocalServer, data_dir: Path) -> Service:
    server.remove_leftovers()

    def health() -> str | None:
        return None if server.is_ready() else f"{server.address} does not answer"

    def alive() -> str | None:
        problem = health()
        if problem is None and server.chores is not None:
            server.chores()
        return problem

    return Service(
        name=server.name,
        argv=server.argv,
        log=data_dir / "logs" / f"{server.name}.log",
        health=health,
        alive=alive,
        env=server.env,
        cwd=server.cwd,
        stop_timeout=server.stop_grace,
        # A port may be gone between choosing and binding it; one more try costs little.
        restart=RestartPolicy(start_attempts=2),
        cleanup=server.remove_leftovers,
    )
