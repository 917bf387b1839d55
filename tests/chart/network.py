"""Who may talk to whom: the semantics of NetworkPolicy, and what the services of a release really dial.

Policies add up: a pod that one of them selects for a direction gets there only what the rules of those that select it
allow; a connection needs both ends (https://kubernetes.io/docs/concepts/services-networking/network-policies/). Nodes
always reach their pods, so probes need nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.chart.render import NAMESPACE, Rendered

Rule = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """One end of a connection: a pod of the release, or somebody outside.

    Args:
        name: for messages.
        labels: of the pod; empty: it is none of the release's.
        namespace: where it runs; empty: outside of the cluster.
    """

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    namespace: str = ""

    @property
    def inside(self) -> bool:
        return self.namespace == NAMESPACE and bool(self.labels)


@dataclass(frozen=True, order=True)
class Edge:
    """Somebody who dials a port of somebody."""

    source: str
    target: str
    port: int
    protocol: str = "TCP"


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Of a label selector with matchLabels alone, as all of the chart's are."""
    if set(selector) - {"matchLabels"}:
        raise NotImplementedError(f"selector {selector}")
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _peers_match(peers: list[Rule] | None, peer: Peer) -> bool:
    if not peers:
        return True
    for rule in peers:
        if "ipBlock" in rule:
            raise NotImplementedError("addresses are not known here")
        home = {"kubernetes.io/metadata.name": peer.namespace} if peer.namespace else None
        if "namespaceSelector" in rule:
            if home is None or not matches(rule["namespaceSelector"], home):
                continue
        elif peer.namespace != NAMESPACE:
            continue
        if "podSelector" not in rule or matches(rule["podSelector"], dict(peer.labels)):
            return True
    return False


def _ports_match(ports: list[Rule] | None, port: int, protocol: str) -> bool:
    return not ports or any(rule["port"] == port and rule.get("protocol", "TCP") == protocol for rule in ports)


def _selecting(release: Rendered, pod: Peer, direction: str) -> list[Rule]:
    return [
        policy["spec"]
        for policy in release.of("NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and matches(policy["spec"]["podSelector"], dict(pod.labels))
    ]


def allows(release: Rendered, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether the release's policies let a connection through."""
    for pod, other, direction, field, key in (
        (source, target, "Egress", "egress", "to"),
        (target, source, "Ingress", "ingress", "from"),
    ):
        if not pod.inside:
            continue
        selecting = _selecting(release, pod, direction)
        rules = [rule for spec in selecting for rule in spec.get(field, ())]
        if selecting and not any(
            _ports_match(rule.get("ports"), port, protocol) and _peers_match(rule.get(key), other) for rule in rules
        ):
            return False
    return True


def peers(release: Rendered, outside: str) -> dict[str, Peer]:
    """The pods of a release by component, and somebody of a namespace "somewhere", of another, and of the internet."""
    found = {
        workload.component: Peer(workload.component, tuple(sorted(workload.labels.items())), NAMESPACE)
        for workload in release.workloads
    }
    found["stranger"] = Peer("stranger", (("app", "other"),), NAMESPACE)
    found[outside] = Peer(outside, (("app", "x"),), outside)
    found["elsewhere"] = Peer("elsewhere", (("app", "x"),), "elsewhere")
    found["internet"] = Peer("internet")
    return found


def dialled(release: Rendered, outside: Mapping[tuple[str, str], str], dns: Sequence[int] = (53,)) -> Iterator[Edge]:
    """What the containers connect to, read off their environments: everything they have an address of, and a resolver.

    Args:
        outside: values of Secrets that are not the release's.
        dns: ports of resolvers.
    """
    for workload in release.workloads:
        if workload.component not in ("gateway", "engine", "test"):
            continue  # stores dial nobody
        for protocol, port in itertools.product(("TCP", "UDP"), dns):
            yield Edge(workload.component, "dns", port, protocol)
        for container in (*workload.init_containers, *workload.containers):
            env = container.env(outside)
            for name, url in env.items():
                for host, port in _addresses(name, url, env):
                    yield Edge(workload.component, _component(release, host), port)
            for arg in container.args:
                if arg.startswith("http://"):
                    parts = urlsplit(arg)
                    yield _service_edge(release, workload.component, str(parts.hostname), int(parts.port or 80))


def _service_edge(release: Rendered, source: str, host: str, port: int) -> Edge:
    """Policies see the pod's port, not the Service's."""
    for service in release.of("Service"):
        if host == f"{service['metadata']['name']}.{NAMESPACE}.svc":
            component = service["metadata"]["labels"]["app.kubernetes.io/component"]
            (named,) = [entry["targetPort"] for entry in service["spec"]["ports"] if entry["port"] == port]
            (container,) = release.workload(component).containers
            return Edge(source, component, container.ports[named])
    raise LookupError(f"{host}:{port} is no Service of the release")


def _component(release: Rendered, host: str) -> str:
    for service in release.of("Service"):
        if host == f"{service['metadata']['name']}.{NAMESPACE}.svc":
            return str(service["metadata"]["labels"]["app.kubernetes.io/component"])
    return host


def _addresses(name: str, value: str, env: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Hosts and ports that a setting names."""
    if name == "TEMPER_ENGINES":
        for entry in value.split(","):
            host, _, port = entry.removeprefix("dns:///").rpartition(":")
            if host != "127.0.0.1":  # no policy is between the containers of a pod
                yield host, int(port)
    elif name == "TEMPER_REDIS_URL":
        yield _host(value, 6379)
    elif name in ("TEMPER_S3_ENDPOINT", "TEMPER_MODEL_S3_ENDPOINT"):
        secure = env.get(name.replace("ENDPOINT", "SECURE"), "false") == "true"
        yield _host(f"//{value}", 443 if secure else 80)
    elif name in ("TEMPER_S3_CREDENTIALS", "TEMPER_MODEL_S3_CREDENTIALS") and value == "chain":
        yield from (("identity", 443), ("identity", 80))
    elif name in ("TEMPER_OTLP_ENDPOINT", "TEMPER_HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY"):
        yield _host(value, 443 if value.startswith("https") else 80)
    elif name == "TEMPER_REWARD_WEBHOOKS":
        for entry in value.split(","):
            yield _host(entry if "://" in entry else f"https://{entry}", 443)


def _host(url: str, default: int) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), parts.port or default
