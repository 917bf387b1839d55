"""Drawn schemas, random outputs under their masks, and another validator: what ends by itself is valid.

`python -m benchmarks.structured.answers --schemas 5000` does the same with answers of the model.
"""

from __future__ import annotations

import random

from benchmarks.structured.judge import Judge
from services.engine.constraints.grammars import CompiledGrammar
from services.engine.constraints.vocabulary import Bits, allows, tokens_of
from services.engine.requests.sampling_params import Constraint, SamplingParams
from tests.unit.engine.constraints.support import codec, mask_of, vocabulary

_SCHEMAS = 300
_LONGEST = 80


def _closers() -> list[int]:
    """Tokens that bring an output to its end."""
    return [codec().encode_plain(text)[0] for text in ('"', "}", "]", ",", ":")]


def _walk(
    grammar: CompiledGrammar, constraint: Constraint, chance: random.Random, closers: list[int]
) -> list[int] | None:
    """An output at random, which ends where it can, sooner or later; None: it did not."""
    of = grammar.matcher(SamplingParams(constraint=constraint))
    output: list[int] = []
    while len(output) < _LONGEST:
        mask = mask_of(of)
        if _ends(mask) and chance.random() < 0.5:
            return output
        ready = [token for token in closers if allows(mask, token)]
        token = chance.choice(ready if ready and chance.random() < len(output) / 40 + 0.2 else tokens_of(mask))
        if token in vocabulary().eos_ids:
            return output
        output.append(token)
        if of.advance(token):
            return output
    return None


def _ends(mask: Bits) -> bool:
    return any(allows(mask, token) for token in vocabulary().eos_ids)


def test_what_is_generated_under_drawn_schemas_is_valid() -> None:
    judge, closers = Judge(codec(), vocabulary(), seed=3), _closers()
    for number in range(_SCHEMAS):
        schema, constraint, grammar = judge.next_schema()
        for seed in range(2):
            output = _walk(grammar, constraint, random.Random(f"{number}/{seed}"), closers)
            if output is not None:
                judge.answer(schema, grammar, output)
    outcome = judge.outcome
    assert not outcome.problems, outcome.problems
    assert outcome.answers > 1.5 * _SCHEMAS
    assert outcome.refused < _SCHEMAS
    assert outcome.taken > outcome.answers, "values near an answer are of its language, too"


def test_the_judge_notices() -> None:
    judge = Judge(codec(), vocabulary(), seed=3)
    _, _, grammar = judge.next_schema()
    judge.answer({"type": "integer"}, grammar, codec().encode_plain('"x"'))
    judge.answer({"type": "integer"}, grammar, codec().encode_plain('{"x'))
    judge.failed({}, "too complex")
    assert [problem.partition(":")[0] for problem in judge.outcome.problems] == ["invalid", "no JSON", "failed"]
