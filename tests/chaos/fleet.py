"""Fleet: gateways and engines on the stores of a Temper, with a link on every connection between them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.chaos.link import Link
from tests.e2e.cluster import Cluster
from tests.stack import Stack

_STORES = {"redis": "TEMPER_REDIS_URL", "s3": "TEMPER_S3_ENDPOINT"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of each."""

    engines: int = 3
    gateways: int = 2


class Fleet(Cluster):
    """Cluster whose processes reach each other and the stores through links, and are started again when they end.

    Args:
        loop: event loop that the links run on, in another thread than the caller's.
    """

    def __init__(self, stack: Stack, directory: Path, sizes: Sizes, loop: asyncio.AbstractEventLoop) -> None:
        self.links: dict[str, Link] = {}
        self._links_loop = loop
        self._sizes = sizes
        self._spawned: dict[str, tuple[str, Mapping[str, str]]] = {}
        engine = {
            "TEMPER_TRAINER": "true",
            "TEMPER_MAX_NUM_SEQS": "8",
            "TEMPER_TOKEN_BUDGET": "128",
            "TEMPER_MAX_MODEL_LEN": "1024",
            "TEMPER_KV_CACHE_BYTES": "64MiB",
            "TEMPER_DRAIN_SECONDS": "5",
        }
        gateway = {"TEMPER_STATUS_INTERVAL_SECONDS": "0.2", "TEMPER_REQUEST_TIMEOUT_SECONDS": "60"}
        super().__init__(stack, directory, sizes.engines, engine_env=engine, gateway_env=gateway)
        self.urls = [self.url]

    def start_gateways(self) -> None:
        """The gateways besides the first, which is ready."""
        from cli.local.ports import claim_ports

        for number, claim in enumerate(claim_ports(self._sizes.gateways - 1), 2):
            self._claims.append(claim)
            self.start_gateway(f"gateway-{number}", claim.number)
            self.urls.append(f"http://127.0.0.1:{claim.number}")

    def _spawn(self, name: str, module: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """See Cluster. What the process is told of others are links."""
        linked = dict(env)
        for store, variable in _STORES.items():
            linked[variable] = self._through(f"{name}-{store}", env[variable])
        if engines := env.get("TEMPER_ENGINES"):
            addresses = [self._through(f"{name}-{address}", address) for address in engines.split(",")]
            linked["TEMPER_ENGINES"] = ",".join(addresses)
        self._spawned[name] = (module, env)
        return super()._spawn(name, module, linked)

    def _through(self, name: str, address: str) -> str:
        """The address with a link's in the place of its host and port."""
        before, _, rest = address.rpartition("@")
        place, slash, path = rest.partition("/")
        host, _, port = place.rpartition(":")
        if name not in self.links:
            link = self.links[name] = Link(name, host, int(port))
            asyncio.run_coroutine_threadsafe(link.start(), self._links_loop).result(10)
        through = f"127.0.0.1:{self.links[name].port}"
        return f"{before}@{through}{slash}{path}" if before else f"{through}{slash}{path}"

    def kill(self, name: str, number: signal.Signals) -> None:
        """Signals a process; one that has ended is none."""
        process = self.processes[name]
        if process.poll() is None:
            os.kill(process.pid, number)

    def start_what_ended(self) -> list[str]:
        """Starts processes again that have ended, as a supervisor does; returns their names."""
        ended = [name for name, process in self.processes.items() if process.poll() is not None]
        for name in ended:
            module, env = self._spawned[name]
            self.processes[name] = self._spawn(name, module, env)
        return ended

    def handles(self) -> dict[str, int]:
        """Open file handles of each process."""
        found = {}
        for name, process in self.processes.items():
            with suppress(OSError):
                found[name] = len(os.listdir(f"/proc/{process.pid}/fd"))
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
