"""The instructions scorer: what follows each of IFEval's instructions and what does not, and which items it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.evaluation.suites.spec import SuiteItem
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.of_suites.instructions import INSTRUCTIONS, InstructionsSpec, followed
from services.common.jobs.scorers.sample import Instruction, Sample

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["blue sky", "Sun"]}, ["The sun in a Blue Sky"], ["The sun", "blue sky"]),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, ["the season"], ["The Sea!"]),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, "relation": "at least"}, ["No, no"], ["no"]),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, "relation": "less than"}, ["no"], ["No, no"]),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "at least"}, ["bAnana"], ["baa"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one, two, three"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["drei große Wörter"], ["one two"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["Pi is 3.14. Is it?", "一つ。二つ。"],
        ["Pi is 3.14."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "a\n***\nb\n***"],
        ["a", "a***b***c"],
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a *** b"], ["a *** *** b"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        ["One\n\n**Weekend**, at last"],
        ["Weekend\n\nOne", "One\n\nweekend\n\nthree"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] of [city]"], ["[name]", "[a\nb] [c]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye. p. s. more", "P.S. x"], ["Bye. PS"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S x"], ["P.S. x"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n- b", "  * a\n* b\n**c**"],
        ["* a", "* a\n* b\n- c"],
    ),
    ("detectable_format:constrained_response", {}, ["Well. My answer is no."], ["No."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and **b**"], ["*a*", "** ** *a*"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\na", "section one section two"],
    ),
    ("detectable_format:json_format", {}, ['{"a": [1]}', '```json\n{"a": 1}\n```'], ["{a: 1}", "{} x", "NaN"]),
    ("detectable_format:title", {}, ["<<poem of joy>>\nx"], ["<< >>", "<poem>", "<<a\nb>>"]),
    ("combination:two_responses", {}, ["a\n******\nb", "a******b******"], ["a", "a******a", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, ["say it. Yes."], ["Yes. Say it."]),
    (
        "startend:end_checker",
        {"end_phrase": "Is that all?"},
        ['x "is that all?"', "Is that ALL? "],
        ["Is that all? No"],
    ),
    ("startend:quotation", {}, [' "a" '], ['"', '"a']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I AM me"],
        ["I am"],
    ),
    ("change_case:english_capital", {}, ["ALL 3!"], ["All 3"]),
    ("change_case:english_lowercase", {}, ["all 3!"], ["All 3"]),
    ("punctuation:no_comma", {}, ["one; two"], ["one, two"]),
]


@pytest.mark.parametrize(("name", "kwargs", "right", "wrong"), CASES)
def test_instructions(name: str, kwargs: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert InstructionsSpec().wrong_item(item((name, kwargs)).reference) is None
    assert [text for text in right if not followed(Instruction(name, kwargs), text)] == []
    assert [text for text in wrong if followed(Instruction(name, kwargs), text)] == []


def test_every_instruction_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(INSTRUCTIONS)


def item(*instructions: tuple[str, dict[str, Any]]) -> SuiteItem:
    return SuiteItem.model_validate(
        {"prompt": "?", "instructions": [{"id": name, "kwargs": kwargs} for name, kwargs in instructions] or None}
    )


def test_all_instructions_count_or_the_share_of_them() -> None:
    asked = item(("punctuation:no_comma", {}), ("change_case:english_lowercase", {}))
    samples = [Sample("?", text, 1, reference=asked.reference) for text in ("fine", "Fine", "Fine, fine", "  ")]
    strict = InstructionsSpec().scorer("scorer", Grants())
    share = InstructionsSpec(count="share").scorer("scorer", Grants())
    assert strict.score(samples, lambda: None) == [1, 0, 0, 0]
    assert share.score(samples, lambda: None) == [1, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("instructions", "reason"),
    [
        ((), "instructions: are missing"),
        ((("punctuation:no_comma", {}), ("no:such", {})), "instructions[1]: 'no:such' is none of"),
        ((("language:response_language", {"language": "hi"}),), "needs a detector of languages"),
        ((("punctuation:no_comma", {"words": 1}),), "has no argument 'words'"),
        ((("length_constraints:number_words", {"num_words": 3}),), 'needs relation, "at least" or "less than"'),
        ((("detectable_format:number_bullet_lists", {"num_bullets": True}),), "needs num_bullets, a whole number"),
        ((("keywords:existence", {"keywords": []}),), "needs keywords, a list of texts"),
        ((("keywords:letter_frequency", {"letter": "ab"}),), "needs letter, one character"),
    ],
)
def test_items_that_cannot_be_verified_are_refused(instructions: Any, reason: str) -> None:
    assert reason in (InstructionsSpec().wrong_item(item(*instructions).reference) or "")
