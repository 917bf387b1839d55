"""Patterns as terminals find what another reader of ECMA-262 finds, in a text as it stands and as it stands in JSON."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

from services.common.json_schema import formats
from services.common.json_schema.patterns import PatternError, parse
from services.common.json_schema.terminals import finite, found_in
from services.engine.constraints.schema.probe import Probe

PROBE = Probe()
PATTERNS = [
    "",
    "^$",
    "a",
    "^a",
    "a$",
    "^a|b$",
    "^(a|b)$",
    "(^a|b$)c?",
    "^(?:ab)*$",
    "^[^a]$",
    "^[^\\s]{2}$",
    "^\\S{2}$",
    "^\\s$",
    "^[\\s\\S]$",
    "^[\\W\\d]$",
    "^\\D$",
    '^["\\\\]$',
    '^[^"\\\\]$',
    "^\\u0061\\x62$",
    "^\\u{1F600}$",
    "^[\\u0000-\\u001f]$",
    "^\\cJ$",
    "^\\p{L}$",
    "^\\P{Lu}$",
    "^\\p{Script=Greek}+$",
    "^[\\]\\-x]$",
    "^[a-]$",
    "^a{2}$",
    "^a{1,}b{0,2}?$",
    "a.*?b",
    "^(?!a)",
    "^(?!.*aa)[ab]+$",
    "^(?=.*1)[a1]{2}$",
    "(?<=a)b$",
    "(?<!a)b$",
    "\\bab\\b",
    "a\\Bb",
    "^(?<year>\\d{2})$",
    "a|",
    "^(|a)$",
    "^(?:(?:^a)|b)$",
]
TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "ba",
    "aa",
    "aba",
    "abab",
    "a b",
    "ab c",
    "abb",
    "c",
    "ac",
    "1",
    "12",
    "a1",
    "1a",
    "_",
    "-",
    "x",
    "]",
    " ",
    "\n",
    "\t",
    "\r",
    "\u0000",
    "\u001f",
    "\u007f",
    '"',
    "\\",
    "/",
    "é",
    "É",
    "λγ",
    "日",
    "😀",
    "\u00a0",
    "\u0085",
    "\ufeff",
    "\u2028",
    "\u200b",
    ": ",
    "x{,2}",
    "aab",
    "A",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_found(pattern: str) -> None:
    validator = jsonschema_rs.validator_for({"pattern": pattern})
    plain, quoted = found_in(pattern, quoted=False), found_in(pattern, quoted=True)
    for text in TEXTS:
        found = validator.is_valid(text)
        assert PROBE.matches(plain, text) == found, text
        assert PROBE.matches(quoted, json.dumps(text, ensure_ascii=False)[1:-1]) == found, text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        # As V8 reads them.
        ("^.$", ["a", "\t", "\u0085"], ["\n", "\r", "\u2028", "\u2029", ""]),
        ("^[^]$", ["a", "\n"], ["", "ab"]),
        ("[]", [], ["", "a"]),
        ("^[\\d-x]$", ["1", "-", "x"], ["a", "w"]),
        ("x{,2}", ["x{,2}"], ["", "x", "xx"]),
        ("^\\ud83d\\ude00$", ["😀"], ["a"]),
    ],
)
def test_what_other_readers_do_not_read(pattern: str, good: list[str], bad: list[str]) -> None:
    found = found_in(pattern, quoted=False)
    assert [text for text in good if not PROBE.matches(found, text)] == []
    assert [text for text in bad if PROBE.matches(found, text)] == []


def test_a_text_has_one_spelling_in_json() -> None:
    for spelled in ("\\u0061", "\\u000a", "\\/", "\\u0022", "\\u00e9"):
        assert not PROBE.matches(found_in("^[^]$", quoted=True), spelled)
    for spelled in ("a", "\\n", "/", '\\"', "é", "\\u0001", "\\\\"):
        assert PROBE.matches(found_in("^[^]$", quoted=True), spelled)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a)\\1", "back-reference"),
        ("(?<x>a)\\k<x>", "back-reference"),
        ("(", "not closed"),
        (")", "too many"),
        ("*", "nothing for"),
        ("[a", "too early"),
        ("[b-a]", "out of order"),
        ("a{3,2}", "out of order"),
        ("a**", "cannot be repeated"),
        ("\\p{Nope}", "Nope"),
        ("\\q", "escape"),
        ("\\ud800", "surrogate"),
        ("\\x1", "hexadecimal"),
        ("(?i)a", r"\(\?i"),
        ("(?P<x>a)", r"\(\?P"),
        ("((?=a)b)*", "repetition"),
        ("(" * 70 + ")" * 70, "nested"),
        ("a{1000000}", "100000"),
    ],
)
def test_what_cannot_be_read_is_said(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        found_in(pattern, quoted=True)


def test_patterns_of_few_texts() -> None:
    assert finite("^[ab]$", 8) == ["a", "b"]
    assert finite("^(x|y[12]?)$", 8) == ["x", "y", "y1", "y2"]
    assert finite("^[ab]", 8) is None
    assert finite("^[a-z]{3}$", 8) is None
    assert parse("a") != parse("b")


def test_formats_are_those_of_another_reader() -> None:
    """What a format's pattern takes is valid; not all that is valid is taken."""
    good = {
        "date": ["2024-02-29", "0001-01-01"],
        "time": ["23:59:59Z", "00:00:00.5+02:00"],
        "email": ["a.b@example.org"],
        "date-time": ["2023-01-31T10:00:00+02:00"],
        "duration": ["P1Y2M3DT4H5M6S", "PT36H", "P2W"],
        "uri": ["https://a.bc/d?e#f"],
        "hostname": ["www.example.org"],
        "ipv4": ["255.0.10.1"],
        "ipv6": ["::", "::1", "1::", "2001:db8::8:800:200c:417a"],
        "uuid": ["00000000-0000-0000-0000-000000000000"],
        "json-pointer": ["", "/a~1b/0"],
        "regex": ["a+", "^[0-9]?b|c$"],
        "relative-json-pointer": ["0", "1/a", "2#"],
        "uri-reference": ["a/b", "?x"],
    }
    bad = {
        "date": ["1900-02-29", "2023-02-29", "2023-04-31", "0000-01-01"],
        "time": ["23:59:60Z", "23:59:59"],
        "email": ["a..b@c.org"],
        "date-time": ["2023-01-31 10:00:00Z"],
        "duration": ["P", "P1YT", "P1Y2D"],
        "hostname": ["-a.org", "a" * 64 + ".org"],
        "ipv4": ["256.0.0.1", "01.2.3.4"],
        "ipv6": [":::", "1:2:3:4:5:6:7:8:9", "1::2::3"],
        "regex": ["(", "a**"],
        "uuid": ["0" * 32],
    }
    for shape, texts in good.items():
        pattern = formats.pattern_of(shape)
        assert pattern is not None
        validator = jsonschema_rs.validator_for({"format": shape}, validate_formats=True)
        for text in texts:
            assert PROBE.matches(found_in(pattern, quoted=False), text), (shape, text)
            assert validator.is_valid(text), (shape, text)
    for shape, texts in bad.items():
        pattern = formats.pattern_of(shape)
        assert pattern is not None
        for text in texts:
            assert not PROBE.matches(found_in(pattern, quoted=False), text), (shape, text)
    assert {found_in(formats.pattern_of(shape) or "", quoted=True) for shape in formats.known()}
