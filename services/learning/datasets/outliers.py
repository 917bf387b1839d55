"""Users whose feedback is unlike that of the rest: they may be right, or mean to teach something else.

Each user with enough feedback has a mean score, and an agreement with what others said of the same answers. A modified
z score says how far one is from the median of all, in units of the median absolute deviation, which a few outliers do
not move (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Final

from services.common.storage.ids import key_of
from services.common.validation.strict_models import StrictModel
from services.learning.feedback.record import FeedbackRecord

LEAST: Final = 5
"""Feedback of a user, and users, below which nothing is said."""
UNLIKE: Final = 3.5
"""Score from which on one is an outlier, as Iglewicz and Hoaglin recommend."""
DIGITS: Final = 12
"""Characters of a user's digest that are told."""
_TOLD: Final = 10
_BY_MEDIAN, _BY_MEAN = 1.4826, 1.2533
"""Standard deviations of a normal distribution in its median, and its mean, absolute deviation."""


class UserOutlier(StrictModel):
    """A user whose feedback is unlike that of the rest."""

    user: str
    """First characters of a digest of the user's id."""
    opinions: int
    """Rated ones."""
    score: float
    """Mean of what the user said, -1 to 1."""
    score_z: float
    """Robust z score of it among all users."""
    agreement: float | None = None
    """Mean agreement with the others who rated the same answers, 0 to 1; null: there are too few such answers."""
    agreement_z: float | None = None


def outliers_of(opinions: Iterable[FeedbackRecord]) -> tuple[UserOutlier, ...]:
    """Users whose mean score or agreement differs from the rest, the most different first."""
    rated: dict[str, dict[str, float]] = defaultdict(dict)
    for one in opinions:
        if one.said.user is not None and one.said.rating is not None:
            rated[key_of(one.said.user)][f"{one.owner} {one.said.target}"] = one.said.rating
    scores = {user: fmean(said.values()) for user, said in rated.items() if len(said) >= LEAST}
    agreements = _agreements(rated, scores)
    score_z, agreement_z = z_scores(scores), z_scores(agreements)
    found = [
        UserOutlier(
            user=user[:DIGITS],
            opinions=len(rated[user]),
            score=round(scores[user], 6),
            score_z=round(score_z[user], 3),
            agreement=round(agreements[user], 6) if user in agreements else None,
            agreement_z=round(agreement_z[user], 3) if user in agreement_z else None,
        )
        for user in score_z
        if max(abs(score_z[user]), abs(agreement_z.get(user, 0.0))) > UNLIKE
    ]
    found.sort(key=lambda one: (-max(abs(one.score_z), abs(one.agreement_z or 0.0)), one.user))
    return tuple(found[:_TOLD])


def z_scores(values: Mapping[str, float]) -> dict[str, float]:
    """Modified z scores; none of fewer than LEAST values. Where most are equal, by the mean absolute deviation."""
    if len(values) < LEAST:
        return {}
    middle = median(values.values())
    away = [abs(value - middle) for value in values.values()]
    scale = _BY_MEDIAN * median(away) or _BY_MEAN * fmean(away)
    return {name: (value - middle) / scale if scale else 0.0 for name, value in values.items()}


def _agreements(rated: Mapping[str, Mapping[str, float]], users: Iterable[str]) -> dict[str, float]:
    """Of each of the users: 1 minus half the distance from what others said, as the mean over answers that others have
    rated, too."""
    said_of: dict[str, list[float]] = defaultdict(list)
    for said in rated.values():
        for answer, rating in said.items():
            said_of[answer].append(rating)
    found = {}
    for user in users:
        near = [_near(rating, said_of[answer]) for answer, rating in rated[user].items() if len(said_of[answer]) > 1]
        if len(near) >= LEAST:
            found[user] = fmean(near)
    return found


def _near(rating: float, all_of_it: Sequence[float]) -> float:
    others = (math.fsum(all_of_it) - rating) / (len(all_of_it) - 1)
    return 1 - abs(rating - others) / 2
