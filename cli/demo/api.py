"""Requests of the demo to a running Temper: answers with the openai client, training jobs over the HTTP API."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import openai
from openai.types.chat import ChatCompletion

from cli.http.client import Client
from cli.http.job_events import follow, succeeded
from models.tiny.recipe.item import Item
from models.tiny.recipe.skills import dates

_REQUESTS_AT_ONCE = 16
_ANSWER_TOKENS = 16
"""A date has ten characters, each a token."""
_JOB_SECONDS = 600.0

Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The sampled answers to one round's questions: one group a question, as POST /v1/train/grpo takes them."""

    groups: list[dict[str, Any]]
    accuracy: float
    """Share of sampled answers that are exactly right."""
    adapter: str | None
    """The version that sampled them."""


@dataclass(frozen=True, slots=True)
class Temper:
    """One gateway, seen through the openai client and the command line's own."""

    openai: openai.OpenAI
    http: Client
    model: str

    @classmethod
    def connect(cls, http: Client) -> Temper:
        """Uses the served model of the gateway that ``http`` talks to."""
        transport = openai.DefaultHttpxClient(trust_env=False)  # a gateway on this machine is not behind a proxy
        client = openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", http_client=transport, timeout=120.0)
        return cls(client, http, client.models.list().data[0].id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.openai.close()

    def stream(self, question: str, *, adapter: str | None = None) -> Iterator[str]:
        """One greedy answer, in pieces as they arrive."""
        extra = {} if adapter is None else {"adapter": adapter}
        stream = self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            temperature=0.0,
            max_tokens=64,
            stream=True,
            extra_body=extra,
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content

    def accuracy(self, items: Sequence[Item], advance: Advance) -> tuple[float, str | None]:
        """Exact accuracy of greedy answers to plain requests, and the adapter version that gave them."""

        def one(item: Item) -> ChatCompletion:
            answer = self._ask(item, temperature=0.0)
            advance()
            return answer

        with concurrent.futures.ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            answers = list(pool.map(one, items))
        replies = [answer.choices[0].message.content or "" for answer in answers]
        return dates.accuracy(replies, items), _version(answers[-1])

    def sample(self, items: Sequence[Item], *, n: int, seed: int, advance: Advance) -> Rollouts:
        """``n`` answers a question at temperature 1, scored here in Python."""

        def one(index: int) -> ChatCompletion:
            answer = self._ask(items[index], temperature=1.0, n=n, seed=seed + index * n)
            advance()
            return answer

        with concurrent.futures.ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            answers = list(pool.map(one, range(len(items))))
        groups, right = [], 0.0
        for item, answer in zip(items, answers, strict=True):
            completions = []
            for choice in answer.choices:
                extra = choice.model_extra or {}
                text = choice.message.content or ""
                right += dates.score(text, item.answer)
                completions.append(
                    {
                        "token_ids": extra["token_ids"],
                        "logprobs": extra["sampling_logprobs"],
                        "truncated": choice.finish_reason == "length",
                        "adapter": _version(answer),
                        "reward": dates.graded(text, item.answer),
                    }
                )
            prompt = (answer.model_extra or {})["prompt_token_ids"]
            groups.append({"prompt_token_ids": prompt, "completions": completions})
        return Rollouts(groups, right / (len(items) * n), _version(answers[-1]))

    def _ask(self, item: Item, *, temperature: float, n: int = 1, seed: int = 0) -> ChatCompletion:
        return self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": str(item.messages[-1]["content"])}],
            temperature=temperature,
            max_tokens=_ANSWER_TOKENS,
            n=n,
            seed=seed,
            extra_body={"return_token_ids": True},
        )

    def train(self, kind: str, job: dict[str, Any], progress: Callable[[int, int, dict[str, Any]], None]) -> str:
        """Submits a job, follows it to its end and returns the version it published, "name@n".

        Raises:
            CliError: it failed.
        """
        job_id = str(self.http.post(f"/v1/train/{kind}", job)["id"])
        for event in follow(self.http, job_id, timeout=_JOB_SECONDS):
            if event.kind == "progress":
                progress(int(event.data.get("step", 0)), int(event.data.get("total_steps", 0)), event.data)
        return str(succeeded(self.http, job_id)["result_adapter"])


def _version(answer: ChatCompletion) -> str | None:
    """The adapter version a response reports; None: the base model."""
    value = (answer.model_extra or {}).get("adapter")
    return None if value is None else str(value)
