"""Probe: questions about single terminals, answered by llguidance over bytes instead of a model's tokens."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.engine.constraints.refusal import Refused

_HEAD = '%llguidance {"no_forcing": true}\n'
_NOTHING_FOLLOWS = "NoExtensionBias"
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=1_000,
    max_items_in_row=1_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class Probe:
    """Answers questions about terminals. Immutable; used by many threads. An answer takes some ten microseconds, at
    most some milliseconds.

    Lexers and default limits are those of outputs: a terminal that is too complex here would be too complex there.
    """

    def __init__(self) -> None:
        self._tokenizer = LLTokenizer("byte")

    def empty(self, terminal: str, others: str = "") -> bool:
        """True if a terminal has no text.

        Args:
            others: definitions of the terminals that it refers to, one on each line.

        Raises:
            Refused: it is malformed or too complex.
        """
        matcher = self._matcher(terminal, others)
        if matcher is None:
            return True
        matcher.compute_bitmask()
        if not matcher.is_error():
            return False
        if _NOTHING_FOLLOWS in matcher.get_error():
            return True
        raise Refused("it is too complex")

    def matches(self, terminal: str, text: str) -> bool:
        """True if a terminal has a text.

        Raises:
            Refused: the terminal is malformed or too complex.
        """
        matcher = self._matcher(terminal, "")
        if matcher is None:
            return False
        for byte in text.encode():
            if matcher.is_stopped() or not matcher.consume_token(byte):
                return False
        return bool(matcher.is_accepting())

    def _matcher(self, terminal: str, others: str) -> LLMatcher | None:
        grammar = f"{_HEAD}start: PROBED\nPROBED: {terminal}\n{others}"
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            return matcher
        error = matcher.get_error()
        if "empty" in error or "no match" in error.lower():
            return None
        raise Refused("it cannot be compiled: " + " ".join(error.split("\n")[0].split())[:200])
