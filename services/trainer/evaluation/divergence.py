"""Divergence of a job's result from what it is to replace, on the prompts of suites.

The policy before answers each prompt once at temperature 1, and the result says how probable it finds these tokens. The
mean over tokens of log p_before - log p_after estimates KL(before || after) for each token, out of the former's own
samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.common.evaluation.statistics.scores import Scores
from services.common.evaluation.suites.manifest import SuiteManifest
from services.common.evaluation.suites.store import SuiteStore
from services.common.text.tokenizer import TextCodec
from services.trainer.evaluation.questions import question_of
from services.trainer.host.rollouts import Policy, RolloutRequest, RolloutSampling, RolloutSource, ScoreRequest
from services.trainer.sampling.prompts import sample_seed

MAX_PROMPTS = 256
MAX_TOKENS = 128
"""Of an answer."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """What was measured."""

    values: Scores
    """Of each answer the mean over its tokens, with their number as its weight; items of one group are one."""
    tokens: int


def measured(
    source: RolloutSource,
    prompts: Sequence[tuple[RolloutRequest, str]],
    before: Policy,
    after: Policy,
    interrupt: Callable[[], None],
) -> Divergence:
    """The divergence of one policy from another. Blocks, is interrupted and raises as RolloutSource.generate.

    Args:
        prompts: with the name of each one's group.
    """
    requests = [request for request, _ in prompts]
    answers = source.generate(requests, RolloutSampling(1.0, MAX_TOKENS), before, interrupt=interrupt, gentle=True)
    asked = [
        ScoreRequest(request.prompt, answer.token_ids, 1.0) for request, answer in zip(requests, answers, strict=True)
    ]
    found = source.score(asked, after, interrupt=interrupt)
    means, counts = [], []
    for answer, now in zip(answers, found, strict=True):
        counts.append(len(answer.token_ids))
        means.append(math.fsum(a - b for a, b in zip(answer.logprobs, now, strict=True)) / counts[-1])
    return Divergence(Scores(means, list(map(float, counts)), [group for _, group in prompts]), sum(counts))


def prompts_of(
    suites: SuiteStore, chosen: Sequence[SuiteManifest], source: RolloutSource, codec: TextCodec, seed: int
) -> list[tuple[RolloutRequest, str]]:
    """Prompts of suites, with the name of the group that each belongs to: the same for the same seed, at most
    MAX_PROMPTS, from all parts of the suites. What does not fit the engine is left out.

    Raises:
        InvalidRequest: fewer than two groups are left, whose spread nobody knows.
        NotFound, Unavailable: see SuiteStore.items.
    """
    found = [one for suite in chosen for one in _of_suite(suites, suite, source, codec, seed)]
    kept = found[:: -(-len(found) // MAX_PROMPTS)] if found else []
    if len({group for _, group in kept}) < 2:
        raise InvalidRequest(
            f"max_kl: {len(kept)} prompts of {', '.join(str(suite.ref) for suite in chosen)} fit the engine, and two "
            "of different groups are needed",
            param="max_kl",
        )
    return kept


def _of_suite(
    suites: SuiteStore, suite: SuiteManifest, source: RolloutSource, codec: TextCodec, seed: int
) -> Iterator[tuple[RolloutRequest, str]]:
    for item in suites.items(suite):
        try:
            tokens = question_of(suite.settings, item).tokens(codec)
            source.check(len(tokens), MAX_TOKENS)
        except InvalidRequest:
            continue
        group = f"{suite.ref} {item.group}" if item.group is not None else f"{suite.ref}:{item.id}"
        yield RolloutRequest(tokens, sample_seed(seed, suite.digest, item.id, 0)), group
