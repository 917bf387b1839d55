"""A chat server that answers as a script says, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.cli.server import Reply, Seen, serving

CONTEXT = 4096


def says(text: str, **more: Any) -> dict[str, Any]:
    """An answer in text."""
    return {"content": text, **more}


def calls(*made: tuple[str, dict[str, Any] | str], **more: Any) -> dict[str, Any]:
    """An answer that calls tools by name with arguments."""
    return {"calls": made, **more}


def refuses(code: str, status: int = 400) -> Reply:
    return Reply({"error": {"message": f"refused: {code}", "code": code}}, status)


@contextmanager
def model(*answers: dict[str, Any] | Reply, context: int = CONTEXT) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the server's URL and the bodies of the chat requests so far; each takes the next answer."""
    left = iter(answers)
    bodies: list[dict[str, Any]] = []

    def answer(seen: Seen) -> Reply:
        if seen.path == "/v1/models":
            return Reply({"data": [{"id": "qwen3.5", "max_model_len": context}]})
        bodies.append(seen.json)
        found = next(left)
        return found if isinstance(found, Reply) else _streamed(found, seen.json)

    with serving(answer) as (url, _):
        yield url, bodies


def _streamed(answer: dict[str, Any], body: dict[str, Any]) -> Reply:
    tokens = answer.get("tokens", 100)
    choices: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}]
    choices += [{"delta": {"content": piece}} for piece in answer.get("content", "")]
    for index, (name, arguments) in enumerate(answer.get("calls", ())):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": name, "arguments": text[:3]}
        choices.append({"delta": {"tool_calls": [{"index": index, "id": f"call-{index}", "function": function}]}})
        choices.append({"delta": {"tool_calls": [{"index": index, "function": {"arguments": text[3:]}}]}})
    finish = answer.get("finish", "tool_calls" if "calls" in answer else "stop")
    choices.append({"delta": {}, "finish_reason": finish})
    chunks: list[dict[str, Any]] = [
        {"adapter": answer.get("adapter"), "choices": [{"index": 0, **choice}]} for choice in choices
    ]
    if body.get("return_token_ids"):
        chunks[0]["prompt_token_ids"] = answer.get("prompt", [1, 2])
        for chunk in chunks:
            chunk["choices"][0] |= {"token_ids": [5], "sampling_logprobs": [-0.5]}
    usage = {"prompt_tokens": tokens - 10, "completion_tokens": 10, "total_tokens": tokens}
    chunks.append({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 7}}})
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return Reply(text + "data: [DONE]\n\n", content_type="text/event-stream")
