"""Scores of a suite's items, out of the scores of their samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from services.common.evaluation.statistics.samples import majority_at_k, mean_of_samples, pass_at_k
from services.common.evaluation.suites.spec import SuiteSampling
from services.common.jobs.scorers.sample import Sample, Scorer


def sample_scores(
    scorer: Scorer, samples: Sequence[Sample], interrupt: Callable[[], None] = lambda: None
) -> list[float]:
    """One score a sample: where its item has several right answers, the best of comparing with each.

    Args:
        samples: each with the reference of its item.
        interrupt: called now and then; may raise.

    Raises:
        Unavailable: a webhook failed, also when asked again.
    """
    compared = [replace(sample, answer=answer) for sample in samples for answer in sample.reference.expected or (None,)]
    scores = iter(scorer.score(compared, interrupt))
    return [max(next(scores) for _ in sample.reference.expected or (None,)) for sample in samples]


def item_score(sampling: SuiteSampling, scores: Sequence[float], votes: Sequence[Hashable | None]) -> float:
    """Score of an item.

    Args:
        scores: one a sample.
        votes: what each sample says (`SampleScorerSpec.vote`); read for "majority" only.

    Raises:
        ValueError: there are fewer samples than k, or equal votes have different scores.
    """
    k = sampling.k or len(scores)
    right = [score >= 1 for score in scores]
    if sampling.score == "pass":
        return pass_at_k(len(scores), sum(right), k)
    if sampling.score == "majority":
        return majority_at_k(votes, right, k)
    return mean_of_samples(scores)
