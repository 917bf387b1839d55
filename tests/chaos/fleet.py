"""Fleet: gateways and engines on the stores of a Temper, with a link on every connection between them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import httpx
import psutil
import redis

from cli.local.ports import claim_ports
from tests.certificates import Authority, environment
from tests.chaos.clock import Offset
from tests.chaos.faults import GROUPS, STORES
from tests.chaos.link import Link
from tests.chaos.refusals import REFUSALS
from tests.chaos.stores import Stores
from tests.e2e.cluster import Cluster

_STORE_ADDRESSES = {"redis": "TEMPER_REDIS_URL", "s3": "TEMPER_S3_ENDPOINT"}
_ROLL_SECONDS = 60.0
"""Longest wait for one process of a rolling restart; then the next one's turn has come."""


def _answers(client: redis.Redis) -> bool:
    """False: it is away, or loads what it had before it was killed."""
    try:
        return bool(client.ping())
    except redis.ConnectionError:  # which BusyLoadingError is
        return False


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of each."""

    engines: int = 3
    gateways: int = 2


class Fleet(Cluster):
    """Cluster whose processes reach each other and the stores through links, and are started again when they end.

    Between gateways and engines there is mutual TLS, prefixes go to disk, requests are logged: what can be full is
    used.

    Args:
        loop: event loop that the links run on, in another thread than the caller's.
    """

    def __init__(self, stores: Stores, directory: Path, sizes: Sizes, loop: asyncio.AbstractEventLoop) -> None:
        self.links: dict[str, Link] = {}
        self.offsets: dict[str, Offset] = {}
        """Clock of each process."""
        self._stores = stores
        self._links_loop = loop
        self._sizes = sizes
        self._spawned: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._authority = Authority("chaos")
        self._tls = self._authority.issue(directory / "tls", "temper")
        tls = environment(self._tls)
        engine = {
            "TEMPER_TRAINER": "true",
            "TEMPER_MAX_NUM_SEQS": "8",
            "TEMPER_TOKEN_BUDGET": "128",
            "TEMPER_MAX_MODEL_LEN": "1024",
            "TEMPER_KV_CACHE_BYTES": "64MiB",
            "TEMPER_DRAIN_SECONDS": "5",
            "TEMPER_TIERS": "host,disk",
            "TEMPER_TIER_HOST_BYTES": "16MiB",
            "TEMPER_TIER_DISK_BYTES": "64MiB",
            **tls,
        }
        gateway = {
            "TEMPER_STATUS_INTERVAL_SECONDS": "0.2",
            "TEMPER_REQUEST_TIMEOUT_SECONDS": "60",
            "TEMPER_BATCH_RECLAIM_SECONDS": "10",
            "TEMPER_RESPONSE_LEASE_SECONDS": "10",
            "TEMPER_REQUEST_LOG": "true",
            **tls,
        }
        super().__init__(stores, directory, sizes.engines, engine_env=engine, gateway_env=gateway)
        self.urls = [self.url]

    def start_gateways(self) -> None:
        """The gateways besides the first, which is ready."""
        for number, claim in enumerate(claim_ports(self._sizes.gateways - 1), 2):
            self._claims.append(claim)
            self.start_gateway(f"gateway-{number}", claim.number)
            self.urls.append(f"http://127.0.0.1:{claim.number}")

    def channel(self, address: str) -> grpc.Channel:
        """See Cluster."""
        files = (self._tls.ca, self._tls.key, self._tls.cert)
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(*(file.read_bytes() for file in files)))

    def _spawn(self, name: str, module: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """See Cluster. What the process is told of others are links, and its clock can be moved."""
        linked = dict(env)
        for store, variable in _STORE_ADDRESSES.items():
            linked[variable] = self._through(f"{name}-{store}", env[variable], http=store == "s3")
        if engines := env.get("TEMPER_ENGINES"):
            addresses = [self._through(f"{name}-{address}", address) for address in engines.split(",")]
            linked["TEMPER_ENGINES"] = ",".join(addresses)
        own = self._directory / name.replace(":", "-")
        linked |= {
            "TEMPER_TIER_DISK_DIR": f"{own}-tier",
            "TEMPER_REQUEST_LOG_SPOOL": f"{own}-spool",
            "CHAOS_CLOCK": f"{own}.clock",
            "CHAOS_MODULE": module,
        }
        self.offsets.setdefault(name, Offset(Path(linked["CHAOS_CLOCK"])))
        self._spawned[name] = (module, env)
        return super()._spawn(name, "tests.chaos.clock", linked)

    def _through(self, name: str, address: str, *, http: bool = False) -> str:
        """The address with a link's in the place of its host and port."""
        before, _, rest = address.rpartition("@")
        place, slash, path = rest.partition("/")
        host, _, port = place.rpartition(":")
        if name not in self.links:
            link = self.links[name] = Link(name, host, int(port), http=http)
            asyncio.run_coroutine_threadsafe(link.start(), self._links_loop).result(10)
        through = f"127.0.0.1:{self.links[name].port}"
        return f"{before}@{through}{slash}{path}" if before else f"{through}{slash}{path}"

    # Breaking.

    def pid(self, name: str) -> int | None:
        """Of a process or store, as of now; None: it has ended."""
        if name in STORES:
            return self._stores.pid(name)
        process = self.processes[name]
        return process.pid if process.poll() is None else None

    def kill(self, name: str, number: signal.Signals) -> None:
        """Signals a process or a store; one that has ended is none."""
        if (pid := self.pid(name)) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    @contextmanager
    def refusing(self, code: str) -> Iterator[None]:
        """Redis refuses what it is asked for as long as the context lasts."""
        url = self._stores.settings.redis_url.get_secret_value()
        with redis.Redis.from_url(url, decode_responses=True, protocol=2) as client:
            self.wait_for(partial(_answers, client), "Valkey, which loads what it had", _ROLL_SECONDS)
            with REFUSALS[code](client):
                yield

    def renew(self, pause: float) -> None:
        """Replaces the certificate of everybody, as cert-manager does, but slowly: for a while certificate and key do
        not belong together."""
        fresh = self._authority.issue(self._directory / "tls-new", "temper")
        for number, (new, old) in enumerate(((fresh.cert, self._tls.cert), (fresh.key, self._tls.key))):
            if number:
                time.sleep(pause)
            shutil.copy(new, old.with_suffix(".new"))
            os.replace(old.with_suffix(".new"), old)

    def roll(self, group: str) -> None:
        """Restarts processes one after the other: each is asked to stop, and the next one's turn is when it is back."""
        names = self.addresses if group == GROUPS[1] else [n for n in self.processes if n.startswith("gateway")]
        for name in names:
            before = self.processes[name]
            self.kill(name, signal.SIGTERM)
            with suppress(TimeoutError):
                self.wait_for(partial(self._is_back, name, before), name, _ROLL_SECONDS)

    def _is_back(self, name: str, before: subprocess.Popen[bytes]) -> bool:
        if self.processes[name] is before:
            return False
        if name in self.addresses:
            with suppress(grpc.RpcError):
                return not self.status(name, timeout=1.0).draining
            return False
        return any(bool(engine["ready"]) for engine in self.health_of(name))

    def health_of(self, name: str) -> list[dict[str, object]]:
        """Engines as one gateway sees them; none while it does not answer."""
        names = sorted(n for n in self.processes if n.startswith("gateway"))
        with suppress(httpx.TransportError):
            return self.engines_at(self.urls[names.index(name)])
        return []

    # Mending, and looking.

    def start_what_ended(self, gone: str | None) -> list[str]:
        """Starts processes and stores again that have ended, but not this one; returns the names of processes."""
        self._stores.start_what_ended(gone)
        ended = [name for name, process in self.processes.items() if name != gone and process.poll() is not None]
        for name in ended:
            module, env = self._spawned[name]
            self.processes[name] = self._spawn(name, module, env)
        return ended

    def measured(self) -> dict[int, tuple[str, int, int]]:
        """(name, open file handles, resident bytes) by pid of each process."""
        found = {}
        for name, process in self.processes.items():
            with suppress(OSError, psutil.Error):
                resident = psutil.Process(process.pid).memory_info().rss
                found[process.pid] = name, len(os.listdir(f"/proc/{process.pid}/fd")), resident
        return found

    def left(self) -> list[str]:
        """What engines still hold, though nobody asks for anything: their books are not clean."""
        wrong = []
        for address in self.addresses:
            try:
                status = self.status(address)
            except grpc.RpcError as error:
                wrong.append(f"{address} does not answer: {error.code()}")
                continue
            held = status.running + status.waiting + status.blocks_used
            if held:
                wrong.append(
                    f"{address} has {status.running} running, {status.waiting} waiting, {status.blocks_used} blocks"
                )
        return wrong

    def stop_links(self) -> None:
        for link in self.links.values():
            asyncio.run_coroutine_threadsafe(link.stop(), self._links_loop).result(20)
