"""Examples of requests in the API's description. Each runs as it is against `temper up` (tests hold them to that)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.jobs import JOBS

_MODEL = "qwen3.5"
_QUESTION = {"role": "user", "content": "What is 12 plus 7?"}
_ANSWER = {"role": "assistant", "content": "19"}
_SUM = {
    "type": "object",
    "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
    "required": ["left", "right"],
    "additionalProperties": False,
}
_ADD = {"name": "add", "description": "Adds two numbers.", "parameters": _SUM}

EXAMPLES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": {
        "question": {"model": _MODEL, "messages": [_QUESTION], "max_tokens": 32},
        "stream": {
            "model": _MODEL,
            "messages": [_QUESTION],
            "max_tokens": 32,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "tool": {
            "model": _MODEL,
            "messages": [_QUESTION],
            "max_tokens": 96,
            "tools": [{"type": "function", "function": {**_ADD, "strict": True}}],
            "tool_choice": "required",
        },
        "schema": {
            "model": _MODEL,
            "messages": [_QUESTION],
            "max_tokens": 96,
            "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": _SUM, "strict": True}},
        },
        "rollouts": {
            "model": _MODEL,
            "messages": [_QUESTION],
            "n": 4,
            "max_tokens": 16,
            "seed": 1,
            "return_token_ids": True,
        },
    },
    "/v1/completions": {
        "text": {"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 16, "logprobs": 2},
        "tokens": {"model": _MODEL, "prompt": [5, 6, 7], "max_tokens": 4},
    },
    "/v1/embeddings": {"texts": {"model": _MODEL, "input": ["a cat", "a sum"], "dimensions": 16}},
    "/v1/score": {
        "texts": {"model": _MODEL, "prompt": "The capital of France is", "completion": [" Paris", " Lyon"]},
        "teacher": {"model": _MODEL, "prompt": [5, 6, 7], "completion": [8, 9], "top_logprobs": 8},
    },
    "/v1/responses": {"text": {"model": _MODEL, "input": "What is 12 plus 7?", "max_output_tokens": 32}},
    "/v1/conversations": {"begun": {"items": [_QUESTION, _ANSWER], "metadata": {"topic": "sums"}}},
    "/v1/responses/input_tokens": {"text": {"model": _MODEL, "input": "What is 12 plus 7?"}},
    "/v1/messages": {
        "question": {"model": _MODEL, "max_tokens": 32, "messages": [_QUESTION]},
        "tool": {
            "model": _MODEL,
            "max_tokens": 96,
            "messages": [_QUESTION],
            "tools": [{"name": "add", "description": "Adds two numbers.", "input_schema": _SUM}],
            "tool_choice": {"type": "any"},
        },
    },
    "/v1/messages/batches": {
        "questions": {
            "requests": [
                {"custom_id": "first", "params": {"model": _MODEL, "max_tokens": 32, "messages": [_QUESTION]}},
                {"custom_id": "second", "params": {"model": _MODEL, "max_tokens": 32, "messages": [_QUESTION]}},
            ]
        }
    },
    "/v1/messages/count_tokens": {"question": {"model": _MODEL, "messages": [_QUESTION]}},
    "/tokenize": {"chat": {"model": _MODEL, "messages": [_QUESTION]}, "text": {"model": _MODEL, "prompt": "a text"}},
    "/detokenize": {"tokens": {"model": _MODEL, "tokens": [5, 6, 7]}},
    **{f"/v1/train/{kind}": model.request_examples for kind, model in JOBS.items()},
    "/v1/train/sessions": {"adapter": {"lora": {"rank": 8}, "ttl_seconds": 60}},
}
"""Example bodies of POST by path and name."""


def add_examples(description: dict[str, Any]) -> None:
    """Adds the examples to the description of the API."""
    for path, examples in EXAMPLES.items():
        content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        content["examples"] = {name: {"value": body} for name, body in examples.items()}
