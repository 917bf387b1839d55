"""Bodies of training jobs: what each kind accepts, and what is refused with the field that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.common.jobs import GrpoJob
from tests.stack import PATIENCE
from tests.unit.gateway.api.training.test_training import GRPO, OPD, SFT, refusal
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"examples": []}, "examples"),
        ({"examples": [{"prompt": "x"}]}, "examples[0]"),
        ({"examples": [{"prompt": "x", "completion": "y", "z": 1}]}, "examples[0].z"),
        ({"examples": [SFT["examples"][0], {"prompt": "x", "completion": "y" * 400}]}, "examples[1]"),
        ({"examples": [{"prompt": "x", "completion": "y" * 400}], "overlong": "drop"}, "examples"),
        ({"examples": [{"messages": [{"role": "assistant", "content": "refuse"}]}]}, "examples[0]"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
def test_sft_refused(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    error = refusal(http.post("/v1/train/sft", json=SFT | change))
    assert error["param"] == param, error


USER, ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
TURNS = {"messages": [USER, ASSISTANT]}
THINKING = {"enable_thinking": True}
KTO_ROWS = [{"prompt": str(number), "completion": "y", "label": number % 2 == 0} for number in range(4)]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, ASSISTANT | {"refusal": None}],
        [
            USER,
            ASSISTANT | {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        ],
        [{"role": "developer", "content": "s"}, USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT | {"weight": 1}],
        [USER | {"content": [{"type": "text", "text": "x"}]}, ASSISTANT | {"content": [{"type": "text", "text": "y"}]}],
        [ASSISTANT, USER, ASSISTANT],
        [{"role": "system", "content": "s"}, ASSISTANT, USER, ASSISTANT],
        [USER | {"name": "ann"}, ASSISTANT | {"name": "bot"}],
    ],
)
def test_conversations_of_the_chat_are_prompts(http: httpx.Client, messages: list[dict[str, Any]]) -> None:
    """A history for /tokenize, and what is before the last turn a prompt of every method. tests/e2e/test_examples.py
    has the whole as an example."""
    said = [{key: value for key, value in turn.items() if key != "weight"} for turn in messages]
    assert http.post("/tokenize", json={"model": MODEL, "messages": [*said, USER]}).status_code == 200
    for kwargs in ({}, THINKING):
        example = {"prompt": messages[:-1], "completion": "y"}
        body = {"adapter": "bot", "examples": [example], "chat_template_kwargs": kwargs}
        answer = http.post("/v1/train/sft", json=body)
        assert answer.status_code == 202, answer.text
    pair = {"adapter": "bot", "examples": [{"messages": messages[:-1], "chosen": "a", "rejected": "b"}]}
    assert http.post("/v1/train/dpo", json=pair).status_code == 202
    group = {
        "adapter": "bot",
        "prompt": messages[:-1],
        "completions": ["a", "b"],
        "rewards": [1, 0],
        "truncated": [True, False],
    }
    assert http.post("/v1/train/grpo", json=group).status_code == 202


@pytest.fixture
def second_model(running: Running) -> Iterator[None]:
    """The engines have one loaded."""
    info = running.inference.engines.served.info
    before, info.teacher = info.teacher, "digest"
    yield
    info.teacher = before


@pytest.mark.parametrize(
    ("kind", "body", "param", "says"),
    [
        ("sft", SFT | {"eval_fraction": 0.5}, "eval_fraction", "only one"),
        (
            "dpo",
            {"examples": [{"prompt": "x", "chosen": "a", "rejected": "b"}], "eval_fraction": 0.1},
            "eval_fraction",
            "only one",
        ),
        ("kto", {"examples": KTO_ROWS, "eval_fraction": 0.2}, "eval_fraction", "holds one example out"),
        ("kto", {"examples": KTO_ROWS, "eval_fraction": 0.9}, "eval_fraction", "leaves one example"),
        ("sft", SFT | {"lora": {"target_modules": ["qproj"]}}, "lora.target_modules", "did you mean 'q_proj'"),
        ("sft", SFT | {"lora": {"target_modules": []}}, "lora.target_modules", "is empty"),
        ("sft", SFT | {"lora": {"target_modules": "q_proj"}}, "lora.target_modules", "all-linear"),
        (
            "sft",
            {"examples": [{"prompt": [USER, ASSISTANT], "completion": "y"}]},
            "examples[0]",
            "must end with the turn",
        ),
        ("sft", {"examples": [{"prompt": [], "completion": "y"}]}, "examples[0]", "has none"),
        ("grpo", GRPO | {"prompt": [USER, ASSISTANT]}, "prompt", "must end with the turn"),
        (
            "grpo",
            {"groups": [{"messages": [USER, ASSISTANT], "completions": [{"text": "a", "reward": 1}]}]},
            "groups[0]",
            "must end",
        ),
        ("opd", OPD | {"prompts": [{"messages": [USER, ASSISTANT]}]}, "prompts[0]", "must end with the turn"),
        ("sft", {"examples": [{"messages": [ASSISTANT]}]}, "examples[0]", "no turn to learn"),
        ("sft", {"examples": [{"messages": [USER, ASSISTANT | {"weight": 0}]}]}, "examples[0]", "no turn to learn"),
        (
            "sft",
            {"examples": [{"messages": [USER, ASSISTANT | {"reasoning": "hm"}]}]},
            "examples[0]",
            "enable_thinking",
        ),
        (
            "sft",
            {"examples": [{"messages": [{"role": "system", "content": "s"}, ASSISTANT]}]},
            "examples[0]",
            "no turn to learn",
        ),
        (
            "dpo",
            {"examples": [{"prompt": "x", "chosen": "a", "rejected": "b"}], "chat_template_kwargs": THINKING},
            "examples[0]",
            "never closes",
        ),
        ("grpo", GRPO | {"chat_template_kwargs": THINKING}, "completions[0]", "never closes"),
        (
            "opd",
            OPD | {"prompts": [{"prompt": "x", "completion": "y"}], "lmbda": 0, "chat_template_kwargs": THINKING},
            "prompts[0]",
            "never closes",
        ),
        ("grpo", GRPO | {"completions": ["", "b"], "truncated": [True, False]}, "completions[0]", "has no tokens"),
        ("grpo", GRPO | {"truncated": [True]}, "completions", "one each"),
        ("grpo", GRPO | {"truncated": "no"}, "truncated", "list"),
        ("sft", SFT | {"learning_rate": 1e-3, "optimizer": {"learning_rate": 5e-6}}, "learning_rate", "same setting"),
        ("sft", SFT | {"learning_rate": 1e-3, "optimizer": {"learning_rate": 1e-4}}, "learning_rate", "same setting"),
        ("opd", OPD | {"teacher": "base"}, "teacher", "nothing to learn"),
        ("opd", OPD | {"teacher": "base", "start_from": "base"}, "teacher", "nothing to learn"),
        ("sft", {"examples": [{"promt": "x", "completion": "y"}]}, "examples[0].promt", "did you mean 'prompt'?"),
        ("sft", SFT | {"epoch": 3}, "epoch", "did you mean 'epochs'?"),
        ("sft", SFT | {"lora": {"ranks": 3}}, "lora.ranks", "did you mean 'rank'?"),
        (
            "sft",
            {"examples": [{"messages": [USER, {"role": "assistant", "contents": "y"}]}]},
            "examples[0].messages[1].contents",
            "did you mean 'content'?",
        ),
        (
            "sft",
            {"examples": [{"messages": [USER, ASSISTANT | {"refusal": "no"}]}]},
            "examples[0].messages[1].refusal",
            "must be null",
        ),
    ],
)
def test_what_the_body_decides_is_said_at_submission(
    running: Running,
    http: httpx.Client,
    second_model: None,
    kind: str,
    body: dict[str, Any],
    param: str | None,
    says: str,
) -> None:
    before = set(running.queue.specs)
    error = refusal(http.post(f"/v1/train/{kind}", json=body | {"adapter": "fresh"}))
    assert error["param"] == param, error
    assert says in error["message"], error
    for word in ("Value error", "Extra inputs", "pydantic"):
        assert word not in error["message"]
    assert set(running.queue.specs) == before


DPO = {"adapter": "bot", "examples": [{"prompt": "2+2", "chosen": "4", "rejected": "5"}], "beta": 0.2}
KTO = {
    "adapter": "bot",
    "examples": [
        {"prompt": "2+2", "completion": "4", "label": True},
        {"messages": [{"role": "user", "content": "2+2"}], "completion": "5", "label": False},
    ],
}


@pytest.mark.parametrize(("kind", "body"), [("dpo", DPO), ("kto", KTO)])
def test_preference_jobs_are_queued(running: Running, http: httpx.Client, kind: str, body: dict[str, Any]) -> None:
    answer = http.post(f"/v1/train/{kind}", json=body)
    assert answer.status_code == 202, answer.text
    assert answer.json()["kind"] == kind
    spec = running.queue.specs[answer.json()["id"]]
    assert (spec.kind, len(spec.examples)) == (kind, len(body["examples"]))


def test_plain_text_is_queued(http: httpx.Client) -> None:
    assert http.post("/v1/train/sft", json=SFT | {"examples": [{"text": "Once upon a time"}]}).status_code == 202
    error = refusal(http.post("/v1/train/sft", json=SFT | {"examples": [{"text": "x" * 500}]}))
    assert error["param"] == "examples[0]"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"examples": []}, "examples"),
        ({"examples": [{"prompt": "x", "chosen": "a"}]}, "examples[0].rejected"),
        ({"examples": [DPO["examples"][0], {"prompt": "x", "chosen": "a", "rejected": "a"}]}, "examples[1]"),
        ({"examples": [{"prompt": "x", "chosen": "a", "rejected": "b" * 500}]}, "examples[0]"),
        ({"examples": [{"prompt": "x", "chosen": "a", "rejected": "b" * 500}], "overlong": "drop"}, "examples"),
        ({"eval_examples": [{"prompt": "x", "chosen": "a" * 500, "rejected": "b"}]}, "eval_examples[0]"),
        ({"examples": [{"messages": [], "chosen": "a", "rejected": "b"}]}, "examples[0]"),
        ({"beta": 0}, "beta"),
        ({"beta": 1e6}, "beta"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"learning_rate": 7}, "learning_rate"),
        ({"reference": "teacher"}, "reference"),
    ],
)
def test_dpo_refused(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    error = refusal(http.post("/v1/train/dpo", json=DPO | change))
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"examples": KTO["examples"][:1]}, "every label is true"),
        ({"examples": KTO["examples"][1:]}, "every label is false"),
        ({"examples": [*KTO["examples"], {"prompt": "x", "completion": "y" * 500, "label": True}]}, "examples[2]"),
        ({"batch_size": 1}, "batch_size"),
        ({"undesirable_weight": -1}, "undesirable_weight"),
        ({"beta": float(10**6)}, "beta"),
        ({"eval_examples": KTO["examples"][:1]}, "eval_examples"),
    ],
)
def test_kto_refused(http: httpx.Client, change: dict[str, Any], says: str) -> None:
    error = refusal(http.post("/v1/train/kto", json=KTO | change))
    assert says in f"{error['param']} {error['message']}", error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rewards": [0.5, 0.5]}, "nothing to learn"),
        ({"completions": ["4"], "rewards": [1.0]}, "nothing to learn"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"beta": -1}, "beta"),
        ({"beta": 1e4}, "beta"),
        ({"mismatch_cap": 2}, "mismatch_cap would do nothing here"),
        ({"loss_type": "cispo", "clip_low": 0.1}, "clip_low would do nothing here"),
        ({"loss_type": "dr_grpo", "max_completion_length": 1, "completions": ["4", "five"]}, "max_completion_length"),
        ({"exact_forward": "often"}, "exact_forward"),
    ],
)
def test_grpo_settings_refused(http: httpx.Client, change: dict[str, Any], says: str) -> None:
    error = refusal(http.post("/v1/train/grpo", json=GRPO | change))
    assert says in f"{error['param']} {error['message']}", error


GENERATE = {"prompts": ["2+2", "3+3"], "rounds": 1, "max_tokens": 8, "reward": {"type": "regex", "pattern": "4"}}
LONG = {"type": "length", "free": 8, "most": 16}


@pytest.mark.parametrize(
    ("kind", "body", "param", "says"),
    [
        ("grpo", {"generate": GENERATE, "groups_per_step": 3}, "groups_per_step", "but a round has 2 prompts"),
        ("grpo", {"generate": GENERATE | {"reward": LONG}}, "generate.reward[0].free", "at most 8 tokens"),
        ("sft", SFT | {"eval_every": 5}, "eval_every", "give eval_examples, or hold some examples out"),
        ("dpo", DPO | {"eval_every": 5}, "eval_every", "would do nothing: there is nothing to evaluate on"),
    ],
)
def test_settings_that_do_nothing_are_refused(
    running: Running, http: httpx.Client, kind: str, body: dict[str, Any], param: str, says: str
) -> None:
    before = len(running.queue.specs)
    error = refusal(http.post(f"/v1/train/{kind}", json={"adapter": "bot", **body}))
    assert error["param"] == param
    assert says in error["message"]
    assert len(running.queue.specs) == before


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("grpo", {"generate": GENERATE | {"reward": LONG | {"free": 7}}, "groups_per_step": 2}),
        ("grpo", GRPO | {"groups_per_step": 3}),
        ("sft", SFT | {"examples": [*SFT["examples"], *SFT["examples"]], "eval_every": 5, "eval_fraction": 0.5}),
        ("sft", SFT | {"eval_examples": SFT["examples"], "eval_every": 5}),
    ],
)
def test_settings_that_do_something_are_queued(http: httpx.Client, kind: str, body: dict[str, Any]) -> None:
    answer = http.post(f"/v1/train/{kind}", json={"adapter": "bot", **body})
    assert answer.status_code == 202, answer.text


def test_grpo_settings_are_queued(running: Running, http: httpx.Client) -> None:
    settings = {
        "loss_type": "gspo", "scale_rewards": False, "mismatch_correction": "sequence_mask", "mask_truncated": True,
    }  # fmt: skip
    job = http.post("/v1/train/grpo", json=GRPO | settings).json()
    spec = running.queue.specs[job["id"]]
    assert isinstance(spec, GrpoJob)
    assert (spec.scale_rewards, spec.clip_low, spec.mismatch_cap) == ("none", 3e-4, 3.0)


def test_exact_forward(running: Running, http: httpx.Client) -> None:
    """GRPO alone has it; and a correction of what the job samples itself would be void."""
    job = http.post("/v1/train/grpo", json=GRPO | {"exact_forward": True}).json()
    spec = running.queue.specs[job["id"]]
    assert isinstance(spec, GrpoJob)
    assert spec.exact_forward
    opd = {"adapter": "bot", "prompts": ["2+2"], "rounds": 1, "max_tokens": 8, "teacher": "base"}
    assert http.post("/v1/train/opd", json=opd).status_code == 202
    error = refusal(http.post("/v1/train/opd", json=opd | {"exact_forward": True}))
    assert "exact_forward" in f"{error['param']} {error['message']}"
    generate = {"prompts": ["2+2"], "rounds": 1, "max_tokens": 8, "reward": {"type": "regex", "pattern": "4"}}
    body = {"adapter": "bot", "generate": generate, "exact_forward": True}
    assert http.post("/v1/train/grpo", json=body).status_code == 202
    error = refusal(http.post("/v1/train/grpo", json=body | {"mismatch_correction": "token_mask"}))
    assert "mismatch_correction would do nothing here" in error["message"]


def test_exact_forward_needs_room_in_the_engine(start: Starter) -> None:
    running = start(FakeEngine(max_model_len=40, max_train_tokens=100))
    completions = [{"token_ids": [1] * size, "reward": size} for size in (10, 11)]
    body = {"adapter": "bot", "groups": [{"prompt_token_ids": [1] * 30, "completions": completions}]}
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        assert http.post("/v1/train/grpo", json=body).status_code == 202
        error = refusal(http.post("/v1/train/grpo", json=body | {"exact_forward": True}))
        assert error["param"] == "groups[0].completions[1]"
        assert "41 tokens with its prompt" in error["message"]
        completions[1]["token_ids"] = [1] * 9
        assert http.post("/v1/train/grpo", json=body | {"exact_forward": True}).status_code == 202


def test_some_groups_may_teach_nothing(http: httpx.Client) -> None:
    groups = [
        {"prompt": "2+2", "completions": [{"text": str(reward), "reward": reward} for reward in rewards]}
        for rewards in ([1.0, 1.0], [0.5], [1.0, 0.0])
    ]
    assert http.post("/v1/train/grpo", json={"adapter": "bot", "groups": groups}).status_code == 202
    error = refusal(http.post("/v1/train/grpo", json={"adapter": "bot", "groups": groups[:2]}))
    assert "in each of the 2 groups all rewards are equal" in error["message"]


def test_token_ids_outside_the_vocabulary(http: httpx.Client) -> None:
    completions = [{"token_ids": [3], "reward": 1}, {"token_ids": [10**6], "reward": 0}]
    for prompt, param in (([1], "groups[0].completions[1].token_ids"), ([10**6], "groups[0].prompt_token_ids")):
        group = {"prompt_token_ids": prompt, "completions": completions}
        error = refusal(http.post("/v1/train/grpo", json={"adapter": "bot", "groups": [group]}))
        assert error["param"] == param


@pytest.mark.parametrize(
    ("route", "body", "condition", "words"),
    [
        ("sft", SFT, {"metric": "eval_loss"}, "eval_examples"),
        ("sft", {**SFT, "eval_examples": SFT["examples"]}, {"metric": "eval_los"}, "eval_loss, eval_token_accuracy"),
        ("dpo", DPO, {"metric": "eval_accuracy"}, "eval_fraction"),
        ("kto", {**KTO, "eval_examples": KTO["examples"]}, {"metric": "eval_accuracy"}, "eval_loss, eval_margin"),
        ("grpo", GRPO, {"metric": "eval_loss"}, "leave publish_if out"),
    ],
)
def test_a_condition_that_nothing_measures_is_refused(
    running: Running, http: httpx.Client, route: str, body: Any, condition: Any, words: str
) -> None:
    jobs = len(running.queue.jobs)
    error = refusal(http.post(f"/v1/train/{route}", json={**body, "publish_if": condition}))
    assert error["param"] == "publish_if"
    assert condition["metric"] in error["message"]
    assert words in error["message"]
    assert len(running.queue.jobs) == jobs


@pytest.mark.parametrize(
    ("condition", "param"),
    [
        ({}, "publish_if.metric"),
        ({"metric": "eval_loss", "min_gain": "NaN"}, "publish_if.min_gain"),
        ({"metric": "eval_loss", "min_gian": 1}, "publish_if.min_gian"),
    ],
)
def test_a_malformed_condition_is_refused(http: httpx.Client, condition: Any, param: str) -> None:
    body = {**SFT, "eval_examples": SFT["examples"], "publish_if": condition}
    assert refusal(http.post("/v1/train/sft", json=body))["param"] == param


def test_a_condition_on_what_is_measured(running: Running, http: httpx.Client) -> None:
    condition = {"metric": "eval_token_accuracy", "min_gain": 0.01}
    answer = http.post("/v1/train/sft", json={**SFT, "eval_examples": SFT["examples"], "publish_if": condition})
    assert answer.status_code == 202, answer.text
    assert running.queue.specs[answer.json()["id"]].publish_if.min_gain == 0.01


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("kto", {"examples": [row | {"label": True} for row in KTO_ROWS]}, "examples"),
        ("kto", {"examples": KTO_ROWS, "eval_examples": KTO_ROWS[:1]}, "eval_examples"),
        ("grpo", {}, "prompt"),
        ("grpo", {"prompt": "p", "completions": ["a"]}, "prompt"),
        ("grpo", {"prompt": "p", "completions": ["a"], "rewards": [1, 2]}, "completions"),
        ("grpo", {**GRPO, "cispo_max_ratio": 3}, "cispo_max_ratio"),
        ("opd", {**OPD, "eval_every": 3}, "eval_every"),
        ("opd", {**OPD, "prompts_per_round": 100}, "prompts_per_round"),
        ("opd", {**OPD, "lmbda": 0.5}, "lmbda"),
        ("sft", {**SFT, "observation_weight": 0.5}, "observation_weight"),
        ("sft", {**SFT, "gradient_checkpointing": True, "recompute": "none"}, "gradient_checkpointing"),
    ],
)
def test_fields_that_do_not_go_together_are_named(
    http: httpx.Client, kind: str, body: dict[str, Any], param: str
) -> None:
    error = refusal(http.post(f"/v1/train/{kind}", json={"adapter": "a", **body}))
    assert error["param"] == param, error
    assert param in error["message"]
