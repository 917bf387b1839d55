"""Streamed answers of the chat endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.http.client import Client, parse_json
from cli.output import CliError, ExitCode


@dataclass(slots=True)
class Answer:
    """Answer that the chunks of a stream add up to."""

    text: str = ""
    reasoning: str = ""
    adapter: str | None = None
    completion_id: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    """With return_token_ids, as are the next two."""
    token_ids: list[int] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The turn of the assistant, as a next request has it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in self.tool_calls
            ]
        return message


def served_model(client: Client) -> str:
    """The base model's name: the first of /v1/models."""
    return str(_models(client)[0]["id"])


def context_tokens(client: Client) -> int | None:
    """Tokens of a conversation that the server takes; None: it does not say."""
    found = _models(client)[0].get("max_model_len")
    return None if found is None else int(found)


def _models(client: Client) -> list[dict[str, Any]]:
    answer = client.get("/v1/models")
    models: list[dict[str, Any]] | None = answer.get("data") if isinstance(answer, dict) else None
    if models is None:
        raise CliError(f"{client.url} has not OpenAI's API: /v1/models has no list of them", ExitCode.UNREACHABLE)
    if not models:
        raise CliError(f"{client.url} serves no model: name one with --model", ExitCode.UNREACHABLE)
    return models


def stream_answer(
    client: Client, options: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], answer: Answer
) -> Iterator[tuple[str, str]]:
    """Yields ("text" | "reasoning", piece) and fills ``answer`` on the way.

    Raises:
        CliError: the server refused, or the stream broke off without its end mark.
    """
    body = {**options, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    finished = False
    for event in client.events("POST", "/v1/chat/completions", body):
        if event.data == "[DONE]":
            finished = True
            break
        chunk = parse_json(event.data)
        if "error" in chunk:
            raise CliError(str(chunk["error"].get("message")), ExitCode.UNREACHABLE, error=chunk["error"])
        answer.adapter = chunk.get("adapter") or answer.adapter
        answer.usage = chunk.get("usage") or answer.usage
        answer.prompt_token_ids = chunk.get("prompt_token_ids") or answer.prompt_token_ids
        for choice in chunk.get("choices", ()):
            answer.completion_id = choice.get("completion_id") or answer.completion_id
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            answer.token_ids += choice.get("token_ids") or ()
            answer.sampling_logprobs += choice.get("sampling_logprobs") or ()
            delta = choice.get("delta", {})
            if piece := delta.get("reasoning_content"):
                answer.reasoning += piece
                yield "reasoning", piece
            if piece := delta.get("content"):
                answer.text += piece
                yield "text", piece
            for call in delta.get("tool_calls") or ():
                _add_call(answer, call)
    if not finished:
        raise CliError("the answer broke off: the engine or the gateway went away", ExitCode.UNREACHABLE)


def _add_call(answer: Answer, call: dict[str, Any]) -> None:
    function = call.get("function", {})
    while len(answer.tool_calls) <= int(call.get("index", 0)):
        answer.tool_calls.append({"id": None, "name": "", "arguments": ""})
    entry = answer.tool_calls[int(call.get("index", 0))]
    entry["id"] = call.get("id") or entry["id"]
    entry["name"] = function.get("name") or entry["name"]
    entry["arguments"] += function.get("arguments") or ""
