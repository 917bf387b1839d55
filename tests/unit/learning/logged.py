"""Logged requests and feedback of tests, and the data sets that are built of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.learning.datasets.build import Built, DatasetBuilder
from services.learning.datasets.spec import DatasetSpec
from services.learning.feedback.record import Feedback, FeedbackRecord
from services.learning.request_log.log import RequestFilter, RequestLog
from services.learning.request_log.parts import Line
from services.learning.request_log.record import LoggedChoice, LoggedRequest


class ListedLog(RequestLog):
    """A request log that is a list."""

    def __init__(self, requests: Sequence[LoggedRequest]) -> None:
        self._requests = requests

    def find(self, answer_ids: Sequence[str]) -> list[tuple[str, LoggedRequest]]:
        by_id = {one: request for request in self._requests for one in (request.id, *request.also)}
        names = [(one, by_id.get(one.partition(":")[0])) for one in answer_ids]
        return [(one, request) for one, request in names if request is not None]

    def newest(self, wanted: RequestFilter, *, limit: int, after: str | None = None) -> list[LoggedRequest]:
        del after
        return [one for one in reversed(self._requests) if wanted.takes(one)][:limit]

    def between(self, wanted: RequestFilter) -> Iterator[tuple[Line, LoggedRequest]]:
        yield from ((Line("p", 0, 1), one) for one in self._requests if wanted.takes(one))


def request(
    number: int, *answers: str, asks: str | None = None, answered_by: str = "toy@1", **more: Any
) -> LoggedRequest:
    name = f"chatcmpl-{number}"
    choices = tuple(
        LoggedChoice(
            completion_id=name if len(answers) == 1 else f"{name}:{index}",
            message={"role": "assistant", "content": text},
            finish_reason="stop",
            version=answered_by,
            token_ids=[number, index],
            logprobs=[-0.5, -0.25],
        )
        for index, text in enumerate(answers)
    )
    fields: dict[str, Any] = {
        "at": float(number),
        "kind": "chat",
        "model": "m",
        "messages": [{"role": "user", "content": asks or f"question {number}"}],
        "prompt_token_ids": [[1, 2, number if asks is None else 0]],
        "choices": choices,
    }
    return LoggedRequest(id=name, **{**fields, **more})


def said(number: int, **fields: Any) -> FeedbackRecord:
    fields = (
        fields
        if fields.keys() & {"completion_id", "session_id", "completion_ids"}
        else {"completion_id": f"chatcmpl-{number}", **fields}
    )
    return FeedbackRecord(id=f"fb_{number}", owner="", said=Feedback(**fields), created_at=number, changed_at=number)


def build(spec: Mapping[str, Any], requests: Sequence[LoggedRequest], *opinions: FeedbackRecord) -> Built:
    everything = {"split": {"validation": 0.0, "held_out": 0.0}, **spec}
    return DatasetBuilder(DatasetSpec.model_validate(everything), ListedLog(requests), None).build(opinions, {})
