"""Answers of the tiny model under drawn schemas, against another validator: `python -m benchmarks.schema_answers`.

For every schema the engine's loop samples some answers at a high temperature, under the masks of its grammar. Each that
ends by itself must be valid for jsonschema_rs, which shares no code with ours. Values near an answer are tried too: a
text that the grammar takes must be valid (of those that are valid some are not generated: that is counted). A schema
may be refused, before anything is generated; a request that fails afterwards counts as a fault.

    --schemas 5000 --answers 5

One JSON line; the exit status is 1 if something did not hold. `tests/unit/benchmarks/test_schema_answers.py` does some.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs

from benchmarks.drawn_schemas import Draw, Schema, spelled
from benchmarks.in_process import InProcessEngine, only_warnings, settings_for
from services.engine.constraints.bits import allows
from services.engine.constraints.grammars import CompiledGrammar, GrammarLimits, compile_grammar
from services.engine.constraints.refusal import Refused
from services.engine.constraints.spec import Constraint, ConstraintKind
from services.engine.constraints.vocabulary import Vocabulary
from services.engine.ports import Submission
from services.engine.request import FinishReason, SamplingParams
from services.engine.updates import SequenceUpdate
from services.engine.wire import AdapterChoice

TINY = Path(__file__).parents[1] / "models" / "tiny"
_PROMPT = "Give me JSON."
_MAX_TOKENS = 160
_AT_ONCE = 64
_NEAR = 4


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    schemas: int = 0
    """That were accepted."""
    refused: int = 0
    answers: int = 0
    """That ended by themselves."""
    cut: int = 0
    near: int = 0
    """Values near an answer."""
    taken: int = 0
    """Of those, that the grammar takes."""
    missed: int = 0
    """Valid ones that it does not take: that is allowed."""
    problems: list[str] = field(default_factory=list)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)

    def summary(self) -> dict[str, Any]:
        return {
            "schemas": self.schemas, "refused": self.refused, "answers": self.answers, "cut": self.cut,
            "near": self.near, "taken": self.taken, "missed": self.missed, "problems": len(self.problems),
        }  # fmt: skip


@dataclass(slots=True)
class _Asked:
    schema: Schema
    grammar: CompiledGrammar
    tokens: list[int] = field(default_factory=list)


class Campaign:
    """One engine, and what its answers were.

    Args:
        model: directory of the checkpoint.
        seed: of everything that is drawn.
        answers: of each schema.
        temperature: of the answers.
    """

    def __init__(self, model: Path = TINY, *, seed: int = 0, answers: int = 5, temperature: float = 1.5) -> None:
        self.outcome = Outcome()
        self._seed = seed
        self._answers = answers
        self._temperature = temperature
        self._engine = InProcessEngine(
            settings_for(
                model, "cpu", max_num_seqs=_AT_ONCE, token_budget=2048, num_blocks=2049, max_model_len=512,
                torch_threads=1,
            )
        )  # fmt: skip
        self._codec = self._engine.engine.codec
        self._vocabulary: Vocabulary = self._engine.engine.constraints.vocabulary
        self._prompt = tuple(self._codec.encode_plain(_PROMPT))
        self._bytes = self._single_bytes()

    def stop(self) -> None:
        """Ends the engine."""
        self._engine.stop()

    def run(self, schemas: int) -> Outcome:
        """Draws until so many schemas more are accepted, and asks under them in batches."""
        batch: list[_Asked] = []
        wanted = self.outcome.schemas + schemas
        while self.outcome.schemas < wanted:
            schema = Draw(f"{self._seed}/{self.outcome.schemas}/{self.outcome.refused}").schema()
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),), "schema")
            try:
                grammar = compile_grammar(self._vocabulary, constraint, GrammarLimits())
            except Refused as error:
                self.outcome.refused += 1
                self.outcome.reasons[str(error).partition(": ")[2][:60] or str(error)[:60]] += 1
                continue
            self.outcome.schemas += 1
            batch += [_Asked(schema, grammar) for _ in range(self._answers)]
            if len(batch) >= 2 * _AT_ONCE:
                self._ask(batch)
                batch = []
        if batch:
            self._ask(batch)
        return self.outcome

    def _ask(self, batch: list[_Asked]) -> None:
        done = threading.Event()
        asked = {f"{self.outcome.schemas}-{place}": each for place, each in enumerate(batch)}
        left = len(batch)
        ends: list[tuple[str, SequenceUpdate]] = []

        def sink(updates: list[SequenceUpdate]) -> None:
            nonlocal left
            for update in updates:
                if update.token is not None:
                    asked[update.request_id].tokens.append(update.token.token_id)
                if update.finish_reason is not None:
                    ends.append((update.request_id, update))
                    left -= 1
            if left == 0:
                done.set()

        for place, (name, each) in enumerate(asked.items()):
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(each.schema),), "schema")
            sampling = SamplingParams(
                temperature=self._temperature, max_tokens=_MAX_TOKENS, seed=place, constraint=constraint
            )
            matcher = each.grammar.matcher(sampling)
            self._engine.engine.loop.submit(
                Submission(name, self._prompt, sampling, AdapterChoice(), matcher=matcher), sink
            )
        done.wait()
        for name, update in ends:
            self._judge(name, asked[name], update)

    def _judge(self, name: str, asked: _Asked, update: SequenceUpdate) -> None:
        outcome, schema = self.outcome, json.dumps(asked.schema)
        tokens = [token for token in asked.tokens if token not in self._codec.eos_ids]
        text = b"".join(self._codec.token_bytes(token) for token in tokens).decode(errors="replace")
        if update.finish_reason is FinishReason.LENGTH:
            outcome.cut += 1
            return
        if update.finish_reason is not FinishReason.STOP:
            outcome.problems.append(f"failed: {update.error} after {text!r} under {schema}")
            return
        outcome.answers += 1
        try:
            value = json.loads(text)
        except ValueError:
            outcome.problems.append(f"no JSON: {text!r} under {schema}")
            return
        validator = jsonschema_rs.validator_for(asked.schema, validate_formats=True)
        if not validator.is_valid(value):
            outcome.problems.append(f"invalid: {text!r} under {schema}")
            return
        draw = Draw(f"{name}/{text}")
        for _ in range(_NEAR):
            near = draw.near(value)
            written = spelled(near, draw.chance)
            taken, valid = self._takes(asked.grammar, written), validator.is_valid(near)
            outcome.near += 1
            outcome.taken += taken
            outcome.missed += valid and not taken
            if taken and not valid:
                outcome.problems.append(f"takes {written!r} under {schema}")

    def _takes(self, grammar: CompiledGrammar, text: str) -> bool:
        """Whether the masks let a text through, byte by byte."""
        matcher = grammar.prototype.deep_copy()
        for byte in text.encode():
            if matcher.is_stopped() or not matcher.consume_token(self._bytes[byte]):
                return False
        return bool(matcher.is_accepting())

    def _single_bytes(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for token in range(self._vocabulary.size):
            if token in self._codec.added_ids.values():
                continue
            raw = self._codec.token_bytes(token) if allows(self._vocabulary.nameable, token) else b""
            if len(raw) == 1:
                found.setdefault(raw[0], token)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--answers", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    only_warnings()
    campaign = Campaign(seed=options.seed, answers=options.answers, temperature=options.temperature)
    try:
        outcome = campaign.run(options.schemas)
    finally:
        campaign.stop()
    for problem in outcome.problems[:20]:
        print(problem, file=sys.stderr)
    for reason, count in outcome.reasons.most_common(25):
        print(f"{count} refused: {reason}", file=sys.stderr)
    print(json.dumps({"benchmark": "schema_answers", "seed": options.seed, **outcome.summary()}))
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()
