"""Which log-probabilities belong to the text of messages: those of reasoning, calls and markup do not."""

from __future__ import annotations

from collections import deque

from services.gateway.inference.choice import Step
from services.gateway.inference.logprobs import TokenLogprob
from services.gateway.text.detokenizer import Vocabulary
from services.gateway.text.output_parser import END_THINK, THINK, TextDelta
from services.gateway.text.tool_calls.parser import CLOSE, ToolDelta


class MessageLogprobs:
    """Finds the deltas of messages in the raw text of an answer, which is where its tokens are.

    Deltas are pieces of the raw text in its order; what lies between them is reasoning, calls or markup, and ends where
    services/gateway/text/output_parser.py sees it end.

    Args:
        vocabulary: text of tokens.
        thinking: the answer begins inside of reasoning.
    """

    def __init__(self, vocabulary: Vocabulary, *, thinking: bool) -> None:
        self._vocabulary = vocabulary
        self._thinking = thinking
        self._raw = ""  # from _begin on
        self._begin = 0
        self._entries: deque[tuple[int, TokenLogprob]] = deque()
        self._fresh = True  # no message has begun
        self._calls = 0  # since the last text

    def feed(self, step: Step) -> None:
        """Takes the raw text of a step, before its deltas are located."""
        self._raw += step.piece.text
        self._entries.extend(zip(step.piece.offsets, step.piece.entries, strict=True))

    def locate(self, delta: TextDelta | ToolDelta) -> list[TokenLogprob]:
        """The tokens in the next delta that no delta before had."""
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
