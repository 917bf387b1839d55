"""OpenAI's fine-tuning requests as training jobs, and their refusals. tests/conformance has the life of such jobs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.common.jobs import DpoJob, GrpoJob, JobState, SftJob
from tests.unit.gateway.conftest import MODEL, Running

ASK = {"role": "user", "content": "2+2"}
ANSWER = {"role": "assistant", "content": "4"}
CHAT = {"messages": [ASK, ANSWER], "parallel_tool_calls": False}
"""A line that the template of the fake engine cannot render as an answer."""
TEXT = {"prompt": "2+2=", "completion": "4"}
PAIR = {
    "input": {"messages": [ASK], "tools": None},
    "preferred_output": [ANSWER],
    "non_preferred_output": [{"role": "assistant", "content": "5"}],
}
QUESTION = {"messages": [ASK], "answer": "4", "more": {"unit": 7}}
CHECK = {
    "type": "string_check",
    "name": "right",
    "input": "{{ sample.output_text }}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}


def upload(http: httpx.Client, *rows: dict[str, Any] | str, purpose: str = "fine-tune") -> str:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    answer = http.post("/v1/files", files={"file": ("data.jsonl", text.encode())}, data={"purpose": purpose})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def create(http: httpx.Client, file: str, **fields: Any) -> httpx.Response:
    return http.post("/v1/fine_tuning/jobs", json={"model": MODEL, "training_file": file, **fields})


def made(running: Running, answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return running.queue.specs[answer.json()["id"].replace("ftjob-", "job-")]


def reinforce(grader: dict[str, Any], **hyperparameters: Any) -> dict[str, Any]:
    return {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyperparameters}}


def test_supervised(running: Running, http: httpx.Client) -> None:
    file, held_out = upload(http, TEXT, TEXT, ""), upload(http, TEXT)
    answer = create(
        http,
        file,
        validation_file=held_out,
        suffix="sums",
        seed=5,
        metadata={"team": "a"},
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": "auto", "batch_size": 2, "learning_rate_multiplier": 0.5}},
        },
    )
    spec = made(running, answer)
    assert isinstance(spec, SftJob)
    assert (len(spec.examples), len(spec.eval_examples), spec.batch_size, spec.epochs) == (2, 1, 2, None)
    assert (spec.start_from, spec.attach, spec.seed, spec.learning_rate_multiplier) == ("base", False, 5, 0.5)
    assert spec.adapter.startswith("ft-sums-")
    job = answer.json()
    assert job["hyperparameters"] == {"n_epochs": "auto", "batch_size": 2, "learning_rate_multiplier": 0.5}
    assert (job["status"], job["training_file"], job["metadata"]) == ("queued", file, {"team": "a"})
    older = made(running, create(http, file, hyperparameters={"n_epochs": 2}))
    assert (older.epochs, older.batch_size) == (2, 8)
    assert older.prompt_format == "raw"


def test_dpo(running: Running, http: httpx.Client) -> None:
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 3}}}
    spec = made(running, create(http, upload(http, PAIR), method=method))
    assert isinstance(spec, DpoJob)
    assert (spec.beta, spec.reference, spec.epochs) == (0.2, "start", 3)
    assert (spec.examples[0].chosen, spec.examples[0].rejected) == ("4", "5")


def test_reinforcement(running: Running, http: httpx.Client) -> None:
    file = upload(http, *[QUESTION] * 5)
    multi = {
        "type": "multi",
        "name": "both",
        "graders": {"exact": CHECK, "part": {**CHECK, "operation": "ilike"}},
        "calculate_output": "(exact * 3 - part) / 4",
    }
    method = reinforce(multi, n_epochs=2, batch_size=2, compute_multiplier=0.5, eval_interval=1)
    answer = create(http, file, validation_file=file, method=method)
    spec = made(running, answer)
    assert isinstance(spec, GrpoJob)
    assert spec.generate is not None
    generate = spec.generate
    assert (generate.rounds, generate.prompts_per_round, generate.completions) == (6, 2, 4)
    assert (generate.eval_every, len(generate.eval_prompts)) == (1, 5)
    assert [(one.type, one.weight) for one in generate.reward] == [("exact", 0.75), ("contains", -0.25)]
    assert [prompt.answer for prompt in generate.prompts] == ["4"] * 5
    assert answer.json()["method"]["reinforcement"]["grader"]["calculate_output"] == multi["calculate_output"]
    nested = {**CHECK, "reference": "={{item.more.unit}}{{ item.answer }}"}
    spec = made(running, create(http, file, method=reinforce(nested)))
    assert spec.generate.prompts[0].answer == "=74"


@pytest.mark.parametrize(
    ("rows", "method", "param", "says"),
    [
        (["{"], None, "training_file", "line 1: the line is not valid JSON"),
        ([CHAT, "[1]"], None, "training_file", "line 2: the line must be a JSON object"),
        (
            [CHAT, "", {"messages": [ASK, {"role": "robot", "content": "4"}]}],
            None,
            "training_file",
            "line 3: messages[1]",
        ),
        ([CHAT, {"messages": [ASK]}], None, "training_file", "line 2: messages has no turn to learn"),
        ([{"messages": [ASK, ANSWER], "functions": []}], None, "training_file", "line 1: unknown field 'functions'"),
        ([CHAT, {"prompt": "a", "completion": "b"}], None, "training_file", "cannot be mixed"),
        ([CHAT], None, "training_file", "line 1 of training_file: the chat template"),
        ([CHAT], {"type": "dpo"}, "training_file", "line 1"),
        ([PAIR | {"non_preferred_output": [ANSWER]}], {"type": "dpo"}, "training_file", "line 1: chosen and rejected"),
        ([QUESTION, {"messages": [ASK]}], reinforce(CHECK), "training_file", "line 2: the field 'answer'"),
        ([QUESTION], reinforce(CHECK | {"operation": "ne"}), "method.reinforcement.grader.operation", "ne is not"),
        ([QUESTION], reinforce(CHECK | {"input": "x"}), "method.reinforcement.grader.input", "sample.output_text"),
        (
            [QUESTION],
            reinforce({"type": "python", "name": "p", "source": "def grade(): ..."}),
            "method.reinforcement.grader",
            "graders of type python are not supported",
        ),
        (
            [QUESTION],
            reinforce({"type": "multi", "name": "m", "graders": {"a": CHECK}, "calculate_output": "a * a"}),
            "method.reinforcement.grader.calculate_output",
            "sum of multiples",
        ),
        (
            [QUESTION],
            reinforce(CHECK, eval_interval=2),
            "method.reinforcement.hyperparameters.eval_interval",
            "no validation_file",
        ),
        (
            [QUESTION],
            reinforce(CHECK, reasoning_effort="high"),
            "method.reinforcement.hyperparameters.reasoning_effort",
            "",
        ),
        ([CHAT], {"type": "supervised", "dpo": {}}, "method.dpo", "would do nothing"),
        ([CHAT], {"type": "rlhf"}, "method.type", ""),
    ],
)
def test_refusals_name_the_field_and_the_line(
    running: Running, http: httpx.Client, rows: list[Any], method: Any, param: str, says: str
) -> None:
    before = len(running.queue.specs)
    answer = create(http, upload(http, *rows), **({} if method is None else {"method": method}))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], says in error["message"]) == (param, True), error
    assert len(running.queue.specs) == before


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, 400, "integrations"),
        ({"model": "no-such"}, 404, "model"),
        ({"training_file": "file-none"}, 404, "training_file"),
        ({"suffix": "not a name"}, 400, "suffix"),
        ({"n_epochs": 3}, 400, "n_epochs"),
        ({"method": {"type": "supervised"}, "hyperparameters": {}}, 400, "hyperparameters"),
    ],
)
def test_requests_that_are_refused(
    running: Running, http: httpx.Client, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = create(http, upload(http, TEXT), **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_file_for_a_batch_is_not_learnt_from(running: Running, http: httpx.Client) -> None:
    answer = create(http, upload(http, CHAT, purpose="batch"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "training_file")


def test_lists_and_ids(running: Running, http: httpx.Client) -> None:
    file = upload(http, TEXT)
    key = {"idempotency-key": "once"}
    body = {"model": MODEL, "training_file": file}
    first = http.post("/v1/fine_tuning/jobs", json=body, headers=key).json()
    assert http.post("/v1/fine_tuning/jobs", json=body, headers=key).json()["id"] == first["id"]
    second = create(http, file, metadata={"team": "b"}).json()
    plain = http.post("/v1/train/sft", json={"adapter": "bot", "examples": [{"text": "a"}]}).json()

    def listed(**params: Any) -> tuple[list[str], bool]:
        page = http.get("/v1/fine_tuning/jobs", params=params).json()
        return [job["id"] for job in page["data"]], page["has_more"]

    assert listed(limit=1) == ([second["id"]], True)
    assert listed(after=second["id"], limit=1)[0] == [first["id"]]
    assert all(job.startswith("ftjob-") for job in listed()[0])
    assert listed(**{"metadata[team]": "b"}) == ([second["id"]], False)
    for unknown in (plain["id"], plain["id"].replace("job-", "ftjob-"), "ftjob-none"):
        assert http.get(f"/v1/fine_tuning/jobs/{unknown}").status_code == 404
    path = f"/v1/fine_tuning/jobs/{first['id']}"
    assert http.post(f"{path}/pause").json()["status"] == "paused"
    assert http.post(f"{path}/resume").json()["status"] == "queued"
    assert http.get(f"{path}/checkpoints").json()["data"] == []
    job_id = first["id"].replace("ftjob-", "job-")
    running.queue.finish(job_id)
    newest = http.get(f"{path}/events", params={"limit": 2}).json()
    assert [event["type"] for event in newest["data"]] == ["message", "metrics"]
    assert newest["data"][1]["data"] == {"step": 1, "train_loss": 0.5}
    assert newest["has_more"]
    rest = http.get(f"{path}/events", params={"after": newest["data"][1]["id"]}).json()
    assert [event["message"] for event in rest["data"]] == ["The job waits for an engine"]
    assert http.get(f"{path}/events", params={"after": "ftevent-x"}).status_code == 404
    assert http.post(f"{path}/cancel").json()["status"] == "cancelled"
    failed = running.queue.jobs[job_id].model_copy(update={"state": JobState.FAILED, "reason": "too hot"})
    running.queue.jobs[job_id] = failed
    assert http.get(path).json()["error"] == {"code": "job_failed", "message": "too hot", "param": None}
