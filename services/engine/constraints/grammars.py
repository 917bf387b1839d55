"""Compiles one grammar, within limits of size and work."""

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
"""What llguidance says of a language without any text."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost. llguidance counts its work in units of fuel, 14 to 50 of them a microsecond."""

    max_bytes: int = 256 * 1024
    """Of the source."""
    step_fuel: int = 200_000
    """Of the lexer, for the mask of one token: some 15 ms of one thread."""
    initial_fuel: int = 1_000_000
    """Of the lexer, once, when it is built."""
    step_items: int = 50_000
    """Of the parser, for the mask of one token: some 3 ms."""
    max_symbols: int = 500_000
    """Of all rules."""
    max_states: int = 20_000
    """That the lexer of one request may have; each has 1 to 2 kB."""

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
            # Errors would have parts of the output, which go to no log.
            verbose_errors=False,
        )


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A language over the vocabulary, at its beginning. Copied for each request, never advanced itself."""

    vocabulary: Vocabulary
    kind: ConstraintKind
    prototype: LLMatcher
    size: int
    """Bytes of its source."""

    def matcher(self, sampling: SamplingParams) -> OutputMatcher:
        """For one request with this constraint."""
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
    """For a request with a thinking budget and no constraint."""
    stops = sampling.stop_token_ids | vocabulary.eos_ids
    return OutputMatcher(vocabulary, None, sampling.thinking, stops, param="thinking")


def compile_grammar(vocabulary: Vocabulary, constraint: Constraint, limits: GrammarLimits) -> CompiledGrammar:
    """Compiles a constraint up to the mask of its first token. Takes no GIL most of the time.

    Raises:
        Refused: it is malformed, asks for what is not enforced, is over a limit, or nothing fulfils it.
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
