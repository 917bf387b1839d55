"""Constraints of requests: over the wire, in combination with other parameters, and their metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.common.errors import InvalidRequest
from services.common.pb import engine_pb2 as pb
from services.engine.observability.events import GrammarDone, StepDone
from services.engine.observability.metrics import EngineMetrics
from services.engine.observability.status import Counts
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import Constraint, ConstraintKind, SamplingParams, Thinking
from services.engine.server.protobuf import sampling_params, submission
from tests.unit.engine.constraints.support import constraint, matcher, request


def read(**fields: Any) -> SamplingParams:
    return sampling_params(pb.SamplingParams(**{"max_tokens": 9, **fields}))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (pb.Constraint(json_schema="{}", param="p"), Constraint(ConstraintKind.JSON_SCHEMA, ("{}",), "p")),
        (pb.Constraint(regex="a+"), Constraint(ConstraintKind.REGEX, ("a+",), "constraint")),
        (pb.Constraint(lark="start: /a/"), Constraint(ConstraintKind.LARK, ("start: /a/",))),
        (pb.Constraint(choices=pb.Choices(texts=["a", "b"])), Constraint(ConstraintKind.CHOICES, ("a", "b"))),
    ],
)
def test_every_kind_is_read(message: pb.Constraint, expected: Constraint) -> None:
    sampling = read(constraint=message)
    assert sampling.constraint == expected
    assert sampling.masked
    assert sampling.draftable


def test_thinking_is_read() -> None:
    sampling = read(thinking=pb.Thinking(end_token_id=7, budget=0, closing_token_ids=[5, 7]))
    assert sampling.thinking == Thinking(7, 0, (5, 7))
    assert sampling.masked
    unbounded = read(thinking=pb.Thinking(end_token_id=7))
    assert unbounded.thinking == Thinking(7)
    assert unbounded.thinking.closing == (7,)
    assert not unbounded.masked, "alone it changes nothing"
    assert unbounded.draftable
    assert not SamplingParams().masked


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"constraint": pb.Constraint(param="p")}, "p"),
        ({"constraint": pb.Constraint(choices=pb.Choices(), param="p")}, "p"),
        ({"constraint": pb.Constraint(regex="a"), "min_tokens": 1}, "min_tokens"),
        ({"constraint": pb.Constraint(regex="a"), "ignore_eos": True}, "ignore_eos"),
        ({"thinking": pb.Thinking(end_token_id=7, closing_token_ids=[5])}, "thinking"),
        ({"thinking": pb.Thinking(end_token_id=7, closing_token_ids=[7, 5, 7])}, "thinking"),
        ({"thinking": pb.Thinking(end_token_id=7, closing_token_ids=[5] * 300 + [7])}, "thinking"),
        ({"thinking": pb.Thinking(end_token_id=7), "stop_token_ids": [7]}, "stop_token_ids"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(**fields)
    assert error.value.param == param


def test_tokens_of_another_vocabulary_are_refused() -> None:
    message = pb.GenerateRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling=pb.SamplingParams(max_tokens=1, thinking=pb.Thinking(end_token_id=100, budget=3)),
    )
    with pytest.raises(InvalidRequest, match="thinking: token id 100"):
        submission(message, 100)
    assert submission(message, 101).matcher is None
    message.sampling.thinking.call_token_id = 101
    with pytest.raises(InvalidRequest, match="thinking: token id 101"):
        submission(message, 101)
    thinking = submission(message, 102).sampling.thinking
    assert thinking is not None
    assert thinking.call_token_id == 101


@pytest.mark.parametrize("field", [{"constraint": constraint("regex", "a")}, {"thinking": Thinking(7, 3)}])
def test_given_tokens_are_not_constrained(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="would do nothing"):
        SamplingParams(max_tokens=1, ignore_eos=True, forced_ids=(5,), **field)


def test_a_matcher_goes_with_a_constraint_and_only_so() -> None:
    sampling = SamplingParams(constraint=constraint("regex", "a"))
    with pytest.raises(ValueError, match="matcher"):
        Request("r", (1,), sampling)
    with pytest.raises(ValueError, match="matcher"):
        Request("r", (1,), SamplingParams(), matcher=matcher(sampling))
    assert request("r", constraint=sampling.constraint).matcher is not None


def test_grammars_and_masks_are_measured() -> None:
    metrics = EngineMetrics(CollectorRegistry())
    metrics.listen(GrammarDone("compiled", 0.03))
    metrics.listen(GrammarDone("cached", 0.0))
    counts = Counts(1, 0, 1, 0, 9, 1, 0, 9, 0)
    for seconds in (0.0, 0.0003):
        metrics.listen(StepDone(0.1, 0.1, 1, 0, counts, 0, mask_seconds=seconds))
    text = generate_latest(metrics.registry).decode()
    assert 'temper_engine_grammars_total{result="cached"} 1.0' in text
    assert "temper_engine_grammar_compile_seconds_count 1.0" in text
    assert "temper_engine_mask_seconds_count 1.0" in text, "steps without masks do not count"
