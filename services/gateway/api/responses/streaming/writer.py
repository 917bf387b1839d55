"""Turns the steps of a generation into the items and the events of a response."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from services.gateway.api.responses.streaming.calls import Call
from services.gateway.api.responses.streaming.items import Data, Text
from services.gateway.api.responses.streaming.logprobs import MessageLogprobs
from services.gateway.api.responses.streaming.response_object import failure, usage_of
from services.gateway.api.responses.to_chat.tools import Offers
from services.gateway.core.sse import ChunkTemplate, event
from services.gateway.inference.choice import Step, usage
from services.gateway.inference.generation import Generation
from services.gateway.inference.logprobs import chat_logprobs
from services.gateway.protocol.responses.request import ResponseRequest
from services.gateway.text.output_parser import Delta, TextDelta
from services.gateway.text.tool_calls.parser import ToolDelta


class ResponseWriter:
    """Events of one response. Events are numbered in the order in which they are made.

    Args:
        response: the object, from ``new_response``; it is kept up to date.
        body: the request.
        offers: its tools.
        generation: what answers it.
    """

    def __init__(self, response: Data, body: ResponseRequest, offers: Offers, generation: Generation) -> None:
        self.response = response
        self._offers = offers
        self._generation = generation
        self._vocabulary = generation.served.vocabulary
        self._summarised = body.summarised
        self._top = body.top_logprobs or 0
        self._logprobs: MessageLogprobs | None = None
        if body.logprobs:
            self._logprobs = MessageLogprobs(self._vocabulary, thinking=generation.specs[0].thinking)
        self._open: Text | Call | None = None
        self._sequence = 0
        self._finish_reason: str | None = None

    def start(self) -> list[Data]:
        """The events before the first item: the model has begun."""
        self.response["status"] = "in_progress"
        return [self._snapshot("response.created"), self._snapshot("response.in_progress")]

    def add(self, step: Step) -> list[Data]:
        """Takes a step; the events of what it adds."""
        if step.first:
            self.response["adapter"] = step.choice.adapter
        if self._logprobs is not None:
            self._logprobs.feed(step)
        events: list[Data] = []
        for delta in step.deltas:
            if self._open is None or not self._open.takes(delta):
                events += self._close("completed")
                events += self._begin(delta)
            events += self._more(delta)
        self._finish_reason = step.finish_reason or self._finish_reason
        return self._numbered(events)

    def end(self) -> list[Data]:
        """The model has ended: closes the last item, and completes the object. ``last`` makes the last event."""
        full = self._finish_reason == "length"
        # A stop ends a text, but it breaks a call.
        cut = full or self._generation.choices[0].broken
        events = self._close("incomplete" if cut else "completed")
        if not cut and not any(item["type"] != "reasoning" for item in self.response["output"]):
            # Even an empty answer is a message.
            events += self._begin(TextDelta(""))
            events += self._close("completed")
        generation = self._generation
        counts = usage(generation.choices, choices_per_prompt=generation.choices_per_prompt)
        self.response |= {
            "status": "incomplete" if cut else "completed",
            # OpenAI has no word for a stop.
            "incomplete_details": {"reason": "max_output_tokens"} if full else None,
            "completed_at": None if cut else int(time.time()),
            "completion_id": generation.choices[0].completion_id,
            "usage": usage_of(counts),
        }
        return self._numbered(events)

    def fail(self, error: Exception) -> None:
        """The model does not go on: what it has written stays, as far as it came."""
        if self._open is not None:
            self.response["output"].append(self._open.item("incomplete"))
            self._open = None
        self.response |= {"status": "failed", "error": failure(error), "conversation": None}

    def last(self) -> Data:
        """The last event: response.completed, .incomplete or .failed."""
        return self._snapshot(f"response.{self.response['status']}")

    def _begin(self, delta: Delta) -> list[Data]:
        place = len(self.response["output"]), self.response["id"]
        if isinstance(delta, ToolDelta):
            name = delta.name or ""
            self._open = Call(*place, delta.index, delta.call_id or "", name, self._offers.called(name))
        else:
            self._open = Text(*place, delta.reasoning, self._summarised and delta.reasoning)
        return self._open.begin()

    def _more(self, delta: Delta) -> list[Data]:
        entries = self._logprobs.locate(delta) if self._logprobs is not None else []
        if isinstance(self._open, Call) and isinstance(delta, ToolDelta):
            return self._open.add(delta)
        if isinstance(self._open, Text) and isinstance(delta, TextDelta):
            return [self._open.add(delta, chat_logprobs(self._vocabulary, entries, self._top))]
        raise RuntimeError("a delta went to an item of another kind")

    def _close(self, status: str) -> list[Data]:
        if self._open is None:
            return []
        events = self._open.end(status)
        self.response["output"].append(self._open.item(status))
        self._open = None
        return events

    def _snapshot(self, name: str) -> Data:
        # A copy: the object goes on changing.
        return self._numbered([{"type": name, "response": {**self.response, "output": [*self.response["output"]]}}])[0]

    def _numbered(self, events: Iterable[Data]) -> list[Data]:
        numbered = []
        for data in events:
            data["sequence_number"] = self._sequence
            self._sequence += 1
            numbered.append(data)
        return numbered


class EventEncoder:
    """Encodes the events of one stream; those of which there is one a token from a template."""

    def __init__(self) -> None:
        self._templates: dict[tuple[str, str], ChunkTemplate] = {}

    def encode(self, events: Sequence[Data]) -> bytes:
        """All of them, in one piece."""
        return b"".join(map(self._one, events))

    def _one(self, data: Data) -> bytes:
        name = data["type"]
        if not name.endswith(".delta") or data.get("logprobs"):
            return event(data, name=name)
        key = name, data["item_id"]
        template = self._templates.get(key)
        if template is None:

            def write(delta: str, number: str) -> bytes:
                return event({**data, "delta": delta, "sequence_number": number}, name=name)

            template = self._templates[key] = ChunkTemplate(write, 2)
        return template.fill(data["delta"], data["sequence_number"])
