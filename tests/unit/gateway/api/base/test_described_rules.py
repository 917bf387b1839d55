"""The description of a request and its validators agree on the rules between its fields."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema_rs
import pytest
from pydantic import BaseModel, ValidationError

from services.common.jobs import DpoJob, GrpoJob, KtoJob, OpdJob, SftJob
from services.common.jobs.scorers.webhook import WebhookReward
from services.common.jobs.training_sessions.calls import Forward, ForwardBackward, Load, OpenSession, Save
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.completions import CompletionRequest
from services.gateway.protocol.messages.request import MessagesRequest
from services.gateway.protocol.models import MergeRequest
from services.gateway.protocol.pooling import ScoreRequest
from services.gateway.protocol.responses.request import ResponseRequest
from services.gateway.protocol.tokenize import TokenizeRequest
from tests.unit.gateway.conftest import MODEL

USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}
CHAT = {"model": "m", "messages": [USER]}
TOOL = {"type": "function", "function": {"name": "f"}}
TEXT = {"model": "m", "prompt": "a"}
RESPONSE = {"model": "m", "input": "a"}
CLAUDE = {"model": "m", "max_tokens": 9, "messages": [USER]}
CLAUDE_TOOL = {"name": "f", "input_schema": {}}
CLAUDE_WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CLAUDE_FORM = {"type": "json_schema", "schema": {}}
ONE, TWO = {"adapter": "a@1"}, {"adapter": "b@0002"}
SFT = {"adapter": "a", "examples": [{"text": "a"}]}
TWICE = {"adapter": "a", "examples": [{"text": "a"}, {"text": "b"}]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}]}
PAIR = {"chosen": "a", "rejected": "b"}
GOOD, BAD = ({"prompt": "p", "completion": "c", "label": label} for label in (True, False))
ROLLOUTS = {"adapter": "a", "rollouts": [{"completion_id": "c", "reward": 1}]}
REWARD = {"type": "numeric"}
REGEX = {"type": "regex", "pattern": "a"}
GENERATE = {"prompts": [{"prompt": "p", "answer": 5}], "rounds": 1, "max_tokens": 9, "reward": REWARD}
GAME = {"type": "environment", "url": "http://a.example"}
TOOLS = {"type": "environment", "tools": [{"name": "look", "url": "http://a.example/look"}]}
OPD = {"adapter": "a", "prompts": ["p"], "teacher": "t@1", "rounds": 1, "max_tokens": 9}
SCORED = {"token_ids": [1, 2], "advantages": [0, 1], "logprobs": [0, -1]}


def _sft(**example: Any) -> dict[str, Any]:
    return SFT | {"examples": [example]}


def _datum(**datum: Any) -> dict[str, Any]:
    return {"seq": 1, "loss": "cross_entropy", "data": [datum]}


def _group(completion: dict[str, Any], **group: Any) -> dict[str, Any]:
    return {"adapter": "a", "groups": [{"completions": [completion | {"reward": 1}], **group}]}


CASES: list[tuple[type[BaseModel], list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        ChatRequest,
        [
            CHAT,
            CHAT | {"messages": [{"role": "assistant", "reasoning": "hm"}]},
            CHAT | {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]},
            CHAT | {"logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
            CHAT | {"tools": [TOOL], "tool_choice": "required", "store": True, "modalities": ["text"]},
            CHAT | {"tool_choice": "none", "tools": None, "service_tier": "auto", "functions": None},
            CHAT | {"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}},
            CHAT | {"logit_bias": {"0017": 5}, "reasoning_effort": "low", "thinking_budget": None, "n": 2.0},
            CHAT | {"messages": [USER, ASSISTANT], "continue_final_message": True, "add_generation_prompt": False},
            CHAT | {"adapter": "a@01"},
            CHAT | {"tools": [TOOL, {"type": "web_search", "filters": None}], "service_tier": "flex"},
            CHAT | {"messages": [USER | {"cache_control": {"type": "ephemeral", "scope": "a"}}], "verbosity": "low"},
        ],
        [
            CHAT | {"messages": [{"role": "assistant"}]},
            CHAT | {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
            CHAT | {"top_logprobs": 2},
            CHAT | {"top_logprobs": 2, "logprobs": False},
            CHAT | {"stream_options": {}},
            CHAT | {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            CHAT | {"stream": True, "prompt_logprobs": 0},
            CHAT | {"tool_choice": "auto"},
            CHAT | {"tool_choice": "auto", "tools": []},
            CHAT | {"modalities": ["text", "audio"]},
            CHAT | {"service_tier": "gold"},
            CHAT | {"tools": [{"type": "web_search"}]},
            CHAT | {"tools": [{"type": "frobnicate"}, TOOL]},
            CHAT | {"verbosity": "mute"},
            CHAT | {"functions": []},
            CHAT | {"structured_outputs": {}},
            CHAT | {"structured_outputs": {"json": {}, "regex": "a"}},
            CHAT | {"response_format": {"type": "json_schema"}},
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": None}}},
            CHAT | {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
            CHAT | {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            CHAT | {"guided_choice": ["a"], "guided_regex": "a"},
            CHAT | {"logit_bias": {"a": 5}},
            CHAT | {"reasoning_effort": "low", "thinking_budget": 5},
            CHAT | {"thinking_token_budget": 5, "thinking_budget": 5},
            CHAT | {"messages": [USER, ASSISTANT], "continue_final_message": True, "add_generation_prompt": True},
        ],
    ),
    (
        CompletionRequest,
        [TEXT, TEXT | {"max_tokens": 0, "echo": True}, TEXT | {"suffix": None}],
        [TEXT | {"max_tokens": 0}, TEXT | {"max_tokens": 0, "echo": False}, TEXT | {"suffix": "a"}],
    ),
    (
        TokenizeRequest,
        [{"prompt": ""}, {"messages": [USER], "tools": [TOOL]}, {"prompt": "a", "messages": None, "tools": None}],
        [
            {},
            {"prompt": "a", "messages": [USER]},
            {"prompt": "a", "tools": []},
            {"prompt": "a", "continue_final_message": False},
            {"messages": [USER], "add_special_tokens": True},
        ],
    ),
    (
        ScoreRequest,
        [
            {"model": "m", "completion": [5]},
            {"model": "m", "completion": "a", "messages": [USER], "chat_template_kwargs": {}},
        ],
        [
            {"model": "m", "completion": "a", "prompt": "a", "messages": [USER]},
            {"model": "m", "completion": "a", "tools": []},
        ],
    ),
    (
        ResponseRequest,
        [
            RESPONSE | {"top_logprobs": 0},
            RESPONSE | {"top_logprobs": 1, "include": ["message.output_text.logprobs"]},
            RESPONSE | {"background": True, "store": True, "stream": False},
            RESPONSE | {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
            RESPONSE | {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
        ],
        [
            RESPONSE | {"top_logprobs": 1},
            RESPONSE | {"top_logprobs": 1, "include": ["reasoning.encrypted_content"]},
            RESPONSE | {"background": True, "store": False},
            RESPONSE | {"background": True, "stream": True},
            RESPONSE | {"stream_options": {}},
            RESPONSE | {"input": [{"role": "user", "content": [{"type": "output_text", "text": "a"}]}]},
        ],
    ),
    (
        MessagesRequest,
        [
            CLAUDE | {"tools": [CLAUDE_TOOL | {"allowed_callers": ["direct"]}], "tool_choice": {"type": "any"}},
            CLAUDE | {"tools": [CLAUDE_WEB, CLAUDE_TOOL | {"allowed_callers": ["code", "direct"]}], "betas": ["a"]},
            CLAUDE | {"output_format": CLAUDE_FORM, "output_config": {"format": None, "effort": "low"}},
            CLAUDE | {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
            CLAUDE | {"tool_choice": {"type": "none"}, "speed": "standard", "thread": None, "container": None},
            CLAUDE | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": []}]}]},
        ],
        [
            CLAUDE | {"tool_choice": {"type": "any"}},
            CLAUDE | {"tool_choice": {"type": "auto"}, "tools": []},
            CLAUDE | {"tools": [CLAUDE_TOOL | {"allowed_callers": ["code"]}]},
            CLAUDE | {"tools": [CLAUDE_WEB]},
            CLAUDE | {"tools": [CLAUDE_TOOL, {"type": "frobnicate_20250305"}]},
            CLAUDE | {"output_format": CLAUDE_FORM, "output_config": {"format": CLAUDE_FORM}},
            CLAUDE | {"speed": "fast"},
            CLAUDE | {"thread": {}},
            CLAUDE | {"container": "c"},
            CLAUDE | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": [{}]}]}]},
        ],
    ),
    (
        MergeRequest,
        [
            {"sources": [ONE, TWO]},
            {"sources": [ONE], "method": "svd", "rank": 4},
            {"sources": [ONE], "method": "ties", "rank": 4, "density": 0.5},
        ],
        [
            {"sources": [ONE | {"weight": 0}]},
            {"sources": [ONE], "density": 0.5},
            {"sources": [ONE], "method": "svd"},
            {"sources": [ONE], "method": "svd", "rank": 4, "density": 0.5},
            {"sources": [ONE], "method": "ties", "rank": 4},
        ],
    ),
    (
        SftJob,
        [
            SFT | {"epochs": 2.0},
            _sft(prompt="a", completion="", text=None),
            _sft(messages=[USER, ASSISTANT], tools=[]),
            TWICE | {"eval_fraction": 0.5, "publish_if": {"metric": "eval_loss"}},
            SFT | {"eval_fraction": 0.5, "eval_examples": [{"text": "b"}]},
            _sft(messages=[ASSISTANT, USER, ASSISTANT | {"refusal": None, "weight": 1}]),
            _sft(messages=[PARTS | {"role": "developer"}, PARTS, {"role": "assistant", "reasoning": "hm"}]),
            SFT | {"lora": {"target_modules": "all-linear"}},
            SFT | {"lora": {"target_modules": ["q_proj", "layers.3.mlp.up_proj"]}},
            SFT | {"gradient_checkpointing": True, "recompute": "full", "start_from": "base"},
        ],
        [
            _sft(),
            _sft(prompt="a"),
            _sft(prompt=[], completion="a") | {"prompt_format": "x"},
            _sft(text="a", tools=[]),
            _sft(text="a", messages=[ASSISTANT]),
            _sft(messages=[USER]),
            _sft(messages=[ASSISTANT]),
            _sft(messages=[USER, ASSISTANT | {"weight": 0}]),
            _sft(messages=[USER | {"weight": 1}, ASSISTANT]),
            _sft(messages=[USER, ASSISTANT | {"refusal": "no"}]),
            _sft(messages=[USER, ASSISTANT, {"role": "user"}]),
            _sft(messages=[USER, ASSISTANT, {"role": "assistant", "tool_calls": []}]),
            SFT | {"eval_fraction": 0.5},
            SFT | {"lora": {"target_modules": ["qproj"]}},
            SFT | {"lora": {"target_modules": "q_proj"}},
            SFT | {"publish_if": {"metric": "eval_loss"}},
            TWICE | {"eval_fraction": 0.5, "publish_if": {"metric": "loss"}},
            SFT | {"gradient_checkpointing": True, "recompute": "none"},
            SFT | {"epochs": True},
            SFT | {"epochs": "2"},
            SFT | {"shuffle": 1},
            SFT | {"lora": {"alpha": True}},
        ],
    ),
    (
        DpoJob,
        [{"adapter": "a", "examples": [PAIR | {"prompt": "p"}, PAIR | {"messages": [USER]}]}],
        [
            {"adapter": "a", "examples": [PAIR]},
            {"adapter": "a", "examples": [PAIR | {"prompt": "p", "messages": [USER]}]},
            {"adapter": "a", "examples": [PAIR | {"messages": []}]},
        ],
    ),
    (
        KtoJob,
        [{"adapter": "a", "examples": [GOOD, BAD], "eval_examples": [GOOD, GOOD]}],
        [
            {"adapter": "a", "examples": [GOOD]},
            {"adapter": "a", "examples": [BAD, BAD]},
            {"adapter": "a", "examples": [GOOD, BAD], "eval_examples": [GOOD]},
            {"adapter": "a", "examples": [GOOD | {"label": "yes"}, BAD]},
        ],
    ),
    (
        GrpoJob,
        [
            ROLLOUTS,
            {"adapter": "a", "prompt": "p", "completions": ["a"], "rewards": [1]},
            {
                "adapter": "a",
                "prompt": "p",
                "completions": ["a"],
                "rewards": [1],
                "truncated": [True],
                "temperature": 0,
            },
            {"adapter": "a", "generate": GENERATE},
            {"adapter": "a", "generate": GENERATE | {"prompts": ["p"], "reward": [REGEX]}},
            _group({"token_ids": [1], "logprobs": [-1.0], "adapter": "base"}, prompt="p"),
            _group({"completion_id": "c"}),
            {"adapter": "a", "generate": GENERATE | {"reward": [GAME]}, "advantage": "turn", "discount": 0.5},
            {"adapter": "a", "generate": GENERATE | {"reward": [TOOLS, REGEX], "rounds": 2, "staleness": 1}},
            {"adapter": "a", "dataset": "d@1", "observation_weight": 0.5},
            ROLLOUTS | {"loss_type": "cispo", "cispo_max_ratio": 2},
            ROLLOUTS | {"loss_type": "dr_grpo", "max_completion_length": 9, "beta": 0.1, "unbiased_kl": True},
            ROLLOUTS | {"mismatch_correction": "token_mask", "mismatch_cap": 2, "scale_rewards": False},
        ],
        [
            {"adapter": "a"},
            ROLLOUTS | {"prompt": "p", "completions": ["a"], "rewards": [1]},
            ROLLOUTS | {"truncated": [True]},
            ROLLOUTS | {"temperature": 1},
            ROLLOUTS | {"generate": GENERATE},
            ROLLOUTS | {"rollouts": []},
            {"adapter": "a", "prompt": "p", "completions": ["a"]},
            {"adapter": "a", "prompt": "p", "completions": [], "rewards": []},
            {"adapter": "a", "generate": GENERATE | {"eval_every": 1}},
            {"adapter": "a", "generate": GENERATE | {"reward": {}}},
            {"adapter": "a", "generate": GENERATE | {"prompts": ["p"]}},
            {"adapter": "a", "generate": GENERATE | {"eval_prompts": [{"prompt": "p"}], "reward": [{"type": "exact"}]}},
            {"adapter": "a", "generate": GENERATE | {"prompts": ["p"], "reward": REGEX | {"pattern": "a{answer}"}}},
            _group({"text": "a"}),
            _group({"text": "a", "completion_id": "c"}, prompt="p"),
            _group({"text": "a", "logprobs": [-1.0]}, prompt="p"),
            _group({"token_ids": []}, prompt="p"),
            _group({"text": "a", "adapter": "unversioned"}, prompt="p"),
            _group({"text": "a"}, prompt="p", prompt_token_ids=[1]),
            _group({"text": "a"}, prompt_token_ids=[1], tools=[]),
            ROLLOUTS | {"loss_type": "cispo", "clip_low": 0.1},
            ROLLOUTS | {"cispo_max_ratio": 2},
            ROLLOUTS | {"max_completion_length": 9},
            ROLLOUTS | {"unbiased_kl": True},
            ROLLOUTS | {"mismatch_cap": 2},
            ROLLOUTS | {"publish_if": {"metric": "eval_loss"}},
            {"adapter": "a", "generate": GENERATE, "exact_forward": True, "mismatch_correction": "token_mask"},
            ROLLOUTS | {"discount": 0.5},
            {"adapter": "a", "generate": GENERATE, "observation_weight": 0.5},
            {"adapter": "a", "generate": GENERATE | {"reward": GAME | {"max_turns": 1}}, "advantage": "turn"},
            {"adapter": "a", "generate": GENERATE | {"rounds": 1, "staleness": 1}},
            {"adapter": "a", "generate": GENERATE | {"reward": [TOOLS | {"weight": 2}, REGEX]}},
            {"adapter": "a", "generate": GENERATE | {"reward": [TOOLS | {"message_field": None}, REGEX]}},
        ],
    ),
    (
        OpdJob,
        [
            OPD,
            OPD | {"prompts": [{"messages": [USER], "completion": "c"}], "lmbda": 0.5},
            OPD | {"loss": "sampled_reverse_kl", "teacher": "checkpoint"},
            OPD | {"eval_prompts": ["p"], "eval_every": 1, "publish_if": {"metric": "eval_divergence"}},
        ],
        [
            OPD | {"prompts": [{}]},
            OPD | {"prompts": [{"prompt_token_ids": [1], "tools": []}]},
            OPD | {"prompts": [{"prompt": "p", "completion": "c"}]},
            OPD | {"prompts": ["p"], "lmbda": 0.5},
            OPD | {"prompts": [{"prompt": "p", "completion": "c", "completion_token_ids": [1]}], "lmbda": 0.5},
            OPD | {"loss": "sampled_reverse_kl", "beta": 0.5},
            OPD | {"loss": "sampled_reverse_kl", "sampling_temperature": 0},
            OPD | {"eval_every": 1},
            OPD | {"publish_if": {"metric": "eval_divergence"}},
            OPD | {"teacher": "unversioned"},
        ],
    ),
    (
        OpenSession,
        [{}, {"adapter": "a@1", "checkpoint": None}, {"checkpoint": "c"}],
        [{"adapter": "a", "checkpoint": "c"}, {"checkpoint": "a b"}, {"lora": {"alpha": True}}],
    ),
    (
        ForwardBackward,
        [
            _datum(token_ids=[1, 2], weights=[0, 1]),
            _datum(token_ids=[1], targets=[2], weights=[1]),
            {"seq": 1, "loss": "ppo", "data": [SCORED], "loss_config": {"clip_low": 0.1}},
        ],
        [
            _datum(token_ids=[1]),
            _datum(token_ids=[1, 2], weights=[1, 1]),
            _datum(token_ids=[1, 2], weights=[0, 0]),
            _datum(**SCORED),
            _datum(token_ids=[1, 2]) | {"loss": "ppo"},
            _datum(token_ids=[1, 2]) | {"loss_config": {"cap": 2}},
            {"seq": 1, "loss": "ppo", "data": [SCORED], "loss_config": {"cap": 2}},
            {"seq": 1, "loss": "importance_sampling", "data": [SCORED | {"logprobs": None}]},
        ],
    ),
    (Forward, [{"seq": 1, "data": [{"token_ids": [1, 2]}]}], [{"seq": 1, "data": [SCORED]}]),
    (
        Save,
        [{"seq": 1, "name": "a", "attach": True}, {"seq": 1, "checkpoint": "c", "name": None}],
        [{"seq": 1}, {"seq": 1, "name": "a", "checkpoint": "c"}, {"seq": 1, "checkpoint": "c", "attach": True}],
    ),
    (
        WebhookReward,
        [
            {"type": "webhook", "url": url}
            for url in (
                "http://a",
                "https://My-Grader.team_1.svc.cluster.local:18080/v1/score/?a=1&b=%20@x",
                "http://127.0.0.1:65535/",
                "https://[::1]:8443/x",
                "http://a?b=c",
            )
        ],
        [
            {"type": "webhook", "url": url}
            for url in (
                *("", "a", "ftp://a", "http://", "http:///x", "https://:80/", "http://u@a/", "http://a/#f"),
                *("http://a/b c", "http://a/b\\c", "http://\u00e4/", "http://a:x/"),
            )
        ],
    ),
    (
        Load,
        [{"seq": 1, "adapter": "a"}, {"seq": 1, "checkpoint": "c"}],
        [{"seq": 1}, {"seq": 1, "adapter": "a", "checkpoint": "c"}],
    ),
]


@pytest.mark.parametrize(("model", "kept", "broken"), CASES, ids=[model.__name__ for model, _, _ in CASES])
def test_described_as_validated(
    model: type[BaseModel], kept: list[dict[str, Any]], broken: list[dict[str, Any]]
) -> None:
    described = jsonschema_rs.validator_for(model.model_json_schema())
    for body in kept:
        model.model_validate(body)
        assert described.is_valid(body), body
    for body in broken:
        with pytest.raises(ValidationError):
            model.model_validate(body)
        assert not described.is_valid(body), body


CHAT_DESCRIBED = jsonschema_rs.validator_for(ChatRequest.model_json_schema())
CALLS = CHAT | {"tools": [TOOL]}


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"guided_regex": "a", "ignore_eos": True},
        CHAT | {"response_format": {"type": "json_object"}, "min_tokens": 1},
        CALLS | {"tool_choice": "required", "guided_json": {}},
        CALLS | {"tool_choice": TOOL, "structured_outputs": {"json_object": True}},
        CALLS
        | {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}}
        | {"guided_choice": ["a"]},
        CALLS | {"guided_choice": ["a"]},
        CALLS | {"tool_choice": "auto", "structured_outputs": {"regex": "a"}},
    ],
)
def test_described_as_refused_behind_the_validators(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post("/v1/chat/completions", json=body | {"model": MODEL}).status_code == 400
    assert not CHAT_DESCRIBED.is_valid(body)


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"guided_regex": "a", "ignore_eos": False, "min_tokens": 0},
        CHAT | {"response_format": {"type": "text"}, "min_tokens": 1},
        CALLS | {"tool_choice": "required", "response_format": {"type": "json_object"}},
        CALLS | {"tool_choice": "none", "guided_choice": ["a"]},
        CALLS | {"guided_json": {}},
    ],
)
def test_described_as_accepted_behind_the_validators(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post("/v1/chat/completions", json=body | {"model": MODEL}).status_code == 200
    assert CHAT_DESCRIBED.is_valid(body)
