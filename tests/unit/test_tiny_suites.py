"""models/tiny/suites: what the recipe makes, of problems that its training never drew, each with its right answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from models.tiny.recipe.data import SKILLS, training_items
from models.tiny.recipe.item import Item
from models.tiny.recipe.skills.tools import call_text
from models.tiny.recipe.suites import ITEMS, SUITES, suite_files, suite_items
from services.common.evaluation.suites.lines import read_suite
from services.common.evaluation.suites.scoring import sample_scores
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.jobs.fields.messages import as_turns
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.sample import Sample

ALL = {skill: suite_items(skill) for skill in SKILLS}


def suite(skill: str) -> tuple[SuiteSettings, list[SuiteItem]]:
    settings = SuiteSettings.model_validate_json((SUITES / f"{skill}.json").read_text(encoding="utf-8"))
    return settings, read_suite((SUITES / f"{skill}.jsonl").read_text(encoding="utf-8"), settings)


def asked(item: Item) -> str:
    return json.dumps([item.skill, item.messages])


def test_the_files_are_what_the_recipe_makes() -> None:
    made = suite_files()
    assert {path.name: path.read_text(encoding="utf-8") for path in SUITES.glob("*.json*")} == made
    assert sum(map(len, made.values())) < 400_000


def test_training_never_saw_a_problem_in_any_wording() -> None:
    problems = {(skill, item.key) for skill, items in ALL.items() for item in items}
    assert len(problems) == ITEMS * len(SKILLS)
    assert all(item.held_out for items in ALL.values() for item in items)
    # What training draws (models/tiny/recipe/batches.py, its first shards) is on the other side of the split.
    drawn = [item for shard in range(2) for item in itertools.islice(training_items(f"train 1 {shard}"), 4096)]
    assert not any(item.held_out for item in drawn)
    assert problems.isdisjoint((item.skill, item.key) for item in drawn)
    assert {asked(item) for items in ALL.values() for item in items}.isdisjoint(map(asked, drawn))


@pytest.mark.parametrize("skill", SKILLS)
def test_the_right_answer_scores_one_and_another_none(skill: str) -> None:
    settings, items = suite(skill)
    problems = ALL[skill]
    assert [as_turns(item.asked) for item in items] == [list(problem.messages) for problem in problems]
    scorer: Any = settings.scorer
    samples = [
        Sample("", problem.answer, 1, reference=item.reference, tool_calls=item.reference.tool_calls or ())
        for item, problem in zip(items, problems, strict=True)
    ]
    assert sample_scores(scorer.scorer("scorer", Grants()), samples) == [1.0] * ITEMS
    wrong = [Sample("", "another answer", 1, reference=item.reference) for item in items]
    assert sample_scores(scorer.scorer("scorer", Grants()), wrong) == [0.0] * ITEMS


def test_the_calls_that_are_right_are_those_that_the_model_learnt() -> None:
    for item, problem in zip(suite("tools")[1], ALL["tools"], strict=True):
        (call,) = item.reference.tool_calls or ()
        assert call_text(call.name, call.arguments) == problem.answer
