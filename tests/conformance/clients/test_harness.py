"""lm-evaluation-harness itself, by completions and by chat, on tasks of this machine; its results are read as ours, and
ours are read by it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.tiny.recipe.data import DIRECTORY
from models.tiny.recipe.suites import SUITES
from services.common.evaluation.runs.harness import exported_results
from services.common.evaluation.runs.records import Answer, ItemResult, RunRecord, RunSuite, RunTarget
from services.common.evaluation.runs.results import result_of
from services.common.evaluation.suites.spec import SuiteSampling
from tests.conformance.clients.agents import OFFLINE
from tests.conformance.clients.place import HERE, PYTHON
from tests.conformance.clients.recorder import Recording
from tests.stack import PATIENCE
from tests.unit.cli import runner

ITEMS = 12
CHOICES = [
    {"prompt": "The capital of France is", "choices": ["Paris", "Lima", "Oslo"], "expected": "Paris"},
    {"prompt": "The opposite of hot is", "choices": ["old", "cold"], "expected": "cold"},
]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")


def our_results() -> dict[str, Any]:
    """Results of a run with one item, as we write them."""
    sampling = SuiteSampling()
    suite = RunSuite(suite="ours@2", digest="d", items=1, scorer="exact", better="higher", sampling=sampling)
    record = RunRecord(
        id="job", suites=(suite,), targets=(RunTarget(name="base"),), seed=0, base_digest="b", created_at=0
    )
    result = ItemResult(item="1", index=0, score=1.0, weight=1.0, answers=(Answer(text="2", score=1.0),))
    return exported_results(record, result_of(record, {(0, 0): [result]}, 1.0), "base", {"ours@2": 0})


def imported(url: str, directory: Path, task: str) -> dict[str, Any]:
    """One run of the harness as an evaluation of ours, by the command that imports it."""
    (results,) = directory.rglob("results_*.json")
    done = runner.temper("eval", "import", str(results), "--json", url=url)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["imported"]["program"] == "lm-evaluation-harness"
    assert found["suites"][0]["suite"].partition("@")[0] == task
    return dict(found)


def best_choice(stack: Any, recording: Recording, row: dict[str, Any]) -> str:
    """The likeliest choice as /v1/score has it, behind the harness's delimiter."""

    def likelihood(choice: str) -> float:
        body = {"model": stack.served_model_name, "prompt": row["prompt"], "completion": f" {choice}"}
        answer = httpx.post(f"{recording.url}/v1/score", json=body, timeout=60, trust_env=False)
        return sum(answer.json()["data"][0]["token_logprobs"])

    return max(row["choices"], key=likelihood)


def test_the_harness_runs_local_tasks(recording: Recording, stack: Any, tmp_path: Path) -> None:
    lines = (SUITES / "arithmetic.jsonl").read_text(encoding="utf-8").splitlines()[:ITEMS]
    (tmp_path / "arithmetic.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    (tmp_path / "ours.json").write_text(json.dumps(our_results()))
    (tmp_path / "tokenizer").mkdir()
    for name in TOKENIZER:
        shutil.copyfile(DIRECTORY / name, tmp_path / "tokenizer" / name)
    done = subprocess.run(
        [PYTHON, HERE / "scripts" / "harness.py", recording.url, stack.served_model_name, str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8", "HF_HUB_OFFLINE": "1", **OFFLINE},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert recording.refusals == []
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["chat"] == found["text"], "the template is the same on either side"
    assert found["chat"]["score"] >= 0.75
    assert found["chat"]["items"] == ITEMS
    for run, task, metric in (("chat", "sums_chat", "exact_match"), ("choices", "choices", "acc")):
        kept = imported(recording.url, tmp_path / run, task)
        (summary,) = kept["summaries"]
        assert (summary["mean"], summary["target"]) == (pytest.approx(found[run]["score"]), stack.served_model_name)
        assert (kept["suites"][0]["scorer"], kept["state"]) == (f"{metric},none", "succeeded")
    right = [float(best_choice(stack, recording, row) == row["expected"]) for row in CHOICES]
    items = httpx.get(f"{recording.url}/v1/evaluations/{kept['id']}/items", trust_env=False, timeout=PATIENCE).json()[
        "data"
    ]
    assert [one["score"] for one in items] == right
    assert "|ours |      2|none  |     0|score" in found["table"]
