"""Jobs and suites on data sets: what the gateway writes into them, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.evaluation.runs.records import Answer, ItemResult, RunRecord, RunResult, RunSuite, RunTarget
from services.common.evaluation.runs.store import EvaluationStore
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import DpoJob, DraftJob, GrpoJob, KtoJob, SftJob
from services.common.jobs.trajectories.segments import Trajectory
from services.common.security.api_keys import Scope
from services.gateway.api.training.erased_rows import REASON
from services.learning.datasets.build import Built, DatasetReport
from services.learning.datasets.rows import Row
from services.learning.datasets.spec import DatasetSpec
from services.learning.datasets.store import DatasetManifest, DatasetStore, NewDataset
from services.learning.request_log.index import user_mark
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.key_file import Keys


def row(user: str, asks: str, says: str, rating: float | None = 1.0, **more: Any) -> Row:
    return Row(
        source="feedback",
        user=user,
        answer_id=f"chatcmpl-{user}-{len(says)}",
        messages=[{"role": "user", "content": asks}],
        answer={"role": "assistant", "content": says},
        rating=rating,
        opinions=1,
        version="base",
        prompt_token_ids=[5, 6, len(asks)],
        token_ids=[7, len(says)],
        **more,
    )


TRAIN = [
    row("ann", "2 + 2", "4"),
    row("bob", "2 + 2", "five", -1.0),
    row("eve", "a colour", "blue"),
    row("eve", "again", "bad", -1.0, better="good", worse="bad"),
]


def make(running: Running, *, train: list[Row] = TRAIN, key_id: str = "", **splits: list[Row]) -> DatasetManifest:
    rows = {"train": train, "validation": [], "held_out": [], **splits}
    made = NewDataset("thumbs", DatasetSpec(), key_id)
    return DatasetStore(running.store).create(made, Built(rows, DatasetReport(), []))  # type: ignore[arg-type]


def submit(http: httpx.Client, kind: str, **more: Any) -> httpx.Response:
    return http.post(f"/v1/train/{kind}", json={"adapter": "a", "attach": False, "dataset": "thumbs", **more})


def refused(answer: httpx.Response, *said: str, param: str | None = "dataset", status: int = 400) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert all(text in error["message"] for text in said), answer.text


def test_each_kind_gets_what_it_learns_from(running: Running, http: httpx.Client) -> None:
    manifest = make(running, validation=[row("zoe", "7", "8"), row("zoe", "8", "no", -1.0)])
    for kind in ("draft", "sft", "dpo", "kto", "grpo"):
        answer = submit(http, kind)
        assert answer.status_code == 202, answer.text
    draft, sft, dpo, kto, grpo = list(running.queue.specs.values())[-5:]
    assert isinstance(sft, SftJob)
    assert isinstance(dpo, DpoJob)
    assert isinstance(kto, KtoJob)
    assert isinstance(grpo, GrpoJob)
    assert isinstance(draft, DraftJob)
    assert [one.completion for one in draft.examples] == ["4", "blue", "good"]
    assert [one.completion for one in draft.eval_examples] == ["8"]
    for spec in (draft, sft, dpo, kto, grpo):
        assert (spec.dataset, spec.dataset_digest) == ("thumbs@1", manifest.digest)
    assert [one.completion for one in sft.examples] == ["4", "blue", "good"]
    assert [one.completion for one in sft.eval_examples] == ["8"]
    assert {(one.chosen, one.rejected) for one in dpo.examples} == {("4", "five"), ("good", "bad")}
    assert {one.label for one in kto.examples} == {True, False}
    assert [one.label for one in kto.eval_examples] == [True, False]
    assert [[one.reward for one in group.completions] for group in grpo.groups or ()] == [[1.0, -1.0]]
    own = submit(http, "sft", eval_fraction=0.5)
    assert own.status_code == 202, own.text
    spec = list(running.queue.specs.values())[-1]
    assert isinstance(spec, SftJob)
    assert (spec.eval_examples, spec.held_out) == ([], 2), "the job says itself what it evaluates on"


def test_a_repeated_submission_is_the_same_job(running: Running, http: httpx.Client) -> None:
    make(running)
    body = {"adapter": "a", "attach": False, "dataset": "thumbs"}
    first = http.post("/v1/train/sft", json=body, headers={"idempotency-key": "once-per-set"}).json()
    make(running, train=TRAIN[:1])
    again = http.post("/v1/train/sft", json=body, headers={"idempotency-key": "once-per-set"}).json()
    assert again["id"] == first["id"]
    newer = http.post("/v1/train/sft", json=body).json()
    spec = running.queue.specs[newer["id"]]
    assert isinstance(spec, SftJob)
    assert spec.dataset == "thumbs@2"


def test_what_cannot_be_learnt_from(running: Running, http: httpx.Client, start: Starter) -> None:
    refused(submit(http, "sft"), "dataset 'thumbs' does not exist", status=404)
    make(running, train=TRAIN[:1])
    refused(submit(http, "dpo"), "none of the 1 training rows of thumbs@1", "rated differently")
    refused(submit(http, "kto"), "thumbs@1", "every label is true")
    refused(submit(http, "sft", publish_if={"metric": "eval_loss"}), "thumbs@1", "computes no evaluation")
    refused(submit(http, "sft", examples=[{"text": "x"}]), "leave one of them out")
    refused(submit(http, "sft", dataset=None), "give examples, or a dataset", param="examples")
    named = submit(http, "sft", dataset_digest="0", examples=[{"text": "x"}])
    refused(named, "written by the gateway", param="dataset_digest")
    refused(submit(http, "grpo", groups=[]), "exactly one of", param="groups")
    small = start(max_body_bytes=1024)
    make(small, train=[row("ann", f"{number} + {number}", str(2 * number)) for number in range(100)])
    answer = httpx.post(
        f"{small.url}/v1/train/sft", json={"adapter": "a", "attach": False, "dataset": "thumbs"}, timeout=PATIENCE
    )
    refused(answer, "makes 100 examples of", "TEMPER_MAX_BODY_BYTES", "max_rows")


def test_the_erased_are_not_learnt_from(running: Running, http: httpx.Client) -> None:
    before = make(running)
    assert DatasetStore(running.store).cut_out("thumbs", 1, frozenset((user_mark("eve", None),))) == 2  # type: ignore[arg-type]
    answer = submit(http, "sft", dataset="thumbs@1")
    assert answer.status_code == 202, answer.text
    spec = list(running.queue.specs.values())[-1]
    assert isinstance(spec, SftJob)
    assert [one.completion for one in spec.examples] == ["4"]
    assert spec.dataset_digest != before.digest


def test_nobody_erased_while_a_job_is_submitted_is_learnt_from(
    running: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows were read before, and the erasure has looked at jobs before this one was there."""
    make(running)
    submit_it = running.queue.submit

    async def erased_meanwhile(*args: Any, **options: Any) -> Any:
        DatasetStore(running.store).cut_out("thumbs", 1, frozenset((user_mark("eve", None),)))  # type: ignore[arg-type]
        return await submit_it(*args, **options)

    monkeypatch.setattr(running.queue, "submit", erased_meanwhile)
    job = submit(http, "sft").json()
    assert (job["state"], job["reason"]) == ("cancelled", REASON)
    monkeypatch.undo()
    assert submit(http, "sft").json()["state"] == "queued"


HELD_OUT = [
    row("ann", "1 + 1", "2"),
    row("ann", "1 + 2", "3"),
    row("bob", "1 + 1", "three", -1.0),
    row("bob", "a poem", "no", -1.0),
]


def test_a_suite_of_the_held_out_part(running: Running, http: httpx.Client) -> None:
    manifest = make(running, held_out=HELD_OUT)
    body = {"name": "sums", "dataset": "thumbs", "scorer": {"type": "exact"}}
    made = http.post("/v1/eval/suites", json=body)
    assert made.status_code == 201, made.text
    suite = made.json()
    assert (suite["items"], suite["clusters"]) == (2, 1), "items of one user are a group, and a bad answer is none"
    assert suite["origin"] == {"sha256": manifest.digest, "rows": 4, "split": None, "dataset": "thumbs@1"}
    items = http.get("/v1/eval/suites/sums/items").json()["data"]
    assert [(one["messages"][0]["content"], one["expected"]) for one in items] == [("1 + 1", ["2"]), ("1 + 2", ["3"])]
    without = http.post("/v1/eval/suites", json={**body, "scorer": {"type": "choice"}})
    refused(without, "no item comes of thumbs@1", "choices")
    refused(http.post("/v1/eval/suites", json={**body, "jsonl": "{}"}), "give one of them", param="jsonl")
    refused(http.post("/v1/eval/suites", json={**body, "split": {}}), "its own split", param="split")
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"left": 1}'}}]
    asked = row("zoe", "add", "x").model_copy(update={"answer": {"role": "assistant", "tool_calls": calls}})
    make(running, held_out=[asked])
    made = http.post("/v1/eval/suites", json={**body, "scorer": {"type": "tool_calls"}})
    assert made.status_code == 201, made.text
    (item,) = http.get("/v1/eval/suites/sums/items").json()["data"]
    assert item["expected_tool_calls"] == [{"name": "add", "arguments": {"left": 1}}]


def test_nobody_learns_from_the_data_of_others(start: Starter, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    for name in ("mine", "rival"):
        keys.add(name, Scope.TRAIN, Scope.INFERENCE)
    running = start(api_keys_file=str(keys.path))
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        http.headers = keys.bearer("mine")  # type: ignore[assignment]
        job = {"adapter": "a", "attach": False, "dataset": "filed"}
        suite = {"name": "s", "dataset": "filed", "scorer": {"type": "exact"}}
        lines = "\n".join(json.dumps({"prompt": f"{n}?", "completion": str(n)}) for n in range(20))
        upload = {"file": ("a.jsonl", lines.encode())}
        file = http.post("/v1/files", files=upload, data={"purpose": "batch"}).json()["id"]
        # A row's part is drawn by its file's id, which is another each time: a tenth of twenty rows may be none.
        spec = {"name": "filed", "feedback": False, "files": [file], "split": {"held_out": 0.5}}
        made = http.post("/v1/datasets", json=spec)
        assert made.status_code == 201, made.text
        assert http.post("/v1/train/sft", json=job).status_code == 202
        assert http.post("/v1/eval/suites", json=suite).status_code == 201
        http.headers = keys.bearer("rival")  # type: ignore[assignment]
        refused(http.post("/v1/train/sft", json=job), "does not exist", status=404)
        refused(http.post("/v1/eval/suites", json={**suite, "name": "t"}), "does not exist", status=404)


def evaluated(running: Running, run: str, suite: str, answers: Sequence[str]) -> None:
    """A run in which the base has answered the items of a suite."""
    name, _, number = suite.partition("@")
    items = SuiteStore(running.store).items(SuiteStore(running.store).get(name, int(number)))
    asked = RunSuite(suite=suite, digest="0", items=len(items), scorer="exact", better="higher", sampling=None)
    record = RunRecord(
        id=run, suites=(asked,), targets=(RunTarget(name="base"),), seed=0, base_digest="", created_at=1.0
    )
    found = [
        ItemResult(
            item=item.id or str(place), index=place, score=1.0, weight=1.0, answers=(Answer(text=text, score=1),)
        )
        for place, (item, text) in enumerate(zip(items, answers, strict=True))
    ]
    result = RunResult(id=run, summaries=(), comparisons=(), finished_at=2.0)
    EvaluationStore(running.store).add_whole(record, {(0, 0): found}, result)


def test_the_erased_leave_suites_too(running: Running, http: httpx.Client) -> None:
    """The version that had them goes, and a newer one has what is left."""
    more = row("zoe", "3 + 3", "6", said_by=("judge",))
    make(running, held_out=[*HELD_OUT, more])
    body = {"name": "sums", "dataset": "thumbs", "scorer": {"type": "exact"}}
    assert http.post("/v1/eval/suites", json=body).json()["items"] == 3
    own = {"name": "own", "scorer": {"type": "exact"}, "jsonl": '{"prompt": "ann", "expected": "ann"}'}
    assert http.post("/v1/eval/suites", json=own).status_code == 201
    items = http.get("/v1/eval/suites/sums@1/items").json()["data"]
    answered = [("run-1", [f"I heard {item['messages'][0]['content']}" for item in items]), ("run-2", ["", "", ""])]
    for run, answers in answered:
        evaluated(running, run, "sums@1", answers)
    evaluated(running, "run-3", "own@1", ["I heard 1 + 1"])
    erased = http.delete("/v1/users/ann").json()
    assert (erased["datasets"], erased["suites"]) == ({"thumbs@1": 3}, {"sums@1": 2})
    assert erased["evaluations"] == {"run-1": 2}, "nothing was said in the second, and the third is of another suite"
    found = http.get("/v1/evaluations/run-1/items?suite=sums@1&target=base").json()["data"]
    asked = {item["id"]: item["messages"][0]["content"] for item in items}
    texts = {asked[one["item"]]: (one["score"], one["answers"][0]["text"]) for one in found}
    assert texts.pop("3 + 3") == (1.0, "I heard 3 + 3")
    assert set(texts.values()) == {(1.0, "")}
    assert http.get("/v1/eval/suites/sums@1").status_code == 404
    (left,) = http.get("/v1/eval/suites/sums@2/items").json()["data"]
    assert left["messages"][0]["content"] == "3 + 3"
    assert http.delete("/v1/users/ann").json()["suites"] == {}
    assert http.delete("/v1/users/judge").json()["suites"] == {"sums@2": 1}
    assert http.get("/v1/eval/suites/sums").status_code == 404
    assert not any(b"3 + 3" in data for data in running.store.objects.values())
    assert http.get("/v1/eval/suites/own").json()["items"] == 1


def test_trajectories_teach_jobs_and_their_held_out_ones_suites(running: Running, http: httpx.Client) -> None:
    def walked(user: str, reward: float) -> Row:
        segments = [
            {"type": "observation", "token_ids": [5, 6]},
            {"type": "action", "token_ids": [7, len(user)], "logprobs": [-0.5, -0.5], "temperature": 0.5},
        ]
        more = {"trajectory": {"segments": segments, "reward": reward}, "session": user, "turn_ids": (f"c-{user}",)}
        return row(user, "go", f"went {user}", reward, **more)

    manifest = make(running, train=[walked("ann", 1.0), walked("bobby", -1.0)], held_out=[walked("zo", 1.0)])
    for kind in ("grpo", "sft", "draft"):
        answer = submit(http, kind)
        assert answer.status_code == 202, answer.text
    grpo, sft, draft = list(running.queue.specs.values())[-3:]
    assert isinstance(grpo, GrpoJob)
    assert isinstance(sft, SftJob)
    assert isinstance(draft, DraftJob)
    (group,) = grpo.groups or ()
    assert group.turn_rewards == [[1.0], [-1.0]]
    assert [one.actions[0].token_ids for one in group.played] == [[7, 3], [7, 5]]
    (example,) = sft.examples
    assert isinstance(example.trajectory, Trajectory)
    assert [one.completion for one in draft.examples] == ["went ann"]
    refused(submit(http, "kto"), "none of the 2 training rows")

    body = {"name": "walks", "dataset": "thumbs", "scorer": {"type": "exact"}}
    made = http.post("/v1/eval/suites", json=body)
    assert made.status_code == 201, made.text
    items = http.get("/v1/eval/suites/walks/items").json()["data"]
    assert [one["expected"] for one in items] == [["went zo"]]
    assert DatasetStore(running.store).erase(user_mark("ann", None)) == {manifest.ref: 1}
    refused(submit(http, "grpo"), "none of the 1 training rows")
