"""Scorers of suites: texts, tool calls, schemas of items, log-likelihoods and judges; and which items each refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from services.common.adapters.names import AdapterVersion
from services.common.errors import InvalidRequest
from services.common.evaluation.statistics.scores import Scores
from services.common.evaluation.suites.scoring import item_score, sample_scores
from services.common.evaluation.suites.spec import SuiteItem, SuiteSampling, SuiteSettings
from services.common.jobs.scorers.base import SampleScorerSpec
from services.common.jobs.scorers.grants import Grants, JudgeQuestion, JudgeReply
from services.common.jobs.scorers.judge import JudgeSpec
from services.common.jobs.scorers.of_suites.likelihood import (
    ChoiceSpec,
    Likelihood,
    LikelihoodSpec,
    PerplexitySpec,
    bits,
    perplexity,
)
from services.common.jobs.scorers.registry import RewardSpec, SuiteScorerSpec
from services.common.jobs.scorers.sample import Reference, Sample, ToolCall

SPEC: TypeAdapter[Any] = TypeAdapter(SuiteScorerSpec)
REWARD: TypeAdapter[Any] = TypeAdapter(RewardSpec)


def score(settings: dict[str, Any], text: str, reference: Reference, calls: Sequence[ToolCall] = ()) -> float:
    spec: SampleScorerSpec = SPEC.validate_python(settings)
    assert spec.wrong_item(reference) is None
    sample = Sample("q", text, 3, reference=reference, tool_calls=tuple(calls))
    return sample_scores(spec.scorer("scorer", Grants()), [sample])[0]


def right(*expected: str) -> Reference:
    return Reference(expected=expected)


def wrong(settings: dict[str, Any], **item: Any) -> str | None:
    found: str | None = SPEC.validate_python(settings).wrong_item(SuiteItem(prompt="?", **item).reference)
    return found


@pytest.mark.parametrize(
    ("settings", "text", "expected", "found"),
    [
        ({"type": "exact", "normalize": "squad"}, "The Eiffel-Tower!", ["eiffeltower"], 1.0),
        ({"type": "exact", "normalize": "squad"}, "  an   Apple.", ["apple"], 1.0),
        ({"type": "exact", "normalize": "squad"}, "theory", ["ory"], 0.0),
        ({"type": "exact"}, "Paris", ["London", "Paris"], 1.0),
        ({"type": "exact"}, "Rome", ["London", "Paris"], 0.0),
        ({"type": "contains"}, "It is Paris.", ["Paris"], 1.0),
        ({"type": "contains"}, "It is paris.", ["Paris"], 0.0),
        ({"type": "contains", "ignore_case": True}, "It is paris.", ["Paris"], 1.0),
        ({"type": "contains", "normalize": "squad"}, "It is 'The Paris'!", ["paris"], 1.0),
        ({"type": "contains", "normalize": "squad"}, "a comparison", ["paris"], 0.0),
        ({"type": "contains"}, "", ["Paris"], 0.0),
        ({"type": "numeric", "tolerance": 0.1}, "about 3.1", ["2", "3.14"], 1.0),
        ({"type": "regex", "pattern": "{answer}$"}, "so 4", ["3", "4"], 1.0),
    ],
)
def test_texts_are_compared_with_every_right_answer(
    settings: dict[str, Any], text: str, expected: list[str], found: float
) -> None:
    assert score(settings, text, right(*expected)) == found


def test_a_job_without_a_normalization_is_written_as_before() -> None:
    assert "normalize" not in REWARD.validate_python({"type": "exact"}).model_dump()
    assert REWARD.validate_python({"type": "contains"}).needs_answer


@pytest.mark.parametrize("kind", ["choice", "perplexity", "tool_calls", "item_schema"])
def test_what_reads_more_than_a_text_is_no_reward(kind: str) -> None:
    SPEC.validate_python({"type": kind})
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        REWARD.validate_python({"type": kind})


CALL = ToolCall("add", {"left": 1, "right": [2, {"x": None}]})
CALLED = Reference(tool_calls=(CALL,))


@pytest.mark.parametrize(
    ("settings", "wanted", "calls", "found"),
    [
        ({}, [CALL], [ToolCall("add", {"right": [2.0, {"x": None}], "left": 1.0})], 1.0),
        ({}, [CALL], [ToolCall("add", {"left": "1", "right": [2, {"x": None}]})], 0.0),
        ({}, [CALL], [ToolCall("add", {"left": True, "right": [2, {"x": None}]})], 0.0),
        ({}, [CALL], [ToolCall("sub", CALL.arguments)], 0.0),
        ({}, [CALL], [], 0.0),
        ({}, [CALL], [CALL, CALL], 0.0),
        ({}, [], [], 1.0),
        ({}, [CALL], [ToolCall("add", '{"left": 1')], 0.0),
        ({}, [CALL], [ToolCall("add", CALL.arguments | {"unit": "m"})], 0.0),
        ({"arguments": "subset"}, [CALL], [ToolCall("add", CALL.arguments | {"unit": "m"})], 1.0),
        ({"arguments": "subset"}, [CALL], [ToolCall("add", {"left": 1})], 0.0),
        ({"arguments": "ignore"}, [CALL], [ToolCall("add", {})], 1.0),
        ({}, [ToolCall("a", {}), ToolCall("b", {})], [ToolCall("b", {}), ToolCall("a", {})], 1.0),
        ({"ordered": True}, [ToolCall("a", {}), ToolCall("b", {})], [ToolCall("b", {}), ToolCall("a", {})], 0.0),
        # The first expectation must leave the only call that fits the second one.
        (
            {"arguments": "subset"},
            [ToolCall("a", {}), ToolCall("a", {"n": 1})],
            [ToolCall("a", {"n": 1}), ToolCall("a", {"n": 2})],
            1.0,
        ),
    ],
)
def test_tool_calls_are_compared_by_structure(
    settings: dict[str, Any], wanted: list[ToolCall], calls: list[ToolCall], found: float
) -> None:
    assert score({"type": "tool_calls", **settings}, "", Reference(tool_calls=tuple(wanted)), calls) == found


def test_answers_are_validated_against_their_items_schema() -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    reference = Reference(json_schema=schema)
    assert [score({"type": "item_schema"}, text, reference) for text in ('{"n": 1}', '{"n": "1"}', "n")] == [
        1.0,
        0.0,
        0.0,
    ]
    assert "$ref" in str(wrong({"type": "item_schema"}, json_schema={"$ref": "http://elsewhere"}))


@pytest.mark.parametrize(
    ("settings", "item", "told"),
    [
        ({"type": "contains"}, {"expected": ""}, "expected: is '': every completion contains it"),
        ({"type": "tool_calls"}, {"expected": "x"}, "expected_tool_calls: is missing"),
        ({"type": "item_schema"}, {}, "json_schema: is missing"),
        ({"type": "choice"}, {"expected": "a"}, "choices: the choice scorer needs two or more"),
        ({"type": "choice"}, {"choices": ["a", "b"]}, "expected: is missing"),
        ({"type": "choice"}, {"choices": ["a", "b"], "expected": "C"}, "expected: is 'C', which is none"),
        ({"type": "choice"}, {"choices": ["a", "a"], "expected": "a"}, "choices: all of them are the same"),
        ({"type": "choice"}, {"choices": [str(n) for n in range(27)], "expected": "1"}, "choices: there are 27"),
        ({"type": "perplexity"}, {"expected": ["a", "b"]}, "expected: has several answers"),
        ({"type": "perplexity"}, {"expected": ""}, "expected: is empty"),
        ({"type": "judge", "mode": "pairwise"}, {}, "expected: is missing, and the judge scorer"),
        ({"type": "judge"}, {}, None),
    ],
)
def test_items_that_a_scorer_cannot_score_are_named(
    settings: dict[str, Any], item: dict[str, Any], told: str | None
) -> None:
    found = wrong(settings, **item)
    assert found is None if told is None else str(found).startswith(told)


CHOICES = Reference(expected=("blue",), choices=("red", "blue", "dark green"))


def test_letters_are_listed_and_the_likeliest_is_the_answer() -> None:
    spec = ChoiceSpec()
    assert spec.shown("Which?", CHOICES) == "Which?\nA. red\nB. blue\nC. dark green"
    assert spec.continuations(CHOICES) == ["A", "B", "C"]
    assert spec.verdict(CHOICES, [Likelihood(p, 1, 1) for p in (-2.0, -0.5, -1.0)]).score == 1.0
    assert spec.verdict(CHOICES, [Likelihood(p, 1, 1) for p in (-0.1, -0.5, -1.0)]).score == 0.0
    assert spec.verdict(CHOICES, [Likelihood(p, 1, 1) for p in (-0.5, -0.5, -1.0)]).score == 0.5
    assert ChoiceSpec(prefix=" ").continuations(Reference(expected=("A",), choices=("x", "y"))) == [" A", " B"]


@pytest.mark.parametrize(("length", "found"), [("none", 1.0), ("token", 1.0), ("byte", 0.0), (None, 0.0)])
def test_the_length_of_a_choice_is_divided_out(length: Any, found: float) -> None:
    spec = ChoiceSpec(by="text", length=length)
    assert spec.shown("Which?", CHOICES) == "Which?"
    assert spec.continuations(CHOICES) == ["red", "blue", "dark green"]
    # A nat a byte: 1.33, 1.0, 0.9; a token: 4, 4, 4.5.
    likelihoods = [Likelihood(-4.5, 1, 3), Likelihood(-4.0, 1, 4), Likelihood(-9.0, 2, 10)]
    assert spec.verdict(CHOICES, likelihoods).score == found


def test_a_right_choice_is_named_by_its_text_or_its_letter() -> None:
    likelihoods = [Likelihood(-1.0, 1, 1), Likelihood(-2.0, 1, 1)]
    assert ChoiceSpec().verdict(Reference(expected=("A",), choices=("x", "y")), likelihoods).score == 1.0
    assert ChoiceSpec().verdict(Reference(expected=("A",), choices=("B", "A")), likelihoods).score == 0.0, (
        "a text first"
    )


def test_perplexity_is_that_of_all_tokens_whatever_the_items_lengths() -> None:
    spec = PerplexitySpec()
    found = [Likelihood(-2.0, 2, 8), Likelihood(-30.0, 10, 40)]
    verdicts = [spec.verdict(right("text"), [one]) for one in found]
    mean = Scores([one.score for one in verdicts], [one.weight for one in verdicts]).mean
    assert mean == pytest.approx(32 / 12)
    assert perplexity(mean) == pytest.approx(math.exp(32 / 12))
    by_byte = [PerplexitySpec(unit="byte").verdict(right("text"), [one]) for one in found]
    mean = Scores([one.score for one in by_byte], [one.weight for one in by_byte]).mean
    assert bits(mean) == pytest.approx(32 / 48 / math.log(2))
    assert spec.better == "lower"


@pytest.mark.parametrize(("logprob", "tokens", "size"), [(math.nan, 1, 1), (0.1, 1, 1), (-1.0, 0, 1), (-1.0, 1, 0)])
def test_a_likelihood_that_is_none_is_refused(logprob: float, tokens: int, size: int) -> None:
    with pytest.raises(ValueError):
        Likelihood(logprob, tokens, size)


def judged(answer: str, expected: str = "", question: str = "q") -> Sample:
    return Sample("prompt", answer, 1, question=question, reference=right(expected))


def test_a_rubric_is_worth_what_its_verdicts_are_by_their_probabilities() -> None:
    spec = JudgeSpec()
    (question,) = spec.questions(judged("It is {expected}.", "4", "2+2?"))
    assert question.verdicts == ("1", "2", "3", "4", "5")
    assert "Question:\n2+2?\n\nAnswer:\nIt is {expected}.\n" in question.prompt, "what an answer says is no placeholder"
    found = spec.judgement([JudgeReply({"5": math.log(0.6), "3": math.log(0.2)})])
    assert (found.score, found.reason) == (pytest.approx((0.6 * 1 + 0.2 * 0.5) / 0.8), None)
    own = JudgeSpec(prompt="{answer} is {expected}?", verdicts={"no": 0.0, "yes": 1.0})
    assert own.questions(judged("a", "b"))[0].prompt == "a is b?"
    assert own.questions(Sample("prompt", "a", 1, answer="of the job"))[0].prompt == "a is of the job?"
    assert own.judgement([JudgeReply({"yes": math.log(0.9), "no": math.log(0.1)})]).score == pytest.approx(0.9)


@pytest.mark.parametrize("logprobs", [{}, {"5": math.log(0.3)}, {"5": math.nan}])
def test_a_judge_that_answers_something_else_makes_an_answer_wrong_not_absent(logprobs: dict[str, float]) -> None:
    found = JudgeSpec().judgement([JudgeReply(logprobs)])
    assert (found.score, found.reason) == (0.0, "the judge says none of its verdicts")


def test_a_pair_is_asked_in_both_orders_and_a_judge_of_positions_says_nothing() -> None:
    spec = JudgeSpec(mode="pairwise", judge="critic@3")
    there, back = spec.questions(judged("mine", "theirs"))
    assert there.prompt.index("mine") < there.prompt.index("theirs")
    assert back.prompt.index("theirs") < back.prompt.index("mine")
    first = JudgeReply({"A": math.log(0.8), "B": math.log(0.2)})
    second = JudgeReply({"A": math.log(0.2), "B": math.log(0.8)})
    better = spec.judgement([first, second])
    assert (better.score, better.agrees) == (pytest.approx(0.8), True)
    biased = spec.judgement([first, first])
    assert (biased.score, biased.agrees) == (pytest.approx(0.5), False)
    assert spec.judgement([first, JudgeReply({})]).reason is not None
    refused = spec.judgement([first, JudgeReply({}, "it is too long")])
    assert (refused.score, refused.reason) == (0.0, "the judge cannot be asked: it is too long")


def test_a_judge_is_asked_once_for_all_samples() -> None:
    asked = []

    def ask(
        judge: AdapterVersion | None, questions: Sequence[JudgeQuestion], interrupt: Callable[[], None]
    ) -> list[JudgeReply]:
        interrupt()
        asked.append((judge, len(questions)))
        return [JudgeReply({"A": math.log(0.9), "B": math.log(0.1)}) for _ in questions]

    spec = JudgeSpec(mode="pairwise", judge="critic@3")
    scorer = spec.scorer("scorer", Grants(judge=ask))
    assert scorer.score([judged("a", "b"), judged("c", "d")], lambda: None) == [pytest.approx(0.5)] * 2
    assert asked == [(AdapterVersion("critic", 3), 4)]
    with pytest.raises(InvalidRequest, match="no engine answers as a judge"):
        spec.scorer("scorer", Grants())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"type": "choice", "length": "byte"}, "length would do nothing"),
        ({"type": "judge", "mode": "pairwise", "verdicts": {"a": 0.0, "b": 1.0}}, "verdicts would do nothing"),
        ({"type": "judge", "verdicts": {" a": 0.0, "b": 1.0}}, "without white space"),
        ({"type": "judge", "prompt": "?"}, r"prompt must have \{answer\}"),
        ({"type": "judge", "prompt": "{answer} {first}"}, r"prompt has \{first\}"),
        ({"type": "judge", "judge": "critic"}, "must name a version"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        SPEC.validate_python(settings)


@pytest.mark.parametrize(
    ("scorer", "sampling", "told"),
    [
        ({"type": "choice"}, {"max_tokens": 3}, "sampling would do nothing"),
        ({"type": "tool_calls"}, {"samples": 3, "temperature": 1.0, "score": "majority"}, "to know equal answers"),
    ],
)
def test_sampling_that_the_scorer_does_not_read_is_refused(scorer: Any, sampling: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        SuiteSettings.model_validate({"scorer": scorer, "sampling": sampling})
    SuiteSettings.model_validate({"scorer": scorer, "sampling": {"max_tokens": 256}})


def test_samples_of_an_item_become_its_score() -> None:
    votes = ["4", "4", "5", None]
    scores = [1.0, 1.0, 0.0, 0.0]
    sampled: dict[str, Any] = {"samples": 4, "temperature": 1.0}
    assert item_score(SuiteSampling(**sampled), scores, votes) == 0.5
    assert item_score(SuiteSampling(**sampled, score="pass", k=2), scores, votes) == pytest.approx(1 - 1 / 6)
    assert item_score(SuiteSampling(**sampled, score="majority"), scores, votes) == 1.0


def test_equal_answers_have_equal_votes() -> None:
    exact, numeric = (
        SPEC.validate_python({"type": "exact", "normalize": "squad"}),
        SPEC.validate_python({"type": "numeric"}),
    )
    assert exact.vote("The cat.") == exact.vote("cat") == "cat"
    assert numeric.vote("so 4") == numeric.vote("4.0") == 4.0
    assert numeric.vote("none") is exact.vote("!") is None


@pytest.mark.parametrize("spec", [ChoiceSpec(by="text"), PerplexitySpec()])
def test_scorers_by_log_likelihood_ask_as_many_as_they_judge(spec: LikelihoodSpec) -> None:
    reference = Reference(expected=("b",), choices=("a", "b"))
    asked = spec.continuations(reference)
    verdict = spec.verdict(reference, [Likelihood(-1.0, 1, len(text)) for text in asked])
    assert spec.shown("Which?", reference) == "Which?"
    assert verdict.weight > 0
