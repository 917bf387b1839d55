"""Evidence of a canary: what gateways have counted and what feedback says, by arm, and what follows from it.

Opinions of one user are not independent, so a user has one voice in each arm, the mean of its scores; who gives no name
has one for each answer or session. That is also how much a single user can do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from services.common.evaluation.statistics.sequential import Observed
from services.learning.canaries.answers import Counts
from services.learning.canaries.enrolment import arm_of_answer, arm_of_session, session_mark
from services.learning.canaries.guardrails import guarded
from services.learning.canaries.record import (
    ARMS,
    Arm,
    ArmEvidence,
    CanaryEvidence,
    CanaryRecord,
    Decision,
    LookEvidence,
    SourceEvidence,
)
from services.learning.feedback.record import FeedbackRecord, Source

_LABELS = 10
"""Labels that are told of."""


class Opinions:
    """Feedback on the answers of one canary.

    Args:
        sessions: marks of those that had an answer of it, so that what is said of them is said of that.
    """

    def __init__(self, record: CanaryRecord, sessions: Container[str]) -> None:
        self._record = record
        self._sessions = sessions
        self._scores: dict[Arm, dict[tuple[str, ...], list[float]]] = {arm: {} for arm in ARMS}
        self._others: dict[Arm, dict[Source, list[float | None]]] = {arm: {} for arm in ARMS}
        self._labels: dict[Arm, Counter[str]] = {arm: Counter() for arm in ARMS}
        self.counts: Counter[Arm] = Counter()

    def take(self, opinion: FeedbackRecord) -> None:
        """Counts an opinion, if it is about one of the canary's answers: as one that decides if it is of a source that
        the policy names."""
        said = opinion.said
        if opinion.created_at < self._record.began_at:
            return
        if said.source not in self._record.policy.sources:
            for arm, target, score in self._about(opinion):
                if score is not None or target == said.target:
                    self._others[arm].setdefault(said.source, []).append(score)
            return
        for arm, target, score in self._about(opinion):
            voice = (opinion.owner, "user", said.user) if said.user is not None else (opinion.owner, "answer", target)
            if score is not None:
                self._scores[arm].setdefault(voice, []).append(score)
            if target == said.target:
                self.counts[arm] += 1
                if said.label is not None:
                    self._labels[arm][said.label] += 1

    def observed(self, arm: Arm) -> Observed:
        """Scores of an arm, one a voice."""
        return Observed.of(math.fsum(scores) / len(scores) for scores in self._scores[arm].values())

    def labels(self, arm: Arm) -> Mapping[str, int]:
        """The most frequent labels of an arm."""
        return dict(self._labels[arm].most_common(_LABELS))

    def others(self, arm: Arm) -> Mapping[Source, SourceEvidence]:
        """What sources that do not decide say of an arm."""
        found: dict[Source, SourceEvidence] = {}
        for source, said in sorted(self._others[arm].items()):
            scores = [score for score in said if score is not None]
            found[source] = SourceEvidence(opinions=len(said), score=fmean(scores) if scores else None)
        return found

    def _about(self, opinion: FeedbackRecord) -> Iterator[tuple[Arm, str, float | None]]:
        """Arms that it speaks of, with the answer's id and the score; a preference speaks of two."""
        said = opinion.said
        # Several completions are one opinion: of the arm that gave all of them.
        names = said.answers or (said.target,)
        arms = {self._arm_of(opinion.owner, name, said.session_id) for name in names}
        if len(arms) == 1 and (arm := arms.pop()) is not None:
            yield arm, said.target, said.rating
        if said.preferred_over is not None and said.score is None and said.thumb is None:
            other = self._arm_of(opinion.owner, said.preferred_over, None)
            if other is not None:
                yield other, said.preferred_over, -1.0

    def _arm_of(self, owner: str, target: str, session: str | None) -> Arm | None:
        record = self._record
        if session is None:
            return arm_of_answer(record.key, target)
        if session_mark(owner, session) not in self._sessions:
            return None
        return arm_of_session(record.key, record.policy.share, owner, session)


def gathered(
    records: Sequence[CanaryRecord], feedback: Iterable[FeedbackRecord], sessions: Mapping[str, Container[str]]
) -> dict[str, Opinions]:
    """Opinions of each of the canaries that run.

    Args:
        sessions: marks of those that had an answer, by the canary's id.
    """
    found = {record.id: Opinions(record, sessions[record.id]) for record in records}
    for opinion in feedback:
        for opinions in found.values():
            opinions.take(opinion)
    return found


def evidence_of(record: CanaryRecord, counts: Mapping[str, Counts], opinions: Opinions, now: float) -> CanaryEvidence:
    """All that is known of a canary.

    Args:
        counts: of each arm.
        now: unix seconds.
    """
    counted = {arm: counts.get(arm, Counts()) for arm in ARMS}
    observed = {arm: opinions.observed(arm) for arm in ARMS}

    def told(arm: Arm) -> ArmEvidence:
        count, scores = counted[arm], observed[arm]
        return ArmEvidence(
            version=record.version_of(arm),
            answers=count.answers,
            errors=count.errors,
            cut_off=count.cut_off,
            repetition=count.repetition,
            calls=count.calls,
            broken_calls=count.broken_calls,
            refusals=count.refusals,
            tokens=count.tokens,
            seconds=round(count.seconds, 3),
            first_seconds=round(count.first_seconds, 3),
            opinions=opinions.counts[arm],
            voices=scores.count,
            score=scores.mean if scores.count else None,
            labels=opinions.labels(arm),
            others=opinions.others(arm),
        )

    return CanaryEvidence(
        at=now,
        look=LookEvidence.of(record.policy.test.look(observed["current"], observed["candidate"])),
        current=told("current"),
        candidate=told("candidate"),
        guardrails=guarded(record.policy.guardrails, counted["current"], counted["candidate"]),
    )


def decided(record: CanaryRecord, evidence: CanaryEvidence) -> Decision | None:
    """What the policy makes of the evidence; None: it goes on."""
    look, age = evidence.look, evidence.at - record.began_at
    crossed = [one for one in evidence.guardrails if one.crossed]
    if crossed:
        said = "; ".join(f"{one.name} {one.effect:+.3g}, surely above {one.low:.3g}" for one in crossed)
        return Decision(outcome="roll_back", reason="guardrail", detail=f"crossed: {said}")
    scores = f"the score differs by {look.effect:+.3g} ({look.low:+.3g} to {look.high:+.3g})"
    if look.verdict == "not better":
        return Decision(outcome="roll_back", reason="not_better", detail=f"not better: {scores}")
    if look.verdict == "better" and age >= record.policy.min_seconds:
        return Decision(outcome="promote", reason="better", detail=f"better: {scores}")
    if age >= record.policy.max_seconds:
        detail = f"not shown to be better in {record.policy.max_seconds:g} s: {scores}"
        return Decision(outcome="roll_back", reason="time", detail=detail)
    return None
