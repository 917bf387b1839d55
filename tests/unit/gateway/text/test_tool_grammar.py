"""The grammar of tool calls, compiled by the library that the engine uses: what it allows is read back as a call that
is valid under the function's schema, for any tokens that a model could choose."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from services.common.errors import InvalidRequest
from services.common.text.output_parser import ChatParser, TextDelta
from services.common.text.tokenizer import TextCodec
from services.common.text.tool_calls.parser import CLOSE, OPEN
from services.engine.constraints.grammars import GrammarLimits, compile_grammar
from services.engine.constraints.refusal import Refused
from services.engine.constraints.vocabulary import Vocabulary
from services.gateway.text.detokenizer import MARKUP
from services.gateway.text.grammar.tool_calls import CallForm, TurnForm, tool_grammar
from tests.unit.engine.constraints.support import constraint
from tests.unit.gateway.text.test_tool_corpus import joined

CODEC = TextCodec.from_directory(Path("models/tiny"))
TOKENIZER = LLTokenizer(CODEC.files["tokenizer.json"].decode(), eos_token=CODEC.eos_ids[0])
VOCABULARY = Vocabulary(CODEC, TOKENIZER.vocab_size, threads=1)
LIMIT = 262144
FORCED = TurnForm(forced=True, repeat=False)
FREE = TurnForm(forced=False, repeat=True)


def compiled(schema: Any, form: TurnForm = FORCED, *, enforced: bool = True) -> LLMatcher:
    functions = [CallForm("f", schema, enforced, "tools[0]"), CallForm("now", None, True, "tools[1]")]
    text = tool_grammar(functions, form, MARKUP, limit=LIMIT)
    return compile_grammar(VOCABULARY, constraint("lark", text, param="tools"), GrammarLimits()).prototype.deep_copy()


def spelled(text: str) -> list[int]:
    """Tokens of single characters: the tags are text, too."""
    return [token for character in text for token in CODEC.encode_plain(character)]


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether a whole text is in the language: with the tags as tokens, and spelled out."""
    found = set()
    for tokens in (CODEC.encode_completion(text), spelled(text)):
        matcher.reset()
        found.add(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
    assert len(found) == 1, "the two ways of writing differ"
    return found.pop()


def written(**parameters: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"{OPEN}\n<function=f>\n{inside}</function>\n{CLOSE}"


def schema_of(properties: dict[str, Any], required: list[str] | None = None, **others: Any) -> dict[str, Any]:
    every = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": every, **others}


STANDING = [
    "a\n<parameter=t>\n5\n</parameter>\nb",
    "<parameter=t>\n</parameter>",
    "a\n</parameter>\nb\n</parameter>\n</functions>",
    "<parameter=t> and </parameter>",
    "<function=g>\n<parameter=t>\n<parameter=u>\n1\n</parameter>\n</parameter>\n<parameter=v>\n</parameter>\n</function>\nE",
]
"""Texts with markup that are told from the end of their value."""
FALLING = [
    "a\n<parameter=t>\nb",
    "a\n</parameter>\n<parameter=t>\nb",
    "a\n</parameter>\n</function>\nb",
    "<parameter=t>\n<parameter=t>\n</parameter>",
]
"""Texts that may not be."""

POINT = {"$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}
CASES: list[tuple[dict[str, Any], list[dict[str, str]], list[dict[str, str]]]] = [
    (
        schema_of({"s": {"type": "string"}}),
        [{"s": "any\n<text>"}, {"s": ""}, {"s": "a</parameter>b"}, *({"s": text} for text in STANDING)],
        [{}, {"z": "1"}, *({"s": text} for text in FALLING)],
    ),
    (schema_of({"s": {"enum": ["red", 'a "b" \\']}}), [{"s": "red"}, {"s": 'a "b" \\'}], [{"s": "re"}, {"s": "blue"}]),
    (schema_of({"s": {"const": "x/y"}}), [{"s": "x/y"}], [{"s": "x"}]),
    (schema_of({"s": {"type": "string", "pattern": "^[A-Z]/\\d+$"}}), [{"s": "A/12"}], [{"s": "a/1"}, {"s": "A/1 "}]),
    (schema_of({"s": {"type": "string", "pattern": "b+"}}), [{"s": "abbc"}], [{"s": "ac"}]),
    (schema_of({"s": {"type": "string", "pattern": "^a|b$"}}), [{"s": "ax"}, {"s": "xb"}], [{"s": "xax"}]),
    (schema_of({"s": {"type": "string", "minLength": 2, "maxLength": 3}}), [{"s": "éé"}], [{"s": "é"}, {"s": "abcd"}]),
    (schema_of({"i": {"type": "integer", "minimum": 5}}), [{"i": "7"}], [{"i": "4"}, {"i": "x"}, {"i": "7.5"}]),
    (schema_of({"b": {"type": "boolean"}}), [{"b": "true"}], [{"b": "True"}]),
    (
        schema_of({"a": {"type": "string"}, "b": {"type": "string"}}),
        [{"a": "1", "b": "2"}],
        [{"b": "2", "a": "1"}, {"a": ""}],
    ),
    (
        schema_of({"a": {"type": "string"}, "b": {"type": "string"}}, ["b"]),
        [{"b": "2"}, {"a": "1", "b": "2"}],
        [{"a": "1"}],
    ),
    (schema_of({"p": {"$ref": "#/$defs/point"}}, **POINT), [{"p": '{"x": 1}'}], [{"p": "{}"}, {"p": "1"}]),
    (schema_of({"m": {"type": ["string", "null"]}}), [{"m": "null"}, {"m": "text"}], [{"m": "None"}]),
    (
        schema_of({"u": {"anyOf": [{"type": "integer"}, {"enum": ["auto"]}]}}),
        [{"u": "3"}, {"u": "auto"}],
        [{"u": "other"}, {"u": "3.5"}],
    ),
    (
        schema_of({"u": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}}),
        [{"u": "text"}, {"u": "[1, 2]"}],
        [{"u": '["x"]'}, {"u": '{"a": 1}'}],
    ),
    (schema_of({"e": {"enum": ["1", 1, None]}}), [{"e": "1"}, {"e": "null"}], [{"e": "2"}]),
    (schema_of({}, additionalProperties={"type": "integer"}), [{}, {"any": "3"}], [{"any": "x"}]),
    (schema_of({"s": {"type": "string"}}, additionalProperties=True), [{"s": "", "t": "x"}], [{"t": "x"}]),
    (schema_of({"s": {"type": "string"}}, additionalProperties=False), [{"s": "x"}], [{"s": "x", "t": "x"}]),
    ({"$ref": "#/$defs/point", **POINT}, [{"x": "3"}], [{"x": "three"}]),
    (
        schema_of({"u": {"type": ["string", "integer"], "minimum": 3, "exclusiveMaximum": 2**60}}),
        [{"u": "3"}, {"u": "x"}],
        [{"u": "2"}, {"u": str(2**60)}],
    ),
    (schema_of({"s": {"type": "string", "format": "date"}}), [{"s": "2024-02-29"}], [{"s": "2023-02-29"}, {"s": "x"}]),
    (schema_of({"s": {"type": "string", "pattern": r"^[^\s]{2}$"}}), [{"s": "ab"}], [{"s": ":\u00a0"}, {"s": "a "}]),
    (schema_of({"s": {"type": "string", "pattern": r"^(?!a).{2}$"}}), [{"s": "ba"}], [{"s": "ab"}, {"s": "b"}]),
    (schema_of({"s": {"not": {}}, "t": {"type": "string"}}, ["t"]), [{"t": "x"}], [{"s": "x", "t": "x"}]),
    (schema_of({"i": {"enum": [1, 5, 10], "minimum": 5}}), [{"i": "5"}], [{"i": "1"}]),
    (
        schema_of({}, ["a", "b"], propertyNames={"enum": ["a", "b", "c"]}, additionalProperties={"type": "integer"}),
        [{"a": "1", "b": "2"}, {"a": "1", "b": "2", "c": "3"}],
        [{"a": "1"}, {"a": "1", "b": "2", "d": "3"}],
    ),
    (
        schema_of(
            {"r": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}}
        ),
        [{"r": '{"a": 1.5}'}],
        [{"r": '{"a": "x"}'}],
    ),
    (schema_of({"é-1.x": {"type": "string"}}), [{"é-1.x": "v"}], [{"e": "v"}]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[json.dumps(case[0])[39:79] for case in CASES])
def test_language(schema: dict[str, Any], good: list[dict[str, str]], bad: list[dict[str, str]]) -> None:
    matcher = compiled(schema)
    for parameters in good:
        assert accepts(matcher, written(**parameters)), parameters
    for parameters in bad:
        assert not accepts(matcher, written(**parameters)), parameters
    walk(matcher, schema, seeds=3)


def _closing(text: str, deep: int) -> list[int]:
    """Behind a value and the parameters in it."""
    return CODEC.encode_completion("\n</parameter>" * deep + "\n" * bool(deep) + text)


ENDS = [_closing(f"</function>\n{CLOSE}", deep) for deep in range(5)]
QUOTES = [CODEC.encode_plain(text) for text in ('"', 'x"', "]", "}")]
PIECES = [
    *QUOTES,
    *map(CODEC.encode_plain, ("\n</parameter>\n", "xb\n</parameter>\n", "</function>\n", "\n<parameter=b>\n", CLOSE)),
    *map(CODEC.encode_plain, ("\n</parameter>\n</function>\n", "\n</parameter>\n<parameter=b>\n", f"{OPEN}\n<func")),
]


def walk(matcher: LLMatcher, schema: dict[str, Any], *, seeds: int) -> None:
    """Goes through the grammar at random; what comes out has to be one valid call."""
    tools = [{"function": {"name": "f", "parameters": schema}}, {"function": {"name": "now", "parameters": {}}}]
    for seed in range(seeds):
        matcher.reset()
        assert len(check_walk(matcher, tools, random.Random(seed))) == 1


def check_walk(matcher: LLMatcher, tools: list[dict[str, Any]], chance: random.Random) -> list[list[str]]:
    """Calls that random tokens make, and that are valid."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    keys = [key for schema in schemas.values() for key in schema.get("properties", {})]
    text = CODEC.decode(walked(matcher, chance, keys))
    parser = ChatParser(thinking=False, tools=tools)
    content, _, calls = joined([*parser.feed(text), *parser.finish(complete=True)])
    assert content == "", text
    for name, arguments in calls:
        valid = jsonschema_rs.is_valid(schemas[name], json.loads(arguments, parse_float=finite))
        assert valid, (text, schemas[name], arguments)
    return calls


def walked(matcher: LLMatcher, chance: random.Random, keys: list[str]) -> list[int]:
    """Random tokens of the grammar, from its beginning to an end."""
    bits = allocate_token_bitmask(1, TOKENIZER.vocab_size)
    length = chance.randint(10, 150)
    closings = [_closing(f"<parameter={key}>\n", deep) for key in keys for deep in range(4, -1, -1)]
    tokens: list[int] = []
    while not matcher.is_stopped():
        assert len(tokens) < 4000, CODEC.decode(tokens)
        tries: list[list[int]] = []
        if len(tokens) > length:
            tries = [*ENDS, *chance.sample(closings, len(closings)), *QUOTES]
        elif chance.random() < 0.25:
            tries = [chance.choice(PIECES)]
        chosen = next((some for some in tries if matcher.validate_tokens(some) == len(some)), None)
        if chosen is None:
            fill_next_token_bitmask(matcher, bits, 0)
            allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
            allowed = allowed[allowed < TOKENIZER.vocab_size]
            chosen = [int(chance.choice(list(allowed)))]
        if chosen[0] in CODEC.eos_ids:
            break
        assert matcher.consume_tokens(chosen)
        tokens += chosen
    assert not matcher.is_error(), matcher.get_error()
    return tokens


def finite(text: str) -> float:
    """1e999 is a number in JSON, but none that a validator of Python objects can be given."""
    return max(-1e308, min(1e308, float(text)))


def test_free_text_until_a_call() -> None:
    matcher = compiled(schema_of({"i": {"type": "integer"}}), FREE)
    call = written(i="3")
    for text in ("", "just text", "a < b <tool", call, f"Sure.\n\n{call}", f"{call}\n{call}", f"a {call} b {call}\nc"):
        assert accepts(matcher, text), text
    for text in (f"{OPEN}", f"text {OPEN} more", written(i="x"), written(), f"{call} {OPEN}\n"):
        assert not accepts(matcher, text), text


def test_forms() -> None:
    schema, call = schema_of({"i": {"type": "integer"}}), written(i="3")
    now = f"{OPEN}\n<function=now>\n</function>\n{CLOSE}"
    many = compiled(schema, TurnForm(forced=True, repeat=True))
    assert accepts(many, f"{call}\n{now}\n{call}")
    assert not accepts(many, "")
    assert not accepts(many, f"text {call}")
    assert not accepts(compiled(schema), f"{call}\n{now}")
    one = compiled(schema, TurnForm(forced=False, repeat=False))
    assert accepts(one, f"text {call}")
    assert not accepts(one, f"{call}\n{call}")
    document = compiled(schema, TurnForm(forced=False, repeat=True, document={"type": "object"}))
    assert accepts(document, '{"a": 1}')
    assert accepts(document, f"{call}\n{call}")
    assert not accepts(document, "text")
    assert not accepts(document, f'{{"a": 1}}{call}')


def test_a_function_that_is_not_strict_is_bound_to_the_form_only() -> None:
    matcher = compiled(schema_of({"i": {"type": "integer"}}), FREE, enforced=False)
    assert accepts(matcher, written(i="three", other="x"))
    assert not accepts(matcher, f"{OPEN}\n<function=g>\n</function>\n{CLOSE}")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array"}, "'type'"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"properties": []}, "properties must be"),
        (schema_of({}, ["s"]), "'s'"),
        (schema_of({"a>b": {}}), "'a>b'"),
        (schema_of({" a": {}}), "' a'"),
        (schema_of({"a": False}), "no value is valid"),
        (schema_of({"a": 5}), "not a JSON schema"),
        (schema_of({"a": {"type": "string", "not": {"const": "x"}}}), "'not'"),
        (schema_of({"a": {"enum": ["x\n</parameter>\n</function>\n</tool_call>"]}}), "would end it"),
        (schema_of({"a": {"const": "<parameter=b>\nx"}}), "would end it"),
        (schema_of({"a": {"type": "string", "pattern": 3}}), "pattern must be"),
        (schema_of({"a": {"type": ["string", "integer"], "multipleOf": 7}}), "multipleOf"),
        (schema_of({"a": {"type": "string", "format": "phone"}}), "'format' 'phone'"),
        (schema_of({"a": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}), "'oneOf'"),
        (schema_of({}, propertyNames={"pattern": "^a"}), "'propertyNames'"),
        (schema_of({"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}), "$defs"),
        (schema_of({"a": {"$ref": "#/$defs/loop"}}, **{"$defs": {"loop": {"$ref": "#/$defs/loop"}}}), "leads nowhere"),
        (
            schema_of({"a": {"$ref": "#/$defs/t"}}, **{"$defs": {"t": {"anyOf": [{"$ref": "#/$defs/t"}] * 9}}}),
            "nested too deeply",
        ),
        (schema_of({"a": {"type": "object", "description": "x" * LIMIT}}), "bytes"),
    ],
)
def test_what_cannot_be_enforced_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_grammar([CallForm("f", schema, True, "tools[3].function.parameters")], FORCED, MARKUP, limit=LIMIT)
    assert said in caught.value.message
    assert caught.value.param is not None
    assert caught.value.param.startswith("tools")


@pytest.mark.parametrize(
    ("value", "place", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "#/properties/values", "'uniqueItems'"),
        ({"type": "object", "properties": {"n": {"type": "string", "format": "phone"}}}, "/n", "'format'"),
        ({"type": "array", "items": {"$ref": "#/$defs/t"}}, "#/$defs/t", "'unevaluatedItems'"),
        ({"type": "object", "additionalProperties": {"nullable": True}}, "/additionalProperties", "'nullable'"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "contains": {}, "maxContains": 1}]},
         "/anyOf/1", "'maxContains'"),
        ({"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["n"]},
         "#/properties/values/properties/n", "no output can fulfil it"),
        ({"type": "string", "pattern": "^a$", "minLength": 5}, "#/properties/values", "no text can fulfil it"),
    ],
)  # fmt: skip
def test_what_the_engine_refuses_names_the_function_the_place_and_the_keyword(
    value: dict[str, Any], place: str, keyword: str
) -> None:
    definitions = {"$defs": {"t": {"type": "array", "anyOf": [{}], "unevaluatedItems": False}}}
    schema = schema_of({"values": value}, **definitions)
    functions = [CallForm("now", None, True, "tools[0].function.parameters"),
                 CallForm("set_many", schema, True, "tools[1].function.parameters")]  # fmt: skip
    text = tool_grammar(functions, FORCED, MARKUP, limit=LIMIT)
    with pytest.raises(Refused) as caught:
        compile_grammar(VOCABULARY, constraint("lark", text, param="tools"), GrammarLimits())
    assert caught.value.field == "tools[1].function.parameters"
    for part in ("'set_many'", place, keyword):
        assert part in str(caught.value)
    assert "line" not in str(caught.value)


def _random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "pattern", "nullable", "union"]
    kind = chance.choice(kinds + (["array", "object"] if depth < 2 else []))
    match kind:
        case "enum":
            return {"enum": chance.sample(["a", "b b", "true", 1, 2.5, None, True, "1"], 3)}
        case "pattern":
            return {"type": "string", "pattern": chance.choice(["^[a-c]{1,4}$", "x", "^\\w+-\\w+$"])}
        case "nullable":
            return {"anyOf": [_random_schema(chance, 2), {"type": "null"}]}
        case "union":
            return {"type": chance.sample(["string", "integer", "boolean", "null"], 2)}
        case "array":
            return {"type": "array", "items": _random_schema(chance, depth + 1), "maxItems": 2}
        case "object":
            properties = {f"k{i}": _random_schema(chance, depth + 1) for i in range(2)}
            return {"type": "object", "properties": properties, "required": ["k0"], "additionalProperties": False}
        case "string":
            return {"type": "string", "maxLength": chance.choice([0, 3, 8])}
        case _:
            return {"type": kind}


def test_random_schemas() -> None:
    chance = random.Random(3)
    for _ in range(60):
        properties = {name: _random_schema(chance) for name in ("a", "b", "c")[: chance.randint(1, 3)]}
        schema = schema_of(properties, chance.sample(list(properties), 1), additionalProperties=False)
        walk(compiled(schema), schema, seeds=2)


def test_texts_are_free_of_quotes_and_escapes() -> None:
    """As the chat template writes them: a program is not put into JSON."""
    matcher = compiled(schema_of({"s": {"type": "string"}}))
    program = 'print("a\\n")\n\n\tif x < 3 and y > 4: # ünïcode 🙂\n'
    assert accepts(matcher, written(s=program))
    parser = ChatParser(thinking=False, tools=[])
    assert all(isinstance(delta, TextDelta) for delta in parser.feed(written(s=program)))
