"""Judge of structured answers, by jsonschema_rs: are they valid, and does a grammar take what is not?"""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs

from benchmarks.structured.drawn_schemas import Draw, Schema, spelled
from services.common.text.tokenizer import TextCodec
from services.engine.constraints.grammars import CompiledGrammar, GrammarLimits, compile_grammar
from services.engine.constraints.refusal import Refused
from services.engine.constraints.vocabulary import Vocabulary, allows
from services.engine.requests.sampling_params import Constraint, ConstraintKind

_NEAR = 4


@dataclass(slots=True)
class Outcome:
    """Result of some schemas."""

    schemas: int = 0
    """Schemas that were accepted."""
    refused: int = 0
    answers: int = 0
    """Answers that ended by themselves."""
    cut: int = 0
    near: int = 0
    """Values near an answer."""
    taken: int = 0
    """Values near an answer that the grammar takes."""
    missed: int = 0
    """Valid ones that it does not take: that is allowed."""
    problems: list[str] = field(default_factory=list)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)

    def summary(self) -> dict[str, Any]:
        return {
            "schemas": self.schemas, "refused": self.refused, "answers": self.answers, "cut": self.cut,
            "near": self.near, "taken": self.taken, "missed": self.missed, "problems": len(self.problems),
        }  # fmt: skip


class Judge:
    """Counts, and keeps what did not hold.

    Args:
        codec: of the model.
        vocabulary: of the model.
        seed: of the schemas.
    """

    def __init__(self, codec: TextCodec, vocabulary: Vocabulary, seed: int) -> None:
        self.outcome = Outcome()
        self._codec = codec
        self._vocabulary = vocabulary
        self._seed = seed
        self._bytes = self._single_bytes()

    def next_schema(self) -> tuple[Schema, Constraint, CompiledGrammar]:
        """Draws until a schema is accepted."""
        outcome = self.outcome
        while True:
            schema = Draw(f"{self._seed}/{outcome.schemas}/{outcome.refused}").schema()
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),), "schema")
            try:
                grammar = compile_grammar(self._vocabulary, constraint, GrammarLimits())
            except Refused as error:
                outcome.refused += 1
                outcome.reasons[str(error).partition(": ")[2][:60] or str(error)[:60]] += 1
                continue
            outcome.schemas += 1
            return schema, constraint, grammar

    def answer(self, schema: Schema, grammar: CompiledGrammar, tokens: list[int]) -> None:
        """Judges an answer that ended by itself, and values near it."""
        outcome, shown = self.outcome, json.dumps(schema)
        outcome.answers += 1
        kept = (token for token in tokens if token not in self._codec.eos_ids)
        text = b"".join(map(self._codec.token_bytes, kept)).decode(errors="replace")
        try:
            value = json.loads(text)
        except ValueError:
            outcome.problems.append(f"no JSON: {text!r} under {shown}")
            return
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        if not validator.is_valid(value):
            outcome.problems.append(f"invalid: {text!r} under {shown}")
            return
        draw = Draw(text)
        for _ in range(_NEAR):
            near = draw.near(value)
            written = spelled(near, draw.chance)
            taken, valid = self._takes(grammar, written), validator.is_valid(near)
            outcome.near += 1
            outcome.taken += taken
            outcome.missed += valid and not taken
            if taken and not valid:
                outcome.problems.append(f"takes {written!r} under {shown}")

    def failed(self, schema: Schema, why: object) -> None:
        """An accepted schema whose answer failed."""
        self.outcome.problems.append(f"failed: {why} under {json.dumps(schema)}")

    def _takes(self, grammar: CompiledGrammar, text: str) -> bool:
        """True if the masks let a text through, byte by byte."""
        matcher = grammar.prototype.deep_copy()
        for byte in text.encode():
            if matcher.is_stopped() or not matcher.consume_token(self._bytes[byte]):
                return False
        return bool(matcher.is_accepting())

    def _single_bytes(self) -> dict[int, int]:
        found: dict[int, int] = {}
        added = set(self._codec.added_ids.values())
        for token in range(self._vocabulary.tokenizer.vocab_size):
            known = token not in added and allows(self._vocabulary.nameable, token)
            raw = self._codec.token_bytes(token) if known else b""
            if len(raw) == 1:
                found.setdefault(raw[0], token)
        return found
