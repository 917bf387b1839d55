"""Translation of the steps of a generation into the output items and the events of a response.

Items grow: text, reasoning, and calls of functions, which take JSON, and of custom tools, which take text."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.common.text.output_parser import END_THINK, THINK, Delta, TextDelta
from services.common.text.tool_calls.parser import CLOSE, ToolDelta
from services.gateway.api.responses.response_object import Data, failure, new_item_id, usage_of
from services.gateway.api.responses.to_chat import INPUT, Offer, Offers
from services.gateway.core.sse import ChunkTemplate, event
from services.gateway.inference.choice import Step, usage
from services.gateway.inference.generation import Generation
from services.gateway.inference.logprobs import TokenLogprob, chat_logprobs
from services.gateway.protocol.responses.request import ResponseRequest
from services.gateway.text.detokenizer import Vocabulary


@dataclass(slots=True)
class Text:
    """Message or reasoning while it is written."""

    index: int
    response_id: str
    reasoning: bool
    summarised: bool = False
    id: str = ""
    parts: list[str] = field(default_factory=list)
    logprobs: list[Data] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = new_item_id("rs" if self.reasoning else "msg", self.response_id)

    def takes(self, delta: TextDelta | ToolDelta) -> bool:
        """True if the delta continues this item."""
        return isinstance(delta, TextDelta) and delta.reasoning == self.reasoning

    def add(self, delta: TextDelta, logprobs: Sequence[Data]) -> Data:
        """Adds text; its event."""
        self.parts.append(delta.text)
        self.logprobs += logprobs
        more: Data = {} if self.reasoning else {"logprobs": list(logprobs)}
        return {"type": f"{self._event}.delta", **self._place, "delta": delta.text, **more}

    def begin(self) -> list[Data]:
        """Events before the item's first text."""
        part = self._part("", [])
        return [
            {
                "type": "response.output_item.added",
                "output_index": self.index,
                "item": self.item("in_progress", fresh=True),
            },
            {"type": f"response.{self._part_name}.added", **self._place, "part": part},
        ]

    def end(self, status: str) -> list[Data]:
        """Events after the item's last text."""
        text = "".join(self.parts)
        more: Data = {} if self.reasoning else {"logprobs": self.logprobs}
        return [
            {"type": f"{self._event}.done", **self._place, "text": text, **more},
            {"type": f"response.{self._part_name}.done", **self._place, "part": self._part(text, self.logprobs)},
            {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)},
        ]

    def item(self, status: str, *, fresh: bool = False) -> Data:
        """Item as it is now, or with ``fresh`` as it was before its first text."""
        parts = [] if fresh else [self._part("".join(self.parts), self.logprobs)]
        if not self.reasoning:
            return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": parts}
        told = {"summary": parts, "content": []} if self.summarised else {"summary": [], "content": parts}
        return {"id": self.id, "type": "reasoning", "status": status, **told}

    @property
    def _event(self) -> str:
        if not self.reasoning:
            return "response.output_text"
        return "response.reasoning_summary_text" if self.summarised else "response.reasoning_text"

    @property
    def _part_name(self) -> str:
        return "reasoning_summary_part" if self.summarised else "content_part"

    @property
    def _place(self) -> Data:
        counted = "summary_index" if self.summarised else "content_index"
        return {"item_id": self.id, "output_index": self.index, counted: 0}

    def _part(self, text: str, logprobs: list[Data]) -> Data:
        if self.reasoning:
            return {"type": "summary_text" if self.summarised else "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_READABLE = re.compile(r'(?:[^"\\]|\\(?:u(?![dD][89aAbB])[0-9a-fA-F]{4}|u[dD][89aAbB]..\\u[0-9a-fA-F]{4}|[^u]))*')
"""Pattern of the text of a JSON string, up to its end or to an escape sequence that is not whole yet."""


class InputText:
    """Text of a custom tool's input, read out of arguments that come in pieces."""

    def __init__(self) -> None:
        self._unread = ""
        self._begun = False

    def feed(self, arguments: str) -> str:
        """Takes a piece of the arguments; the text that it adds."""
        self._unread += arguments
        if not self._begun:
            head = _HEAD.match(self._unread)
            if head is None:
                return ""
            self._begun, self._unread = True, self._unread[head.end() :]
        readable = _READABLE.match(self._unread)
        text = readable.group() if readable is not None else ""
        self._unread = self._unread[len(text) :]
        return str(json.loads(f'"{text}"', strict=False))


@dataclass(slots=True)
class Call:
    """A call of a tool while it is written."""

    index: int
    response_id: str
    number: int
    """Number of the call among those of the answer."""
    call_id: str
    function: str
    """Name that the model calls."""
    offer: Offer | None
    """Tool that the client offered under this name; None: there is none."""
    id: str = ""
    parts: list[str] = field(default_factory=list)
    text: InputText = field(default_factory=InputText)

    def __post_init__(self) -> None:
        self.id = new_item_id("ctc" if self._custom else "fc", self.response_id)

    def takes(self, delta: TextDelta | ToolDelta) -> bool:
        """True if the delta continues this item."""
        return isinstance(delta, ToolDelta) and delta.index == self.number

    def add(self, delta: ToolDelta) -> list[Data]:
        """Adds arguments or input; their event, or none if there are none."""
        more = self.text.feed(delta.arguments) if self._custom else delta.arguments
        if not more:
            return []
        self.parts.append(more)
        return [{"type": f"{self._event}.delta", **self._place, "delta": more}]

    def begin(self) -> list[Data]:
        """Event before the call's first arguments."""
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.item("in_progress")}]

    def end(self, status: str) -> list[Data]:
        """Events after the call's last arguments."""
        return [
            {"type": f"{self._event}.done", **self._place, self._field: "".join(self.parts)},
            {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)},
        ]

    def item(self, status: str) -> Data:
        """The item as it is now."""
        offer = self.offer
        item: Data = {
            "id": self.id,
            "type": "custom_tool_call" if self._custom else "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.function if offer is None else offer.name,
            self._field: "".join(self.parts),
        }
        return item if offer is None or offer.namespace is None else {**item, "namespace": offer.namespace}

    @property
    def _custom(self) -> bool:
        return self.offer is not None and self.offer.custom

    @property
    def _field(self) -> str:
        return "input" if self._custom else "arguments"

    @property
    def _event(self) -> str:
        return "response.custom_tool_call_input" if self._custom else "response.function_call_arguments"

    @property
    def _place(self) -> Data:
        return {"item_id": self.id, "output_index": self.index}


class MessageLogprobs:
    """Log-probabilities of messages, found by locating the deltas of messages in the raw text of an answer.

    Tokens belong to the raw text. Deltas are pieces of it, in its order; what lies between them is reasoning, calls or
    markup, and ends where services/common/text/output_parser.py sees it end.

    Args:
        vocabulary: text of tokens.
        thinking: the answer begins inside of reasoning.
    """

    def __init__(self, vocabulary: Vocabulary, *, thinking: bool) -> None:
        self._vocabulary = vocabulary
        self._thinking = thinking
        self._raw = ""  # the text from _begin on
        self._begin = 0
        self._entries: deque[tuple[int, TokenLogprob]] = deque()
        self._fresh = True  # True before the first message
        self._calls = 0  # begun since the last text

    def feed(self, step: Step) -> None:
        """Takes the raw text of a step, before its deltas are located."""
        self._raw += step.piece.text
        self._entries.extend(zip(step.piece.offsets, step.piece.entries, strict=True))

    def locate(self, delta: TextDelta | ToolDelta) -> list[TokenLogprob]:
        """Tokens of the next delta that no delta before had."""
        if isinstance(delta, ToolDelta):
            self._calls += delta.name is not None
            return []
        if delta.reasoning:
            return []
        if self._fresh and (self._thinking or self._raw.lstrip().startswith(THINK)):
            self._skip_behind(END_THINK)
        for _ in range(self._calls):
            self._skip_behind(CLOSE)
        self._fresh, self._calls = False, 0
        start = self._raw.find(delta.text)
        if start < 0:
            raise RuntimeError("a delta is not a piece of the answer's text")
        return self._take(start, start + len(delta.text))

    def _take(self, start: int, end: int) -> list[TokenLogprob]:
        begin = self._begin + start
        self._raw = self._raw[end:]
        self._begin += end
        found: list[TokenLogprob] = []
        while self._entries and self._entries[0][0] < self._begin:
            offset, entry = self._entries.popleft()
            if offset + len(self._vocabulary.token_text(entry.token_id)) > begin:
                found.append(entry)
        return found

    def _skip_behind(self, tag: str) -> None:
        before, found, _ = self._raw.partition(tag)
        if found:
            self._take(0, len(before) + len(tag))


class ResponseWriter:
    """Events of one response. Events are numbered in the order in which they are made.

    Args:
        response: the object, from ``new_response``; it is kept up to date.
        body: the request.
        offers: its tools.
        generation: of its answer.
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
        """Events before the first item, when the model has begun."""
        self.response["status"] = "in_progress"
        return [self._snapshot("response.created"), self._snapshot("response.in_progress")]

    def add(self, step: Step) -> list[Data]:
        """Takes a step; events of what it adds."""
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
        """Ends the answer: closes the last item, and completes the object. ``last`` makes the last event."""
        full = self._finish_reason == "length"
        # A stop string completes a text, but it cuts a call off.
        cut = full or self._generation.choices[0].broken
        events = self._close("incomplete" if cut else "completed")
        if not cut and not any(item["type"] != "reasoning" for item in self.response["output"]):
            # An empty answer is a message, too.
            events += self._begin(TextDelta(""))
            events += self._close("completed")
        generation = self._generation
        counts = usage(generation.choices, choices_per_prompt=generation.choices_per_prompt)
        self.response |= {
            "status": "incomplete" if cut else "completed",
            # OpenAI has no reason for a call that a stop string cut off.
            "incomplete_details": {"reason": "max_output_tokens"} if full else None,
            "completed_at": None if cut else int(time.time()),
            "completion_id": generation.choices[0].completion_id,
            "usage": usage_of(counts),
        }
        return self._numbered(events)

    def fail(self, error: Exception) -> None:
        """Fails the response, because the model does not go on. What it has written stays."""
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
        # Copied, because the object goes on changing.
        return self._numbered([{"type": name, "response": {**self.response, "output": [*self.response["output"]]}}])[0]

    def _numbered(self, events: Iterable[Data]) -> list[Data]:
        numbered = []
        for data in events:
            data["sequence_number"] = self._sequence
            self._sequence += 1
            numbered.append(data)
        return numbered


class EventEncoder:
    """Encodes the events of one stream. Those that come with every token are filled into a template."""

    def __init__(self) -> None:
        self._templates: dict[tuple[str, str], ChunkTemplate] = {}

    def encode(self, events: Sequence[Data]) -> bytes:
        """Encodes events in one piece."""
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
