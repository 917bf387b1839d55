"""Builds the rows of a data set: feedback is joined with the requests it speaks of, filtered, deduplicated, split."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from services.common.evaluation.contamination.overlap import SuiteOverlap
from services.common.storage.ids import key_of
from services.common.validation.strict_models import StrictModel
from services.learning.datasets.conversations import (
    Conversation,
    SaidOfConversation,
    conversation_row,
    mean_rating,
    turns_of_answers,
    turns_of_session,
)
from services.learning.datasets.outliers import DIGITS, UserOutlier, outliers_of
from services.learning.datasets.rows import Row, row_of_file, row_texts
from services.learning.datasets.spec import SPLITS, DatasetFilter, DatasetSpec, DatasetSplit, Split
from services.learning.feedback.record import FeedbackRecord
from services.learning.request_log.log import RequestFilter, RequestLog
from services.learning.request_log.record import LoggedChoice, LoggedRequest

_AT_ONCE = 200
_OF_A_SESSION = 1000
_TOLD_USERS = 10
_PARTS = 2**32


class UserShare(StrictModel):
    """How much of a data set one user has said or asked."""

    user: str
    """First characters of a digest of the user's id."""
    rows: int


class DatasetReport(StrictModel):
    """What became of everything that was looked at."""

    opinions: int = 0
    """Feedback that the filter takes."""
    requests: int = 0
    """Answers that it speaks of, and logged ones without feedback."""
    without_request: int = 0
    """Answers whose request is not in the log: nothing can be learnt from them."""
    no_trajectory: int = 0
    """Rated sessions, and completions rated together, that are no trajectory: not one conversation of one user, or
    without the tokens of an answer."""
    without_text: int = 0
    """Answers whose messages were left out of the log, or that are no chat."""
    other_prompt: int = 0
    """Preferences over an answer to other messages, or one that is not logged."""
    faulty_lines: int = 0
    """Lines of files that are no example."""
    duplicates: int = 0
    mixed: int = 0
    """Rows of other data sets among the training rows."""
    capped: int = 0
    """Rows left out because their user had too many, or the data set."""
    of_suites: int = 0
    """Training rows left out because they would have taught items of the suites of `apart_from`."""
    rated: int = 0
    mean_rating: float | None = None
    users: int = 0
    top_users: tuple[UserShare, ...] = ()
    outliers: tuple[UserOutlier, ...] = ()
    """Users whose feedback is unlike that of the rest, by a robust z score over 3.5."""


@dataclass(slots=True)
class Built:
    """Rows of a data set by split, with the report, and the feedback that is in it."""

    rows: Mapping[Split, Sequence[Row]]
    report: DatasetReport
    opinions: Sequence[str]
    """Ids of the feedback."""


@dataclass(slots=True)
class _Said:
    """All that was said of one answer."""

    records: list[FeedbackRecord] = field(default_factory=list)

    @property
    def rating(self) -> float | None:
        return mean_rating(self.records)

    @property
    def newest_correction(self) -> str | None:
        corrected = [one for one in self.records if one.said.correction is not None]
        return max(corrected, key=lambda one: one.changed_at).said.correction if corrected else None


class DatasetBuilder:
    """Builds one data set. Blocking.

    Args:
        spec: what it is made of.
        log: where requests are found.
        owner: API key whose requests may be used; None: everybody's.
    """

    def __init__(self, spec: DatasetSpec, log: RequestLog, owner: str | None) -> None:
        self._spec = spec
        self._log = log
        self._owner = owner
        self._counts: Counter[str] = Counter()
        self._answers_of: dict[str, list[str]] = defaultdict(list)
        """Answers that each opinion speaks of."""

    def build(
        self,
        opinions: Sequence[FeedbackRecord],
        files: Mapping[str, Iterable[Mapping[str, Any]]],
        others: Sequence[Iterable[Row]] = (),
        suites: Sequence[SuiteOverlap] = (),
    ) -> Built:
        """The data set.

        Args:
            opinions: all feedback that the caller may use.
            files: examples by the id of their file.
            others: training rows of other data sets, for each entry of the declaration's `mix`.
            suites: those of `apart_from`.
        """
        wanted = [one for one in opinions if self._takes_opinion(one)] if self._spec.feedback else []
        self._counts["opinions"] = len(wanted)
        rows = self._of_feedback(wanted)
        if self._spec.logged:
            rows += self._of_log({name for row in rows for name in (row.answer_id, *row.turn_ids)})
        rows += self._of_files(files)
        kept = self._capped(self._apart(self._distinct(rows), suites))
        split: dict[Split, list[Row]] = {name: [] for name in SPLITS}
        for row in kept:
            split[split_of(row, self._spec.split)].append(row)
        if split["train"]:
            split["train"] += self._apart(self._mixed(kept, len(split["train"]), others), suites)
        answers = {row.answer_id for row in kept}
        used = [one.id for one in wanted if any(found in answers for found in self._answers_of.get(one.id, ()))]
        return Built(split, self._report(kept, wanted), used)

    # Rows.

    def _of_feedback(self, opinions: Sequence[FeedbackRecord]) -> list[Row]:
        said: dict[str, _Said] = defaultdict(_Said)
        requests: dict[str, LoggedRequest] = {}
        conversations: dict[Conversation, SaidOfConversation] = defaultdict(SaidOfConversation)
        several = [one.said for one in opinions if one.said.completion_ids and one.said.rating is not None]
        together = {name: said.answers for said in several for name in said.answers}
        for start in range(0, len(opinions), _AT_ONCE):
            part = opinions[start : start + _AT_ONCE]
            found = dict(self._log.find([name for one in part for name in one.said.answers]))
            for one in part:
                those = [(request, one.said.target) for request in self._session(one)] if one.said.session_id else []
                those += [(found[name], name) for name in one.said.answers if name in found]
                choices = [
                    (request, choice)
                    for request, name in those
                    if self._takes_request(request)
                    for choice in self._choices(request, name)
                ]
                if not choices:
                    self._counts["without_request"] += 1
                for request, choice in choices:
                    whole = _conversation(one, request, choice, together)
                    if self._spec.trajectories and whole is not None and one.said.rating is not None:
                        conversations[whole].take(one, choice.completion_id)
                        if one.said.correction is None and one.said.preferred_over is None:
                            continue
                    requests[choice.completion_id] = request
                    said[choice.completion_id].records.append(one)
                    self._answers_of[one.id].append(choice.completion_id)
        rows = []
        for name, those_said in said.items():
            request = requests[name]
            choice = next(one for one in request.choices if one.completion_id == name)
            row = self._row(request, choice, "feedback")
            if row is not None:
                rows += self._with_opinions(row, those_said)
        return rows + list(filter(None, (self._trajectory(*one) for one in conversations.items())))

    def _trajectory(self, whole: Conversation, said: SaidOfConversation) -> Row | None:
        """Row of a conversation; None: it is no trajectory, or not one that the filter takes."""
        if whole.answers:
            found = dict(self._log.find(whole.answers))
            requests = [one for one in found.values() if one.owner == whole.owner]
            turns = turns_of_answers(found, whole.answers) if len(requests) == len(whole.answers) else None
        else:
            requests = self._log.newest(RequestFilter(whole.owner, session=whole.session), limit=_OF_A_SESSION)
            turns = turns_of_session(requests)
        answered = (_answered_by(choice, self._spec.filter) for one in requests for choice in one.choices)
        if not all(map(self._takes_request, requests)) or not all(answered) or not self._takes_rating(said.rating):
            return None
        self._counts["requests"] += len(requests)
        row = conversation_row(turns, said) if turns else None
        if row is None:
            self._counts["no_trajectory"] += 1
            return None
        for one in said.records:
            self._answers_of[one.id].append(row.answer_id or "")
        return row

    def _of_log(self, known: set[str | None]) -> list[Row]:
        wanted = self._spec.filter
        if wanted.min_rating is not None or wanted.max_rating is not None or wanted.labels or wanted.sources:
            return []  # nobody said anything of them
        ends = [one for one in (wanted.until, wanted.said_until) if one is not None]
        begins = max(wanted.since or 0.0, wanted.said_since or 0.0)
        chosen = RequestFilter(self._owner, since=begins, until=min(ends, default=float("inf")))
        rows = []
        for _, request in self._log.between(chosen):
            if self._takes_request(request):
                for choice in request.choices:
                    if choice.completion_id not in known and (row := self._row(request, choice, "logged")) is not None:
                        rows.append(row)
        return rows

    def _of_files(self, files: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[Row]:
        rows = []
        for name, examples in files.items():
            for example in examples:
                try:
                    rows.append(row_of_file(example, name))
                except ValueError:
                    self._counts["faulty_lines"] += 1
        return rows

    def _row(self, request: LoggedRequest, choice: LoggedChoice, source: Any) -> Row | None:
        self._counts["requests"] += 1
        if request.kind != "chat" or request.messages is None or choice.message is None or choice.finish_reason is None:
            self._counts["without_text"] += 1
            return None
        prompts = request.prompt_token_ids
        return Row(
            source=source,
            answer_id=choice.completion_id,
            at=request.at,
            key_id=request.owner,
            user=request.user,
            session=request.session,
            version=choice.version,
            messages=request.messages,
            tools=request.tools,
            answer=choice.message,
            temperature=float((request.sampling or {}).get("temperature", 1.0)),
            truncated=choice.finish_reason == "length",
            prompt_token_ids=prompts[0] if prompts else None,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
        )

    def _with_opinions(self, row: Row, said: _Said) -> list[Row]:
        """The row with what was said; one more for each further answer that it was preferred over."""
        rating = said.rating
        if not self._takes_rating(rating):
            return []
        row = row.model_copy(
            update={
                "rating": rating,
                "opinions": len(said.records),
                "labels": tuple(sorted({one.said.label for one in said.records if one.said.label})),
                "said_by": tuple(sorted({one.said.user for one in said.records if one.said.user})),
            }
        )
        rows = [row]
        if (correction := said.newest_correction) is not None:
            rows = [
                row.model_copy(update={"better": correction, "worse": row.text if row.text != correction else None})
            ]
        for one in said.records:
            if one.said.preferred_over is not None:
                other = self._other(row, one.said.preferred_over)
                if other is None or row.text is None or other == row.text:
                    self._counts["other_prompt"] += 1
                else:
                    rows.append(row.model_copy(update={"better": row.text, "worse": other}))
        return rows

    def _other(self, row: Row, answer_id: str) -> str | None:
        """Text of another answer to the same messages."""
        for name, request in self._log.find([answer_id]):
            choice = request.choice(name)
            if choice is not None and self._owner in (None, request.owner):
                other = self._row(request, choice, "feedback")
                return other.text if other is not None and other.prompt == row.prompt else None
        return None

    # Choice.

    def _takes_opinion(self, one: FeedbackRecord) -> bool:
        wanted = self._spec.filter
        return (
            self._owner in (None, one.owner)
            and (wanted.said_since or 0.0) <= one.changed_at
            and (wanted.said_until is None or one.changed_at < wanted.said_until)
            and (wanted.sources is None or one.said.source in wanted.sources)
            and (wanted.labels is None or one.said.label in wanted.labels)
        )

    def _takes_rating(self, rating: float | None) -> bool:
        low, high = self._spec.filter.min_rating, self._spec.filter.max_rating
        return (low is None or (rating is not None and rating >= low)) and (
            high is None or (rating is not None and rating <= high)
        )

    def _takes_request(self, request: LoggedRequest) -> bool:
        wanted = self._spec.filter
        return (
            self._owner in (None, request.owner)
            and (wanted.keys is None or request.owner in wanted.keys)
            and (wanted.since or 0.0) <= request.at < (float("inf") if wanted.until is None else wanted.until)
            and all((request.metadata or {}).get(name) == value for name, value in (wanted.metadata or {}).items())
        )

    def _choices(self, request: LoggedRequest, target: str) -> Sequence[LoggedChoice]:
        one = request.choice(target)
        those = [one] if one is not None else request.choices if ":" not in target or "session:" in target else []
        return [choice for choice in those if _answered_by(choice, self._spec.filter)]

    def _session(self, one: FeedbackRecord) -> Sequence[LoggedRequest]:
        wanted = RequestFilter(one.owner, session=one.said.session_id)
        return self._log.newest(wanted, limit=_OF_A_SESSION)

    def _distinct(self, rows: Sequence[Row]) -> list[Row]:
        """Rows of different content; what was said of equal ones is put together in the oldest."""
        found: dict[str, Row] = {}
        for row in sorted(rows, key=lambda row: (row.at, row.answer_id or "")):
            key = row.content
            first = found.setdefault(key, row)
            if first is row:
                continue
            self._counts["duplicates"] += 1
            rated = [(one.rating, max(one.opinions, 1)) for one in (first, row) if one.rating is not None]
            weight = sum(count for _, count in rated)
            found[key] = first.model_copy(
                update={
                    "rating": sum(rating * count for rating, count in rated) / weight if rated else None,
                    "opinions": first.opinions + row.opinions,
                    "labels": tuple(sorted({*first.labels, *row.labels})),
                    "said_by": tuple(sorted({*first.said_by, *row.said_by})),
                }
            )
        return list(found.values())

    def _apart(self, rows: Sequence[Row], suites: Sequence[SuiteOverlap]) -> list[Row]:
        """Rows without those to train on that have something of a suite."""

        def teaches(row: Row) -> bool:
            return any(suite.touches(text) for text in row_texts(row) for suite in suites)

        kept = (
            [row for row in rows if split_of(row, self._spec.split) != "train" or not teaches(row)] if suites else rows
        )
        self._counts["of_suites"] += len(rows) - len(kept)
        return list(kept)

    def _capped(self, rows: Sequence[Row]) -> list[Row]:
        """The newest rows, of each user no more than its share, in the order of time."""
        most = max(1, int(self._spec.max_user_share * min(len(rows), self._spec.max_rows)))
        counts: Counter[str] = Counter()
        kept: list[Row] = []
        in_time = sorted(rows, key=lambda row: row.at)
        for row in reversed(in_time):
            users = row.users
            if len(kept) >= self._spec.max_rows or any(counts[user] >= most for user in users):
                self._counts["capped"] += 1
                continue
            counts.update(users)
            kept.append(row)
        return kept[::-1]

    def _mixed(self, own: Sequence[Row], count: int, others: Sequence[Iterable[Row]]) -> list[Row]:
        """Rows of other data sets that go to the training rows, ``count`` in number; none that is held out here."""
        spec = self._spec
        left = 1 - sum(one.share for one in spec.mix)
        seen = {row.content for row in own}
        mixed: list[Row] = []
        for part, rows in zip(spec.mix, others, strict=True):
            found = {row.content: row for row in rows if split_of(row, spec.split) == "train"}
            order = sorted(found.keys() - seen, key=lambda content: key_of(f"{spec.split.seed} {content}"))
            chosen = order[: round(part.share / left * count)]
            seen.update(chosen)
            mixed += [found[content] for content in sorted(chosen)]
        self._counts["mixed"] = len(mixed)
        return mixed

    def _report(self, rows: Sequence[Row], opinions: Sequence[FeedbackRecord]) -> DatasetReport:
        users = Counter(user for row in rows for user in row.users)
        rated = [row.rating for row in rows if row.rating is not None]
        return DatasetReport(
            **self._counts,
            rated=len(rated),
            mean_rating=round(fmean(rated), 6) if rated else None,
            users=len(users),
            top_users=tuple(
                UserShare(user=user[:DIGITS], rows=count) for user, count in users.most_common(_TOLD_USERS)
            ),
            outliers=outliers_of(opinions),
        )


def _conversation(
    one: FeedbackRecord, request: LoggedRequest, choice: LoggedChoice, together: Mapping[str, tuple[str, ...]]
) -> Conversation | None:
    """The conversation that an opinion of this answer counts for; None: it is of the answer alone.

    Args:
        together: answers that were rated together, by each of them.
    """
    if one.said.session_id is None:
        several = one.said.answers if one.said.completion_ids else together.get(choice.completion_id)
        if several is not None:
            return Conversation(request.owner, answers=several)
    return None if request.session is None else Conversation(request.owner, session=request.session)


def split_of(row: Row, split: DatasetSplit) -> Split:
    """Split of a row, by a digest of its user, session or request: the same in every data set."""
    place = zlib.crc32(f"{split.seed} {key_of(row.unit(split.by))}".encode()) / _PARTS
    if place < split.held_out:
        return "held_out"
    return "validation" if place < split.held_out + split.validation else "train"


def _answered_by(choice: LoggedChoice, wanted: DatasetFilter) -> bool:
    """True if a version that the filter names has answered."""
    if wanted.versions is None:
        return True
    version = choice.version or "base"
    # What several adapters together have answered is an answer of none of them.
    single = "+" not in version and "*" not in version
    return version in wanted.versions or (single and version.partition("@")[0] in wanted.versions)
