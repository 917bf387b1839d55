"""NetworkPolicies allow what the services dial and nothing else, over all combinations of values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.chart.combinations import OUTSIDE
from tests.chart.network import Edge, Peer, allows, dialled, peers
from tests.chart.render import Rendered, render
from tests.chart.test_objects import given

PARTS = ("gateway", "engine", "redis", "s3", "test")
PORTS = (
    *(22, 53, 80, 443, 3128, 4317, 5353, 5557, 5558, 6379, 6380, 8000),
    *(8420, 8443, 9000, 9090, 9100, 26379, 50051, 50052),
)
SOMEWHERE = "somewhere"


def needed(release: Rendered, values: Mapping[str, Any]) -> set[Edge]:
    """What the services dial."""
    outside = {
        pair: text
        for workload in release.workloads
        for container in (*workload.init_containers, *workload.containers)
        for pair, text in given(container, release.secrets).items()
    }
    if not values["redis"]["bundled"]:
        external = values["redis"]["external"]
        outside[external["existingSecret"], external["key"]] = f"redis://redis.example.com:{external['port']}/0"
    found = set(dialled(release, outside, (53, 5353) if values["global"]["openshift"] else (53,)))
    if values["redis"]["external"]["sentinelPort"]:
        found |= {Edge(part, "sentinel", values["redis"]["external"]["sentinelPort"]) for part in ("gateway", "engine")}
    if values["engine"]["trainer"]["webhooks"]:
        found |= {Edge("engine", "webhook", port) for port in values["networkPolicy"]["webhookPorts"]}
    if values["gateway"]["env"].keys() & {"TEMPER_WEBHOOK_URLS", "TEMPER_WEBHOOK_ALLOW"}:
        found |= {Edge("gateway", "webhook", port) for port in values["networkPolicy"]["webhookPorts"]}
    return found


def test_every_needed_edge_is_there_and_no_other(release: Rendered, values: Mapping[str, Any]) -> None:
    if not values["networkPolicy"]["enabled"]:
        assert release.of("NetworkPolicy") == []
        return
    wanted = needed(release, values)
    known = peers(release, SOMEWHERE)
    inside = [name for name in PARTS if name in known]
    policy = values["networkPolicy"]
    for source in inside:
        for target in inside:
            for port in PORTS:
                expected = Edge(source, target, port) in wanted
                assert allows(release, known[source], known[target], port) == expected, (source, target, port)
    # To the outside: the ports of what is dialled there, and only where the values say, if they do.
    for source in inside:
        ports = {(edge.port, edge.protocol) for edge in wanted if edge.source == source and edge.target not in inside}
        for port, protocol in itertools.product(PORTS, ("TCP", "UDP")):
            rules = policy["dnsTo"] if port in (53, 5353) else policy["redisTo"]
            place = _place(rules) if rules else known["internet"]
            assert allows(release, known[source], place, port, protocol) == ((port, protocol) in ports), (source, port)
            for other in ("internet", "elsewhere", "stranger") if rules else ():
                assert not allows(release, known[source], known[other], port, protocol), (source, other, port)


def _place(rules: Sequence[Mapping[str, Any]]) -> Peer:
    """Somebody whom a rule names."""
    (rule,) = rules
    labels = rule.get("podSelector", {}).get("matchLabels", {"app": "x"})
    return Peer("place", tuple(labels.items()), rule["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])


def test_who_may_come_in(release: Rendered, values: Mapping[str, Any]) -> None:
    policy = values["networkPolicy"]
    if not policy["enabled"]:
        return
    known = peers(release, SOMEWHERE)
    open_to = {
        "gateway": {8420: policy["gatewayFrom"]},
        "engine": {9100: policy["monitoringFrom"]} if values["monitoring"]["enabled"] else {},
    }
    if (http := values["engine"]["http"])["enabled"]:
        open_to["engine"][8000] = http["from"] or policy["gatewayFrom"]
    if (kv_events := values["engine"]["kvEvents"])["enabled"]:
        open_to["engine"] |= dict.fromkeys((5557, 5558), kv_events["from"])
    for target in (name for name in PARTS if name in known):
        for port in PORTS:
            rules = open_to.get(target, {}).get(port)
            outside = {
                name: allows(release, known[name], known[target], port)
                for name in ("stranger", SOMEWHERE, "elsewhere", "internet")
            }
            if rules is None:
                expected = dict.fromkeys(outside, False)
                if (target, port) in (("redis", 6379), ("s3", 9000)) and policy["redisFrom"]:
                    expected[SOMEWHERE] = True
            elif not rules:
                expected = dict.fromkeys(outside, True)
            else:
                names = {rule["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for rule in rules}
                if port in (8420, 8000) and values["monitoring"]["enabled"]:
                    names |= {
                        rule["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
                        for rule in policy["monitoringFrom"]
                    }
                expected = {name: name in names for name in outside}
            assert outside == expected, (target, port)


def test_every_policy_selects_a_pod(release: Rendered) -> None:
    for policy in release.of("NetworkPolicy"):
        labels = policy["spec"]["podSelector"]["matchLabels"]
        assert [one for one in release.workloads if labels.items() <= one.labels.items()], policy["metadata"]["name"]


@pytest.mark.parametrize(
    ("edge", "values"),
    [
        (("gateway", "engine", 50051), {}),
        (("engine", "s3", 9000), {}),
        (("test", "gateway", 8420), {"networkPolicy": {"gatewayFrom": OUTSIDE}}),
    ],
)
def test_the_evaluation_itself(edge: tuple[str, str, int], values: Mapping[str, Any]) -> None:
    """A policy less, and an edge is gone: what the tests above rely on."""
    release = render(values)
    source, target, port = edge
    known = peers(release, SOMEWHERE)
    assert allows(release, known[source], known[target], port)
    for name in (source, target):
        without = Rendered(
            tuple(
                obj
                for obj in release.objects
                if obj["kind"] != "NetworkPolicy" or not obj["metadata"]["name"].endswith(f"-{name}")
            ),
            "",
        )
        assert not allows(without, known[source], known[target], port)
    assert not allows(release, Peer("stranger", (("app", "x"),), "ai"), known["engine"], 50051)
