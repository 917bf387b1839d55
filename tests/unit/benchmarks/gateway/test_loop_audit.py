"""What the benchmark of a loop under kills takes for a breach: each kind is found, and a sound loop has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.gateway.loop_kills.audit import answers, cycles_of, opinions, paths, promotions
from benchmarks.gateway.loop_kills.users import Opinion

PASSED = {"gates": [{"conditions": [{"passed": True}]}]}
DECIDED: dict[str, Any] = {
    "candidate": "loop@1",
    "canary": "canary_1",
    "decision": {"outcome": "promote"},
    "look": {"n": 1},
}
PROMOTED = ("preparing", "data", "training", "evaluating", "canary", "canary", "promoted")


def told(*kinds: str, cycle: int = 1, **evidence: Any) -> list[dict[str, Any]]:
    found = {"canary": {"candidate": f"loop@{cycle}", **PASSED}, "promoted": {**DECIDED, "candidate": f"loop@{cycle}"}}
    found |= evidence
    return [{"kind": kind, "cycle": cycle, "evidence": found.get(kind, {})} for kind in kinds]


def test_a_sound_loop_has_no_breach() -> None:
    cycles = cycles_of(
        [
            *told("collecting", cycle=0),
            *told(*PROMOTED),
            *told("preparing", "data", "training", "rejected", cycle=2),
            *told("preparing", "failed", cycle=3),
            *told(*PROMOTED[:-1], "rolled_back", "stopped", "resumed", cycle=4),
            *told("preparing", "data", cycle=5),
        ]
    )
    assert [*paths(cycles), *promotions(cycles)] == []
    assert [cycle.outcome for cycle in cycles] == ["promoted", "rejected", "failed", "rolled_back", None]
    seen = {("", ""), ("loop@1", ""), ("loop@1", "current"), ("loop@1", "candidate"), ("loop@4", "candidate")}
    assert list(answers(seen, cycles, {"loop@1", "loop@4"})) == []


@pytest.mark.parametrize(
    "events",
    [
        told(*PROMOTED, "promoted"),
        told("preparing", "data", "data", "training"),
        told("preparing", "training"),
        told("preparing", "data", "training", "canary", "promoted"),
        [*told("preparing", "data"), *told(*PROMOTED, cycle=2)],
        told(*PROMOTED, cycle=2),
    ],
    ids=["ended twice", "data made twice", "data left out", "no canary", "no end", "a number left out"],
)
def test_an_illegal_way_is_a_breach(events: Sequence[dict[str, Any]]) -> None:
    assert list(paths(cycles_of(events)))


@pytest.mark.parametrize(
    "events",
    [
        told(*PROMOTED, promoted={**DECIDED, "decision": None}),
        told(*PROMOTED, promoted={**DECIDED, "look": None}),
        told(*PROMOTED, promoted={**DECIDED, "decision": {"outcome": "roll_back"}}),
        told(*PROMOTED, canary={"gates": []}),
        told(*PROMOTED, canary={"gates": [{"conditions": [{"passed": False}]}]}),
        [*told(*PROMOTED), *told(*PROMOTED, cycle=2, promoted=DECIDED)],
    ],
    ids=["undecided", "no look", "decided otherwise", "no gate", "gate not passed", "twice"],
)
def test_a_promotion_without_evidence_is_a_breach(events: Sequence[dict[str, Any]]) -> None:
    assert list(promotions(cycles_of(events)))


@pytest.mark.parametrize("seen", [("loop@9", ""), ("loop@4", ""), ("loop@4", "current"), ("loop@2", "candidate")])
def test_an_answer_of_a_version_that_never_was_to_is_a_breach(seen: tuple[str, str]) -> None:
    cycles = cycles_of([*told(*PROMOTED), *told(*PROMOTED[:-1], "rolled_back", cycle=4)])
    assert list(answers({seen}, cycles, {"loop@1", "loop@2", "loop@4"}))


SAID = {"completion_id": "chatcmpl-1", "user": "ann", "score": 0.5}
KEPT = {"id": "fb_1", **SAID, "thumb": None}


@pytest.mark.parametrize(
    ("kept", "breaches"),
    [
        ([KEPT], 0),
        ([], 1),
        ([{**KEPT, "score": 0.4}], 1),
        ([KEPT, KEPT], 2),
        ([KEPT, {**KEPT, "id": "fb_2"}], 2),
        ([KEPT, {**KEPT, "id": "fb_2", "user": "bob"}], 1),
    ],
    ids=["sound", "lost", "changed", "listed twice", "kept twice", "nobody's"],
)
def test_feedback_is_there_once(kept: Sequence[dict[str, Any]], breaches: int) -> None:
    assert len(list(opinions([Opinion("fb_1", SAID)], kept))) == breaches
