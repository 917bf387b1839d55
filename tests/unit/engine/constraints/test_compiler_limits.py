"""Compiler limits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.common.errors import InvalidRequest, Overloaded
from services.common.pb import engine_pb2
from services.engine.constraints.compiler import ConstraintCompiler
from services.engine.constraints.grammars import GrammarLimits
from services.engine.constraints.matcher import ConstraintBroken
from services.engine.constraints.vocabulary import tokens_of
from services.engine.requests.sampling_params import SamplingParams, Thinking
from services.engine.server.errors import to_message
from tests.unit.engine.constraints.compiling import Counted, regex, use
from tests.unit.engine.constraints.support import (
    codec,
    compiled,
    constraint,
    mask_of,
    vocabulary,
)  # fmt: skip


def test_equal_constraints_are_compiled_once() -> None:
    async def test(compiler: ConstraintCompiler, counted: Counted) -> None:
        first, second = await asyncio.gather(compiler.matcher(regex("a+")), compiler.matcher(regex("a+", "other")))
        third = await compiler.matcher(regex("a+"))
        assert first is not None
        assert second is not None
        assert third is not None
        assert first._grammar is not second._grammar
        first.advance(codec().encode_plain("a")[0])
        assert set(tokens_of(mask_of(third))) < set(tokens_of(mask_of(first))), "third is at its beginning"

    counted = use(test)
    assert counted.calls == ["a+"]
    assert counted.results == ["compiled", "compiled", "cached"]


def test_the_cache_is_bounded_in_number_and_in_bytes() -> None:
    async def test(compiler: ConstraintCompiler, counted: Counted) -> None:
        for text in ("aa", "bb", "aa", "cc", "aa", "bb"):
            await compiler.matcher(regex(text))
        assert counted.calls == ["aa", "bb", "cc", "bb"], "the least recently used one goes"
        assert compiler.cached == 2
        await compiler.matcher(regex("x" * 90))
        assert (compiler.cached, compiler.cached_bytes) == (2, 92)
        await compiler.matcher(regex("y" * 100))
        await compiler.matcher(regex("z" * 101))
        assert (compiler.cached, compiler.cached_bytes) == (1, 100)

    use(test, cache_entries=2, cache_bytes=100)


def test_what_is_refused_names_the_field_and_is_not_kept() -> None:
    async def test(compiler: ConstraintCompiler, counted: Counted) -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"guided_regex: .*unclosed") as error:
                await compiler.matcher(regex("(", "guided_regex"))
            assert error.value.param == "guided_regex"
        assert compiler.cached == 0

    counted = use(test)
    assert counted.calls == ["(", "("]
    assert counted.results == ["refused", "refused"]


def test_what_takes_too_long_is_refused_and_never_kept() -> None:
    async def test(compiler: ConstraintCompiler, counted: Counted) -> None:
        counted.hold = threading.Event()
        with pytest.raises(InvalidRequest, match=r"regex: .*0.05 s.*TEMPER_CONSTRAINT_COMPILE_SECONDS"):
            await compiler.matcher(regex("slow"))
        with pytest.raises(InvalidRequest, match="longer"):
            await compiler.matcher(regex("slow"))
        assert counted.calls == ["slow"], "not begun again while it runs"
        # The only thread is taken.
        with pytest.raises(Overloaded):
            await compiler.matcher(regex("other"))
        counted.hold.set()
        await asyncio.sleep(0.1)
        assert compiler.cached == 0
        assert await compiler.matcher(regex("slow")) is not None

    counted = use(test, seconds=0.05, threads=1)
    assert counted.results == ["refused", "refused", "overloaded", "compiled"]


def test_too_many_at_once_are_refused() -> None:
    async def test(compiler: ConstraintCompiler, counted: Counted) -> None:
        counted.hold = threading.Event()
        first = asyncio.create_task(compiler.matcher(regex("a")))
        assert await asyncio.to_thread(counted.began.wait, 20)
        waiting = [asyncio.create_task(compiler.matcher(regex(text))) for text in "bcd"]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await compiler.matcher(regex("e"))
        # One that nobody waits for any more is compiled all the same.
        waiting[0].cancel()
        counted.hold.set()
        assert None not in await asyncio.gather(first, *waiting[1:])
        assert compiler.cached == 4

    use(test, threads=1, waiting=2)


def test_a_budget_needs_no_compiling() -> None:
    async def test(compiler: ConstraintCompiler, counted: Counted) -> None:
        assert await compiler.matcher(SamplingParams()) is None
        assert await compiler.matcher(SamplingParams(thinking=Thinking(2047))) is None
        assert await compiler.matcher(SamplingParams(thinking=Thinking(2047, 3))) is not None

    assert use(test).calls == []


def test_a_grammar_that_reaches_its_limits_is_its_requests_fault_not_the_engines() -> None:
    """A gateway lets engines rest that fail by themselves: a hostile grammar must not look like that."""
    wanted = constraint("lark", 'start: e\ne: e e | "a" | "b"\n', param="guided_grammar")
    of = compiled(wanted, GrammarLimits(step_items=150)).matcher(SamplingParams(constraint=wanted))

    def go_on() -> None:
        for _ in range(200):
            of.advance(next(token for token in tokens_of(mask_of(of)) if token not in vocabulary().eos_ids))

    with pytest.raises(ConstraintBroken, match="guided_grammar: the grammar is too complex") as failure:
        go_on()
    assert to_message(failure.value).code == engine_pb2.ERROR_CODE_INVALID_REQUEST
    assert to_message(failure.value).param == "guided_grammar"
