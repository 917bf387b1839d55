"""Engines and clients that the tests of compiler share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from services.engine.constraints.compiler import CompilerLimits, ConstraintCompiler
from services.engine.constraints.grammars import CompiledGrammar, GrammarLimits, compile_grammar
from services.engine.constraints.matcher import ConstraintBroken
from services.engine.constraints.refusal import Refused
from services.engine.constraints.vocabulary import tokens_of
from services.engine.observability.events import EngineEvent, EventStream, GrammarDone
from services.engine.requests.sampling_params import Constraint, SamplingParams
from tests.unit.engine.constraints.support import (
    codec,
    compiled,
    constraint,
    mask_of,
    vocabulary,
)  # fmt: skip

SECONDS = 5.0


CONTROL = frozenset(range(2039, 2048))


def takes(wanted: Constraint, text: str) -> bool:
    """True if a text, token by token, is a whole output."""
    of = compiled(wanted).matcher(SamplingParams(constraint=wanted))
    ids = codec().encode_plain(text)
    for number, token in enumerate(ids):
        if token not in tokens_of(mask_of(of)):
            return False
        if of.advance(token):
            return number == len(ids) - 1
    return bool(vocabulary().eos_ids & set(tokens_of(mask_of(of))))


BLOW_UPS = {
    "deep references": {"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3} for i in range(25)}, "d25": {"type": "null"}}},
    "wide unions": {"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"anyOf": [{"type": "array", "items": {"$ref": (to := f"#/$defs/d{i + 1}")}}, {"$ref": to}]}
           for i in range(40)}, "d40": {"type": "null"}}},
    "itself": {"$ref": "#"},
    "recursive": {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]},
    "many names": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
    "long enum": {"enum": [f"value-{i}-{i * 7919}" for i in range(4000)]},
    "a million items": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
    "a million characters": {"type": "string", "minLength": 1_000_000},
    "nested repeats": {"type": "string", "pattern": "^((a{100}){100}){100}$"},
}  # fmt: skip


def _bounded(wanted: Constraint) -> None:
    """Compiled or refused in time; and what is compiled makes masks in time, or fails as its request's error."""
    began = time.process_time()
    try:
        of = compiled(wanted).matcher(SamplingParams(constraint=wanted))
    except Refused:
        assert time.process_time() - began < SECONDS
        return
    assert time.process_time() - began < SECONDS
    for _ in range(30):
        began = time.process_time()
        problem: ConstraintBroken | None = None
        try:
            allowed = tokens_of(mask_of(of))
            token = allowed[len(allowed) // 2]
            ended = token in vocabulary().eos_ids or of.advance(token)
        except ConstraintBroken as error:
            problem = error
        assert time.process_time() - began < 1.0
        assert problem is None or "too complex" in str(problem)
        if ended or problem is not None:
            return


class Counted:
    """Compiles, counted; as slowly as the test wants."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.results: list[str] = []
        self.hold: threading.Event | None = None
        self.began = threading.Event()

    def __call__(self, of: Any, wanted: Constraint, limits: GrammarLimits) -> CompiledGrammar:
        self.calls.append(wanted.source[0])
        self.began.set()
        if self.hold is not None:
            assert self.hold.wait(20)
        return compile_grammar(of, wanted, limits)

    def listen(self, event: EngineEvent) -> None:
        assert isinstance(event, GrammarDone)
        self.results.append(event.result)


def use(test: Callable[[ConstraintCompiler, Counted], Any], **limits: Any) -> Counted:
    """Runs a test on a compiler."""

    async def run() -> None:
        compiler = ConstraintCompiler(vocabulary(), CompilerLimits(**limits), EventStream(counted.listen), counted)
        try:
            await test(compiler, counted)
        finally:
            if counted.hold is not None:
                counted.hold.set()
            compiler.close()

    counted = Counted()
    asyncio.run(run())
    return counted


def regex(text: str, param: str = "regex") -> SamplingParams:
    return SamplingParams(constraint=constraint("regex", text, param=param))
