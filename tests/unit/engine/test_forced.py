"""Given tokens in place of drawn ones: what may go with them, that they are scored as drawn ones, where they end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.engine.executors.cpu.sampler import Sampler
from services.engine.requests.request import FinishReason, Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk
from tests.unit.engine.executors.cpu.test_sampler import EOS, VOCAB, chunk, random_logits
from tests.unit.engine.machine import next_token
from tests.unit.engine.toy_engine import LONG, Engine


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"seed": 0}, "seed"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"stop_token_ids": frozenset({3})}, "stop_token_ids"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"max_tokens": 3}, "forced_ids"),
        ({"ignore_eos": False}, "forced_ids"),
        ({"forced_ids": (1, -1)}, "forced_ids"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_would_choose_is_refused(fields: dict[str, Any], param: str) -> None:
    good: dict[str, Any] = {"forced_ids": (1, 2), "max_tokens": 2, "ignore_eos": True}
    assert SamplingParams(**good) == SamplingParams.forcing((1, 2), 1.0)
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**(good | fields))
    assert refused.value.param == param


def test_nothing_to_force_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        SamplingParams.forcing((), 1.0)


def test_nothing_is_drafted_of_given_tokens() -> None:
    assert SamplingParams().draftable
    assert SamplingParams(min_tokens=1, presence_penalty=1.0, logit_bias={1: 1.0}).draftable
    assert not SamplingParams.forcing((1,), 1.0).draftable


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0, 0.0])
def test_a_given_token_is_scored_as_if_it_had_been_drawn(temperature: float) -> None:
    """Log-probabilities are equal to the bit, beside sampling rows."""
    logits = random_logits(6, seed=3)
    others: list[dict[str, Any]] = [{}, {"top_k": 5}, {"presence_penalty": 1.0}]
    drawing = [chunk(SamplingParams(seed=n, **fields), [4, 5]) for n, fields in enumerate(others)]
    asked = [chunk(SamplingParams(seed=9 + n, temperature=temperature), [4, 5]) for n in range(3)]
    sampler = Sampler([EOS], torch.device("cpu"))
    drawn = sampler.sample(logits, [*drawing, *asked])
    given = [
        chunk(SamplingParams.forcing((4, 5, token.token_id, 6), temperature), [4, 5]) for token in drawn[len(drawing) :]
    ]
    assert sampler.sample(logits, [*drawing, *given]) == drawn
    assert sampler.sample(logits, [*drawing, *asked]) == drawn


def test_unlikely_tokens_and_raw_logprobs() -> None:
    logits = random_logits(1, seed=1)
    token = int(logits[0].argmin())
    params = SamplingParams(temperature=2.0, max_tokens=1, ignore_eos=True, forced_ids=(token,), top_logprobs=1)
    found = Sampler([EOS], torch.device("cpu")).sample(logits, [chunk(params)])[0]
    assert found.token_id == token
    assert found.sampling_logprob == pytest.approx(float((logits[0] / 2).log_softmax(-1)[token]), abs=1e-5)
    assert found.logprob == pytest.approx(float(logits[0].log_softmax(-1)[token]), abs=1e-5)
    assert list(found.top_ids) == [int(logits[0].argmax())]


def test_a_bad_row_is_an_error_all_the_same() -> None:
    logits = random_logits(2)
    logits[0, 5] = float("nan")
    bad, good = Sampler([EOS], torch.device("cpu")).sample(
        logits, [chunk(SamplingParams.forcing((4,), 1.0)) for _ in range(2)]
    )
    assert bad.error is not None
    assert good.token_id == 4


def test_the_token_of_a_chunk() -> None:
    request = Request("r", (1, 2), SamplingParams.forcing((7, 8, 9), 1.0))
    chunks = [Chunk(request, [1], 2, [1], 1, True, [], count) for count in range(3)]
    assert [one.forced_id for one in chunks] == [7, 8, 9]
    assert chunk(SamplingParams()).forced_id == -1
    assert VOCAB > EOS


@pytest.mark.parametrize("changes", [{}, {"draft_tokens": 4}])
def test_given_tokens_end_where_they_end(changes: dict[str, Any]) -> None:
    """Stop tokens among them end nothing, and the sequence that draws beside them is not disturbed."""
    engine = Engine(eos_token_ids=frozenset({7, 13}), **changes)
    given = (7, 13, 5, 7, 2, 7)
    engine.add("given", LONG, forced_ids=given, max_tokens=len(given), ignore_eos=True)
    engine.add("drawn", LONG, max_tokens=6, ignore_eos=True)
    engine.run()
    assert engine.output("given") == list(given)
    assert engine.updates["given"][-1].finish_reason is FinishReason.LENGTH
    history: tuple[int, ...] = LONG
    for token in engine.output("drawn"):
        assert token == next_token(history)
        history = (*history, token)


def test_given_tokens_survive_a_preemption() -> None:
    engine = Engine(num_blocks=12, max_num_seqs=3, num_slots=8)
    given = [tuple((n * 7 + k) % 50 for k in range(16)) for n in range(3)]
    for n, forced in enumerate(given):
        engine.add(f"r{n}", tuple(range(n, n + 9)), forced_ids=forced, max_tokens=16, ignore_eos=True)
    engine.run()
    assert engine.scheduler.counts().preemptions > 0
    assert [tuple(engine.output(f"r{n}")) for n in range(3)] == given


def test_given_tokens_that_do_not_fit_are_refused_whole() -> None:
    engine = Engine(max_model_len=24)
    engine.add("fits", LONG, forced_ids=(1,) * 5, max_tokens=5, ignore_eos=True)
    with pytest.raises(ContextLengthExceeded, match="19 prompt tokens and 6 given ones are over the context of 24"):
        engine.add("long", LONG, forced_ids=(1,) * 6, max_tokens=6, ignore_eos=True)
    engine.run()
    assert engine.output("fits") == [1] * 5
