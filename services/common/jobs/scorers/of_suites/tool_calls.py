"""Scorer of tool calls by their structure: names and arguments, however they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from services.common.jobs.scorers.base import SampleScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.sample import Reference, Sample, ToolCall


class ToolCallsSpec(SampleScorerSpec):
    """1 if the answer makes the calls of its item's `expected_tool_calls` and no others, else 0. Of suites only.

    Arguments are compared as JSON values: 1 and 1.0 are equal, 1 and "1" are not, the order of keys does not count.
    """

    type: Literal["tool_calls"] = "tool_calls"
    arguments: Literal["equal", "subset", "ignore"] = "equal"
    """subset: a call may have arguments beside those that are expected; ignore: names only."""
    ordered: bool = False
    """Whether the calls must come in the order in which they are expected."""

    def wrong_item(self, reference: Reference) -> str | None:
        """See ScorerSettings."""
        if reference.tool_calls is None:
            return "expected_tool_calls: is missing, and the tool_calls scorer compares with it ([]: no call is right)"
        return None

    def scorer(self, where: str, grants: Grants) -> ToolCallsScorer:
        """See SampleScorerSpec."""
        del where, grants
        return ToolCallsScorer(self)


class ToolCallsScorer:
    """See ToolCallsSpec."""

    def __init__(self, spec: ToolCallsSpec) -> None:
        self._spec = spec

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        interrupt()
        return [self._one(sample.reference.tool_calls, sample.tool_calls) for sample in samples]

    def _one(self, wanted: Sequence[ToolCall] | None, calls: Sequence[ToolCall]) -> float:
        if wanted is None or len(wanted) != len(calls):
            return 0.0
        if self._spec.ordered:
            return float(all(self._fits(one, call) for one, call in zip(wanted, calls, strict=True)))
        return float(_matched([[self._fits(one, call) for call in calls] for one in wanted]))

    def _fits(self, wanted: ToolCall, call: ToolCall) -> bool:
        if wanted.name != call.name:
            return False
        if self._spec.arguments == "ignore":
            return True
        found, right = call.arguments, wanted.arguments
        if self._spec.arguments == "subset" and isinstance(right, Mapping) and isinstance(found, Mapping):
            found = {name: value for name, value in found.items() if name in right}
        return same_json(right, found)


def same_json(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: numbers by value, and true is no number."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_json(value, right[name]) for name, value in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)


def _matched(fits: Sequence[Sequence[bool]]) -> bool:
    """Whether each row can have a column of its own that fits it (augmenting paths, Kuhn 1955)."""
    owner: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column, fit in enumerate(fits[row]):
            if fit and column not in tried:
                tried.add(column)
                if column not in owner or place(owner[column], tried):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fits)))
