"""Answers: questions of every shape, what each version answers them undisturbed, and streams that are held to it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from benchmarks.gateway.kill_clients import ANSWER_SECONDS, TIE

Version: TypeAlias = "str | None"
"""Adapter version that an answer names; None: the base model."""
_AT_ONCE = 8
_SUM = {
    "type": "object",
    "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
    "required": ["left", "right"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": _SUM, "strict": True}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": _SUM, "strict": True}}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question: its text (of a call, name and arguments) and why it ended."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """A greedy request of /v1/chat/completions.

    Args:
        shape: for the ledger.
        body: without model.
        answers: by version, undisturbed.
    """

    shape: str
    body: Mapping[str, Any]
    answers: Mapping[Version, Answer] = field(default_factory=dict)


def _chat(*said: str) -> list[dict[str, str]]:
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(said)]


def _questions() -> list[Question]:
    free = {"max_tokens": 32, "ignore_eos": True}
    found = [
        Question("chat", {"messages": _chat(text), **free})
        for text in ("What is 12 plus 7?", "Reverse the word temper.", "Hello", "Count from one to ten.")
    ]
    found.append(Question("long", {"messages": _chat("Say the days of the week."), **free, "max_tokens": 96}))
    found += [
        Question("session", {"messages": _chat(*said), **free})
        for said in (
            ("Ada is 36 years old.",),
            ("Ada is 36 years old.", "I see.", "How old is Ada?"),
            ("Ada is 36 years old.", "I see.", "How old is Ada?", "36", "And in a year?"),
        )
    ]
    for text in ("What is 12 plus 7?", "Add 31 and 14."):
        asked = {"messages": _chat(text), "max_tokens": 64}
        found.append(Question("schema", {**asked, "response_format": _FORMAT}))
        found.append(Question("tool", {**asked, "tools": [_TOOL], "tool_choice": "required"}))
        found.append(Question("regex", {**asked, "structured_outputs": {"regex": "(yes|no|[0-9]{1,3})"}}))
    return found


async def known_questions(client: httpx.AsyncClient, models: Mapping[Version, str], most: int) -> list[Question]:
    """Questions with the answers of each version, without those whose answer hangs on a tie.

    Args:
        models: name to ask for, by version.
        most: questions of each shape.
    """
    turns = asyncio.Semaphore(_AT_ONCE)

    async def known(question: Question) -> Question | None:
        answers = {}
        for version, model in models.items():
            async with turns:
                answer = await _undisturbed(client, model, version, question)
            if answer is None:
                return None
            answers[version] = answer
        return Question(question.shape, question.body, answers)

    asked = _questions()
    first = [one for n, one in enumerate(asked) if sum(other.shape == one.shape for other in asked[:n]) < most]
    found = [one for one in await asyncio.gather(*map(known, first)) if one is not None]
    if not {"chat", "session", "schema", "tool"} <= {one.shape for one in found}:
        raise RuntimeError(f"too many answers of this model hang on a tie: {Counter(one.shape for one in found)}")
    return found


async def _undisturbed(client: httpx.AsyncClient, model: str, version: Version, question: Question) -> Answer | None:
    body = {**question.body, "model": model, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise RuntimeError(f"{question.shape} of {model}: {response.status_code} {response.text[:300]}")
    told = response.json()
    if told["adapter"] != version:
        raise RuntimeError(f"{model} was answered by {told['adapter']}, not {version}")
    choice = told["choices"][0]
    tops = [[top["logprob"] for top in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
    if any(len(top) > 1 and abs(top[0] - top[1]) < TIE for top in tops):
        return None
    return said_in(told)


def _said(message: Mapping[str, Any]) -> str:
    """Text of a message or of a piece of one."""
    calls = "".join(
        (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        for call in message.get("tool_calls") or []
    )
    return (message.get("content") or "") + calls


@dataclass(frozen=True, slots=True)
class Told:
    """What came of asking.

    Args:
        end: "whole", "cut", "refused", "unreachable", or a breach.
        why: of what is not whole.
        id: of the completion.
    """

    end: str
    why: str = ""
    id: str = ""

    @property
    def breach(self) -> bool:
        return self.end not in ("whole", "cut", "refused", "unreachable")


async def ask(client: httpx.AsyncClient, model: str, question: Question, **more: Any) -> Told:
    """Streams an answer and holds it to that of the version it names."""
    body = {**question.body, **more, "model": model, "temperature": 0, "stream": True}
    text, reason, completion = "", "", ""
    named: set[Version] = set()
    ended, why, begun, done = "", "", False, False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                told = (await response.aread()).decode(errors="replace")[:300]
                end = "refused" if response.status_code >= 500 else "unexpected"
                return Told(end, f"{response.status_code} {told}")
            begun = True
            async for data in _events(response):
                if data == "[DONE]":
                    done = True
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    ended, why = "cut", str(chunk["error"])
                    continue
                completion = chunk["id"]
                named.add(chunk["adapter"])
                for choice in chunk["choices"]:
                    text += _said(choice["delta"])
                    reason = choice["finish_reason"] or reason
    except httpx.ReadTimeout:
        return Told("hung", f"nothing for {ANSWER_SECONDS:.0f} s after {len(text)} characters")
    except httpx.TransportError as error:
        ended, why = ("cut" if begun else "unreachable"), type(error).__name__
    return _judged(question, model, named, Answer(text, reason), done, ended, why, completion)


def _judged(
    question: Question,
    model: str,
    named: set[Version],
    answer: Answer,
    done: bool,
    ended: str,
    why: str,
    completion: str,
) -> Told:
    what = f"{question.shape} {question.body['messages'][-1]['content']!r} of {model}"
    if not named:
        return Told(ended or "truncated", why)
    if len(named) > 1 or not named <= question.answers.keys() or ("@" in model and named != {model}):
        return Told("wrong", f"{what} names {named}")
    expected = question.answers[named.pop()]
    if done:
        if answer == expected:
            return Told("whole", id=completion)
        return Told("wrong", f"{what}: {answer}, not {expected}")
    if not expected.text.startswith(answer.text):
        return Told("wrong", f"{what}: {answer.text!r} is no beginning of {expected.text!r}")
    return Told(ended or "truncated", why or f"after {len(answer.text)} characters")


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line[6:]


def said_in(told: Mapping[str, Any]) -> Answer:
    """Answer of a whole completion."""
    choice = told["choices"][0]
    return Answer(_said(choice["message"]), choice["finish_reason"])


def of_shapes(questions: Sequence[Question], *shapes: str) -> list[Question]:
    """Questions of some shapes."""
    return [question for question in questions if question.shape in shapes]


def any_model(rng: random.Random, models: Sequence[str]) -> str:
    """The base model twice as often as any adapter."""
    return rng.choice([models[0], *models])
