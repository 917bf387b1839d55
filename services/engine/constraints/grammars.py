"""Compilation of one grammar, within limits of size and work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from services.engine.constraints.matcher import OutputMatcher
from services.engine.constraints.refusal import Refused
from services.engine.constraints.source import lark_of, reason_of
from services.engine.constraints.vocabulary import Vocabulary
from services.engine.requests.sampling_params import Constraint, ConstraintKind, SamplingParams

_NOTHING_FOLLOWS = "NoExtensionBias"
"""Error text of llguidance for a language without any text."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of one grammar. llguidance counts its work in units of fuel, 14 to 50 for each microsecond."""

    max_bytes: int = 256 * 1024
    """Most bytes of the source."""
    step_fuel: int = 200_000
    """Fuel of the lexer for the mask of one token: some 15 ms of one thread."""
    initial_fuel: int = 1_000_000
    """Fuel of the lexer to build it, once."""
    step_items: int = 50_000
    """Items of the parser for the mask of one token: some 3 ms."""
    max_symbols: int = 500_000
    """Most symbols of all rules together."""
    max_states: int = 20_000
    """Most states of the lexer of one request; each has 1 to 2 kB."""

    def __post_init__(self) -> None:
        if (
            min(self.max_bytes, self.step_fuel, self.initial_fuel, self.step_items, self.max_symbols, self.max_states)
            < 1
        ):
            raise ValueError(f"limits of grammars must be positive, got {self}")

    def of_parser(self) -> LLParserLimits:
        return LLParserLimits(
            initial_lexer_fuel=self.initial_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            max_items_in_row=self.step_items,
            max_lexer_states=self.max_states,
            max_grammar_size=self.max_symbols,
            # Verbose errors have parts of the output, which must not get into a log.
            verbose_errors=False,
        )


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """Compiled grammar over the vocabulary, at its beginning. It is copied for each request and never advanced
    itself."""

    vocabulary: Vocabulary
    kind: ConstraintKind
    prototype: LLMatcher
    size: int
    """Bytes of the source."""

    def matcher(self, sampling: SamplingParams) -> OutputMatcher:
        """Matcher for one request with this constraint."""
        constraint = sampling.constraint
        return OutputMatcher(
            self.vocabulary,
            self.prototype.deep_copy(),
            sampling.thinking,
            sampling.stop_token_ids | self.vocabulary.eos_ids,
            param="constraint" if constraint is None else constraint.param,
            names_tokens=self.kind is ConstraintKind.LARK,
        )


def budget_matcher(vocabulary: Vocabulary, sampling: SamplingParams) -> OutputMatcher:
    """Matcher for a request with a thinking budget and no constraint."""
    stops = sampling.stop_token_ids | vocabulary.eos_ids
    return OutputMatcher(vocabulary, None, sampling.thinking, stops, param="thinking")


def compile_grammar(vocabulary: Vocabulary, constraint: Constraint, limits: GrammarLimits) -> CompiledGrammar:
    """Compiles a constraint and checks it with the mask of its first token. Mostly runs without the GIL.

    Raises:
        Refused: it is malformed, cannot be enforced, is over a limit, or no output fulfils it.
    """
    if constraint.size > limits.max_bytes:
        raise Refused(f"it has {constraint.size} bytes, the limit is {limits.max_bytes} (TEMPER_CONSTRAINT_MAX_BYTES)")
    lark = lark_of(constraint, vocabulary.reserved, vocabulary.probe)
    matcher = LLMatcher(vocabulary.tokenizer, lark, log_level=0, limits=limits.of_parser())
    if matcher.is_error():
        raise Refused(reason_of(matcher.get_error(), constraint))
    first = matcher.deep_copy()
    masks = np.zeros((1, vocabulary.words), dtype=np.int32)
    vocabulary.fill([(first, 0)], masks)
    reason = reason_of(first.get_error(), constraint)
    if first.is_error() and reason != _NOTHING_FOLLOWS:
        raise Refused(f"it is too complex: {reason}")
    if first.is_error() or not masks.any():
        raise Refused("no output can fulfil it")
    return CompiledGrammar(vocabulary, constraint.kind, matcher, constraint.size)
