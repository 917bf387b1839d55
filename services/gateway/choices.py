"""One choice of a completion: the updates of its engine request become text, deltas and counts."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field

from services.common.pb import engine_pb2
from services.gateway.metrics import GatewayMetrics
from services.gateway.prompt_scores import PromptScores
from services.gateway.text.assembler import Piece, TextAssembler
from services.gateway.text.chat import END_THINK, ChatParser, Delta


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token with the alternatives to it, natural logarithms."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class Step:
    """What one update adds to a choice."""

    choice: Choice
    piece: Piece
    deltas: list[Delta]
    token_ids: list[int]
    sampling_logprobs: list[float]
    first: bool
    finish_reason: str | None = None


@dataclass(slots=True)
class Choice:
    """State of one choice.

    Args:
        index: its number in the response.
        completion_id: also the id of its engine request.
        prompt_tokens: length of its prompt.
        assembler: makes text of tokens.
        parser: splits the text of a chat; None for a text completion.
        end_ids: tokens that end a completion and are not part of its text.
        end_think_id: the token `</think>`, if the model has one.
        silent: only the prompt is wanted: the token that ends the engine's request is none of the completion's.
        shows_end: the token that ended the completion has a log-probability like the others, behind the text.
    """

    index: int
    completion_id: str
    prompt_tokens: int
    assembler: TextAssembler
    parser: ChatParser | None
    end_ids: frozenset[int]
    end_think_id: int | None = None
    silent: bool = False
    shows_end: bool = False
    prompt_scores: PromptScores = field(default_factory=PromptScores)
    adapter: str | None = None
    session: dict[str, str] | None = None
    """The client's session, and which engine it is at; None without one."""
    cached_tokens: int = 0
    begun: bool = False
    finished: bool = False
    _starts: list[int] = field(default_factory=list)
    """Where each token that may be reasoning begins in the text."""
    _last_update: float = field(default_factory=time.monotonic)
    _end: TokenLogprob | None = None

    def reads(self, update: engine_pb2.Update) -> bool:
        """Takes what an update says of the prompt; whether it says nothing else."""
        if not update.HasField("prompt_logprobs"):
            return False
        self.prompt_scores.add(update.prompt_logprobs)
        if update.token_ids or update.finish_reason != engine_pb2.FINISH_REASON_UNSPECIFIED:
            return False
        self.adapter = update.adapter or self.adapter
        self.cached_tokens = update.cached_tokens or self.cached_tokens
        return True

    def take(self, update: engine_pb2.Update, metrics: GatewayMetrics) -> Step:
        """Takes the next update of the engine."""
        first, self.begun = not self.begun, True
        if first:
            self.adapter = update.adapter or self.adapter
            self.cached_tokens = update.cached_tokens or self.cached_tokens
        self._measure(first, len(update.token_ids), metrics)
        deltas: list[Delta] = []
        early = Piece()
        used = self._push(update, early, deltas)
        reason: str | None = None
        if self.assembler.stopped or update.finish_reason == engine_pb2.FINISH_REASON_STOP:
            reason = "stop"
        elif update.finish_reason == engine_pb2.FINISH_REASON_LENGTH:
            reason = "length"
        if self.parser is not None and self.parser.ended:
            reason = "stop"
        if self.silent and reason is not None:
            reason = "length"
        piece = self.assembler.take(final=reason is not None)
        if self._end is not None:
            piece.entries.append(self._end)
            piece.offsets.append(self.assembler.length)
        if self.parser is not None:
            deltas += self.parser.feed(piece.text)
            if reason is not None:
                deltas += self.parser.finish(complete=reason == "stop")
            if reason == "stop" and self.parser.calls:
                reason = "tool_calls"
        self.finished = reason is not None
        return Step(
            self,
            early + piece,
            deltas,
            list(update.token_ids[:used]),
            list(update.sampling_logprobs[:used]),
            first,
            reason,
        )

    @property
    def tokens(self) -> int:
        """Tokens of the completion so far."""
        return self.assembler.tokens

    @property
    def reasoning_tokens(self) -> int:
        """Those of them whose text is reasoning; the tags around it do not count."""
        span = None if self.parser is None else self.parser.reasoning
        if span is None:
            return 0
        start, end = span
        last = len(self._starts) if end is None else bisect_left(self._starts, end)
        return last - bisect_left(self._starts, start)

    def _push(self, update: engine_pb2.Update, early: Piece, deltas: list[Delta]) -> int:
        """Feeds the tokens to the assembler; returns how many belong to the completion.

        Where a call may end the completion the parser sees each token on its own, so that those behind the call, which
        may be in the same update or not, never belong to it: ``early`` and ``deltas`` are what came of that.
        """
        if self.silent:
            return 0
        count = len(update.token_ids)
        ended = update.finish_reason == engine_pb2.FINISH_REASON_STOP
        for position, token_id in enumerate(update.token_ids):
            entry = None
            if position < len(update.logprobs):
                tops = update.top_logprobs[position] if position < len(update.top_logprobs) else None
                entry = TokenLogprob(
                    token_id,
                    update.logprobs[position],
                    tuple(tops.token_ids) if tops is not None else (),
                    tuple(tops.logprobs) if tops is not None else (),
                )
            # The token that ended the completion is counted and reported by id, but it is not text. (Where a constraint
            # allows nothing more, the last token is text.)
            visible = not (ended and position == count - 1 and token_id in self.end_ids)
            may_reason = self.parser is not None and self.parser.may_reason
            if visible and may_reason and token_id != self.end_think_id:
                self._starts.append(self.assembler.length)
            self.assembler.push(token_id, entry, visible=visible)
            if not visible and self.shows_end:
                self._end = entry
            if self.assembler.stopped:
                return position + 1
            if token_id == self.end_think_id and self.parser is not None and self.parser.awaits_end_of_reasoning:
                self.parser.end_reasoning(self.assembler.length - len(END_THINK))
            if self.parser is not None and self.parser.may_end:
                piece = self.assembler.take()
                early += piece
                deltas += self.parser.feed(piece.text)
                if self.parser.ended:
                    return position + 1
        return count

    def _measure(self, first: bool, tokens: int, metrics: GatewayMetrics) -> None:
        now = time.monotonic()
        if first:
            metrics.ttft.observe(now - self._last_update)
        elif tokens:
            metrics.itl.observe((now - self._last_update) / tokens)
        self._last_update = now
