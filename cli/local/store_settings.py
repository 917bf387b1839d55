"""Settings of the local stores that `temper up` remembers: credentials and ports, in the data directory."""

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
    engine: ClaimedPort

    @classmethod
    def load_or_choose(cls, path: Path, *, gateway_port: int) -> Ports:
        """The ports of last time if all are free, else new ones."""
        if path.exists():
            old: dict[str, int] = json.loads(path.read_text())
            with contextlib.suppress(OSError):
                return cls(**{name: ClaimedPort(number, again=True) for name, number in old.items()})
        fresh = cls(*claim_ports(3, avoid={gateway_port}))
        numbers = {"redis": fresh.redis.number, "s3": fresh.s3.number, "engine": fresh.engine.number}
        path.write_text(json.dumps(numbers) + "\n")
        return fresh


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
        avoid=(ports.redis.number, ports.engine.number, gateway_port),
    )
    return _service(server, data_dir)


def _service(server: LocalServer, data_dir: Path) -> Service:
    server.remove_leftovers()

    def health() -> str | None:
        return None if server.is_ready() else f"{server.address} does not answer"

    return Service(
        name=server.name,
        argv=server.argv,
        log=data_dir / "logs" / f"{server.name}.log",
        health=health,
        alive=health,
        env=server.env,
        cwd=server.cwd,
        stop_timeout=server.stop_grace,
        # A port may be gone between choosing and binding it; one more try costs little.
        restart=RestartPolicy(start_attempts=2),
        cleanup=server.remove_leftovers,
    )
