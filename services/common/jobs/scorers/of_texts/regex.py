"""Scorer that matches a pattern.

The pattern comes from a client and runs beside the thread that serves, so it must end soon whatever it is given: RE2
takes time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from services.common.errors import InvalidRequest
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.sample import Sample, as_utf8, error_text
from services.common.validation.json_rules import Rule, has

MAX_PATTERN = 2000
ANSWER = "{answer}"
"""Placeholder in a pattern: it stands for the prompt's answer, taken literally."""
MAX_ANSWER = 2000
"""Characters of an answer that becomes part of a pattern."""
_PATTERN_MEMORY = 8 * 2**20
"""Bytes of one compiled pattern."""

Matcher: TypeAlias = Callable[[str], bool]


class RegexReward(ScorerSpec):
    """1 if the pattern (RE2 syntax) matches, else 0."""

    type: Literal["regex"] = "regex"
    pattern: str = Field(min_length=1, max_length=MAX_PATTERN)
    """`{answer}` stands for the prompt's answer, literally."""
    match: Literal["search", "full"] = "search"
    """search: anywhere in the completion; full: the whole of it."""

    compares: ClassVar[Rule | None] = has(type="regex", pattern={"pattern": re.escape(ANSWER)})

    @property
    def needs_answer(self) -> bool:
        """See ScorerSpec."""
        return ANSWER in self.pattern

    def check(self, where: str, answers: Iterable[tuple[str, str | None]]) -> None:
        """See ScorerSpec: the pattern is compiled with every answer."""
        matcher(self, "", where)
        if not self.needs_answer:
            return
        for field, answer in answers:
            if len(answer or "") > MAX_ANSWER:
                raise InvalidRequest(
                    f"{field} has over {MAX_ANSWER} characters, too many for {where}.pattern", param=field
                )
            matcher(self, answer, where)

    def scorer(self, where: str, grants: Grants) -> RegexScorer:
        """See ScorerSpec."""
        del grants
        return RegexScorer(self, where)


def matcher(reward: RegexReward, answer: str | None, where: str) -> Matcher:
    """The compiled pattern for a prompt with this answer.

    Raises:
        InvalidRequest: it is no RE2 pattern, or too large.
    """
    import re2

    pattern = reward.pattern
    if reward.needs_answer:
        pattern = pattern.replace(ANSWER, f"(?:{re2.escape(answer or '')})")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _PATTERN_MEMORY
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        raise InvalidRequest(
            f"{where}.pattern is no RE2 pattern (there is no lookaround and no backreference): {error_text(error)}",
            param=f"{where}.pattern",
        ) from error
    match = compiled.search if reward.match == "search" else compiled.fullmatch
    return lambda text: match(text) is not None


class RegexScorer:
    """See RegexReward. Raises InvalidRequest if the pattern cannot be used."""

    def __init__(self, spec: RegexReward, where: str) -> None:
        self._spec = spec
        self._where = where
        self._known: dict[str | None, Matcher] = {}
        self._matcher("")

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        self._known.clear()  # one round's answers
        interrupt()
        return [float(self._matcher(sample.answer)(as_utf8(sample.text))) for sample in samples]

    def _matcher(self, answer: str | None) -> Matcher:
        key = answer if self._spec.needs_answer else None
        if key not in self._known:
            self._known[key] = matcher(self._spec, key, self._where)
        return self._known[key]
