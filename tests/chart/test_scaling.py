"""What engines are scaled by: each query of the ScaledObject in Prometheus' own evaluator, over series as they come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from observability.alerts.cases import rising, series, steady
from tests.chart.render import NAMESPACE, RELEASE, render
from tests.chart.test_values import raw_env
from tests.promtool import Promtool

ONE: Mapping[str, Any] = {"enabled": True, "minReplicas": 1}
ZERO: Mapping[str, Any] = {"enabled": True, "minReplicas": 0}
GATEWAY = {"namespace": NAMESPACE, "release": RELEASE, "component": "gateway"}
ENGINE = {"namespace": NAMESPACE, "release": RELEASE, "component": "engine"}
AGE, WAITING = "temper_gateway_job_oldest_queued_seconds", "temper_gateway_waiting_for_engine"
JOBS, REFUSED = "temper_gateway_jobs", "temper_gateway_requests_total"
CHAT = {"method": "POST", "route": "/v1/chat/completions", "status": "503"}


def engines(*loads: tuple[float, float], release: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
    """Series of engines by their running and waiting requests."""
    found: dict[str, str] = {}
    for index, (running, waiting) in enumerate(loads):
        place = {**ENGINE, "namespace": namespace, "release": release, "pod": f"{release}-temper-engine-{index}"}
        found[series("up", place)] = steady(1)
        found[series("vllm:num_requests_running", place)] = steady(running)
        found[series("vllm:num_requests_waiting", place)] = steady(waiting)
    return found


def gateways(queued: float = 0, running: float = 0, *, count: int = 2, queue: str = "training") -> dict[str, str]:
    """Series of gateways, each of which says the same of the queue."""
    found: dict[str, str] = {}
    for index in range(count):
        place = {**GATEWAY, "pod": f"{RELEASE}-temper-gateway-{index}"}
        for state, jobs in (("queued", queued), ("running", running), ("failed", 1000)):
            found[series(JOBS, place, queue=queue, state=state)] = steady(jobs)
    return found


def refused(a_minute: float, **labels: str) -> dict[str, str]:
    """A gateway that refuses so many requests a minute."""
    return {series(REFUSED, {**GATEWAY, "pod": f"{RELEASE}-temper-gateway-0", **CHAT, **labels}): rising(a_minute)}


def waits(age: float = 0, *requests: float, queue: str = "training") -> dict[str, str]:
    """Series of gateways, which all say the age of the oldest job, and each how many requests wait there."""
    found: dict[str, str] = {}
    for index, count in enumerate(requests or (0,)):
        place = {**GATEWAY, "pod": f"{RELEASE}-temper-gateway-{index}"}
        found[series(AGE, place, queue=queue)] = steady(age)
        found[series(WAITING, place)] = steady(count)
    return found


UNREAD = {series("up", {**ENGINE, "pod": f"{RELEASE}-temper-engine-0"}): steady(0)}
"""An engine is there and Prometheus cannot read it."""
NOBODY: dict[str, str] = {}
CASES: tuple[tuple[str, Mapping[str, Any], str, Mapping[str, str], float | None], ...] = (
    ("running and waiting count", ONE, "requests", engines((100, 10), (28, 0)), 138),
    ("full engines with nobody waiting count", ONE, "requests", engines((192, 0), (192, 0)), 384),
    ("idle is nought", ONE, "requests", engines((0, 0)), 0),
    (
        "of this release alone",
        ONE,
        "requests",
        engines((5, 0)) | engines((70, 7), release="other") | engines((70, 7), namespace="elsewhere"),
        5,
    ),
    ("no engine can be read: nothing, no nought", ONE, "requests", gateways() | UNREAD, None),
    ("Prometheus knows nobody", ONE, "requests", NOBODY, None),
    ("jobs are counted once, whoever says it", ONE, "jobs", gateways(3, 1), 4),
    ("jobs of other queues are not", ONE, "jobs", gateways() | gateways(50, queue="batches"), 0),
    ("gateways cannot be read", ONE, "jobs", engines((1, 0)), None),
    ("the oldest job's age is one, whoever says it", ONE, "age", waits(1200, 0, 0), 1200),
    ("the age of batches is none of a trainer", ONE, "age", waits(5, 0) | waits(900, 0, queue="batches"), 5),
    ("no gateway knows an age", ONE, "age", engines((1, 0)), None),
    ("a job that has waited", ZERO, "age", waits(60), 60),
    ("the first request waits for an engine", ZERO, "waiting", waits(0, 1, 0), 1),
    ("nobody waits for an engine", ZERO, "waiting", waits(), 0),
    ("gateways cannot be read for who waits", ZERO, "waiting", engines((1, 0)), None),
    ("there are engines", ZERO, "requests", engines((100, 10)) | gateways(), 110),
    ("there is no engine, and gateways say so", ZERO, "requests", gateways(), 0),
    ("an engine is there and cannot be read", ZERO, "requests", gateways() | UNREAD, None),
    ("one of two engines can be read", ZERO, "requests", engines((9, 1)) | UNREAD | gateways(), 10),
    ("Prometheus knows nobody, from zero", ZERO, "requests", NOBODY, None),
    ("a queued job wakes one", ZERO, "jobs", gateways(1), 1),
    ("a refused request wakes one", ZERO, "refused", gateways() | refused(3), 6),
    ("nobody was refused", ZERO, "refused", gateways(), 0),
    ("not what a client did wrong", ZERO, "refused", gateways() | refused(9, status="429"), 0),
    ("nor what asks for health", ZERO, "refused", gateways() | refused(9, route="/readyz"), 0),
    ("gateways cannot be read, from zero", ZERO, "refused", engines((1, 0)), None),
)


def triggers(values: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    (found,) = render({"engine": {"autoscaling": values}}).of("ScaledObject")
    return {one["name"]: one["metadata"] for one in found["spec"]["triggers"]}


@pytest.mark.parametrize("values", [ONE, ZERO], ids=["one", "zero"])
def test_every_query_gives_the_number_that_is_wanted(
    values: Mapping[str, Any], promtool: Promtool, tmp_path: Path
) -> None:
    queries = {name: one["query"] for name, one in triggers(values).items()}
    cases = [case for case in CASES if case[1] is values]
    assert {trigger for _, _, trigger, _, _ in cases} == set(queries), "a trigger that nothing is known of"
    tests = [
        {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": one, "values": points} for one, points in found.items()],
            "promql_expr_test": [
                {
                    "expr": queries[trigger],
                    "eval_time": "30m",
                    "exp_samples": [] if wanted is None else [{"labels": "{}", "value": wanted}],
                }
            ],
        }
        for name, _, trigger, found, wanted in cases
    ]
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
    for test in tests:  # or a file that promtool does not read would pass as well
        test["promql_expr_test"][0]["exp_samples"] = [{"labels": "{}", "value": 12345}]
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    assert promtool("test", "rules", file).returncode == 1


@pytest.mark.parametrize(
    ("loads", "wish"),
    [([(192, 0)] * 8, 8), ([(256, 100)] * 2, 4), ([(20, 0)] * 8, 1)],
    ids=["full", "two are over", "hardly used"],
)
def test_full_engines_are_wanted_as_they_are(loads: list[tuple[float, float]], wish: int) -> None:
    """AverageValue: the autoscaler wants the sum, which the test above has, over the threshold, rounded up."""
    threshold = float(triggers(ONE)["requests"]["threshold"])
    assert math.ceil(sum(running + waiting for running, waiting in loads) / threshold) == wish


def test_the_first_request_waits_where_engines_are_scaled_to_zero() -> None:
    setting = "TEMPER_ENGINE_START_SECONDS"
    for values, waits_for in ((ZERO, "600"), ({**ZERO, "startSeconds": 0}, "0"), (ONE, None)):
        (gateway,) = render({"engine": {"autoscaling": values}}).workload("gateway").containers
        assert raw_env(gateway).get(setting, {}).get("value") == waits_for
    assert "age" not in triggers({**ONE, "jobAgeSeconds": 0})


def test_an_autoscaler_of_kubernetes_goes_by_the_same_numbers() -> None:
    release = render({"engine": {"autoscaling": {**ONE, "scaler": "hpa"}}})
    assert release.of("ScaledObject") == []
    wanted = {f"temper_scale_{name}": (one["query"], one["threshold"]) for name, one in triggers(ONE).items()}
    (rules,) = release.of("PrometheusRule")
    recorded = {rule["record"]: rule for group in rules["spec"]["groups"] for rule in group["rules"]}
    (scaler,) = release.of("HorizontalPodAutoscaler")
    metrics = {one["external"]["metric"]["name"]: one["external"] for one in scaler["spec"]["metrics"]}
    assert recorded.keys() == metrics.keys() == wanted.keys()
    for name, (query, threshold) in wanted.items():
        assert recorded[name]["expr"] == query
        assert recorded[name]["labels"] == {"namespace": NAMESPACE, "release": RELEASE}
        assert metrics[name]["metric"]["selector"] == {"matchLabels": {"release": RELEASE}}
        assert metrics[name]["target"] == {"type": "AverageValue", "averageValue": threshold}
