"""Scorer of programs: what is run, what is refused, and that rewards and suites share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.jobs.scorers.grants import Granted, Grants
from services.common.jobs.scorers.python_tests import PythonTestsReward, program_of
from services.common.jobs.scorers.registry import Rewards
from services.common.jobs.scorers.sample import ProgramTests, Sample
from services.common.security.sandbox.sandbox import Sandbox
from services.common.security.sandbox.shut_in import Isolation
from tests.missing import sandbox_level


def test_the_first_block_is_the_program() -> None:
    tests = ProgramTests("assert x", "import a\n")
    for text, code in (
        ("Well:\n```python\nx = 1\n```\nThen:\n```\nx = 2\n```", "\nx = 1\n"),
        ("```PY\nx = 1", "\nx = 1"),
        ("x = 1", "x = 1"),
        ("```js x```", "```js x```"),
    ):
        assert program_of(text, tests) == f"import a\n{code}\n\nassert x\n"
    assert program_of("\ud800", tests).encode()


def test_items_without_tests_that_are_python_are_refused() -> None:
    items: tuple[tuple[dict[str, Any], str], ...] = (
        ({"expected": "x"}, "expected: would do nothing"),
        ({}, "tests: is missing"),
        ({"tests": {"code": "assert f(:"}}, "tests.code: the tests are not Python"),
        ({"tests": {"code": " "}}, "tests.code: there are no tests"),
        ({"tests": {"code": "x\0"}}, "tests.code: the tests are not Python"),
    )
    for item, reason in items:
        found = PythonTestsReward().wrong_item(SuiteItem(prompt="?", **item).reference)
        assert (found or "").startswith(reason)
    with pytest.raises(ValueError, match="majority"):
        SuiteSettings.model_validate(
            {"scorer": {"type": "python_tests"}, "sampling": {"samples": 2, "temperature": 1, "score": "majority"}}
        )


def test_without_a_sandbox_nothing_runs() -> None:
    spec = PythonTestsReward()
    refusals: tuple[Callable[[], object], ...] = (
        lambda: spec.check_allowed("here", Granted()),
        lambda: spec.scorer("here", Grants()),
    )
    for refuse in refusals:
        with pytest.raises(InvalidRequest, match="here: programs of answers run in a sandbox"):
            refuse()
    spec.check_allowed("here", Granted(sandbox=True))


def test_a_reward_runs_the_answer_as_tests() -> None:
    sandbox = Sandbox(Isolation.NAMESPACES)
    with sandbox_level():
        sandbox.check()
    tests = "assert double(2) == 4"
    texts = (
        "def double(x):\n    return 2 * x",
        "def double(x):\n    return x",
        "import sys\nsys.exit(0)",
        "no program",
    )
    samples = [Sample("q", text, 1, answer=tests) for text in texts]
    rewards = Rewards([PythonTestsReward(weight=2.0)], Grants(sandbox=sandbox))
    assert rewards.score(samples) == [2.0, 0.0, 0.0, 0.0]
