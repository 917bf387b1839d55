"""`temper eval run|show|list`: what is sent, and what people are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.cli.runner import routes, temper
from tests.unit.cli.server import Reply, serving

BOUNDS = {"low": 0.25, "high": 0.75, "level": 0.95, "method": "wilson"}
RUN: dict[str, Any] = {
    "id": "job-1",
    "state": "succeeded",
    "reason": None,
    "progress": {"step": 8, "total_steps": 8},
    "suites": [{"suite": "sums@1", "better": "higher"}],
    "targets": [{"name": "base"}, {"name": "polite@1"}],
    "summaries": [
        {
            "suite": "sums@1",
            "target": "base",
            "mean": 0.5,
            "interval": BOUNDS,
            "items": 4,
            "invalid": 1,
            "finish_reasons": {"stop": 3, "length": 1},
            "tokens_mean": 2.5,
        }
    ],
    "comparisons": [
        {
            "suite": "sums@1",
            "first": "base",
            "second": "polite@1",
            "gain": 0.25,
            "interval": BOUNDS,
            "p": 0.125,
            "better": 1,
            "worse": 0,
            "sees": None,
        }
    ],
    "created_at": 1.0,
}


def test_a_run_is_sent_with_its_targets_and_settings() -> None:
    with serving(routes(POST_v1_evaluations=Reply({**RUN, "state": "queued"}, 202))) as (url, requests):
        result = temper(
            *("eval", "run", "sums", "colours@2", "--target", "base", "--target", "theirs@http://other:8000/v1"),
            *("--samples", "4", "--seed", "7", "--set", "sampling.temperature=0.5"),
            url=url,
        )
    assert result.exit_code == 0, result.stderr
    assert requests[0].json == {
        "suites": ["sums", "colours@2"],
        "targets": ["base", {"model": "theirs", "url": "http://other:8000/v1"}],
        "sampling": {"samples": 4, "temperature": 0.5},
        "seed": 7,
    }
    assert "job-1 queued" in result.stdout


def test_scores_and_comparisons_are_tables() -> None:
    with serving(routes(GET_v1_evaluations_job1=Reply(RUN))) as (url, _):
        result = temper("eval", "show", "job-1", url=url)
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["sums@1", "base", "50.0", "%", "25.0", "to", "75.0", "%", "4", "1", "1", "2.5"] in lines
    assert ["sums@1", "base", "→", "polite@1", "+0.2500", "+0.2500", "to", "+0.7500", "0.12", "1", "0"] in lines


def test_runs_of_a_version_are_listed() -> None:
    answer = Reply({"object": "list", "data": [RUN], "has_more": False})
    with serving(routes(GET_v1_adapters_polite_versions_1_evaluations=answer)) as (url, _):
        result = temper("eval", "list", "--adapter", "polite@1", url=url)
    assert result.exit_code == 0, result.stderr
    assert "base polite@1" in result.stdout
    assert temper("eval", "list", "--adapter", "polite", url=url).exit_code == 2


def test_a_gates_decision_is_a_table() -> None:
    condition = {"kind": "no_loss", "suite": "sums@1", "gain": -0.01, "at_least": -0.05, "p": 0.04, "alpha": 0.05}
    gate = {"gate": "publish_if", "against": "base", "passed": True, "conditions": [{**condition, "passed": True}]}
    with serving(routes(GET_v1_evaluations_job1=Reply({**RUN, "job": "job-0", "gates": [gate]}))) as (url, _):
        result = temper("eval", "show", "job-1", url=url)
    assert result.exit_code == 0, result.stderr
    assert "publish_if of job-0 against base: met" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["no", "loss", "sums@1", "-0.0100", ">", "-0.05", "0.04", "0.05", "shown"] in lines


def test_targets_side_by_side_are_a_table_and_a_plot(tmp_path: Path) -> None:
    cell = {"suite": "sums@1", "better": "higher", "mean": 0.5, "interval": BOUNDS, "items": 4, "invalid": 0}
    pair = RUN["comparisons"][0]
    answer = {
        "entries": [{"label": "base"}, {"label": "polite@1"}],
        "data": [{**cell, "entry": 0, "with_first": None}, {**cell, "entry": 1, "with_first": pair}],
    }
    file = tmp_path / "scores.png"
    with serving(routes(GET_v1_evaluations_compare=Reply(answer))) as (url, requests):
        result = temper("eval", "compare", "job-1", "polite@1", "--target", "base", "--plot", str(file), url=url)
        assert temper("eval", "compare", "job-1", "--plot", str(tmp_path / "x.pdf"), url=url).exit_code == 2
    assert result.exit_code == 0, result.stderr
    (asked,) = requests  # a plot that cannot be is refused before anything is asked
    assert asked.path == "/v1/evaluations/compare?of=job-1&of=polite%401&target=base"
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "sums@1 polite@1 50.0 % 25.0 to 75.0 % 0 +0.2500 +0.2500 to +0.7500 0.12" in lines
    assert file.read_bytes().startswith(b"\x89PNG")
