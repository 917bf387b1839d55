"""Learner of the demo: its policy, what its cycles came to, and the canary of a version that went past its gate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.commands.evaluation.suites import SHIPPED
from cli.http.client import Client, path
from cli.http.job_events import follow, succeeded
from cli.job_files import read_object

NAME = "visitors"
"""Name of the learner, its adapter and its data sets."""
ROWS = 40
"""New opinions that begin a cycle, and most rows that it learns from: the newest."""
_SUITE_ITEMS = 30
"""Of each skill: enough to rule out a loss of ``_MAX_LOSS`` if hardly anything changes, and answered in seconds."""
_MAX_LOSS = 0.2
_BAD_EPOCHS = 4
_JOB_SECONDS = 300.0
_OUTCOMES = ("promoted", "rejected", "rolled_back", "superseded", "failed")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a cycle ended."""

    cycle: int
    outcome: str
    why: str
    candidate: str | None
    effect: float | None
    """Rise of the mean rating that its canary saw."""
    visitors: int
    """Opinions that decided the canary."""


@dataclass(frozen=True, slots=True)
class Learner:
    """The learner of one demo, over the HTTP API."""

    client: Client
    policy: Mapping[str, Any]

    @classmethod
    def applied(cls, client: Client, seed: int) -> Learner:
        """Makes the suites of its gate, and the learner."""
        settings = {"epochs": 2, "learning_rate": 7e-4, "batch_size": 8, "lora": {"rank": 8, "alpha": 16, "seed": seed}}
        policy = {
            "name": NAME,
            "adapter": NAME,
            "method": "sft",
            "settings": settings,
            "data": {"max_rows": ROWS, "max_user_share": 0.1, "split": {"validation": 0, "held_out": 0}},
            "trigger": {"min_rows": ROWS},
            "budget": {"jobs": 1},
            "gate": {"no_loss": [{"suite": suite, "max_loss": _MAX_LOSS} for suite in _suites(client)]},
            "canary": {"share": 0.5, "gain": 0.1, "max_seconds": 90},
        }
        client.post("/v1/learners", policy)
        return cls(client, policy)

    def now(self) -> dict[str, Any]:
        """Where it stands."""
        found: dict[str, Any] = self.client.get(path("v1", "learners", NAME))
        return found

    def allow(self, jobs: int) -> None:
        """Lets it begin so many jobs in all: its budget."""
        self.client.put(path("v1", "learners", NAME), {**self.policy, "budget": {"jobs": jobs}})

    def ended(self) -> Sequence[Ended]:
        """Cycles that have ended, the first one first."""
        events = self.client.get(path("v1", "learners", NAME, "events"), limit=1000)["data"]
        return [_ended(event) for event in reversed(events) if event["kind"] in _OUTCOMES]

    # What somebody does past the learner.

    def candidate(self, dataset: str) -> str:
        """Version that a job without a gate makes of a data set."""
        named = {"adapter": NAME, "dataset": dataset, "attach": False, "candidate": True}
        body = {**self.policy["settings"], **named, "epochs": _BAD_EPOCHS}
        job = str(self.client.post("/v1/train/sft", body)["id"])
        for _ in follow(self.client, job, timeout=_JOB_SECONDS):
            pass
        return str(succeeded(self.client, job)["result_adapter"])

    def try_out(self, version: str, share: float) -> str:
        """Begins a canary, and returns its id."""
        return str(self.client.post("/v1/canaries", {"version": version, "policy": {"share": share}})["id"])

    def canary(self, name: str) -> dict[str, Any]:
        """A canary with all that is known of it."""
        found: dict[str, Any] = self.client.get(path("v1", "canaries", name))
        return found


def _suites(client: Client) -> Sequence[str]:
    made = []
    for file in sorted(SHIPPED.glob("*.jsonl")):
        body = {
            **read_object(file.with_suffix(".json")),
            "name": f"skill-{file.stem}",
            "jsonl": _first(file.read_text()),
        }
        made.append(str(client.post("/v1/eval/suites", body, patient=True)["id"]))
    return made


def _first(items: str) -> str:
    """The first items of a suite, of each group one: statistics count groups."""
    found: dict[str, str] = {}
    for number, line in enumerate(items.splitlines()):
        found.setdefault(json.loads(line).get("group", f"#{number}"), line)
    return "\n".join(list(found.values())[:_SUITE_ITEMS])


def _ended(event: Mapping[str, Any]) -> Ended:
    evidence = event["evidence"]
    look = (evidence.get("look") or {}).get("look") or {}
    lost = [
        f"{one['suite']} {one['before']:.2f} → {one['after']:.2f}"
        for gate in evidence.get("gates", ())
        for one in gate["conditions"]
        if not one["passed"]
    ]
    decision = evidence.get("decision") or {}
    return Ended(
        cycle=event["cycle"],
        outcome=event["kind"],
        why=", ".join(lost) or decision.get("detail") or event["detail"],
        candidate=evidence.get("candidate"),
        effect=look.get("effect"),
        visitors=sum(look.get("observed", ())),
    )
