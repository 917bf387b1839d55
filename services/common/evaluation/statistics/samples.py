"""Scores of items that were answered several times: the mean, pass@k and majority@k."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def mean_of_samples(scores: Sequence[float]) -> float:
    """Score of an item: the mean over its samples, so that an item counts once however often it was answered."""
    if not scores:
        raise ValueError("an item without samples has no score")
    return math.fsum(scores) / len(scores)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of k samples passes, estimated without bias (Chen et al., arXiv 2107.03374).

    Args:
        samples: samples drawn, at least k.
        passed: how many of them passed.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {passed} of which passed")
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Probability that the most frequent answer among k samples is right: the mean over all choices of k samples. Where
    several answers are as frequent, one of them is taken by chance.

    Args:
        answers: of each sample, in a form in which equal answers are equal; None: there was none, and it has no vote.
        right: whether each sample's answer is right, the same for equal answers.
        k: at most as many as there are samples.

    Raises:
        ValueError: the arguments contradict each other.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(right):
        raise ValueError(f"majority@{k} of {len(answers)} answers, {len(right)} of which are judged")
    votes: dict[Hashable, int] = {}
    correct: dict[Hashable, bool] = {}
    for answer, good in zip(answers, right, strict=True):
        if answer is None:
            continue
        if correct.setdefault(answer, good) != good:
            raise ValueError(f"the answer {answer!r} is right in one sample and wrong in another")
        votes[answer] = votes.get(answer, 0) + 1
    silent = len(answers) - sum(votes.values())
    won = math.fsum(
        _wins(count, [other for name, other in votes.items() if name != answer], silent, k)
        for answer, count in votes.items()
        if correct[answer]
    )
    return won / math.comb(len(answers), k)


def _wins(count: int, others: Sequence[int], silent: int, k: int) -> float:
    """Choices of k samples in which an answer wins, one with t answers tied at the top counted as 1/t.

    Args:
        count: samples with the answer.
        others: samples with each other answer.
        silent: samples without an answer.
    """
    won = 0.0
    for top in range(1, min(count, k) + 1):
        # ways[size, tied]: choices among the others of so many samples, so many of whose answers tie with this one.
        ways = {(0, 0): 1}
        for other in others:
            wider: dict[tuple[int, int], int] = {}
            for (size, tied), number in ways.items():
                for picked in range(min(other, top, k - top - size) + 1):
                    key = (size + picked, tied + (picked == top))
                    wider[key] = wider.get(key, 0) + number * math.comb(other, picked)
            ways = wider
        chosen = math.comb(count, top)
        for (size, tied), number in ways.items():
            rest = k - top - size
            won += chosen * number * math.comb(silent, rest) / (1 + tied)
    return won
