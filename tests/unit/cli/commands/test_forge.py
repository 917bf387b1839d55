"""`temper forge`: the process that it starts, and how its result is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from cli.commands.up import DEFAULT_MODEL
from cli.main import app
from tests.unit.cli.runner import JOB, routes, state, temper
from tests.unit.cli.server import Reply, serving, sse

PLAN = {
    "parameters": 6_584_624,
    "parameters_after": 5_138_152,
    "bytes": 13_169_248,
    "bytes_after": 10_276_304,
    "shape": {"layers": [8, 7], "mlp_channels": [512, 384]},
}


def run(result: dict[str, Any], *arguments: str | Path) -> tuple[Any, list[str], dict[str, Any]]:
    with patch("cli.commands.forge.run_tool", return_value=result) as tool:
        done = CliRunner().invoke(app, ["forge", *map(str, arguments)])
    return done, (tool.call_args.args[1] if tool.called else []), dict(tool.call_args.kwargs) if tool.called else {}


def test_levels_become_arguments_and_the_plan_is_told() -> None:
    result = {"out": "cut.json", "plan": PLAN}
    done, given, options = run(
        result, "prune", DEFAULT_MODEL, "scores.json", "cut.json", "--mlp-channels", "25%", "--layers", "1"
    )
    assert done.exit_code == 0, done.output
    assert given[given.index("--mlp-channels") + 1] == "25%"
    assert given[given.index("--layers") + 1] == "1"
    assert "--kv-groups" not in given
    assert options["module"] == "services.forge"
    assert "6,584,624 → 5,138,152 (22.0% less)" in done.stdout
    assert "mlp_channels  512 → 384" in done.stdout


@pytest.mark.parametrize("command", [("prune", "s", "c"), ("compact", "c", "o"), ("quantize", "o")])
def test_a_dry_run_says_that_nothing_was_written(command: tuple[str, ...]) -> None:
    name, *rest = command
    done, given, _ = run({"out": None, "plan": PLAN}, name, DEFAULT_MODEL, *rest, "--dry-run")
    assert done.exit_code == 0, done.output
    assert given[-1] == "--dry-run"
    assert "nothing was written" in done.stdout


def test_a_planned_recovery_tells_each_part_of_its_memory() -> None:
    plan = {
        **PLAN,
        "trained_parameters": 1_000_000,
        "examples": {"learnt": 9, "held_out": 1},
        "steps": 200,
        "tokens": 819_200,
        "memory": {"student": 2**24, "teacher": 2**25, "sampling": 0},
        "memory_bytes": 2**26,
        "memory_there": 2**33,
        "disk_bytes": 2**25,
        "seconds": 75.2,
        "measured_flops": 4e10,
    }
    arguments = ("recover", DEFAULT_MODEL, "o", "--teacher", DEFAULT_MODEL, "--data", "d.jsonl", "--dry-run")
    done, given, _ = run({"out": None, "plan": plan}, *arguments)
    assert done.exit_code == 0, done.output
    assert given[-1] == "--dry-run"
    assert "nothing was written" in done.stdout
    assert "memory  64.0 MiB of 8.0 GiB: student 16.0 MiB, teacher 32.0 MiB\n" in done.stdout
    assert "about 75 s (estimated, from 40 GFLOP/s measured here)" in done.stdout


def test_importance_names_kinds_and_data() -> None:
    result = {"kinds": ["layers"], "method": "gradients", "data": {"name": "chats", "tokens": 1851}}
    done, given, options = run(
        result, "importance", DEFAULT_MODEL, "s.json", "--method", "gradients", "--data", "d.jsonl", "--only", "layers"
    )
    assert done.exit_code == 0, done.output
    assert given[given.index("--kinds") + 1 : given.index("--sample-tokens")] == ["layers"]
    assert given[given.index("--data") + 1] == "d.jsonl"
    assert options["amount"] == "count"
    assert "layers by gradients, measured on 1,851 tokens of chats" in done.stdout


def test_the_key_to_sign_with_and_the_key_to_verify_with() -> None:
    done, given, _ = run({"out": "o", "plan": PLAN}, "compact", DEFAULT_MODEL, "c", "o", "--sign", "key.pem")
    assert given[given.index("--sign") + 1] == "key.pem"
    result = {"verified": True, "files": 7, "steps": ["compact", "quantize"]}
    done, given, _ = run(result, "verify", DEFAULT_MODEL, "--key", "key.pub.pem")
    assert done.exit_code == 0, done.output
    assert given[given.index("--key") + 1] == "key.pub.pem"
    assert "is what was signed: 7 files, made by compact → quantize" in done.stdout
    done, given, _ = run(result, "verify", DEFAULT_MODEL)
    assert (done.exit_code, given) == (2, []), "without a key nothing is verified"


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    done, given, _ = run({}, "quantize", tmp_path, tmp_path / "out")
    assert (done.exit_code, given) == (2, [])
    assert "is not a checkpoint directory" in done.stderr


@pytest.mark.thorough
def test_the_process_itself_refuses_an_impossible_level(tmp_path: Path) -> None:
    scores = tmp_path / "s.json"
    done = CliRunner().invoke(app, ["forge", "importance", str(DEFAULT_MODEL), str(scores), "--method", "random"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(
        app,
        ["forge", "prune", str(DEFAULT_MODEL), str(scores), str(tmp_path / "c.json"), "--kv-groups", "25%", "--json"],
    )
    assert done.exit_code == 2
    message = json.loads(done.stdout)["error"]["message"]
    assert message == "kv_groups: 25% of 2 cannot go; possible are 1 (0.5 of them)"


def test_a_run_that_is_waited_for_is_told_in_lines(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("importance:\n  method: weights\nprune:\n  layers: 1\n")
    run = {
        "id": "job-1",
        "state": "succeeded",
        "reason": None,
        "model": None,
        "progress": {"step": 2, "total_steps": 2},
    }
    events = sse(("1-0", "state", state("succeeded")))
    answers = {"POST_v1_forge": Reply(run), "GET_v1_forge_job1": Reply(run)}
    job = {"GET_v1_train_jobs_job1_events": events, "GET_v1_train_jobs_job1": Reply(JOB)}
    with serving(routes(**answers, **job)) as (url, _):
        result = temper("forge", "submit", str(recipe), "--wait", "--json", url=url)
    assert result.exit_code == 0, result.stderr
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["1-0", "job-1"]
    job["GET_v1_train_jobs_job1"] = Reply({**JOB, "state": "failed", "reason": "no data"})
    with serving(routes(**answers, **job)) as (url, _):
        result = temper("forge", "submit", str(recipe), "--wait", url=url)
    assert (result.exit_code, "forge run job-1 failed: no data" in result.stderr) == (1, True)
