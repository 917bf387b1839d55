"""What a rollout job may ask for: the request and its checks."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoJob
from services.common.jobs.kinds.generate import check_rewards
from services.common.jobs.scorers.allowed_webhooks import webhook_parts
from services.common.jobs.scorers.json_schema import JsonSchemaReward, schema_validator
from services.common.jobs.scorers.of_texts.regex import RegexReward, matcher

GENERATE: dict[str, Any] = {
    "prompts": ["2 + 2 =", {"prompt": "3 + 3 =", "answer": 6}],
    "rounds": 2,
    "max_tokens": 8,
    "reward": {"type": "regex", "pattern": "4"},
}
ANSWERED = [{"prompt": "2 + 2 =", "answer": "4"}, {"messages": [{"role": "user", "content": "x"}], "answer": 6}]
EPISODES = {"type": "environment", "url": "http://127.0.0.1:9000"}
TOOL = {"name": "look", "url": "http://127.0.0.1:9000/look"}
WITH_TOOL = {"type": "environment", "tools": [TOOL]}
REGEX = {"type": "regex", "pattern": "4"}


def job(**fields: Any) -> GrpoJob:
    return GrpoJob.model_validate({"adapter": "a", "generate": GENERATE | fields})


def test_it_survives_the_queue() -> None:
    spec = job(prompts=ANSWERED, reward=[{"type": "exact"}, {"type": "numeric", "weight": 0.5}])
    assert GrpoJob.model_validate_json(spec.model_dump_json()) == spec
    assert spec.generate is not None
    assert [prompt.answer for prompt in spec.generate.prompts] == ["4", "6"]
    assert spec.generate.round_prompts == 2


def test_a_checkpoint_each_step_unless_told_otherwise() -> None:
    assert job().checkpoint_every == 1
    assert GrpoJob.model_validate({"adapter": "a", "generate": GENERATE, "checkpoint_every": 5}).checkpoint_every == 5
    other = {"adapter": "a", "prompt": "q", "completions": ["a"], "rewards": [1]}
    assert GrpoJob.model_validate(other).checkpoint_every == 10


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompts": []}, "at least 1 item"),
        ({"prompts": [{"answer": "1"}]}, "exactly one of prompt, messages, prompt_token_ids"),
        ({"prompts": [{"prompt": "a", "prompt_token_ids": [1]}]}, "exactly one of"),
        ({"prompts": [{"prompt_token_ids": []}]}, "at least 1 item"),
        ({"prompts": [{"prompt": "q", "answer": True}]}, "valid string"),
        ({"completions": 1}, "greater than or equal to 2"),
        ({"temperature": 0}, "greater than 0"),
        ({"rounds": 0}, "greater than or equal to 1"),
        ({"prompts_per_round": 3}, "prompts_per_round is 3, but there are 2 prompts"),
        ({"eval_every": 1}, "eval_every needs eval_prompts"),
        ({"in_flight": "change"}, 'in_flight "change" would do nothing: with staleness 0 .* set staleness to 1'),
        ({"in_flight": "keep_kv"}, "Input should be 'keep' or 'change'"),
        ({"rounds": 1, "staleness": 1}, "staleness would do nothing: rounds is 1"),
        ({"cut": {"fraction": 0.94}}, "cut would do nothing: its fraction 0.94 of the 16 rollouts"),
        ({"cut": {"fraction": 1}}, "less than 1"),
        ({"cut": {"requeues": 9}}, "less than or equal to 8"),
        ({"reward": []}, "at least 1 item"),
        ({"reward": {"type": "environment"}}, "give one of url, tools"),
        ({"reward": {**EPISODES, "tools": [TOOL]}}, "give one of url, tools"),
        ({"reward": [EPISODES, EPISODES]}, "several environments"),
        ({"reward": {"type": "environment", "tools": [TOOL]}}, "add a reward that reads the last answer"),
        ({"reward": [{"type": "environment", "tools": [TOOL, TOOL]}, {"type": "exact"}]}, "'look' twice"),
        ({"reward": [WITH_TOOL | {"weight": 2.0}, REGEX]}, "weight would do nothing here: tools give no reward"),
        ({"reward": [WITH_TOOL | {"success_at": 0.5}, REGEX]}, "success_at would do nothing here"),
        ({"reward": [WITH_TOOL | {"message_field": None}, REGEX]}, "message_field would do nothing here"),
        ({"reward": [WITH_TOOL | {"observation_field": "a"}, REGEX]}, "observation_field would do nothing here"),
        ({"reward": EPISODES, "prompts": [{"prompt_token_ids": [1]}]}, "prompt_token_ids: what an environment says"),
        ({"prompts": [{"prompt": "q", "reset": {"seed": 1}}]}, "reset would do nothing"),
        ({"reward": {"type": "vibes"}}, "does not match any of the expected tags"),
        ({"reward": {"type": "exact"}}, r"prompts\[0\] has no answer, which the exact reward compares with"),
        ({"reward": {"type": "regex", "pattern": "{answer}"}}, r"prompts\[0\] has no answer, which the regex reward"),
        ({"prompts": ANSWERED, "eval_prompts": ["x"], "reward": {"type": "exact"}}, r"eval_prompts\[0\] has no answer"),
        (
            {"prompts": [{"prompt": "q", "answer": "four"}], "reward": {"type": "numeric"}},
            r"prompts\[0\].answer is 'four': the numeric reward needs a finite number",
        ),
        ({"prompts": [{"prompt": "q", "answer": "1e999"}], "reward": {"type": "numeric"}}, "finite number"),
        ({"reward": {"type": "regex", "pattern": "x" * 2001}}, "at most 2000 characters"),
        ({"reward": {"type": "regex", "pattern": "x", "weight": float("nan")}}, "weight"),
        ({"top_p": 0.9}, "Extra inputs are not permitted"),
    ],
)
def test_bad_requests_are_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        job(**fields)


def test_what_is_just_enough_is_taken() -> None:
    assert job(rounds=2, staleness=1, cut={"fraction": 0.93}).generate is not None
    assert job(reward=[WITH_TOOL, REGEX]).generate is not None


@pytest.mark.parametrize("field", [{"advantage": "turn"}, {"discount": 0.9}, {"observation_weight": 0.1}])
def test_settings_of_turns_are_of_rollouts_that_have_some(field: dict[str, Any]) -> None:
    for reward in (REGEX, EPISODES | {"max_turns": 1}):
        with pytest.raises(ValidationError, match=f"{next(iter(field))} would do nothing here"):
            GrpoJob.model_validate({"adapter": "a", "generate": GENERATE | {"reward": reward}, **field})
    played = GrpoJob.model_validate({"adapter": "a", "generate": GENERATE | {"reward": EPISODES}, **field})
    assert GrpoJob.model_validate_json(played.model_dump_json()) == played


@pytest.mark.parametrize(("limit", "most"), [(None, 8 * 3), (20, 20), (100, 8 * 3)])
def test_a_rollout_has_the_tokens_of_all_its_turns(limit: int | None, most: int) -> None:
    """What dr_grpo divides by is no less than that."""
    reward = EPISODES | {"max_turns": 3, "max_trajectory_tokens": limit}
    fields = {"adapter": "a", "generate": GENERATE | {"reward": reward}, "loss_type": "dr_grpo"}
    assert GrpoJob.model_validate(fields | {"max_completion_length": most}).max_completion_length == most
    with pytest.raises(ValidationError, match=f"generate.max_tokens 8, with which a rollout may have {most}"):
        GrpoJob.model_validate(fields | {"max_completion_length": most - 1})


def test_exactly_one_form() -> None:
    both = {"adapter": "a", "generate": GENERATE, "prompt": "q", "completions": ["a"], "rewards": [1]}
    with pytest.raises(ValidationError, match="exactly one of"):
        GrpoJob.model_validate(both)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x/",
        "https:///path",
        "https://user:pass@host/",
        "https://allowed@evil/",
        "https://host/#fragment",
        "https://host/a/../b",
        "https://host/a/%2e%2e/b",
        "https://host/a%2fb",
        "https://host\\@evil/",
        "https://host:99999/",
        "https://host/\n",
        "https://hôst/",
        "https://a..b/",
        "https://.a/",
        f"https://{'a' * 64}.example/",
        "https://256.1.1.1/",
        "https://0x7f.1/",
        "https://2130706433/",
        "host/path",
        "",
    ],
)
def test_a_webhook_url_means_one_thing(url: str) -> None:
    with pytest.raises(ValueError):
        webhook_parts(url)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://127.0.0.1:9000/a", "127.0.0.1"),
        ("http://[::1]:9000", "::1"),
        ("https://scores.team-1.svc.cluster.local./v1", "scores.team-1.svc.cluster.local."),
        ("http://my_service", "my_service"),
        (f"https://{'a' * 63}.example1", f"{'a' * 63}.example1"),
    ],
)
def test_hosts_that_everybody_reads_alike(url: str, host: str) -> None:
    assert webhook_parts(url)[1] == host


def settings(**fields: Any) -> Any:
    return job(**fields).generate


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "missing"),
        ("(?=a)", "invalid perl operator"),
        (r"(a)\1", "invalid escape"),
        ("((a{500}){500})", "repetition"),
    ],
)
def test_patterns_are_checked_at_submission(pattern: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"generate.reward\[0\].pattern is no RE2 pattern .*{says}"):
        check_rewards(settings(reward={"type": "regex", "pattern": pattern}))


def test_patterns_are_checked_with_every_answer() -> None:
    wide = {"type": "regex", "pattern": "{answer}" * 200}
    prompts = [{"prompt": "q", "answer": "a"}, {"prompt": "q", "answer": "é" * 1999}]
    check_rewards(settings(prompts=prompts[:1], reward=wide))
    with pytest.raises(InvalidRequest, match="pattern"):
        check_rewards(settings(prompts=prompts, reward=wide))
    with pytest.raises(InvalidRequest, match=r"generate.prompts\[0\].answer has over 2000"):
        check_rewards(settings(prompts=[{"prompt": "q", "answer": "a" * 2001}], reward=wide))


def test_an_answer_in_a_pattern_is_literal() -> None:
    reward = RegexReward(pattern="^so: {answer}$")
    match = matcher(reward, ".*", "r")
    assert match("so: .*")
    assert not match("so: anything")
    assert matcher(RegexReward(pattern="{answer}?x"), "ab", "r")("x")


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*)*x", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_no_pattern_takes_forever(pattern: str) -> None:
    match = matcher(RegexReward(pattern=pattern), None, "r")
    started = time.monotonic()
    match("a" * 100_000 + "!")
    assert time.monotonic() - started < 60  # not the age of the universe


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"pattern": "(?=a)"}, "regex"),
        ({"$ref": "http://127.0.0.1:9/schema"}, r"must be #/\$defs/NAME"),
        ({"$ref": "file:///etc/passwd"}, r"must be #/\$defs/NAME"),
        ({"$ref": "#"}, r"must be #/\$defs/NAME"),
        ({"$ref": "#/$defs/a"}, "refers to nothing"),
        ({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}, "recursive"),
        ({"$defs": {"a": {"$dynamicRef": "#a"}}}, "not supported"),
        ({"$id": "http://x/", "type": "object"}, "not supported"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "draft 4"),
        ({"$schema": "http://127.0.0.1:9/meta"}, "meta-schema"),
        (nested(80), "nested over 64 deep"),
        ({"enum": ["x" * 70_000]}, "over 65536 bytes"),
        (
            {
                "$defs": {
                    **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 8} for n in range(8)},
                    "d8": {"type": "integer"},
                },
                "$ref": "#/$defs/d0",
            },
            "over 20000 parts",
        ),
    ],
)
def test_schemas_are_checked_at_submission(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"generate.reward\[0\].json_schema cannot be used: .*{says}"):
        check_rewards(settings(reward={"type": "json_schema", "json_schema": schema}))


def test_a_schema_with_definitions_is_fine() -> None:
    schema = {
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
    }
    valid = schema_validator(JsonSchemaReward(json_schema=schema), "r")
    assert valid([{"x": 1}, {"x": 2.5}])
    assert not valid([{"y": 1}])
