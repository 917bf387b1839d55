"""Compiling: what is enforced, what is refused and why, what it may cost, and the cache."""

from __future__ import annotations

import json
import re

import pytest

from services.engine.constraints.grammars import GrammarLimits
from services.engine.constraints.refusal import Refused
from services.engine.constraints.vocabulary import tokens_of
from services.engine.requests.sampling_params import Constraint, SamplingParams
from services.gateway.text.grammar.tool_calls import CallForm, TurnForm, tool_grammar
from tests.unit.engine.constraints.compiling import BLOW_UPS, CONTROL, _bounded, takes
from tests.unit.engine.constraints.support import (
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


def test_a_source_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(Refused, match=r"101 bytes, the limit is 100 \(TEMPER_CONSTRAINT_MAX_BYTES\)"):
        compiled(constraint("regex", "x" * 101), GrammarLimits(max_bytes=100))
    assert compiled(constraint("regex", "x" * 100), GrammarLimits(max_bytes=100)).size == 100


def test_every_allowed_token_is_taken_and_no_other() -> None:
    """Masks of the whole vocabulary, at every point of some outputs. Control tokens come only at the end."""
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
    """Tool grammars as the gateway writes them; every drawn output has the form of a call."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1,
                                                                           "maximum": 9}},
        "required": ["city", "days"],
    }  # fmt: skip
    function = CallForm("weather", parameters, True, "tools[0].function.parameters")
    document = None if forced else {"type": "array", "items": {"const": "a"}, "maxItems": 2}
    source = tool_grammar([function], TurnForm(forced, False, document), ["<tool_call>", "</tool_call>"], limit=65536)
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
