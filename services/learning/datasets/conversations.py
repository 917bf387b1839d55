"""Conversations as rows: a session, or completions that were rated together, is a trajectory, by the tokens that were
sampled and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from services.learning.datasets.rows import Json, Row
from services.learning.feedback.record import FeedbackRecord
from services.learning.request_log.record import LoggedChoice, LoggedRequest

Turn = tuple[LoggedRequest, LoggedChoice]
"""A request, and its answer that the conversation went on from."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A session, or completions that were rated together, of one API key."""

    owner: str
    session: str | None = None
    answers: tuple[str, ...] = ()
    """Without a session: ids of the completions, in their order."""

    def __post_init__(self) -> None:
        if (self.session is None) == (not self.answers):
            raise ValueError("a conversation is a session, or completions")


@dataclass(slots=True)
class SaidOfConversation:
    """All ratings of one conversation, and of single answers in it."""

    whole: list[FeedbackRecord] = field(default_factory=list)
    turns: dict[str, list[FeedbackRecord]] = field(default_factory=dict)
    """By the id of the choice."""

    def take(self, one: FeedbackRecord, choice: str) -> None:
        """Adds a rating: of the whole, or of this answer in it."""
        if one.said.session_id is None and one.said.completion_ids is None:
            self.turns.setdefault(choice, []).append(one)
        elif one not in self.whole:
            self.whole.append(one)

    @property
    def records(self) -> list[FeedbackRecord]:
        """All of it, each once."""
        those = [*self.whole, *(one for said in self.turns.values() for one in said)]
        return list({one.id: one for one in those}.values())

    @property
    def reward(self) -> float | None:
        """Mean of what was said of the whole; None: nothing was."""
        return mean_rating(self.whole)

    @property
    def rating(self) -> float | None:
        """Of the whole, or without that of the answers that were rated."""
        return mean_rating(self.whole or self.records)

    def of_turn(self, choice: str) -> float | None:
        """Mean of what was said of one answer."""
        return mean_rating(self.turns.get(choice, ()))


def mean_rating(records: Sequence[FeedbackRecord]) -> float | None:
    """Mean of the opinions that have a rating; None: none has."""
    ratings = [one.said.rating for one in records if one.said.rating is not None]
    return fmean(ratings) if ratings else None


def turns_of_answers(found: Mapping[str, LoggedRequest], answers: Sequence[str]) -> list[Turn] | None:
    """Turns that the answers are of; None: an id is of several choices.

    Args:
        found: request of each answer.
    """
    turns = [(found[name], choice) for name in answers if (choice := found[name].choice(name)) is not None]
    return turns if len(turns) == len(answers) else None


def turns_of_session(requests: Sequence[LoggedRequest]) -> list[Turn] | None:
    """Turns of a session, in the order of time; None: a request of it has not one answer.

    Args:
        requests: all that are logged of it.
    """
    in_time = sorted(requests, key=lambda one: (one.at, one.id))
    return [(one, one.choices[0]) for one in in_time] if all(len(one.choices) == 1 for one in in_time) else None


def conversation_row(turns: Sequence[Turn], said: SaidOfConversation) -> Row | None:
    """The row of a conversation; None: it is no trajectory. Its requests are of one user, each goes on from the one
    before, and the tokens of the answers are logged."""
    if not all(map(_is_turn, turns)) or not all(_goes_on(one, other) for (one, _), (other, _) in pairwise(turns)):
        return None
    last, choice = turns[-1]
    truncated = choice.finish_reason == "length"
    trajectory: Json = {"segments": _segments(turns, said), "truncated": truncated}
    if said.reward is not None:
        trajectory["reward"] = said.reward
    return Row(
        source="feedback",
        answer_id=choice.completion_id,
        turn_ids=tuple(one.completion_id for _, one in turns),
        at=last.at,
        key_id=last.owner,
        user=last.user,
        session=last.session,
        version=choice.version,
        messages=last.messages or [],
        tools=last.tools,
        answer=choice.message,
        rating=said.rating,
        opinions=len(said.records),
        labels=tuple(sorted({one.said.label for one in said.records if one.said.label})),
        said_by=tuple(sorted({one.said.user for one in said.records if one.said.user})),
        truncated=truncated,
        trajectory=trajectory,
    )


def _is_turn(turn: Turn) -> bool:
    request, choice = turn
    return (
        request.kind == "chat"
        and request.messages is not None
        and bool(request.prompt_token_ids and request.prompt_token_ids[0])
        and bool(choice.token_ids)
        and choice.message is not None
        and choice.finish_reason is not None
    )


def _goes_on(first: LoggedRequest, second: LoggedRequest) -> bool:
    """The second request has the messages of the first in front: nothing else was read between them."""
    asked = first.messages or []
    return (
        first.user == second.user
        and first.tools == second.tools
        and len(second.messages or []) > len(asked)
        and (second.messages or [])[: len(asked)] == asked
    )


def _segments(turns: Sequence[Turn], said: SaidOfConversation) -> list[Json]:
    """Actions and observations. Where a prompt does not begin with the tokens before it (a template that drops earlier
    thoughts), the context begins anew."""
    recorded = all(len(one.logprobs or ()) == len(one.token_ids or ()) for _, one in turns)
    segments: list[Json] = []
    before: list[int] = []
    for request, choice in turns:
        prompt = (request.prompt_token_ids or [[]])[0]
        follows = prompt[: len(before)] == before
        seen: Json = {"type": "observation", "token_ids": prompt[len(before) :] if follows else prompt}
        if not follows:
            seen["restarts"] = True
        if seen["token_ids"]:
            segments.append(seen)
        segments.append(_action(request.sampling or {}, choice, said.of_turn(choice.completion_id), recorded=recorded))
        before = [*prompt, *(choice.token_ids or ())]
    return segments


def _action(sampling: Mapping[str, Any], choice: LoggedChoice, reward: float | None, *, recorded: bool) -> Json:
    action: Json = {
        "type": "action",
        "token_ids": choice.token_ids,
        "temperature": float(sampling.get("temperature", 1.0)),
        "adapter": choice.version or "base",
    }
    if recorded:
        action["logprobs"] = [min(value, 0.0) for value in choice.logprobs or ()]
    if reward is not None:
        action["reward"] = reward
    return action
