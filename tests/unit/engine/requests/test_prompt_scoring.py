"""Prompt scoring, case by case; arbitrary traffic is in test_scheduler_machine.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.common.errors import InvalidRequest
from services.common.pb import engine_pb2 as pb
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.prompt_scoring import PromptRead, PromptScores
from services.engine.requests.request import FinishReason, Pooling
from services.engine.scheduler.step_plan import StepResult
from services.engine.server.protobuf import submission, update_message
from tests.unit.engine.toy_engine import ADAPTER, LONG, Engine
from tests.unit.engine.toy_reads import Told


def told(engine: Engine, name: str) -> Told:
    """Scores in the updates of a finished request, checked."""
    (finished,) = [update.finished for update in engine.updates[name] if update.finished is not None]
    book = Told(finished.request)
    for update in engine.updates[name]:
        book.add(update)
    book.check()
    return book


def test_every_chunk_tells_its_rows() -> None:
    engine = Engine(token_budget=8)
    engine.add("r", LONG, max_tokens=2, prompt_logprobs=2, pooling=Pooling.MEAN, pin=ADAPTER)
    plans = engine.run()
    reads = [read for plan in plans for read in plan.reads]
    assert reads == [PromptRead(0, 0, 8), PromptRead(0, 8, 16), PromptRead(0, 16, 19)]
    assert len(told(engine, "r").logprobs) == 18
    first, second, third, *rest = engine.updates["r"]
    assert (first.adapter, first.cached_tokens) == ("a@1", 0)
    assert second.adapter is third.adapter is rest[0].adapter is None
    assert (first.embedding, second.embedding) == (None, None)
    assert third.embedding is not None
    assert all(update.token is not None for update in rest)


def test_steps_without_such_requests_read_nothing() -> None:
    engine = Engine()
    engine.add("r", LONG, max_tokens=3)
    assert not any(plan.reads for plan in engine.run())


def test_nothing_of_it_comes_from_the_cache() -> None:
    engine = Engine()
    for name, changes, cached in (
        ("first", {}, 0),
        ("again", {}, 18),
        ("scored", {"prompt_logprobs": 0}, 0),
        ("last", {"pooling": Pooling.LAST}, 0),
        ("mean", {"pooling": Pooling.MEAN}, 0),
    ):
        engine.add(name, LONG, max_tokens=1, **changes)
        engine.run()
        assert engine.cached(name) == cached, name
        told(engine, name)


def test_what_lies_before_the_scored_tokens_may() -> None:
    """Completions of one prompt: the second finds what the first left, and is told as much."""
    engine = Engine()
    prompt = LONG[:13]
    for name, tail in (("a", (20, 21, 22)), ("b", (30,)), ("c", (20, 21, 23))):
        engine.add(name, (*prompt, *tail), max_tokens=1, prompt_logprobs=1, prompt_logprobs_from=13)
        engine.run()
    # Row 12 says how likely the first token behind the prompt is; blocks have four.
    assert [engine.cached(name) for name in "abc"] == [0, 12, 12]
    assert [len(told(engine, name).logprobs) for name in "abc"] == [3, 1, 3]


def test_completions_that_come_together_wait_for_the_first() -> None:
    engine = Engine()
    for name in "abcd":
        engine.add(name, (*LONG[:13], ord(name) % 40), max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=13)
    engine.run()
    assert sorted(engine.cached(name) or 0 for name in "abcd") == [0, 12, 12, 12]
    # 14 tokens of the first, two of each of the others.
    assert engine.runner.computed_tokens == 20
    for name in "abcd":
        told(engine, name)


@pytest.mark.parametrize("pooling", Pooling)
def test_a_vector_and_the_end_of_the_tokens(pooling: Pooling) -> None:
    """Each of what it is asked for, whatever rows the other needs."""
    engine = Engine(token_budget=8)
    engine.add("r", LONG, max_tokens=1, prompt_logprobs=1, prompt_logprobs_from=10, pooling=pooling)
    engine.run()
    assert len(told(engine, "r").logprobs) == 9


def test_preempted_in_the_middle_of_a_prompt() -> None:
    engine = Engine(max_num_seqs=1, num_slots=4, token_budget=5)
    engine.add("patient", LONG, max_tokens=2, prompt_logprobs=1, pooling=Pooling.MEAN, priority=1)
    engine.step()
    engine.step()
    engine.add("urgent", (5, 6), max_tokens=1)
    plans = engine.run()
    finished = engine.updates["patient"][-1].finished
    assert finished is not None
    assert finished.preemptions == 1
    told(engine, "patient")
    again = [plan for plan in plans if plan.chunks[0].request.request_id == "patient"]
    assert again[0].chunks[0].start == 0
    assert not again[0].reads, "told before"


def test_what_is_not_a_number_ends_the_request() -> None:
    for broken in ("logprobs", "pooled"):
        engine = Engine(token_budget=8)
        engine.add("r", LONG, max_tokens=2, prompt_logprobs=0, pooling=Pooling.MEAN)
        engine.add("other", (1, 2), max_tokens=1)
        plan = engine.scheduler.schedule(0.0)
        assert plan is not None
        result = engine.runner.execute(plan)
        (report,) = result.reports
        assert report.scores is not None
        if broken == "logprobs":
            report.scores.logprobs[3] = np.nan
        else:
            report = report._replace(pooled=np.array([1.0, np.inf, 2.0], dtype=np.float32))
        engine.take(engine.scheduler.update(plan, replace(result, reports=[report]), 0.0))
        engine.run()
        (update,) = engine.updates["r"]
        assert update.finish_reason is FinishReason.ERROR
        assert update.error is not None
        assert "not finite" in update.error.message
        assert engine.updates["other"][-1].finish_reason is FinishReason.LENGTH


def test_a_result_without_its_reports_is_refused() -> None:
    engine = Engine()
    engine.add("r", (1, 2, 3), max_tokens=1, prompt_logprobs=0)
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    result = engine.runner.execute(plan)
    with pytest.raises(ValueError, match="0 reports for 1 reads"):
        engine.scheduler.update(plan, StepResult(result.tokens), 0.0)
    engine.take(engine.scheduler.update(plan, result, 0.0))
    told(engine, "r")


def message(**fields: object) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=1)
    return pb.GenerateRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling=sampling, **fields)


def test_requests_on_the_wire() -> None:
    plain = submission(message(), 50)
    assert (plain.prompt_logprobs, plain.prompt_logprobs_from, plain.pooling) == (None, 0, None)
    read = submission(message(prompt_logprobs=0, prompt_logprobs_from=2, pooling=pb.POOLING_MEAN), 50)
    request = read.pinned(ADAPTER, 1)
    assert (request.prompt_logprobs, request.prompt_logprobs_from, request.pooling) == (0, 2, Pooling.MEAN)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 129}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "prompt_logprobs_from": 3}, "prompt_logprobs_from"),
        ({"prompt_logprobs_from": 1}, "prompt_logprobs_from"),
        ({"pooling": 7}, "pooling"),
    ],
)
def test_requests_that_make_no_sense(fields: dict[str, int], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        submission(message(**fields), 50)
    assert refused.value.param == param


def test_updates_on_the_wire() -> None:
    scores = PromptScores(
        np.array([-1.0, -2.0], dtype=np.float32),
        np.array([1, 4], dtype=np.int32),
        np.array([[5, 6], [7, 8]], dtype=np.int32),
        np.array([[-1.0, -1.5], [-0.5, -0.75]], dtype=np.float32),
    )
    sent = update_message(SequenceUpdate("r", prompt=scores, embedding=np.array([0.5, -1.0], dtype=np.float32)))
    told = sent.prompt_logprobs
    assert (list(told.logprobs), list(told.ranks)) == ([-1.0, -2.0], [1, 4])
    assert (list(told.top_token_ids), list(told.top_logprobs)) == ([5, 6, 7, 8], [-1.0, -1.5, -0.5, -0.75])
    assert list(sent.embedding) == [0.5, -1.0]
    assert not sent.token_ids
    assert not update_message(SequenceUpdate("r", finish_reason=FinishReason.STOP)).HasField("prompt_logprobs")
