"""Output matcher: the tokens that may follow the output of one request, first in its reasoning, then in its answer.

The matcher of a sequence has taken the tokens that the host knows. It never moves ahead of them or back, so a preempted
sequence keeps it unchanged. Copies of it follow draft tokens, for the masks behind them.
"""

from __future__ import annotations

import enum
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from services.common.errors import InvalidRequest, TemperError
from services.engine.constraints.vocabulary import Bits, allow, allows, forbid
from services.engine.requests.sampling_params import Thinking

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from services.engine.constraints.vocabulary import Vocabulary

_NEWLINE_TOKENS = 2
"""Most newline tokens between the reasoning and the answer: templates write `</think>` and two newlines."""
_EXCLUDED = "doesn't satisfy the grammar"
"""Part of llguidance's error for a token that is not allowed; any other error is a limit."""
_REGULAR_ENDS = frozenset({"NoExtension", "NoExtensionBias", "EndOfSentence"})


class ConstraintBroken(TemperError):
    """A mask could not be made, or an excluded token was sampled. The request ends, because its text cannot be trusted;
    other requests are not affected."""


class ConstraintUnusable(ConstraintBroken, InvalidRequest):
    """The constraint itself cannot be enforced here: the engine works, and a simpler constraint helps. A gateway must
    not count it as a fault of this engine."""


class _Phase(enum.Enum):
    REASONING = enum.auto()
    CLOSING = enum.auto()
    """The budget is used up: the closing tokens follow one by one."""
    GAP = enum.auto()
    """The reasoning has ended: newlines may come before the answer."""
    ANSWER = enum.auto()
    FREE = enum.auto()
    """The rest of the output is not constrained."""


class OutputMatcher:
    """The constraint of one request, from its first token to its last. One thread uses it at a time.

    Inside the reasoning of a request with a grammar, every token is allowed but those that end the output: reasoning
    without an answer would violate the grammar. Without a grammar the model may end anywhere; only the budget is
    enforced.

    An answer may begin within the reasoning, if the request names the token that begins it. It is not masked, because
    it may be a thought, but the grammar follows it: where it is complete, the output may end.

    Args:
        grammar: copy of a compiled grammar for this request, at its beginning; None: there is only a budget.
        thinking: set if the output begins inside the reasoning.
        stop_ids: tokens that end the output; allowed where the answer is complete. A stop token that is also text of
            the grammar ends the output as well, as a stop string does.
        param: request field that failures name.
        names_tokens: whether the grammar may name added tokens.
    """

    __slots__ = (
        "_closed",
        "_early",
        "_grammar",
        "_names_tokens",
        "_newlines_left",
        "_param",
        "_phase",
        "_reasoned",
        "_stop_ids",
        "_thinking",
        "vocabulary",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammar: LLMatcher | None,
        thinking: Thinking | None,
        stop_ids: frozenset[int],
        *,
        param: str,
        names_tokens: bool = False,
    ) -> None:
        self.vocabulary = vocabulary
        self._grammar = grammar
        self._thinking = thinking
        self._stop_ids = stop_ids
        self._param = param
        self._names_tokens = names_tokens
        self._newlines_left = _NEWLINE_TOKENS
        self._reasoned = 0
        self._closed = 0
        """Number of closing tokens so far."""
        self._early: LLMatcher | None = None
        """Matcher of an answer that has begun within the reasoning; None: there is none."""
        self._phase = _Phase.ANSWER if grammar is not None else _Phase.FREE
        if thinking is not None:
            self._phase = _Phase.CLOSING if thinking.budget == 0 else _Phase.REASONING

    def may_mask(self, count: int) -> bool:
        """True if the token behind the first ``count`` output tokens, pending ones included, may need a mask."""
        if self._grammar is not None:
            return True
        if self._thinking is None or self._thinking.budget is None or self._phase is _Phase.FREE:
            return False
        return self._thinking.budget <= count

    @property
    def masks(self) -> bool:
        """True if the next token is sampled under a mask."""
        return self._grammar is not None or self._phase is _Phase.CLOSING

    def begin_mask(self, row: Bits) -> LLMatcher | None:
        """Writes the mask of the next token, or returns the grammar that must write it; then ``end_mask`` completes
        it."""
        if self._thinking is not None and self._phase is _Phase.CLOSING:
            row[:] = 0
            allow(row, (self._thinking.closing[self._closed],))
            return None
        if self._phase is _Phase.REASONING:
            row[:] = -1
            if self._early is None or not self._early.is_accepting():
                forbid(row, self._stop_ids)
            return None
        return self._grammar

    def end_mask(self, row: Bits) -> None:
        """Completes the grammar's mask: adds the tokens that end the output, and newlines before an answer.

        Raises:
            ConstraintUnusable: the grammar reached its limits, or nothing may follow.
        """
        grammar = self._grammar
        if grammar is None or self._phase not in (_Phase.ANSWER, _Phase.GAP):
            return
        self._check(grammar)
        if self._names_tokens:
            np.bitwise_and(row, self.vocabulary.nameable, out=row)
        if grammar.is_accepting():
            allow(row, self._stop_ids)
        if self._phase is _Phase.GAP and self._newlines_left:
            np.bitwise_or(row, self.vocabulary.newlines, out=row)
        if not row.any():
            raise ConstraintUnusable(f"{self._param}: no token of the model can continue the output", param=self._param)

    def advance(self, token_id: int) -> bool:
        """Takes a token that does not end the output; returns True if the answer is complete, so that nothing more may
        follow.

        Raises:
            ConstraintBroken: the token is not allowed here.
        """
        thinking = self._thinking
        if thinking is not None and self._phase is _Phase.REASONING:
            self._reasoned += 1
            self._follow(token_id, thinking)
            if token_id == thinking.end_token_id:
                self._end_reasoning()
            elif thinking.budget is not None and self._reasoned >= thinking.budget:
                self._phase = _Phase.CLOSING
            return False
        if thinking is not None and self._phase is _Phase.CLOSING:
            if token_id != thinking.closing[self._closed]:
                raise self._excluded(token_id)
            self._closed += 1
            if self._closed == len(thinking.closing):
                self._end_reasoning()
            return False
        grammar = self._grammar
        if grammar is None:
            return False
        if self._phase is _Phase.GAP:
            if self._is_gap(token_id, grammar):
                self._newlines_left -= 1
                return False
            self._phase = _Phase.ANSWER
        if not grammar.consume_token(token_id):
            if _EXCLUDED not in grammar.get_error():
                self._check(grammar)
            raise self._excluded(token_id)
        if not grammar.is_stopped():
            return False
        self._check(grammar)
        return True

    def ahead(self, token_id: int) -> OutputMatcher | None:
        """Copy that has taken a draft token as well; None: the token is not allowed, or nothing may follow it."""
        if token_id in self._stop_ids:
            return None
        other = copy(self)
        other._grammar = self._grammar and self._grammar.deep_copy()
        other._early = self._early and self._early.deep_copy()
        try:
            return None if other.advance(token_id) else other
        except ConstraintBroken:
            return None

    def _follow(self, token_id: int, thinking: Thinking) -> None:
        """Takes a token of the reasoning that may belong to an answer."""
        begins = token_id == thinking.call_token_id
        if self._early is not None:
            # Text behind a call belongs to the reasoning, even where the grammar has text.
            over = self._early.is_accepting() and not begins and not allows(self.vocabulary.newlines, token_id)
            if over or not self._early.consume_token(token_id):
                self._early = None
        if self._early is None and begins and self._grammar is not None:
            self._early = self._grammar.deep_copy()
            if not self._early.consume_token(token_id):
                self._early = None

    def _end_reasoning(self) -> None:
        self._early = None
        self._phase = _Phase.FREE if self._grammar is None else _Phase.GAP

    def _is_gap(self, token_id: int, grammar: LLMatcher) -> bool:
        """True if a token is a newline before the answer and not the beginning of the answer."""
        newline = self._newlines_left > 0 and allows(self.vocabulary.newlines, token_id)
        return newline and grammar.validate_tokens([token_id]) == 0

    def _check(self, grammar: LLMatcher) -> None:
        if grammar.is_error():
            raise ConstraintUnusable(
                f"{self._param}: the grammar is too complex at this point of the output; simplify it "
                "(TEMPER_CONSTRAINT_STEP_FUEL is the engine's limit)",
                param=self._param,
            )
        if grammar.is_stopped() and grammar.stop_reason() not in _REGULAR_ENDS:
            raise ConstraintUnusable(f"{self._param}: the grammar stopped: {grammar.stop_reason()}", param=self._param)

    def _excluded(self, token_id: int) -> ConstraintBroken:
        return ConstraintBroken(
            f"{self._param}: token {token_id} is not allowed at this point of the output", param=self._param
        )
