"""Jobs that no trainer could do are refused when they are submitted: by what they name, and by what is left of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.common.adapters.manifest import DRAFTER_CONFIG, DRAFTER_WEIGHTS
from services.common.adapters.registry import CONFIG, WEIGHTS
from services.common.jobs import JOBS, ExampleJob, JobState, KtoJob
from services.common.pb import engine_pb2
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine

SFT = {"adapter": "bot", "examples": [{"prompt": "hi", "completion": "yo"}]}
LAYERS = ("layers.0.linear_attn.out_proj", "layers.3.self_attn.q_proj", "layers.3.mlp.up_proj")
LISTED = engine_pb2.RewardWebhooks(allowed=["https://scores.example/v1", "http://127.0.0.1:9000"], signed=True)


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def webhook_job(*urls: str) -> dict[str, Any]:
    rewards = [{"type": "regex", "pattern": "x"}, *({"type": "webhook", "url": url} for url in urls)]
    return {"adapter": "bot", "generate": {"prompts": ["2+2"], "rounds": 1, "max_tokens": 8, "reward": rewards}}


def test_environments_and_tools_that_the_engine_may_not_call(listing: tuple[Running, httpx.Client]) -> None:
    running, http = listing

    def answer(**environment: Any) -> httpx.Response:
        job = webhook_job()
        job["generate"]["reward"].append({"type": "environment", **environment})
        return http.post("/v1/train/grpo", json=job | {"lora": {"rank": 8}})

    tool = {"name": "look", "url": "http://127.0.0.1:9000/look"}
    assert answer(url="http://127.0.0.1:9000").status_code == 202
    assert answer(tools=[tool]).status_code == 202
    before = len(running.queue.jobs)
    error = refusal(answer(url="http://127.0.0.1:9001"))
    assert error["param"] == "generate.reward[1].url"
    error = refusal(answer(tools=[tool, {"name": "see", "url": "http://127.0.0.1:9001"}]))
    assert error["param"] == "generate.reward[1].tools[1].url"
    error = refusal(answer(tools=[tool | {"parameters": {"type": "no type"}}]))
    assert error["param"] == "generate.reward[1].tools[0].parameters"
    assert len(running.queue.jobs) == before


def publish(running: Running, name: str, base_digest: str = "d" * 64, weights: bytes = b"w", **config: Any) -> str:
    shape = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], **config}
    files = {WEIGHTS: weights, CONFIG: json.dumps(shape).encode()}
    return str(running.registry.publish(name, files, base_digest=base_digest).ref)


@pytest.fixture
def listing(start: Starter) -> Iterator[tuple[Running, httpx.Client]]:
    """A gateway whose engine says what it allows."""
    running = start(FakeEngine(webhooks=LISTED, linear_layers=LAYERS, max_lora_rank=8))
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        yield running, http


def test_webhooks_that_the_engine_may_not_call(listing: tuple[Running, httpx.Client]) -> None:
    running, http = listing
    rank = {"lora": {"rank": 8}}
    for url in ("https://scores.example/v1", "https://scores.example/v1/math?x=1", "http://127.0.0.1:9000/any"):
        assert http.post("/v1/train/grpo", json=webhook_job(url) | rank).status_code == 202, url
    before = len(running.queue.jobs)
    for url in (
        "https://scores.example/v2",
        "https://scores.example/v12",
        "http://scores.example/v1",
        "https://scores.example:444/v1",
        "https://scores.example.evil/v1",
        "http://127.0.0.1:9001/",
        "http://169.254.169.254/latest",
    ):
        error = refusal(http.post("/v1/train/grpo", json=webhook_job("http://127.0.0.1:9000/", url) | rank))
        assert error["param"] == "generate.reward[2].url"
        assert url in error["message"]
        assert "TEMPER_REWARD_WEBHOOKS" in error["message"]
        assert "https://scores.example/v1, http://127.0.0.1:9000" in error["message"]
    assert len(running.queue.jobs) == before


TOGETHER = {"target": "polite@1*0.5+brief@1"}


def test_draft_jobs_and_adapters_keep_apart(listing: tuple[Running, httpx.Client]) -> None:
    running, http = listing
    publish(running, "polite")
    publish(running, "stranger", base_digest="e" * 64)
    described = json.dumps({"format": 1, "base_digest": "d" * 64}).encode()
    drafter = {DRAFTER_WEIGHTS: b"w", DRAFTER_CONFIG: described}
    running.registry.publish("sharp", drafter, base_digest="d" * 64)
    job = {"adapter": "sharp", "examples": SFT["examples"]}
    publish(running, "brief")
    for change in (
        {},
        {"target": "polite@1"},
        {"start_from": "sharp@1"},
        {"start_from": "base"},
        {"adapter": "new"},
        TOGETHER,
    ):
        assert http.post("/v1/train/draft", json=job | change).status_code == 202, change
    for change, param, says in (
        ({"adapter": "polite"}, "adapter", "polite is the name of an adapter"),
        ({"start_from": "polite"}, "start_from", "a drafter goes on from a drafter"),
        ({"target": "sharp@1"}, "target", "sharp@1 is a drafter"),
        ({"target": "stranger@1"}, "target", "another base|belongs to base model"),
        ({"target": "gone@1"}, "target", "does not exist"),
        ({"target": "polite"}, "target", "must name a version"),
        ({"target": "polite@1+brief*2"}, "target", "must name a version, as in brief@1"),
        ({"target": "polite@1+gone@1"}, "target", "does not exist"),
        ({"start_from": "sharp@1*2"}, "start_from", "merge them into one"),
        ({"attach": True}, "attach", "False"),
        ({"lora": {"rank": 4}}, "lora", "leave it out"),
    ):
        answer = http.post("/v1/train/draft", json=job | change)
        assert answer.status_code >= 400, change
        error = answer.json()["error"]
        assert error["param"] == param, error
        assert any(part in error["message"] for part in says.split("|")), error
    error = refusal(http.post("/v1/train/sft", json=SFT | {"adapter": "sharp"}))
    assert "sharp is the name of a drafter" in error["message"]
    error = refusal(http.post("/v1/train/sft", json=SFT | {"start_from": "sharp@1"}))
    assert error["param"] == "start_from"
    assert "sharp@1 is a drafter" in error["message"]


def test_judges_that_cannot_be_asked(listing: tuple[Running, httpx.Client]) -> None:
    running, http = listing
    publish(running, "critic")
    publish(running, "strict")
    publish(running, "stranger", base_digest="e" * 64)
    job = webhook_job() | {"lora": {"rank": 8}}

    def judged_by(judge: str) -> httpx.Response:
        job["generate"]["reward"] = [{"type": "regex", "pattern": "x"}, {"type": "judge", "judge": judge}]
        return http.post("/v1/train/grpo", json=job)

    for judge in ("base", "critic@1", "critic@1*0.5+strict@1"):
        assert judged_by(judge).status_code == 202, judge
    for judge, status in (
        ("critic@2", 404),
        ("nobody@1", 404),
        ("stranger@1", 422),
        ("critic", 400),
        ("strict@9+critic@1", 404),
    ):
        error = refusal(judged_by(judge), status)
        assert error["param"] == "generate.reward[1].judge", error
        assert judge.split("@")[0] in error["message"]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ((engine_pb2.RewardWebhooks(),), "lists nothing"),
        ((LISTED, engine_pb2.RewardWebhooks()), "lists nothing"),
        ((LISTED, engine_pb2.RewardWebhooks(allowed=LISTED.allowed)), "no TEMPER_REWARD_WEBHOOK_SECRET"),
        ((LISTED, None), None),
        ((None,), None),
    ],
)
def test_any_engine_may_take_a_job(
    start: Starter, others: tuple[engine_pb2.RewardWebhooks | None, ...], says: str | None
) -> None:
    """One that does not say what it allows, takes no jobs or is of an earlier release."""
    running = start(*(FakeEngine(webhooks=webhooks) for webhooks in others))
    running.wait_for(lambda: all(client.ready for client in running.inference.engines.clients))
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        answer = http.post("/v1/train/grpo", json=webhook_job("https://scores.example/v1"))
    if says is None:
        assert answer.status_code == 202, answer.text
    else:
        assert says in refusal(answer)["message"]


def test_layers_and_ranks_that_the_model_does_not_have(listing: tuple[Running, httpx.Client]) -> None:
    _, http = listing
    for names in (["q_proj"], [LAYERS[1], "out_proj"], "all-linear"):
        body = SFT | {"lora": {"rank": 8, "target_modules": names}}
        assert http.post("/v1/train/sft", json=body).status_code == 202, names
    for name in ("layers.0.self_attn.q_proj", "layers.99.mlp.up_proj", "gate_proj"):
        error = refusal(http.post("/v1/train/sft", json=SFT | {"lora": {"rank": 8, "target_modules": [name]}}))
        assert error["param"] == "lora.target_modules"
        assert name in error["message"]
    for lora, word in (({}, "16 by default"), ({"rank": 9}, "is 9 and")):
        error = refusal(http.post("/v1/train/sft", json=SFT | {"adapter": "fresh", "lora": lora}))
        assert error["param"] == "lora.rank"
        assert word in error["message"]


@pytest.mark.parametrize(
    ("lora", "param"),
    [
        ({"rank": 8}, "lora.rank"),
        ({"alpha": 8, "rank": 4}, None),
        ({"alpha": 16}, "lora.alpha"),
        ({"use_rslora": True}, "lora.use_rslora"),
        ({"target_modules": ["up_proj", "q_proj"]}, None),
        ({"target_modules": ["q_proj"]}, "lora.target_modules"),
        ({"target_modules": "all-linear"}, "lora.target_modules"),
        ({"seed": 3}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("by", ["name", "version", "adapter"])
def test_a_job_that_contradicts_what_it_continues(
    running: Running, http: httpx.Client, lora: dict[str, Any], param: str | None, by: str
) -> None:
    version = publish(running, "old")
    start = {"adapter": "old"} if by == "adapter" else {"start_from": "old" if by == "name" else version}
    body = SFT | {"adapter": "fresh-one"} | start | {"lora": lora}
    answer = http.post("/v1/train/sft", json=body)
    if param is None:
        assert answer.status_code == 202, answer.text
        http.post(f"/v1/train/jobs/{answer.json()['id']}/cancel")
        return
    error = refusal(answer)
    assert error["param"] == param
    assert 'start_from to "base"' in error["message"]
    answer = http.post("/v1/train/sft", json=body | {"start_from": "base"})
    assert answer.status_code == 202
    http.post(f"/v1/train/jobs/{answer.json()['id']}/cancel")


def test_what_is_not_decided_yet_is_left_to_the_trainer(running: Running, http: httpx.Client) -> None:
    """A job in front may publish another version to continue."""
    version = publish(running, "line")
    first = http.post("/v1/train/sft", json=SFT | {"adapter": "line", "start_from": "base", "lora": {"rank": 8}})
    assert first.status_code == 202
    body = SFT | {"adapter": "line", "lora": {"rank": 8}}
    assert http.post("/v1/train/sft", json=body).status_code == 202
    assert refusal(http.post("/v1/train/sft", json=body | {"start_from": version}))["param"] == "lora.rank"
    for job in list(running.queue.jobs.values()):
        if job.state is JobState.QUEUED and job.adapter == "line":
            http.post(f"/v1/train/jobs/{job.id}/cancel")
    assert refusal(http.post("/v1/train/sft", json=body))["param"] == "lora.rank"


def test_shapes_that_only_the_files_tell_are_left_to_the_trainer(running: Running, http: httpx.Client) -> None:
    for config in ({"target_modules": "a.*"}, {"target_modules": ["q_proj"], "layers_to_transform": [0]}):
        publish(running, "odd", **config)
        body = SFT | {"adapter": "odd", "lora": {"target_modules": ["up_proj"]}}
        answer = http.post("/v1/train/sft", json=body)
        assert answer.status_code == 202, answer.text
        http.post(f"/v1/train/jobs/{answer.json()['id']}/cancel")


def test_versions_of_another_base_model(running: Running, http: httpx.Client) -> None:
    alien = publish(running, "alien", base_digest="e" * 64)
    for start in ({"adapter": "alien"}, {"start_from": "alien"}, {"start_from": alien}):
        error = refusal(http.post("/v1/train/sft", json=SFT | start), 422)
        assert error["param"] == "start_from"
        assert "eeeeeeeeeeee" in error["message"]
    opd = {"adapter": "pupil-2", "prompts": ["2+2"], "rounds": 1, "max_tokens": 8, "teacher": alien}
    assert refusal(http.post("/v1/train/opd", json=opd), 422)["param"] == "teacher"


def test_a_teacher_with_the_weights_of_the_start(running: Running, http: httpx.Client) -> None:
    """Whatever it is called."""
    one, same, other = publish(running, "one"), publish(running, "two"), publish(running, "three", weights=b"v")
    body = {"adapter": "pupil-3", "prompts": ["2+2"], "rounds": 1, "max_tokens": 8, "start_from": one}
    assert refusal(http.post("/v1/train/opd", json=body | {"teacher": same}))["param"] == "teacher"
    assert http.post("/v1/train/opd", json=body | {"teacher": other}).status_code == 202


@pytest.mark.parametrize("seed", range(4))
def test_kto_is_left_with_both_labels(http: httpx.Client, seed: int) -> None:
    """What the seed holds out decides."""
    rows = [{"prompt": "x", "completion": str(n), "label": n == 0} for n in range(4)]
    body = {"adapter": "bot", "examples": rows, "eval_fraction": 0.5, "seed": seed}
    trained, held, _ = KtoJob.model_validate(body).split
    assert len(trained) == len(held) == 2
    answer = http.post("/v1/train/kto", json=body)
    if {row.label for _, row in trained} == {True, False}:
        assert answer.status_code == 202, answer.text
    else:
        assert "all have label false" in refusal(answer)["message"]


def row(kind: str, number: int, *, long: bool = False) -> dict[str, Any]:
    text = "y " * 400 if long else str(number)
    more = {"sft": {"completion": text}, "dpo": {"chosen": text, "rejected": "no"}}
    return {"prompt": "x", **more.get(kind, {"completion": text, "label": number % 2 == 0})}


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_something_is_left_behind_what_is_dropped(http: httpx.Client, kind: str) -> None:
    """To learn from, and to evaluate on where the job wants that."""
    body = {"adapter": "bot", "overlong": "drop", "eval_fraction": 0.5, "seed": 1}
    order = JOBS[kind].model_validate(body | {"kind": kind, "examples": [row(kind, n) for n in range(8)]})
    assert isinstance(order, ExampleJob)
    trained, held = ({index for index, _ in part} for part in order.split[:2])
    for dropped, param in ((trained, "examples"), (held, "eval_fraction"), (set(list(held)[:1]), None)):
        rows = [row(kind, n, long=n in dropped) for n in range(8)]
        answer = http.post(f"/v1/train/{kind}", json=body | {"examples": rows})
        assert answer.status_code == 202 if param is None else refusal(answer)["param"] == param, answer.text
    given = {"examples": [row(kind, n) for n in range(4)], "eval_examples": [row(kind, n, long=True) for n in (0, 1)]}
    assert refusal(http.post(f"/v1/train/{kind}", json=body | given))["param"] == "eval_examples"


def test_rollouts_that_are_all_masked(http: httpx.Client) -> None:
    body = {"adapter": "bot", "prompt": "x", "completions": ["a", "b"], "rewards": [1, 0], "truncated": [True, True]}
    assert http.post("/v1/train/grpo", json=body).status_code == 202
    error = refusal(http.post("/v1/train/grpo", json=body | {"mask_truncated": True}))
    assert error["param"] == "mask_truncated"
    half = body | {"mask_truncated": True, "truncated": [True, False]}
    assert http.post("/v1/train/grpo", json=half).status_code == 202
    group = {"prompt_token_ids": [], "completions": [{"text": "a", "reward": 1}, {"text": "b", "reward": 0}]}
    error = refusal(http.post("/v1/train/grpo", json={"adapter": "bot", "groups": [group]}))
    assert error["param"] == "groups[0].prompt_token_ids"


def test_a_token_that_the_second_checkpoint_does_not_know(running: Running, http: httpx.Client) -> None:
    info = running.inference.engines.served.info
    body = {"adapter": "bot", "rounds": 1, "max_tokens": 8, "teacher": "checkpoint"}
    try:
        info.teacher, info.teacher_vocab_size = "digest", 100
        assert http.post("/v1/train/opd", json=body | {"prompts": [{"prompt_token_ids": [99]}]}).status_code == 202
        error = refusal(http.post("/v1/train/opd", json=body | {"prompts": [{"prompt_token_ids": [3, 100]}]}))
        assert error["param"] == "prompts[0]"
        assert "teacher's vocabulary of 100" in error["message"]
    finally:
        info.teacher, info.teacher_vocab_size = "", 0


def test_a_merge_whose_exact_sum_no_engine_serves(running: Running, http: httpx.Client) -> None:
    publish(running, "sum", r=12)
    publish(running, "sum", r=12)
    publish(running, "sum", r=12, target_modules=["down_proj"])
    publish(running, "sum", r=12, target_modules=["down_proj"], rank_pattern={"x": 1})

    def merge(*numbers: int, **more: Any) -> httpx.Response:
        sources = [{"adapter": f"sum@{number}"} for number in numbers]
        return http.post("/v1/adapters/out/merge", json={"sources": sources} | more)

    error = refusal(merge(1, 2))
    assert error["param"] == "rank"
    assert "has rank 24" in error["message"]
    assert merge(1, 2, rank=16, method="svd").status_code == 202
    assert merge(1, 3).status_code == 202, "no layer has both"
    assert merge(3, 4).status_code == 202, "only the files tell"
