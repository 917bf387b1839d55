"""Readers of published sets: each in its forms, as a suite that the API takes, and what is malformed by its line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.evaluation.readers.formats import FORMATS
from services.common.evaluation.suites.lines import read_suite
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.jobs.scorers.of_suites.likelihood import ChoiceSpec, Likelihood
from services.common.jobs.scorers.python_tests import program_of


def read(form: str, text: str) -> tuple[SuiteSettings, list[SuiteItem]]:
    found = FORMATS[form](text)
    settings = SuiteSettings.model_validate(found.settings)
    return settings, read_suite(found.jsonl, settings)


def lines(*rows: Any) -> str:
    return "\n".join(map(json.dumps, rows))


def test_mmlu_as_csv() -> None:
    text = '"Which one, of these?",4,3,"2, or so",1,B\nTwo\nlines?'.replace("Two\nlines?", '"Two\nlines?",a,b,c,d,D\n')
    settings, items = read("mmlu", text)
    assert settings.scorer.name == "choice"
    assert [(item.prompt, item.choices, item.expected) for item in items] == [
        ("Which one, of these?", ["4", "3", "2, or so", "1"], ["3"]),
        ("Two\nlines?", ["a", "b", "c", "d"], ["d"]),
    ]


def test_mmlu_as_lines() -> None:
    row = {"question": "Which?", "choices": ["x", "y", "z", "w"], "answer": 2, "subject": "law"}
    _, items = read("mmlu", lines(row, {**row, "answer": "A", "subject": ""}))
    assert [(item.expected, item.metadata) for item in items] == [(["z"], {"subject": "law"}), (["x"], {})]


@pytest.mark.parametrize(
    "text", ["Which?,B,A,A,B", lines({"question": "Which?", "choices": ["B", "A", "A"], "answer": "B"})]
)
def test_a_choice_is_named_by_its_place_though_it_is_a_letter_or_there_twice(text: str) -> None:
    settings, (item,) = read("mmlu", text)
    assert isinstance(settings.scorer, ChoiceSpec)
    likeliest = [[Likelihood(0.0 if place == best else -1.0, 1, 1) for place in range(3)] for best in range(3)]
    assert [settings.scorer.verdict(item.reference, found).score for found in likeliest] == [0.0, 1.0, 1.0]


def test_gsm8k() -> None:
    settings, (item,) = read("gsm8k", lines({"question": "How much?", "answer": "5*200=1000\n#### 1,000"}))
    assert (settings.scorer.name, settings.sampling.max_tokens) == ("numeric", 512)
    assert (item.prompt, item.expected) == ("How much?", ["1000"])


def test_humaneval() -> None:
    prompt = 'from math import sqrt\n\ndef root(x: float) -> float:\n    """Square root."""\n'
    row = {"task_id": "H/0", "prompt": prompt, "test": "def check(f):\n    assert f(4) == 2\n", "entry_point": "root"}
    settings, (item,) = read("humaneval", lines(row))
    assert (settings.scorer.name, item.id, settings.scorer.wrong_item(item.reference)) == ("python_tests", "H/0", None)
    assert str(item.prompt).endswith('    """Square root."""\n```')
    tests = item.reference.tests
    assert tests is not None
    whole = program_of("Here:\n```python\ndef root(x):\n    return sqrt(x)\n```\nor\n```\nx\n```", tests)
    for program in (whole, program_of("    return sqrt(x)", tests)):  # an answer, and a completion of code
        exec(program, {})
    with pytest.raises(AssertionError):
        exec(program_of("I would not know.\n```\n```", tests), {})


def test_ifeval() -> None:
    nulls = {"relation": None, "num_words": None, "keywords": ["a"]}
    row = {
        "key": 1000,
        "prompt": "Write.",
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{}, nulls],
    }
    other = {**row, "key": 1001, "instruction_id_list": ["language:response_language"], "kwargs": [{"language": "hi"}]}
    settings, (item,) = read("ifeval", lines(row, other))
    assert settings.scorer.name == "instructions"
    assert "without 1 prompts" in settings.description
    assert item.id == "1000"
    assert item.model_dump()["instructions"] == [
        {"id": "punctuation:no_comma", "kwargs": {}},
        {"id": "keywords:existence", "kwargs": {"keywords": ["a"]}},
    ]


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        ("mmlu", "Which?,a,b,c,d,E\n", "line 1: must be a question, two or more choices and the letter"),
        ("mmlu", 'Which?,a,b,c,d,A\n"Which?,a', "line 2: is no CSV"),
        (
            "mmlu",
            lines({"question": "Which?", "choices": ["a", "b"], "answer": 2}),
            "answer: must be the index",
        ),
        ("mmlu", lines({"question": "Which?", "answer": 2}), "line 1: choices: must be a list"),
        ("gsm8k", lines({"question": "?", "answer": "#### 1"}, {"question": "?", "answer": "1"}), "line 2: answer"),
        ("gsm8k", lines({"answer": "#### 1"}), "line 1: question: must be a text"),
        ("gsm8k", "question,answer", "line 1: is not JSON"),
        (
            "ifeval",
            lines({"prompt": "x", "instruction_id_list": ["a"], "kwargs": []}),
            "list has 1 entries",
        ),
        (
            "ifeval",
            lines({"prompt": "x", "instruction_id_list": ["language:response_language"], "kwargs": [{}]}),
            "cannot be verified here",
        ),
        ("humaneval", lines({"task_id": "HumanEval/0"}), "line 1: prompt: must be a text"),
        ("humaneval", lines({"prompt": "def f", "test": "x", "entry_point": "f g"}), "entry_point: is 'f g'"),
    ],
)
def test_what_is_not_of_the_form_is_named(form: str, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        FORMATS[form](text)
    assert reason in refused.value.message


@pytest.mark.parametrize(
    ("form", "text", "line"),
    [
        ("mmlu", 'Which?,a,b,A\n\n"Which\none?",a,a,B\n', 4),
        ("mmlu", "\n" + lines({"question": "Which?", "choices": ["a", 2], "answer": 0}), 2),
        ("gsm8k", "\n" + lines({"question": "?", "answer": "#### $12"}), 2),
        (
            "ifeval",
            lines(
                *(
                    {"prompt": "x", "instruction_id_list": [name], "kwargs": [{}]}
                    for name in ("language:response_language", "nothing:known")
                )
            ),
            2,
        ),
    ],
)
def test_what_a_scorer_cannot_use_is_named_by_its_line_in_the_file(form: str, text: str, line: int) -> None:
    with pytest.raises(InvalidRequest, match=f"^jsonl: line {line}: "):
        read(form, text)
