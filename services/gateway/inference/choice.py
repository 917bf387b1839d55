"""One choice of a completion: the updates of its engine request become text, deltas and counts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.pb import engine_pb2
from services.common.telemetry import tracing
from services.common.text.output_parser import END_THINK, ChatParser, Delta
from services.common.text.stops import Stops
from services.common.text.tool_calls.parser import OPEN
from services.gateway.core.metrics import Latencies
from services.gateway.inference.logprobs import PromptLogprobs, TokenLogprob
from services.gateway.text.detokenizer import HeldBackText, Piece, TextAssembler

# What runs for every token reads a field of a message once: that costs as much as a call.
_RUNNING = engine_pb2.FINISH_REASON_UNSPECIFIED
_STOP = engine_pb2.FINISH_REASON_STOP
_LENGTH = engine_pb2.FINISH_REASON_LENGTH


@dataclass(slots=True)
class Step:
    """Addition of one update to a choice."""

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
        stops: of a chat; None: it has none. Those of a text completion are the assembler's.
        cut_ids: of the end ids those that are the client's, not the model's own.
        end_think_id: the token `</think>`, if the model has one.
        call_id: the token `<tool_call>`, if the model has one.
        silent: only the prompt is wanted: the token that ends the engine's request is none of the completion's.
        shows_end: the token that ended the completion has a log-probability like the others, behind the text.
    """

    index: int
    completion_id: str
    prompt_tokens: int
    assembler: TextAssembler
    parser: ChatParser | None
    end_ids: frozenset[int]
    stops: Stops | None = None
    cut_ids: frozenset[int] = frozenset()
    end_think_id: int | None = None
    call_id: int | None = None
    silent: bool = False
    shows_end: bool = False
    prompt_scores: PromptLogprobs = field(default_factory=PromptLogprobs)
    adapter: str | None = None
    session: dict[str, str] | None = None
    """The client's session, and which engine it is at; None without one."""
    cached_tokens: int = 0
    begun: bool = False
    finished: bool = False
    _starts: list[int] = field(default_factory=list)
    """Places in the text where the tokens begin that may be reasoning."""
    _last_update: float = field(default_factory=time.monotonic)
    _end: TokenLogprob | None = None
    _held_back: HeldBackText = field(default_factory=HeldBackText)
    """Text that may turn out to be behind a stop string of a chat."""

    def reads(self, update: engine_pb2.Update) -> bool:
        """Takes what an update says of the prompt; whether it says nothing else."""
        if not update.HasField("prompt_logprobs"):
            return False
        self.prompt_scores.add(update.prompt_logprobs)
        if update.token_ids or update.finish_reason != _RUNNING:
            return False
        self.adapter = update.adapter or self.adapter
        self.cached_tokens = update.cached_tokens or self.cached_tokens
        return True

    def take(self, update: engine_pb2.Update, latencies: Latencies) -> Step:
        """Takes the next update of the engine."""
        first, self.begun = not self.begun, True
        if first:
            self.adapter = update.adapter or self.adapter
            self.cached_tokens = update.cached_tokens or self.cached_tokens
        tokens, finish = list(update.token_ids), update.finish_reason
        self._measure(first, len(tokens), latencies)
        deltas: list[Delta] = []
        early = Piece()
        used = 0 if self.silent else self._push(update, tokens, finish == _STOP, early, deltas)
        reason: str | None = None
        if self.assembler.stopped or finish == _STOP:
            reason = "stop"
        elif finish == _LENGTH:
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
                # A model that ends inside of a call has ended the call, too.
                whole = reason == "stop" and not (finish == _STOP and tokens and tokens[-1] in self.cut_ids)
                deltas += self.parser.finish(complete=whole)
            if self.parser.stopped:
                reason = "stop"
            if reason == "stop" and self.parser.calls and not self.parser.broken:
                reason = "tool_calls"
        if early.text or early.entries:
            piece = early + piece
        self.finished = reason is not None
        if self.stops is None or self.parser is None:
            return Step(self, piece, deltas, tokens[:used], update.sampling_logprobs[:used], first, reason)
        self._held_back.add(piece)
        if self.stops.found is not None:
            certain, ids, logprobs = self._held_back.end(self.stops.found)
        else:
            # A token without text may stand behind all of it.
            end = self.assembler.length + 1 if self.finished else self.parser.certain
            certain, ids, logprobs = self._held_back.take(end)
        return Step(self, certain, deltas, ids, logprobs, first, reason)

    @property
    def tokens(self) -> int:
        """Tokens of the completion so far."""
        return self.assembler.tokens if self.stops is None else self._held_back.taken

    @property
    def stopped(self) -> bool:
        """A stop string, or a stop token that is text, has ended it: the engine does not know that."""
        return self.assembler.stopped or (self.stops is not None and self.stops.found is not None)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended it."""
        found = None if self.stops is None else self.stops.found
        return self.assembler.stopped_by if found is None else found.text

    @property
    def broken(self) -> bool:
        """A stop has ended it inside of a call."""
        return self.parser is not None and self.parser.broken

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens whose text is reasoning; the tags around it do not count."""
        span = None if self.parser is None else self.parser.reasoning
        if span is None:
            return 0
        start, end = span
        last = len(self._starts) if end is None else bisect_left(self._starts, end)
        return last - bisect_left(self._starts, start)

    def _push(
        self, update: engine_pb2.Update, tokens: list[int], ended: bool, early: Piece, deltas: list[Delta]
    ) -> int:
        """Feeds the tokens of an update to the assembler; returns how many belong to the completion.

        Where a call may end the completion the parser sees each token on its own, so that those behind the call, which
        may be in the same update or not, never belong to it: ``early`` and ``deltas`` are what came of that.
        """
        assembler, parser, count = self.assembler, self.parser, len(tokens)
        logprobs, top_logprobs = update.logprobs, update.top_logprobs
        for position, token_id in enumerate(tokens):
            entry = None
            if logprobs:
                tops = top_logprobs[position] if top_logprobs else None
                entry = TokenLogprob(
                    token_id,
                    logprobs[position],
                    tuple(tops.token_ids) if tops is not None else (),
                    tuple(tops.logprobs) if tops is not None else (),
                )
            # The token that ended the completion is counted and reported by id, but it is not text. (Where a constraint
            # allows nothing more, the last token is text.)
            visible = not (ended and position == count - 1 and token_id in self.end_ids)
            if visible and parser is not None and parser.may_reason and token_id != self.end_think_id:
                self._starts.append(assembler.length)
            begin = 0 if self.stops is None else assembler.length
            assembler.push(token_id, entry, visible=visible)
            if self.stops is not None:
                self.stops.take(assembler.tokens, token_id, begin, assembler.length)
                self._held_back.add_token(token_id, update.sampling_logprobs[position], assembler.length)
            if not visible and self.shows_end:
                self._end = entry
            if assembler.stopped:
                return position + 1
            if parser is None:
                continue
            if token_id == self.end_think_id and parser.awaits_end_of_reasoning:
                parser.end_reasoning(assembler.length - len(END_THINK))
            elif token_id == self.call_id and parser.may_reason:
                parser.begin_call(assembler.length - len(OPEN))
            if parser.may_end:
                piece = assembler.take()
                early += piece
                deltas += parser.feed(piece.text)
                if parser.ended:
                    return position + 1
        return count

    def _measure(self, first: bool, tokens: int, latencies: Latencies) -> None:
        now = time.monotonic()
        if first:
            latencies.ttft.observe(now - self._last_update, tracing.exemplar(tracing.current()))
        elif tokens:
            latencies.itl.observe((now - self._last_update) / tokens, tracing.current())
        self._last_update = now


def usage(choices: Sequence[Choice], *, choices_per_prompt: int) -> dict[str, Any]:
    """Token counts. A prompt counts once, however many choices it has. With a `session_id` also where it is."""
    firsts = choices[::choices_per_prompt]
    prompt = sum(choice.prompt_tokens for choice in firsts)
    completion = sum(choice.tokens for choice in choices)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }
    if choices[0].session is not None:
        counts["session"] = choices[0].session
    return counts
