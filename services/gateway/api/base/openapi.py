"""Description of the API: answers that handlers write themselves, examples of bodies, and the page /docs.

The page loads nothing from anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

from fastapi import Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel

from services.common.jobs import JOBS, ForgeJob
from services.gateway.api.base.routing import Routes
from services.gateway.auth.route_permissions import PUBLIC

Responses = dict[int | str, dict[str, Any]]
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def answers_with(whole: type[BaseModel], *, stream: type[BaseModel], done: bool = False) -> Responses:
    """`responses` of a route that answers with JSON, or with events whose data is JSON.

    Args:
        stream: the data of an event.
        done: the last event is `[DONE]`, which is no JSON.
    """
    return {200: {"model": whole, "content": {"text/event-stream": {"schema": _event(stream, done=done)}}}}


def whole_bounds(value: Any) -> Any:
    """OpenAPI document in which bounds that are whole numbers are integers. FastAPI writes all bounds as floating-point
    numbers, which cannot tell 2**63 from its neighbours."""
    if isinstance(value, list):
        return [whole_bounds(member) for member in value]
    if not isinstance(value, dict):
        return value
    return {
        key: int(member)
        if key in _BOUNDS and isinstance(member, float) and member.is_integer()
        else whole_bounds(member)
        for key, member in value.items()
    }


def _event(data: type[BaseModel], *, done: bool) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": _inlined(data.model_json_schema()),
        }
    ]
    if done:
        kinds.insert(0, {"const": "[DONE]"})
    properties = {"event": {"type": "string"}, "id": {"type": "string"}, "data": {"anyOf": kinds}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _inlined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema without references, because FastAPI collects definitions of JSON bodies only."""
    definitions = schema.get("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(definitions[value["$ref"].rpartition("/")[2]])
            return {key: resolve(member) for key, member in value.items() if key != "$defs"}
        return [resolve(member) for member in value] if isinstance(value, list) else value

    inlined: dict[str, Any] = resolve(dict(schema))
    return inlined


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
    "/v1/chat/completions/render": {"chat": {"model": _MODEL, "messages": [_QUESTION]}},
    "/v1/completions/render": {"text": {"model": _MODEL, "prompt": "a text"}},
    "/detokenize": {"tokens": {"model": _MODEL, "tokens": [5, 6, 7]}},
    **{f"/v1/train/{kind}": model.request_examples for kind, model in JOBS.items()},
    "/v1/eval/suites": {
        "items": {
            "name": "sums",
            "scorer": {"type": "numeric"},
            "sampling": {"max_tokens": 16},
            "jsonl": '{"prompt": "What is 12 plus 7?", "expected": 19}\n{"prompt": "And 2 plus 2?", "expected": 4}',
        },
        "choices": {
            "name": "colours",
            "scorer": {"type": "choice", "by": "text"},
            "jsonl": '{"prompt": "Which colour has the sky?", "choices": ["red", "blue"], "expected": "blue"}',
        },
        "training file": {
            "name": "sums-held-out",
            "scorer": {"type": "exact"},
            "split": {"fraction": 0.5, "seed": 1},
            "jsonl": '{"prompt": "What is 1 plus 1?", "completion": "2"}\n{"prompt": "And 2?", "completion": "3"}',
        },
    },
    "/v1/evaluations": {
        "base": {"suites": ["sums"], "targets": ["base"]},
        "versions": {
            "suites": ["sums@1", "sums-held-out"],
            "targets": ["base", "polite@3", {"url": "http://other:8000/v1", "model": "theirs"}],
            "sampling": {"samples": 4, "temperature": 0.7},
            "seed": 1,
        },
    },
    "/v1/evaluations/import": {
        "one task": {
            "results": {
                "model_name": "theirs",
                "results": {"gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 1.0}},
                "n-samples": {"gsm8k": {"original": 1, "effective": 1}},
                "higher_is_better": {"gsm8k": {"exact_match": True}},
                "versions": {"gsm8k": 3.0},
            },
            "samples": {
                "gsm8k": '{"doc_id": 0, "filter": "strict-match", "filtered_resps": ["19"], "exact_match": 1.0}'
            },
        }
    },
    "/v1/feedback": {
        "thumb": {"completion_id": "chatcmpl-0123456789abcdef", "thumb": "down", "user": "u-17"},
        "correction": {"completion_id": "chatcmpl-0123456789abcdef", "correction": "It is 19.", "label": "sums"},
        "preference": {"completion_id": "chatcmpl-0123456789abcdef:0", "preferred_over": "chatcmpl-0123456789abcdef:1"},
        "judge": {"session_id": "support-4711", "score": -0.5, "comment": "No answer.", "source": "judge"},
    },
    "/v1/datasets": {
        "of users": {
            "name": "support",
            "filter": {"min_rating": -1, "sources": ["user"]},
            "max_user_share": 0.1,
            "dry_run": True,
        },
        "by session": {
            "name": "support",
            "logged": True,
            "split": {"by": "session", "validation": 0.1, "held_out": 0.2},
            "dry_run": True,
        },
    },
    "/v1/learners": {
        "thumbs": {
            "name": "support",
            "adapter": "support",
            "method": "kto",
            "trigger": {"min_rows": 500, "window": {"begin": "22:00", "end": "05:00"}},
            "gate": {"metric": "eval_loss"},
        }
    },
    "/v1/forge": ForgeJob.request_examples,
    "/v1/train/sessions": {"adapter": {"lora": {"rank": 8}, "ttl_seconds": 60}},
}
"""Example bodies of POST by path and name."""


def add_examples(description: dict[str, Any]) -> None:
    """Adds the examples to the description of the API."""
    for path, examples in EXAMPLES.items():
        content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        content["examples"] = {name: {"value": body} for name, body in examples.items()}


routes = Routes("docs")

Part = Literal["swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png"]
_TYPES: dict[Part, str] = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
"""Content security policy of /docs. Scripts may be inline because FastAPI writes the page's script into the page."""


@routes.get("/openapi.json", PUBLIC, include_in_schema=False)
def openapi(request: Request) -> JSONResponse:
    """OpenAPI document of this gateway. It differs between gateways only in whether keys are needed.

    Not a coroutine, for the first call takes seconds, in which the event loop has tokens to send.
    """
    return JSONResponse(request.app.openapi())


@routes.get("/docs", PUBLIC, include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Swagger UI over this gateway's own description."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{request.app.title} API",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
    )
    page.headers["content-security-policy"] = _POLICY
    return page


@routes.get("/docs/{part}", PUBLIC, include_in_schema=False)
async def docs_part(part: Part) -> Response:
    """A file of Swagger UI, which the package fastapi-swagger brings along."""
    content = files("fastapi_swagger").joinpath("resources", part).read_bytes()
    return Response(content, media_type=_TYPES[part], headers={"cache-control": "max-age=86400"})
