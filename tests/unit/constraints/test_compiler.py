"""Compiling: what is enforced, what is refused and why, what it may cost, and the cache."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from services.common.errors import InvalidRequest, Overloaded
from services.common.pb import engine_pb2
from services.engine.constraints.bits import tokens_of
from services.engine.constraints.compiler import CompilerLimits, ConstraintCompiler
from services.engine.constraints.grammars import CompiledGrammar, GrammarLimits, compile_grammar
from services.engine.constraints.matcher import ConstraintBroken
from services.engine.constraints.refusal import Refused
from services.engine.observability.events import EngineEvent, EventStream, GrammarDone
from services.engine.requests.sampling_params import Constraint, SamplingParams, Thinking
from services.engine.server.errors import to_message
from services.gateway.text.grammar.tool_calls import CallForm, Form, tool_grammar
from tests.unit.constraints.support import (
    SIZE,
    codec,
    compiled,
    constraint,
    drawn,
    mask_of,
    matcher,
    schema,
    text_of,
    vocabulary,
)  # fmt: skip

SECONDS = 5.0
CONTROL = frozenset(range(2039, 2048))


def takes(wanted: Constraint, text: str) -> bool:
    """Whether a text, token by token, is a whole output."""
    of = compiled(wanted).matcher(SamplingParams(constraint=wanted))
    ids = codec().encode_plain(text)
    for number, token in enumerate(ids):
        if token not in tokens_of(mask_of(of)):
            return False
        if of.advance(token):
            return number == len(ids) - 1
    return bool(vocabulary().eos_ids & set(tokens_of(mask_of(of))))


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (constraint("regex", "^a{2,3}b?$"), ["aa", "aaab"], ["a", "aaaa", "aab "]),
        (constraint("regex", r"cost: \$[0-9]+\.[0-9]{2}$"), ["cost: $1.25"], ["cost: 1.25"]),
        (constraint("regex", "a/b\nc"), ["a/b\nc"], ["a/b c"]),
        (constraint("choices", "yes", "yes sir", 'a"b\\c\n', "日本😀", "</think>", "a\x7fb"),
         ["yes", "yes sir", 'a"b\\c\n', "日本😀", "</think>", "a\x7fb"], ["", "no", "yes s"]),
        (constraint("lark", 'start: "x" NUMBER ("," NUMBER)*\nNUMBER: /[0-9]{1,3}/'), ["x1", "x1,22"], ["x", "x1,"]),
        (schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                 "additionalProperties": False}),
         ['{"a":1}', '{\n  "a": 12\n}'], ["{}", '{"a": "1"}', '{"a":1,"b":2}']),
        (schema({"const": "<|im_end|> </think> \u2028"}), ['"<|im_end|> </think> \u2028"'], ['"x"']),
        (schema({"oneOf": [{"const": 1}, {"const": "a"}]}), ["1", '"a"'], ["2"]),
        (schema(True), ["[1, null]", '{"x": {}}'], ["nope"]),
    ],
)  # fmt: skip
def test_what_is_taken(wanted: Constraint, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(wanted, text)] == []
    assert [text for text in bad if takes(wanted, text)] == []


@pytest.mark.parametrize(
    ("text", "shape", "valid"),
    [
        ("2024-02-29", "date", True),
        ("2000-02-29", "date", True),
        ("1900-02-29", "date", False),
        ("2023-02-29", "date", False),
        ("2023-04-31", "date", False),
        ("23:59:59Z", "time", True),
        ("23:59:60Z", "time", False),
        ("2023-01-31T10:00:00+02:00", "date-time", True),
        ("2023-01-31T10:00:60Z", "date-time", False),
        ("P1Y2M3DT4H5M6S", "duration", True),
        ("PT36H", "duration", True),
        ("P2W", "duration", True),
        ("P", "duration", False),
        ("P1YT", "duration", False),
        ("P1Y2D", "duration", False),
        ("a.b@example.org", "email", True),
        ("a..b@example.org", "email", False),
        ("www.example.org", "hostname", True),
        ("-www.example.org", "hostname", False),
        (f"{'a' * 64}.org", "hostname", False),
    ],
)
def test_formats_are_strict(text: str, shape: str, valid: bool) -> None:
    for beside in ({}, {"pattern": "[0-9a-z]"}):
        assert takes(schema({"type": "string", "format": shape, **beside}), json.dumps(text)) == valid


def test_blanks_of_patterns_are_those_of_ecma() -> None:
    wanted = schema({"type": "string", "pattern": r"^\s[\s,]\\s$"})
    assert takes(wanted, json.dumps(" ,\\s"))
    assert not takes(wanted, json.dumps("\x85,\\s"))


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (schema(False), "false allows nothing"),
        (constraint("json_schema", "{"), "not JSON"),
        (constraint("json_schema", '{"minimum": NaN}'), "NaN"),
        (constraint("json_schema", "[" * 100_000), "nested too deeply"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "object", "additionalProperties": False}}), "#: 'not' .*'additionalProperties'"),
        (schema({"not": {}}), "no output can fulfil it"),
        (schema({"type": "string", "format": "phone"}), "phone"),
        (schema({"type": "strang"}), "strang"),
        (schema({"$ref": "https://example.org/schema"}), "example.org"),
        (schema({"$ref": "file:///etc/passwd"}), "passwd"),
        (schema({"$ref": "#/$defs/none"}), "none"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "no output can fulfil it"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "no output can fulfil it"),
        (schema({"$anchor": "x", "$ref": "#x"}), "#: '\\$ref' leads back to itself"),
        (schema({"type": "object", "minProperties": 2, "additionalProperties": {}}), "minProperties"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (schema({"type": "object", "uniqueItems": 1, "x-guidance": {"lenient": True}}), "uniqueItems"),
        (constraint("regex", "("), "unclosed"),
        (constraint("regex", r"\bword"), "lookaround"),
        (constraint("regex", "(?=a)a"), "look-around"),
        (constraint("choices", "\ud800"), "surrogate"),
        (constraint("lark", "begin: /a/"), "start"),
        (constraint("lark", "start: nothing"), "line 1, column 8: unknown name"),
        (constraint("lark", 'start: "a" <|im_end|>'), "im_end"),
        (constraint("lark", "start: <[5-9]>"), "by number"),
        (constraint("lark", "start: <nope>"), "nope"),
        (constraint("lark", '%llguidance {}\nstart: "a"'), "%llguidance"),
        (constraint("lark", 'start: %json {"uniqueItems": 1, "x-guidance": {"lenient": true}}'), "uniqueItems"),
        (constraint("lark", "start: %json {"), "%json is not followed"),
        (constraint("lark", 'start[temperature=0.5]: "a"'), "temperature"),
        (constraint("lark", "start: x\nx[capture]: /a/"), "capture"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_what_is_refused(wanted: Constraint, why: str) -> None:
    with pytest.raises(Refused, match=why) as error:
        compiled(wanted)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    assert "no_forcing" not in message, "our own text is nobody's business"


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


@pytest.mark.parametrize("name", BLOW_UPS)
def test_schemas_that_blow_up_are_bounded(name: str) -> None:
    _bounded(schema(BLOW_UPS[name]))


@pytest.mark.parametrize(
    "wanted",
    [
        constraint("regex", "(x{1,1000}){1,1000}"),
        constraint("regex", "((x{1,100}){1,100}){1,100}"),
        constraint("regex", ".*a.{25}b.{25}c.*"),
        constraint("regex", r"(\p{L}|\p{N}){1,1000}"),
        constraint("lark", "start: A\nA: /(.*a.{18})/ & /(.*b.{18})/ & ~/.*c.{18}/"),
        constraint("lark", 'start: a\na: a a | "x" |'),
        constraint("lark", "start: " + " | ".join(f"r{i}" for i in range(3000)) + "\n"
                   + "\n".join(f'r{i}: "x{i}" r{(i * 7) % 3000}' for i in range(3000))),
    ],
    ids=["repeats", "nested", "states", "classes", "intersection", "ambiguous", "rules"],
)  # fmt: skip
def test_grammars_that_blow_up_are_bounded(wanted: Constraint) -> None:
    _bounded(wanted)


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


def test_a_source_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(Refused, match=r"101 bytes, the limit is 100 \(TEMPER_CONSTRAINT_MAX_BYTES\)"):
        compiled(constraint("regex", "x" * 101), GrammarLimits(max_bytes=100))
    assert compiled(constraint("regex", "x" * 100), GrammarLimits(max_bytes=100)).size == 100


def test_every_allowed_token_is_taken_and_no_other() -> None:
    """Of the whole vocabulary, at every point of some outputs. Control tokens come at the end alone."""
    wanted = schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "kind": {"enum": ["</think>", "<tool_call>", 2.5, None]},
                "at": {"type": "string", "format": "date"},
                "more": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 300}, "maxItems": 2},
            },
            "required": ["name", "kind"],
            "additionalProperties": False,
        }
    )
    grammar = compiled(wanted)
    for seed in range(3):
        of = grammar.matcher(SamplingParams(constraint=wanted))
        output = drawn(of, seed)
        assert output is not None
        again = grammar.matcher(SamplingParams(constraint=wanted))
        for place, token in enumerate(output):
            allowed = set(tokens_of(mask_of(again)))
            inner = again._grammar
            assert inner is not None
            complete = inner.is_accepting()
            assert allowed & CONTROL == (vocabulary().eos_ids if complete else set())
            assert max(allowed) < 2048, "the model's logits are wider than the tokenizer's vocabulary"
            if place % 4 == seed:
                taken = {other for other in range(2048) if inner.validate_tokens([other]) == 1}
                assert allowed - vocabulary().eos_ids == taken - CONTROL
            again.advance(token)


def test_a_grammar_in_lark_names_added_tokens() -> None:
    wanted = constraint("lark", 'start: <tool_call> "<tool_call>" </tool_call>')
    output = drawn(matcher(SamplingParams(constraint=wanted)), 1)
    assert output is not None
    assert (output[0], output[-1]) == (2042, 2043)
    assert not CONTROL & set(output[1:-1]), "as text it is made of ordinary tokens"
    assert text_of(output) == "<tool_call><tool_call></tool_call>"


def test_schemas_in_a_grammar_are_as_strict_as_alone() -> None:
    source = 'start: "%json {" date\ndate: %json {\n "format": "date", "type": "string"} // %json {'
    assert takes(constraint("lark", source), '%json {"2024-02-29"')
    assert not takes(constraint("lark", source), '%json {"2023-02-29"')
    blanks = constraint("lark", 'start: %json {"type": "array", "items": {"const": 1}, "maxItems": 1}')
    assert takes(blanks, "[  1]")
    assert not takes(blanks, "[   1]")


@pytest.mark.parametrize("forced", [True, False])
def test_the_grammars_of_tool_calls(forced: bool) -> None:
    """As the gateway writes them; what is drawn has the form of a call."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1,
                                                                           "maximum": 9}},
        "required": ["city", "days"],
    }  # fmt: skip
    function = CallForm("weather", parameters, True, "tools[0].function.parameters")
    document = None if forced else {"type": "array", "items": {"const": "a"}, "maxItems": 2}
    source = tool_grammar([function], Form(forced, False, document), ["<tool_call>", "</tool_call>"], limit=65536)
    wanted = constraint("lark", source, param="tools")
    texts = set()
    for seed in range(6):
        output = drawn(matcher(SamplingParams(constraint=wanted)), seed)
        assert output is not None
        assert not {2039, 2040, 2041, 2046, 2047} & set(output)
        texts.add(text_of(output))
    call = re.compile(
        r"<tool_call>\n<function=weather>\n<parameter=city>\n(?s:.{0,8})\n</parameter>\n<parameter=days>\n[1-9]\n"
        r"</parameter>\n</function>\n</tool_call>"
    )
    called = {text for text in texts if call.fullmatch(text)}
    assert called == texts if forced else all(json.loads(text) is not None for text in texts - called)
    assert forced or called != texts


def test_the_vocabulary_knows_the_tokens_as_the_gateway_does() -> None:
    tokenizer = vocabulary().tokenizer
    other = [token for token in range(2048) if tokenizer.decode_bytes([token]) != codec().token_bytes(token)]
    # The byte 255, which is in no text: llguidance marks control tokens with it.
    assert [codec().token_bytes(token) for token in other] == [b"\xff"]
    assert all(tokenizer.is_special_token(token) for token in CONTROL)
    assert {codec().token_bytes(token) for token in tokens_of(vocabulary().newlines)} >= {b"\n", b"\n\n"}
    assert vocabulary().words * 32 >= SIZE


# The cache and the pool.


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
