"""Scorer that runs the program of an answer with tests, in the sandbox."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from services.common.errors import InvalidRequest
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.grants import Granted, Grants
from services.common.jobs.scorers.sample import ProgramTests, Reference, Sample, as_utf8
from services.common.security.sandbox.sandbox import Limits, Sandbox

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_WALL = 4.0
"""Limit on the time of a program, in limits on its processor's time: it may wait, and others are served first."""


class PythonTestsReward(ScorerSpec):
    """1 if the program of the completion passes the tests, which are Python code, else 0. It runs in the sandbox of the
    engine, with the standard library only.

    The program is the first block between ``` of the completion, or all of it. Of rewards the prompt's answer is the
    tests. A program shares its process with its tests, so one that is made to cheat them can.
    """

    type: Literal["python_tests"] = "python_tests"
    timeout_seconds: int = Field(10, ge=1, le=60)
    """Processor time of one program."""
    memory_mb: int = Field(512, ge=64, le=4096)
    """Address space of one program in MiB."""

    always_compares: ClassVar[bool] = True

    def wrong_answer(self, answer: str) -> str | None:
        """See ScorerSettings."""
        try:
            ast.parse(answer)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"the tests are not Python: {error}"[:300]
        return None if answer.strip() else "there are no tests in it"

    def wrong_item(self, reference: Reference) -> str | None:
        """See ScorerSettings."""
        if reference.expected:
            return "expected: would do nothing here, the python_tests scorer runs `tests`"
        if reference.tests is None:
            return "tests: is missing, and the python_tests scorer runs it"
        reason = self.wrong_answer(reference.tests.code)
        return None if reason is None else f"tests.code: {reason}"

    def check_allowed(self, where: str, granted: Granted) -> None:
        """See ScorerSettings."""
        if not granted.sandbox:
            raise _no_sandbox(where)

    def scorer(self, where: str, grants: Grants) -> PythonTestsScorer:
        """See SampleScorerSpec."""
        if grants.sandbox is None:
            raise _no_sandbox(where)
        limits = Limits(
            cpu_seconds=self.timeout_seconds,
            wall_seconds=_WALL * self.timeout_seconds,
            memory_bytes=self.memory_mb * 2**20,
        )
        return PythonTestsScorer(grants.sandbox, limits)


class PythonTestsScorer:
    """See PythonTestsReward."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox = sandbox
        self._limits = limits

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score. Raises SandboxUnavailable: the sandbox does not work any more."""
        programs = [
            program_of(sample.text, sample.reference.tests or ProgramTests(sample.answer or "")) for sample in samples
        ]
        return [float(outcome.finished) for outcome in self._sandbox.run_all(programs, self._limits, interrupt)]


def program_of(text: str, tests: ProgramTests) -> str:
    """The program of an answer between what stands before it and its tests. An answer without a block goes on where
    that ends, as a completion of code does."""
    block = _BLOCK.search(text)
    code = text if block is None else f"\n{block.group(1)}"
    return as_utf8(f"{tests.prelude}{code}\n\n{tests.code}\n")


def _no_sandbox(where: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: programs of answers run in a sandbox, and the engine that would run them has none: have "
        "TEMPER_SANDBOX set (in every engine that trains), or choose another scorer",
        param=where,
    )
