"""Some seconds of benchmarks.prefix_cache.soak, and that it notices what it is there for."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from benchmarks.prefix_cache.soak import Soak, TokenAudit, summary
from services.engine.requests.outputs import Finished
from services.engine.requests.request import FinishReason, Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk, StepPlan

TINY = Path(__file__).parents[4] / "models" / "tiny"
PROMPT = tuple(range(100, 120))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tiers", [True, False])
def test_random_traffic_leaks_nothing_and_counts_every_token(tiers: bool) -> None:
    # On a busy machine a load seldom seems to be worth its time.
    soak = Soak(TINY, seed=1, tiers=tiers, load_share=50.0)
    try:
        for _ in range(60):  # until all of it has happened, which is a matter of the machine
            outcome = soak.run(cpu_seconds=1.0)
            figures = summary(soak)
            happened = [
                figures[name] for name in ("cached_tokens", "preemptions", *(["loaded_tokens"] if tiers else []))
            ]
            if all(happened) and len(outcome.ends) == 4:
                break
    finally:
        soak.stop()
    assert not outcome.problems, outcome.problems[0]
    assert outcome.growth_mib < 64
    assert figures["checks"] > 20
    assert all(happened), figures
    assert set(outcome.ends) == {"stop", "length", "abort", "error"}
    assert tiers or not figures["loaded_tokens"]


def launch(audit: TokenAudit, request: Request, *chunks: tuple[int, int]) -> None:
    """Steps with these tokens of a request, from where to where."""
    for start, end in chunks:
        audit.launched(StepPlan([Chunk(request, (1,) * (end - start), start, [1], 1, False, [], 0)]))


def finish(audit: TokenAudit, request: Request, *, outputs: int, cached: int, preemptions: int = 0) -> list[str]:
    """What the audit has to say of a request that ends so."""
    reason = FinishReason.LENGTH
    logprobs = array("f", [0.0] * outputs)
    audit.ended(Finished(request, [1] * outputs, logprobs, reason, cached, preemptions, 0.0, 0.0))
    problems, audit.problems = audit.problems, []
    return problems


def asked(name: str = "r") -> Request:
    return Request(name, PROMPT, SamplingParams(max_tokens=3))


def test_right_accounts() -> None:
    audit, request = TokenAudit(), asked()
    launch(audit, request, (8, 16), (16, 20), (20, 21), (21, 22))
    assert finish(audit, request, outputs=3, cached=8) == []
    assert (audit.cached_tokens, audit.computed, audit.open) == (8, 14, 0)


def test_right_accounts_of_one_that_was_preempted() -> None:
    audit, request = TokenAudit(), asked()
    launch(audit, request, (0, 20), (20, 21), (16, 22))
    assert finish(audit, request, outputs=3, cached=0, preemptions=1) == []
    assert audit.again == 5


@pytest.mark.parametrize(
    ("chunks", "cached", "preemptions", "what"),
    [
        ([(8, 22)], 16, 0, "another number"),
        ([(0, 22)], 8, 0, "another number"),
        ([(0, 8), (16, 22)], 0, 0, "do not follow"),
        ([(0, 20), (0, 22)], 0, 0, "do not follow"),
        ([(0, 20), (8, 22), (8, 22)], 0, 1, "do not follow"),
        ([(0, 20)], 0, 0, "instead of 22"),
        ([(0, 23)], 0, 0, "elsewhere"),
        ([], 20, 0, "nothing of the prompt"),
    ],
)
def test_wrong_accounts(chunks: list[tuple[int, int]], cached: int, preemptions: int, what: str) -> None:
    audit, request = TokenAudit(), asked()
    launch(audit, request, *chunks)
    problems = finish(audit, request, outputs=3, cached=cached, preemptions=preemptions)
    assert any(what in problem for problem in problems), problems


def test_one_that_somebody_ended_may_lack_tokens() -> None:
    audit, request = TokenAudit(), asked()
    audit.cut.add("r")
    launch(audit, request, (0, 16))
    assert finish(audit, request, outputs=0, cached=0) == []
    assert not audit.cut
